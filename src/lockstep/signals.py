"""What happens when a command or one of its ranks is told to end: one exception, one line, one exit code."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


_stop: Stopped | None = None  # that this process was told to, in the words for the user
received: set[int] = set()  # signals that `exit_on_signals` has seen, acted on or not


def stop_on_signals() -> None:
    """From now on the first of `STOP_SIGNALS` raises `Stopped`; later ones do not interrupt the clean-up."""

    def handle(number: int, frame: FrameType | None) -> None:
        if _stop is None:
            raise_stop(Stopped(number))

    handle_stop_signals(handle)


def raise_stop(stop: Stopped) -> None:
    """Raise it, and have it said at the end of the command.

    Raises:
        Stopped: `stop`.
    """
    global _stop
    _stop = stop
    raise stop


def raise_if_stopped() -> None:
    """What a signal raised during an import can be swallowed there.

    Raises:
        Stopped: Again, if it was raised before.
    """
    if _stop is not None:
        raise _stop


def exit_on_signals(before: Callable[[int], None]) -> None:
    """From now on any of `STOP_SIGNALS` ends the process with exit code 128 + its number, at once.

    Even while the main thread waits in C++ for another process, where no Python handler runs: a thread ends it. Whoever
    handles the signals differently for a while, puts the old handlers back afterwards.

    Args:
        before: Called with the signal's number first.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handle_stop_signals(_exit_at_once)

    def wait() -> None:
        while number := os.read(reading, 1)[0]:
            received.add(number)
            handler = signal.getsignal(number)
            # Lightning wraps the handlers that it finds
            if _exit_at_once in getattr(handler, "signal_handlers", (handler,)):
                try:
                    before(number)
                finally:  # whatever became of that, a terminal may be gone or a disk full
                    os._exit(128 + number)

    threading.Thread(target=wait, name="exit on signals", daemon=True).start()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Marks the signals that the thread acts on; without a Python handler it would not hear of them."""


def print_stop() -> None:
    """At the end of the command, however early it was stopped: one line that says so."""
    if _stop is not None:
        print(_stop, file=sys.stderr)


def handle_stop_signals(handler: Any) -> dict[int, Any]:
    """Install a handler for `STOP_SIGNALS`, less those that whoever started this process ignores, as nohup does.

    Returns:
        The handlers there were before, by signal.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    return before
