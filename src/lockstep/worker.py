"""One worker's life: what it runs, and what it leaves behind about how it ended.

The launcher learns of one failed worker, the one that it saw first. So every worker leaves a file while it runs and one
that says how it ended, unless all went well.
"""

import json
import os
import pkgutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.config import ConfigError
from lockstep.files import whole_file
from lockstep.signals import STOP_SIGNALS, Stopped, exit_on_signals, received

SHUTDOWN_TIMEOUT_SEC = 10  # what a worker gets between SIGTERM and SIGKILL when the command is told to stop
STARTED_FILE, DONE_FILE, END_FILE = "started.json", "done.json", "end.json"  # running; all went well; it did not
COLLECTIVES = {
    *("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list"),
    *("init_process_group", "reduce"),
}


class WorkerError(RuntimeError):
    """A worker ended with an exception or a signal; the text holds its rank and its traceback."""


class RunError(RuntimeError):
    """What went wrong in a run and is said in full by the message: a traceback would add nothing."""


def work(function: str, config: dict[str, Any], environ: dict[str, str]) -> Any:
    """What the launcher runs in every worker.

    Args:
        function: `package.module:name` of a function of one config.
        config: The resolved config.
        environ: Variables that this worker gets beside the launcher's, unless they are set already.

    Returns:
        The function's value; None after an earlier attempt has ended for good.
    """
    global _record
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    os.environ.update(environ | dict(os.environ))
    _record = record = _Record(folder, int(os.environ["RANK"]), config["launch"]["timeout_sec"])
    exit_on_signals(before=record.leave_stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        if final_end(folder.parents[1]) is not None:
            return None  # to the agent this is a success, after which it does not try again
        result = pkgutil.resolve_name(function)(OmegaConf.create(config))
        record.close()
        return result
    except BaseException as error:
        record.leave(error)
        if not isinstance(error, ConfigError | Stopped):
            _wait_if_another_was_killed(folder)
        raise


def record_failure(error: BaseException) -> None:
    """Leave the file that says how this worker ends, if it is one of ours, before anything is cleaned up.

    A peer that fails of the clean-up may be seen first, and this process be ended by the launcher meanwhile.
    """
    if _record is not None:
        _record.leave(error)


class _Record:
    """The files that a worker leaves: one while it runs, and one that says how it ended.

    Args:
        folder: Where.
        rank: The worker's.
        timeout_sec: `launch.timeout_sec`, for the message when other ranks do not come.
    """

    def __init__(self, folder: Path, rank: int, timeout_sec: float) -> None:
        self.folder, self.rank, self.timeout_sec = folder, rank, timeout_sec
        self._lock = threading.Lock()
        unfinished = folder / f".{STARTED_FILE}"
        unfinished.write_text(json.dumps({"rank": rank, "pid": os.getpid()}))
        unfinished.replace(folder / STARTED_FILE)

    def close(self) -> None:
        """All went well; what is left to do is to wait until the launcher has taken the value."""
        done = self.folder / DONE_FILE
        (self.folder / STARTED_FILE).rename(done)
        Finalize(None, partial(done.unlink, missing_ok=True), exitpriority=0)  # after which the process ends

    def leave_stopped(self, signum: int) -> None:
        """Say that a signal ended this worker, unless it is the launcher's, which ends all when one has failed."""
        peers = [path for path in self.folder.parent.iterdir() if path != self.folder]
        failed = any((peer / END_FILE).exists() or _was_killed(peer / STARTED_FILE) for peer in peers)
        self.leave(_EndedByLauncher() if failed else Stopped(signum))

    def leave(self, error: BaseException) -> None:
        """Say how this worker ends. The first reason counts: what follows may follow from it."""
        with self._lock:
            if not (self.folder / END_FILE).exists():
                error = explain_absence(error, self.timeout_sec, lambda: _silent_peers(self.folder)) or error
                with whole_file(self.folder / END_FILE) as file:
                    file.write(json.dumps(_described(error, self.rank)).encode())


_record: _Record | None = None  # of this process, if it is a worker


def is_worker() -> bool:
    """Whether this process is a worker of our own launcher; torchrun's and srun's are not."""
    return _record is not None


class _EndedByLauncher(Exception):
    """Another rank has failed."""


def _described(error: BaseException, rank: int) -> dict[str, Any]:
    end = {"time": time.time(), "rank": rank, "kind": "error", "message": str(error)}
    if isinstance(error, Stopped):
        return end | {"kind": "stopped", "signum": error.signum, "where": error.where}
    for kind, class_ in {"config": ConfigError, "run": RunError, "ended": _EndedByLauncher}.items():
        if isinstance(error, class_):
            return end | {"kind": kind}
    return end | {"traceback": "".join(traceback.format_exception(error)).rstrip()}


def final_end(folder: Path) -> dict[str, Any] | None:
    """How a job ended that a restart must not try again: it was refused, or told to stop. None if it may go on.

    Args:
        folder: Of all attempts.
    """
    for attempt in folder.glob("attempt_*"):
        first = next(iter(ends(attempt)), None)
        if first is not None and first["kind"] in ("config", "stopped"):
            return first
    return None


def ends(attempt: Path) -> list[dict[str, Any]]:
    """How the workers of one attempt ended, first to last; those that ended well are not in it."""
    return sorted(left_behind(attempt, END_FILE), key=lambda end: end["time"])


def left_behind(attempt: Path, name: str) -> list[dict[str, Any]]:
    """What the workers of one attempt have in their files of one name."""
    return [json.loads(path.read_text()) for path in attempt.glob(f"*/{name}")]


def as_exception(end: dict[str, Any]) -> BaseException:
    """What an end file means to whoever started the worker."""
    if end["kind"] == "stopped":
        return Stopped(end["signum"], end["where"])
    if end["kind"] == "config":
        return ConfigError(end["message"])
    if end["kind"] == "ended":
        return WorkerError(f"rank {end['rank']} was ended by the launcher, since another failed and left no traceback")
    if end["kind"] == "run":
        return WorkerError(f"rank {end['rank']}: {end['message']}")
    return WorkerError(f"rank {end['rank']} failed:\n{end['traceback']}")


def _wait_if_another_was_killed(folder: Path) -> None:
    """Let the agent see a killed rank before this one, whose failure only follows from it: it names one rank's signal.

    A killed rank leaves no file that says how it ended. When this one is not the consequence of a kill, it waits in
    vain for a moment; a process is gone a little later than its connections. Once the agent has sent its SIGTERM, by
    which it ends the others, it has seen what it needs.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    peers = [path / STARTED_FILE for path in folder.parent.iterdir() if path != folder]
    begin, patience = time.monotonic(), 0.3
    while peers and time.monotonic() - begin < patience and signal.SIGTERM not in received:
        if any(_was_killed(path) for path in peers):
            patience = SHUTDOWN_TIMEOUT_SEC / 2  # the agent looks every tenth of a second
        time.sleep(0.02)


def _was_killed(started: Path) -> bool:
    try:
        pid = json.loads(started.read_text())["pid"]
    except FileNotFoundError:  # it has ended well, or has not begun
        return False
    return not (started.parent / END_FILE).exists() and not is_alive(pid) and started.exists()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet asked how does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _process_state(pid) != "Z"


# ------------------------------------------------------------------------------------------------ missing ranks


def explain_absence(error: BaseException, timeout_sec: float, missing: Callable[[], list[str]]) -> RunError | None:
    """A collective's failure in words: which collective, who did not come, where in the run. None for other errors.

    Args:
        error: What the collective raised; Gloo's own text says nothing of this.
        timeout_sec: `launch.timeout_sec`.
        missing: Asked for the ranks that did not come in time.
    """
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
        who = ", ".join(missing()) or "a rank of another node"
        return RunError(f"waited launch.timeout_sec={timeout_sec} s for {who} in {place}")
    return RunError(f"lost the connection to another rank in {place}")


def _silent_peers(folder: Path) -> list[str]:
    """This node's ranks that have not ended; of them those that are stopped, if any are, which may now go on."""
    time.sleep(0.5)  # the others that wait as this one does find it out about now
    silent = {}
    for started in folder.parent.glob(f"*/{STARTED_FILE}"):
        if started.parent != folder and not (started.parent / END_FILE).exists():
            peer = json.loads(started.read_text())
            silent[peer["rank"]] = peer["pid"]
    stopped = {rank: pid for rank, pid in silent.items() if _process_state(pid) == "T"}
    for pid in stopped.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # to hear the launcher's SIGTERM: it would be waited for until killed
    return [f"rank {rank}, which is stopped (process state T)" for rank in stopped] or [f"rank {r}" for r in silent]


def _process_state(pid: int) -> str:
    """The letter that `ps` shows; empty where the system does not tell."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
