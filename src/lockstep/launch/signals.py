"""What happens when a command or one of its ranks is told to stop: one exception, one line, one exit code."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Turns the first stop signal of a command into `Stopped`; later ones do not interrupt the clean-up.

    Attributes:
        stop: What stopped the command; printed when it ends.
    """

    def __init__(self) -> None:
        self.stop: Stopped | None = None
        atexit.register(self._print)
        handle_stop_signals(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop is None:
            self.stop = Stopped(number)
            raise self.stop

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` again, which an import may have swallowed."""
        if self.stop is not None:
            raise self.stop

    def _print(self) -> None:
        if self.stop is not None:
            print(self.stop, file=sys.stderr)


def exit_on_signals(before: Callable[[int], None]) -> None:
    """Let every stop signal end this process at once, with exit code 128 + its number.

    A thread does it, since the main thread may be waiting in C++ for another process, where no Python handler runs.
    Code that handles the signals differently for a while restores the handlers afterwards.

    Args:
        before: Called first, with the signal's number.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a loader's signal is not this process's
    handle_stop_signals(_exit_at_once)

    def wait() -> None:
        while number := os.read(reading, 1)[0]:
            handler = signal.getsignal(number)
            # Lightning wraps the handlers that it finds
            if _exit_at_once in getattr(handler, "signal_handlers", (handler,)):
                try:
                    before(number)
                finally:  # `before` may fail: the terminal is gone, or the disk is full
                    os._exit(128 + number)

    threading.Thread(target=wait, name="exit on signals", daemon=True).start()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Do nothing: being installed marks the signals that the thread acts on, and lets it hear of them."""


@contextmanager
def stop_signals_deferred() -> Iterator[None]:
    """Let stop signals wait until the block is done; processes that it starts have them blocked.

    Blocking alone is not enough: another thread may take a signal, whose handler Python then runs in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # which no handler interrupts
        yield
        return
    received: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    handlers = handle_stop_signals(lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in received[:1]:
            signal.raise_signal(number)


def handle_stop_signals(handler: Any) -> dict[int, Any]:
    """Install a handler for the stop signals, except those that the parent process ignores, as nohup does.

    Returns:
        The earlier handlers by signal, to be restored.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    return before
