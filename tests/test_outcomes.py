"""Which outcome is the cause, and what the command makes of it."""

import signal

import pytest

from lockstep.errors import ConfigError, RunError, Stopped, WorkerError
from lockstep.launch.outcomes import Outcome, cause, how_it_stopped, of_error, of_exit_code


def raised(error: BaseException) -> BaseException:
    """The error with a traceback, as a worker sees it."""
    try:
        raise error
    except BaseException as caught:
        return caught


def all_reduce(error: Exception) -> None:
    raise error


def in_all_reduce(error: Exception, backward: bool = False) -> BaseException:
    def call() -> None:
        all_reduce(error)

    def run_backward() -> None:
        call()

    run_backward.__code__ = run_backward.__code__.replace(co_name="backward")
    try:
        (run_backward if backward else call)()
    except Exception as caught:
        caught.add_note("in epoch 0, batch 1, step 1, on rank 0")
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (of_error(raised(ConfigError("seed=-1; allowed: 0")), 1), ConfigError, r"^seed=-1; allowed: 0$"),
        (of_error(raised(RunError("the disk is full")), 1), WorkerError, r"^rank 1: the disk is full$"),
        (
            of_error(raised(OSError("no such thing")), 1),
            WorkerError,
            r"^rank 1 failed:\nTraceback[\s\S]*no such thing$",
        ),
        (of_error(raised(SystemExit(0)), 1), WorkerError, r"^rank 1 failed:\nTraceback[\s\S]*SystemExit: 0$"),
        (of_exit_code(-9, 1), WorkerError, "^rank 1 was killed by SIGKILL; it left no traceback$"),
        (of_exit_code(-11, 1), WorkerError, "^rank 1 was killed by SIGSEGV; it left no traceback$"),
        (of_exit_code(3, 1), WorkerError, "^rank 1 ended with exit code 3 without reporting an error$"),
    ],
)
def test_an_outcome_becomes_one_exception(outcome: Outcome, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        raise outcome.as_exception()


def test_a_stop_keeps_its_signal_and_place() -> None:
    error = of_error(Stopped(signal.SIGTERM, " after step 3, in epoch 0"), 0).as_exception()
    assert isinstance(error, Stopped)
    assert (error.code, str(error)) == (143, "stopped by SIGTERM after step 3, in epoch 0")


def test_a_failed_collective_is_named_with_its_place() -> None:
    lost = of_error(in_all_reduce(RuntimeError("[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1")), 0)
    assert lost.message == "lost the connection to another rank in all_reduce, in epoch 0, batch 1, step 1, on rank 0"
    backward = of_error(in_all_reduce(RuntimeError("Connection reset by peer"), backward=True), 0)
    assert "in all_reduce of the gradients, in the backward pass, in epoch 0" in backward.message
    late = of_error(in_all_reduce(RuntimeError("Timed out waiting 4000ms")), 0)
    assert (late.kind, late.place) == ("timed out", "all_reduce, in epoch 0, batch 1, step 1, on rank 0")
    assert of_error(in_all_reduce(OSError("Connection closed by peer")), 0).kind == "failed"  # not a collective's


def test_the_first_failure_is_the_cause_unless_a_rank_vanished() -> None:
    first, second = Outcome("failed", 1, "first", time=1.0), Outcome("explained", 0, "lost the connection", time=2.0)
    done = Outcome("succeeded", 2, time=0.5)
    assert cause([second, done, first]) is first
    killed = of_exit_code(-9, 3)
    assert killed.time > second.time
    assert cause([second, first, killed]) is killed


@pytest.mark.parametrize(
    ("kind", "final"), [("refused", True), ("stopped", True), ("failed", False), ("vanished", False)]
)
def test_what_a_restart_must_not_try_again(kind: str, final: bool) -> None:
    assert Outcome(kind, 0).is_final is final


def test_a_stopped_command_says_how_far_its_ranks_came() -> None:
    stopped = of_error(Stopped(signal.SIGINT, " after step 9, in epoch 1"), 1)
    early, broken = of_error(Stopped(signal.SIGINT), 0), of_error(raised(RunError("the disk is full")), 1)
    assert how_it_stopped([early, stopped]) == " after step 9, in epoch 1"
    assert how_it_stopped([early, broken]) == ", but: the disk is full"
    assert how_it_stopped([early]) == how_it_stopped([]) == ""
