"""Shared by all tests: composed configs, jobs in warm workers, and a check that nothing is left behind."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from processes import environment, processes_in

from lockstep import config
from lockstep.launch import STOP_SIGNALS
from lockstep.launch.command import run as run_in_workers
from lockstep.launch.command import start_forkserver

# What makes a run small, quiet and offline.
SMALL = (
    "data=mnist_sample",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=5",
    "launch.timeout_sec=60",
    "launch.threads_per_process=1",  # tests run side by side; two threads that wait for a core spin
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test, beside which the others run."""
    items.sort(key=lambda item: item.path.name != "test_sweep.py")


@pytest.fixture(scope="session", autouse=True)
def _warm_forkserver() -> None:
    """Every test's workers come from one server, as a command's do."""
    torch.set_num_threads(1)  # tests run side by side
    # The workers of the tests find the tests' own modules, such as `faults`.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    start_forkserver("lockstep.preload")
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """No variable, process, replica's thread, process group, signal handler or temporary file outlives its test."""
    before = dict(os.environ)
    scratch = Path(tempfile.mkdtemp(prefix="t"))  # not below tmp_path, whose name is too long for a socket
    os.environ["TMPDIR"] = str(scratch)  # of the commands that the test starts
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for pid in processes_in(tmp_path):  # of a test that failed: a command is waited for by its test
        os.kill(pid, signal.SIGKILL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    leaked = {name for name in os.environ.keys() | environ.keys() if os.environ.get(name) != environ.get(name)}
    os.environ.clear()
    os.environ.update(before)
    left = [path.name for path in scratch.iterdir() if not path.name.startswith(LEFT_BY_OTHERS)]
    shutil.rmtree(scratch)
    assert not left, f"left in the temporary folder: {left}"
    assert not leaked - ALLOWED_VARIABLES, f"environment variables changed: {leaked}"
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers
    assert not multiprocessing.active_children()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("replica")]


# What torchrun, TensorBoard and, on import, torch's compiler leave in the temporary folder.
LEFT_BY_OTHERS = ("torchelastic_", ".tensorboard-info", "torchinductor_")
# pytest's own, and what Lightning's `seed_everything` sets in the process that trains.
ALLOWED_VARIABLES = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"}


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., DictConfig]:
    """Composes the real configs with overrides, as train.py does, for a run folder of its own."""

    def make(*overrides: str, run: str = "run") -> DictConfig:
        with initialize_config_dir(str(config.PROJECT / "conf"), version_base="1.3"):
            return compose("config", [*SMALL, f"run_dir={tmp_path / run}", *overrides])

    return make


@pytest.fixture
def run_job(make_config: Callable[..., DictConfig]) -> Callable[..., dict[str, float]]:
    """Runs a whole job in worker processes and returns its metrics."""

    def run(*overrides: str, run: str = "run", function: str = "lockstep.training:train") -> Any:
        cfg = make_config(*overrides, run=run)
        config.check(cfg)
        return run_in_workers(function, cfg)

    return run


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a disk of its own, of a size as `mount` takes it; skips where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def make(size: str) -> Path:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {made.stderr.strip()}")
        return folder

    yield make
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)
