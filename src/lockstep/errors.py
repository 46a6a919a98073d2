"""What can go wrong in a run, by who has to do something about it."""

import signal


class ConfigError(ValueError):
    """A mistake of the user's: the message names the key as typed, the value found and what is allowed."""


class RunError(RuntimeError):
    """A failure that the message explains in full: a traceback would add nothing."""


class WorkerError(RuntimeError):
    """A worker process failed; the message names its rank and holds its traceback, where it left one."""


class Stopped(SystemExit):
    """A signal asked this command, or one of its ranks, to end.

    Args:
        signum: The signal; the exit code is 128 + its number.
        where: How far the run had come and where it can be resumed, for the message.
    """

    def __init__(self, signum: int, where: str = "") -> None:
        super().__init__(128 + signum)
        self.signum, self.where = signum, where

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}{self.where}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
