"""A signal, a callback or a broken batch on one rank: all end together, and stopped runs resume exactly."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TRAIN, catches, ended, processes_in, remove_what_the_killed_leave, start, wait_until

from lockstep import tags
from lockstep.errors import ConfigError, Stopped, WorkerError

slow = pytest.mark.slow


def slow_(*values: Any) -> Any:
    """One case of a test, left out of `make test`, which runs a few of each kind."""
    return pytest.param(*values, marks=slow)


RunJob = Callable[..., Any]
DDP2 = ("strategy=ddp", "trainer.devices=2")
STRATEGIES = {"single": ("strategy=single",), "dp2": ("strategy=dp", "trainer.devices=2"), "ddp2": DDP2}
EPOCHS3 = ("trainer.max_epochs=3", "trainer.log_every_n_steps=1")  # 17 steps each
DROPOUT = ("model.net._target_=faults.DropoutNet", "~model.net.channels", "~model.net.hidden")
LOADER_PROCESS = ("data.num_workers=1", "trainer.max_epochs=2", "trainer.limit_val_batches=0")
SAME = {tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TEST_ACC, tags.TEST_LOSS}


def fail_at(rank: int, step: int, how: str) -> str:
    return f"+callbacks.fail={{_target_: faults.FailAt, rank: {rank}, step: {step}, how: {how}}}"


def weights(tmp_path: Path, run: str) -> dict[str, torch.Tensor]:
    return torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def seconds_since_the_fault(tmp_path: Path) -> float:
    """How long ago `faults.FailAt` or `faults.KillIn` struck; the start before it may take any time."""
    return time.time() - (tmp_path / "run" / "struck").stat().st_mtime


def steps(tmp_path: Path, run: str = "run") -> set[str]:
    return {path.read_text() for path in (tmp_path / run).glob("steps_*")}


# ---------------------------------------------------------------------------------------- signals to a rank


@pytest.mark.parametrize(
    ("strategy", "rank", "options"),
    [
        ("single", 0, ()),
        slow_("single", 0, DROPOUT),
        ("dp2", 0, ()),
        slow_("ddp2", 0, ()),
        ("ddp2", 1, DROPOUT),
        slow_("ddp2", 1, ("trainer.accumulate_grad_batches=3", "data.batch_size=128")),
        slow_("ddp2", 1, ("trainer.precision=64-true", "trainer.val_check_interval=0.3")),
        slow_("single", 0, LOADER_PROCESS),
        slow_("ddp2", 1, ("trainer.overfit_batches=12",)),
        # where the ranks reach their consensus in last batches only
        slow_("ddp2", 1, ("trainer.limit_train_batches=5",)),
    ],
)
def test_a_run_stopped_within_an_epoch_resumes_with_the_same_bits(
    run_job: RunJob, tmp_path: Path, strategy: str, rank: int, options: tuple[str, ...]
) -> None:
    job = (*STRATEGIES[strategy], *EPOCHS3, *options)
    whole = run_job(*job, run="whole")
    # of 12, 12, 5 or 17 steps in an epoch
    places = {
        "trainer.overfit_batches=12": (13, 1),
        "trainer.accumulate_grad_batches=3": (13, 1),
        "trainer.limit_train_batches=5": (6, 1),
    }
    step, epoch = next((places[option] for option in options if option in places), (20, 1))
    with pytest.raises(Stopped) as stop:
        run_job(*job, fail_at(rank, step, "terminate"), run="stopped")
    assert stop.value.code == 143
    path = tmp_path / "stopped" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert step < checkpoint["global_step"] <= step + 10
    assert f"stopped by SIGTERM after step {checkpoint['global_step']}, in epoch {epoch}; resume with" in str(
        stop.value
    )
    resumed = run_job(*job, f"ckpt_path={path}", run="resumed")
    torch.testing.assert_close(weights(tmp_path, "resumed"), weights(tmp_path, "whole"), rtol=0, atol=0)
    measured = SAME & whole.keys()  # without a validation there is no val/loss
    assert {tag: resumed[tag] for tag in measured} == {tag: whole[tag] for tag in measured}


@slow
def test_a_run_stopped_within_an_epoch_resumes_under_another_strategy(run_job: RunJob, tmp_path: Path) -> None:
    job = (*EPOCHS3, "trainer.precision=64-true", "data.batch_size=252")
    whole = run_job(*job, *STRATEGIES["single"], run="whole")
    for source, target in (("ddp2", "single"), ("single", "ddp2"), ("dp2", "ddp2")):
        with pytest.raises(Stopped):
            run_job(*job, *STRATEGIES[source], fail_at(0, 20, "terminate"), run=source)
        path = tmp_path / source / "checkpoints" / "last.ckpt"
        resumed = run_job(*job, *STRATEGIES[target], f"ckpt_path={path}", run=f"{source}-{target}")
        for tag in SAME:
            assert abs(resumed[tag] - whole[tag]) <= 1e-9, (source, target, tag)


@pytest.mark.parametrize("override", ["data.batch_size=128", slow_("data.seed=1"), slow_("data.val_size=400")])
def test_a_checkpoint_from_within_an_epoch_needs_the_same_batches(
    run_job: RunJob, tmp_path: Path, override: str
) -> None:
    with pytest.raises(Stopped):
        run_job(*EPOCHS3, fail_at(0, 20, "terminate"), run="stopped")
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"^{key}={value}; the checkpoint was written after .* batches of an epoch"):
        run_job(*EPOCHS3, override, f"ckpt_path={tmp_path / 'stopped' / 'checkpoints' / 'last.ckpt'}")


def test_a_checkpoint_from_within_an_epoch_needs_the_same_data(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run_job(*EPOCHS3, fail_at(0, 20, "terminate"), run="stopped")
    other = ("data._target_=faults.FewTestImages", "+data.test_size=10")
    with pytest.raises(
        ConfigError, match=r"^ckpt_path=.* was written within an epoch of other data; allowed: the same"
    ):
        run_job(*EPOCHS3, *other, f"ckpt_path={tmp_path / 'stopped' / 'checkpoints' / 'last.ckpt'}")


@pytest.mark.parametrize("rank", [slow_(0), 1])
def test_a_signal_in_the_last_steps_ends_the_run_before_its_test(run_job: RunJob, tmp_path: Path, rank: int) -> None:
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step 17, in epoch 0; resume with ckpt_path=") as stop:
        run_job(*DDP2, fail_at(rank, 16, "terminate"))
    assert stop.value.code == 143
    metrics = run_job(*DDP2, f"ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}", run="tested")
    assert metrics[tags.TEST_ACC] > 0.3


def test_a_stopped_run_is_not_started_again(run_job: RunJob) -> None:
    with pytest.raises(Stopped):
        run_job(*DDP2, fail_at(1, 5, "terminate"), "launch.max_restarts=3")


def test_without_checkpoints_nothing_is_written(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after step \d+, in epoch 0$"):
        run_job(*DDP2, fail_at(1, 5, "terminate"), "trainer.enable_checkpointing=false")
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---------------------------------------------------------------------------------------- signals to the command

QUIET = (
    *("data=mnist_sample", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"),
    "launch.threads_per_process=1",
)
FOR_EVER = "trainer.max_epochs=1000000"


def start_run(
    cwd: Path, *overrides: str, prefix: Sequence[str] = (), flags: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a run of slow steps that does not end by itself."""
    slow = f"+callbacks.slow={{_target_: faults.SlowSteps, seconds: 0.1, started: {cwd / 'started'}}}"
    return start([*prefix, *TRAIN, *flags, *QUIET, FOR_EVER, f"hydra.run.dir={cwd / 'run'}", slow, *overrides], cwd)


@pytest.mark.parametrize(
    ("strategy", "number", "returncode", "to"),
    [
        slow_("single", signal.SIGTERM, 143, "command"),
        slow_("single", signal.SIGINT, 130, "group"),
        slow_("dp2", signal.SIGTERM, 143, "group"),
        ("ddp2", signal.SIGTERM, 143, "command"),
        slow_("ddp2", signal.SIGTERM, 143, "group"),
        slow_("ddp2", signal.SIGINT, 130, "command"),
        ("ddp2", signal.SIGINT, 130, "group"),
        slow_("ddp2", signal.SIGHUP, 129, "group"),
    ],
)
def test_a_signal_to_the_command_stops_all_ranks_at_one_step(
    tmp_path: Path, strategy: str, number: signal.Signals, returncode: int, to: str
) -> None:
    process = start_run(tmp_path, *STRATEGIES[strategy])
    wait_until((tmp_path / "started").exists, "the first steps")
    (os.kill if to == "command" else os.killpg)(process.pid, number)
    code, lines = ended(process, tmp_path, seconds=30)
    assert code == returncode
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    place = f"after step {checkpoint['global_step']}, in epoch {checkpoint['epoch']}"
    assert lines == [f"stopped by {number.name} {place}; resume with ckpt_path=run/checkpoints/last.ckpt"]
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


MOMENTS: dict[str, Callable[[int, Path], Any]] = {
    "handlers": lambda pid, run: catches(pid, signal.SIGTERM),
    "fork server": lambda pid, run: len(children(pid)) > 1,  # the other child is a resource tracker
    "hydra": lambda pid, run: (run / ".hydra" / "config.yaml").exists(),
    "workers": lambda pid, run: any(children(child) for child in children(pid)),
    "training": lambda pid, run: "batch 256" in (run / "train.log").read_text(),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("delay", [0, slow_(0.2)])
def test_ctrl_c_while_the_command_starts_is_one_line(tmp_path: Path, moment: str, delay: float) -> None:
    process = start_run(tmp_path, *DDP2)

    def has_come() -> bool:
        with suppress(OSError):
            return MOMENTS[moment](process.pid, tmp_path / "run")
        return False

    wait_until(has_come, moment)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    code, lines = ended(process, tmp_path)
    assert code == 130, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("stopped by SIGINT")


def test_ctrl_c_before_python_is_up_ends_the_command(tmp_path: Path) -> None:
    process = start_run(tmp_path, *DDP2)
    os.killpg(process.pid, signal.SIGINT)
    code, _ = ended(process, tmp_path)
    assert code in (-signal.SIGINT, 1, 130)  # Python's own word, or ours if it was fast
    assert not (tmp_path / "run").exists()


def test_ctrl_c_again_and_again_leaves_no_process(tmp_path: Path) -> None:
    process = start_run(tmp_path, *DDP2)
    wait_until((tmp_path / "started").exists, "the first steps")
    for _ in range(20):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    code, lines = ended(process, tmp_path)
    assert code == 130
    assert len(lines) == 1, lines


@pytest.mark.parametrize("local_addr", ["127.0.0.1", slow_("127.0.0.2")], ids=["host", "guest"])
def test_ctrl_c_while_a_node_waits_for_the_other(tmp_path: Path, free_port: int, local_addr: str) -> None:
    endpoint = (f"launch.rdzv_endpoint=127.0.0.1:{free_port}", f"launch.local_addr={local_addr}")
    process = start_run(tmp_path, "strategy=ddp", "trainer.devices=1", "trainer.num_nodes=2", *endpoint)
    wait_until((tmp_path / "run" / ".hydra" / "config.yaml").exists, "the start")
    time.sleep(3)  # by now it waits, or will soon
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, tmp_path) == (130, ["stopped by SIGINT"])


def test_ctrl_c_between_two_jobs_of_a_sweep(tmp_path: Path) -> None:
    sweep = ["strategy=single,ddp", f"hydra.sweep.dir={tmp_path / 'sweep'}", "trainer.max_epochs=1"]
    process = start_run(tmp_path, *sweep, flags=["-m"])
    wait_until((tmp_path / "sweep" / "0" / "metrics.json").exists, "the end of the first job")
    os.killpg(process.pid, signal.SIGINT)
    code, lines = ended(process, tmp_path)
    assert code == 130
    assert len(lines) == 1, lines
    assert lines[0].startswith("stopped by SIGINT")


STARTS = {
    "terminal": (),
    "nohup": ("nohup",),
    "setsid": ("setsid", "--wait"),
    "background": ("bash", "-c", '"$@" & wait', "bash"),  # a shell script's `&` leaves SIGINT ignored
}


def command_in(cwd: Path) -> int:
    """The process id of the command itself, whatever started it."""
    found = processes_in(cwd).items()
    return min(pid for pid, line in found if line.startswith(" ".join(TRAIN)))


@pytest.mark.parametrize("number", [signal.SIGKILL, slow_(signal.SIGUSR1)], ids=lambda number: number.name)
@pytest.mark.parametrize("how", ["terminal", slow_("nohup"), slow_("setsid"), "background"])
def test_a_killed_command_takes_its_workers_along(tmp_path: Path, how: str, number: signal.Signals) -> None:
    process = start_run(tmp_path, *DDP2, prefix=STARTS[how])
    wait_until((tmp_path / "started").exists, "the first steps")
    os.kill(command_in(tmp_path), number)
    wait_until(lambda: not processes_in(tmp_path), "the end of the workers", seconds=5)
    process.communicate(timeout=20)
    remove_what_the_killed_leave()


# ---------------------------------------------------------------------------------------- one rank decides


@pytest.mark.parametrize("strategy", ["single", "dp2", "ddp2"])
@pytest.mark.parametrize("value", ["nan", slow_("inf")])
def test_a_loss_that_is_not_finite_is_named(run_job: RunJob, tmp_path: Path, strategy: str, value: str) -> None:
    rank = 1 if strategy == "ddp2" else 0
    spoilt = ("model._target_=faults.SpoiltLoss", f"+model.rank={rank}", "+model.step=20", f"+model.value={value}")
    expected = f"^rank {rank}: the loss is {value} in epoch 1, batch 3, step 20, on rank {rank}$"
    with pytest.raises(WorkerError, match=expected):
        run_job(*STRATEGIES[strategy], *EPOCHS3, *spoilt)
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 17
    for weight in weights(tmp_path, "run").values():
        assert weight.isfinite().all()


@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp2", 0), ("ddp2", 1)])
def test_should_stop_on_one_rank_stops_all_at_one_step(
    run_job: RunJob, tmp_path: Path, strategy: str, rank: int
) -> None:
    metrics = run_job(
        *STRATEGIES[strategy], *EPOCHS3, fail_at(rank, 20, "stop"), "+callbacks.steps={_target_: faults.NoteSteps}"
    )
    assert steps(tmp_path) == {"30"}  # told at step 25, known at step 30
    assert 0 < metrics[tags.TEST_ACC] < 1


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_should_stop_at_an_epochs_end_counts_at_once(run_job: RunJob, tmp_path: Path, hook: str) -> None:
    ask = f"+callbacks.ask={{_target_: faults.AskToStop, rank: 1, hook: {hook}}}"
    run_job(*DDP2, *EPOCHS3, ask, "+callbacks.steps={_target_: faults.NoteSteps}")
    assert steps(tmp_path) == {"17"}


def test_a_broken_loader_process_is_told_with_its_place(run_job: RunJob) -> None:
    with pytest.raises(WorkerError, match=r"^rank 1 failed:\n[\s\S]*broken on purpose[\s\S]*on rank 1$") as failure:
        run_job(*DDP2, "data._target_=faults.BrokenData", "data.num_workers=1")
    assert "in epoch 0, batch 0, step 0" in str(failure.value)


def test_an_exception_names_epoch_batch_step_and_rank(run_job: RunJob) -> None:
    with pytest.raises(WorkerError, match=r"broken on purpose\nin epoch 1, batch 3, step 20, on rank 1$"):
        run_job(*DDP2, *EPOCHS3, fail_at(1, 20, "raise"))


# ---------------------------------------------------------------------------------------- ranks that do not come


@pytest.mark.parametrize("rank", [slow_(0), 1])
def test_a_frozen_rank_is_named_with_the_collective(run_job: RunJob, tmp_path: Path, rank: int) -> None:
    expected = (
        rf"^rank {1 - rank}: waited launch.timeout_sec=15 s for rank {rank}, which is stopped \(process state T\)"
        r" in all_reduce of the gradients, in the backward pass, in epoch 0, batch \d+, step \d+, on rank"
    )
    with pytest.raises(WorkerError, match=expected):
        run_job(*DDP2, fail_at(rank, 6, "freeze"), "launch.timeout_sec=15")
    assert seconds_since_the_fault(tmp_path) < 15 + 15


@slow
def test_a_slow_download_is_not_a_stuck_rank(run_job: RunJob) -> None:
    slow = ("data._target_=faults.SlowDownload", "+data.seconds=18")
    assert run_job(*DDP2, *slow, "launch.timeout_sec=15")[tags.TEST_ACC] > 0.3
