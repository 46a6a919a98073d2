"""The life of one worker process: it calls one function and reports one outcome."""

import importlib
import os
import pickle
import pkgutil
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from omegaconf import OmegaConf

from lockstep.errors import Stopped
from lockstep.launch.outcomes import Outcome, of_error
from lockstep.launch.signals import STOP_SIGNALS, exit_on_signals


@dataclass(frozen=True)
class Call:
    """What every worker of a job calls: `package.module:name`, a function of the resolved config and its `Worker`.

    Where no fork server did so, importing the module `preload` first is faster.
    """

    function: str
    config: dict[str, Any]
    preload: str | None = None

    def __call__(self, worker: "Worker") -> Any:
        if self.preload is not None:
            importlib.import_module(self.preload)
        return pkgutil.resolve_name(self.function)(OmegaConf.create(self.config), worker)


class Worker:
    """This process as one rank of a job.

    Args:
        launcher: Who started it: `lockstep`, `torchrun` or `srun`.
        rank: Its rank in the job.
        agent: Where to report the outcome; None where nobody listens.
    """

    def __init__(self, launcher: str, rank: int, agent: Connection | None = None) -> None:
        self.launcher, self.rank = launcher, rank
        self._agent, self._lock = agent, threading.Lock()

    def report(self, error: BaseException) -> None:
        """Report that this worker ends with `error`. Only the first report counts: later errors follow from it."""
        self._send(of_error(error, self.rank))

    def report_success(self, value: Any) -> None:
        """Report what the function returned."""
        self._send(Outcome("succeeded", self.rank, value=value))

    def _send(self, outcome: Outcome) -> None:
        message = pickle.dumps(outcome)  # not `send`: torch would share a tensor's memory with a process about to end
        with self._lock:
            if self._agent is not None:
                with suppress(OSError):  # the command is gone, and so will this process be
                    self._agent.send_bytes(message)
                self._agent = None


def work(call: Call, environ: dict[str, str], agent: Connection) -> None:
    """Run one worker: the entry point of its process.

    Args:
        call: What to call.
        environ: The variables that tell this worker its place in the job.
        agent: Takes the outcome; its other end closes when the command is gone.
    """
    os.environ.update(environ)
    worker = Worker("lockstep", int(environ["RANK"]), agent)
    exit_on_signals(before=lambda number: worker.report(Stopped(number)))
    threading.Thread(target=_end_with_command, args=(agent,), name="end with the command", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        worker.report_success(call(worker))
    except BaseException as error:
        worker.report(error)
        sys.exit(error.code if isinstance(error, Stopped) else 1)


def _end_with_command(agent: Connection) -> None:
    # The agent sends nothing. Nothing else tells a worker reliably that its command was killed: its parent is the fork
    # server, which lives as long as its workers do.
    with suppress(EOFError, OSError):
        agent.recv()
    os._exit(1)
