"""How workers end: one record each, and which of them is the cause of the others."""

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.errors import ConfigError, RunError, Stopped, WorkerError, first_line

Kind = Literal["succeeded", "refused", "stopped", "explained", "timed out", "failed", "vanished"]

COLLECTIVES = {
    *("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list"),
    *("init_process_group", "reduce"),
}


@dataclass(frozen=True)
class Outcome:
    """How one worker ended.

    Attributes:
        kind: `succeeded`; `refused`, the config is wrong; `stopped` by a signal; `explained`, the message says it all;
            `timed out` in a collective; `failed` with a traceback; `vanished` without a report.
        rank: The worker's.
        message: The error; of a worker that failed, with its traceback.
        summary: The error in one line.
        place: Where in the run it was.
        signum: The signal that stopped or killed it.
        value: What its function returned.
        time: When it ended, unix time in seconds.
    """

    kind: Kind
    rank: int
    message: str = ""
    summary: str = ""
    place: str = ""
    signum: int | None = None
    value: Any = None
    time: float = field(default_factory=time.time)

    @property
    def is_final(self) -> bool:
        """Return True if a restart must not try again."""
        return self.kind in ("refused", "stopped")

    def as_exception(self) -> BaseException:
        """Return what this outcome means to the command."""
        if self.kind == "stopped":
            return Stopped(self.signum, self.place)
        if self.kind == "refused":
            return ConfigError(self.message)
        if self.kind == "failed":
            return WorkerError(f"rank {self.rank} failed:\n{self.message}")
        separator = " " if self.kind == "vanished" else ": "
        return WorkerError(f"rank {self.rank}{separator}{self.message}")


def of_error(error: BaseException, rank: int) -> Outcome:
    """Return the outcome of a worker whose function raised `error`."""
    if isinstance(error, Stopped):
        return Outcome("stopped", rank, place=error.where, signum=error.signum)
    if isinstance(error, ConfigError | RunError):
        kind = "refused" if isinstance(error, ConfigError) else "explained"
        return Outcome(kind, rank, str(error), first_line(error))
    if (outcome := _of_collective(error, rank)) is not None:
        return outcome
    return Outcome("failed", rank, "".join(traceback.format_exception(error)).rstrip(), first_line(error))


def _of_collective(error: BaseException, rank: int) -> Outcome | None:
    """Return the outcome of a failed collective, None for other errors: Gloo's text names neither it nor the place."""
    text = str(error).lower()
    timed_out = "timed out" in text
    if not isinstance(error, RuntimeError) or not (timed_out or "connection closed" in text or "by peer" in text):
        return None
    calls = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    collective = next((name for name in reversed(calls) if name in COLLECTIVES), "a collective")
    if "backward" in calls:
        collective = "all_reduce of the gradients, in the backward pass"
    place = ", ".join([collective, *getattr(error, "__notes__", ())])
    if timed_out:
        return Outcome("timed out", rank, place=place)
    message = f"lost the connection to another rank in {place}"
    return Outcome("explained", rank, message, message)


def of_exit_code(exit_code: int, rank: int) -> Outcome:
    """Return the outcome of a worker that is gone without having reported one."""
    if exit_code < 0:
        name = next((each.name for each in signal.Signals if each == -exit_code), f"signal {-exit_code}")
        message, summary = f"was killed by {name}; it left no traceback", f"rank {rank} was killed by {name}"
        return Outcome("vanished", rank, message, summary, signum=-exit_code)
    return Outcome("vanished", rank, f"ended with exit code {exit_code} without reporting an error")


def cause(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome that the others follow from: the first failure.

    A worker that vanished could not say when, and its peers fail because they lose the connection to it: it comes
    first.
    """
    failures = [outcome for outcome in outcomes if outcome.kind != "succeeded"]
    return min(failures, key=lambda outcome: (outcome.kind != "vanished", outcome.time))


def how_it_stopped(outcomes: Iterable[Outcome]) -> str:
    """Return what to print beside a signal: where the ranks stopped together, or what went wrong in that."""
    found = list(outcomes)
    if place := max((outcome.place for outcome in found if outcome.kind == "stopped"), default=""):
        return place
    wrong = next((outcome.summary for outcome in found if outcome.summary), "")
    return wrong and f", but: {wrong}"
