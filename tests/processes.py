"""Commands and processes for the tests: started as a person starts them, waited for by what they show."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import config

TRAIN = [sys.executable, str(config.PROJECT / "train.py")]
PATIENCE_SEC = 120  # for an event that must come; no test passes because of how fast it came


def environment(**more: str) -> dict[str, str]:
    """The environment of a command whose workers find the tests' own modules, such as `faults`."""
    path = os.pathsep.join(filter(None, (str(config.PROJECT / "tests"), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path} | more


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SEC) -> Any:
    """Wait for an event, and return what the condition returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain for {seconds} s: {what}"
        time.sleep(0.02)
    return found


def start(command: Sequence[str], cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a terminal's foreground job has."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command,
        cwd=cwd,
        **{"start_new_session": True, "env": environment(), "stdin": subprocess.DEVNULL} | pipes | options,
    )


def processes_in(folder: Path) -> dict[int, str]:
    """The process ids and command lines of all processes whose working directory this is."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.readlink(process / "cwd") == str(folder):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def remove_what_the_killed_leave() -> None:
    """Remove the temporary files of commands that were killed before they could do so themselves."""
    for path in Path(os.environ["TMPDIR"]).iterdir():
        shutil.rmtree(path)


def ended(process: subprocess.Popen[str], cwd: Path, seconds: float = PATIENCE_SEC) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr, once nothing of the command is left running."""
    _, stderr = process.communicate(timeout=seconds)
    wait_until(lambda: not processes_in(cwd), f"the end of {processes_in(cwd)}", seconds)
    return process.returncode, stderr.splitlines()


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(mask >> (number - 1) & 1)
