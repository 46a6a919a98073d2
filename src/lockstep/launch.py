"""Runs a function in fresh worker processes, one per rank, through torch.distributed.elastic.

Lightning's own launcher starts rank 1 by running the command line again, which in a Hydra sweep is the whole sweep.
Here every job, with one process or with many, runs in workers forked from a forkserver that has imported torch and
Lightning once; Lightning finds their environment set and starts nothing. This module imports torch only when a job is
launched.
"""

import atexit
import json
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config import ConfigError, world_size

log = logging.getLogger(__name__)

PRELOAD = ["hydra", "lockstep.training", "lockstep.loggers", "lockstep.callbacks", "lockstep.data", "lockstep.model"]
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SHUTDOWN_TIMEOUT_SEC = 10  # what a worker gets between SIGTERM and SIGKILL once another has failed
STARTED_FILE, FAILURE_FILE = "started", "failure.json"


class WorkerError(RuntimeError):
    """A worker ended with an exception or a signal; the text holds its rank and its traceback."""


def start_forkserver() -> None:
    """Begin the imports that every worker needs, in a process of their own, while this one goes on.

    The server never touches a device, so workers forked from it can.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    # Ctrl-C reaches the whole process group; the server must not answer with a traceback from the middle of an import
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    atexit.register(_stop_forkserver, forkserver._forkserver._forkserver_pid)


def _stop_forkserver(pid: int) -> None:
    # It would end by itself, but only after its imports: seconds of work for nothing after a mistyped command line.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def external_launcher(environ: dict[str, str] | os._Environ[str] = os.environ) -> tuple[str, int, int] | None:
    """Who started this interpreter as a worker, if anybody: launcher, world size, rank."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun", int(environ["WORLD_SIZE"]), int(environ["RANK"])
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "srun", int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_PROCID"])
    return None


def rank() -> int:
    """This process's rank in its job: 0 for the only one."""
    launcher = external_launcher()
    return launcher[2] if launcher is not None else 0


def run(function: str, cfg: DictConfig) -> Any:
    """Call a function in every worker process and return what rank 0's call returned.

    Args:
        function: `package.module:name` of a function of one config. A name, since only the workers import it.
        cfg: The composed config; the workers get it resolved.

    Returns:
        Rank 0's value, or None on the nodes where rank 0 is not.

    Raises:
        ConfigError: If a worker refused the config.
        WorkerError: If a worker failed; no worker is left then.
        SystemExit: With 128 + the signal's number, if this process was told to stop.
    """
    started_at = time.time()
    if cfg.launch.started_at is None:
        cfg.launch.started_at = started_at
    if (launcher := external_launcher()) is not None:
        return _run_in_place(function, cfg, *launcher)
    return _run_in_workers(function, OmegaConf.to_container(cfg, resolve=True))


def _run_in_place(function: str, cfg: DictConfig, launcher: str, size: int, rank: int) -> Any:
    if size != world_size(cfg):
        raise ConfigError(
            f"{launcher} started {size} processes; strategy={cfg.strategy.name} with trainer.devices="
            f"{cfg.trainer.devices} and trainer.num_nodes={cfg.trainer.num_nodes} runs {world_size(cfg)}"
        )
    result = pkgutil.resolve_name(function)(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    return result if rank == 0 else None


def _run_in_workers(function: str, config: dict[str, Any]) -> Any:
    # here and not above: these import torch, which a mistyped command line must not wait for
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic", "torch.multiprocessing")
    launch, num_nodes = config["launch"], config["trainer"]["num_nodes"]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _restored_process_state():
        launch_config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=launch["nproc_per_node"],
            run_id=launch["rdzv_id"] or "lockstep",
            rdzv_backend="c10d",
            rdzv_endpoint=launch["rdzv_endpoint"] or "localhost:0",
            rdzv_configs=_rendezvous_options(launch),
            local_addr=launch["local_addr"] or ("localhost" if num_nodes == 1 else None),
            max_restarts=launch["max_restarts"],
            monitor_interval=0.1,
            start_method=launch["start_method"],
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=SHUTDOWN_TIMEOUT_SEC,
        )
        try:
            results = elastic_launch(launch_config, _work)(function, config)
        except ChildFailedError as error:
            raise _first_failure(Path(folder), *error.get_first_failure()) from None
        except RendezvousError as error:
            endpoint = launch["rdzv_endpoint"]
            raise WorkerError(f"{num_nodes} nodes did not meet at launch.rdzv_endpoint={endpoint}: {error}") from None
        except SignalException as stop:
            print(f"stopped by {signal.Signals(stop.sigval).name}", file=sys.stderr)
            raise SystemExit(128 + stop.sigval) from None
    return results.get(0)


def _rendezvous_options(launch: dict[str, Any]) -> dict[str, Any]:
    options = {"join_timeout": launch["timeout_sec"], "read_timeout": launch["timeout_sec"]}
    if launch["local_addr"] is not None and launch["rdzv_endpoint"] is not None:
        # said rather than looked up: the host names of such a network do not resolve
        options["is_host"] = launch["local_addr"] == launch["rdzv_endpoint"].rpartition(":")[0]
    return options


def _silence(*packages: str) -> None:
    """What they have to say about a failure is said here, once. Torch gives each of its loggers a level of its own."""
    for name in [*logging.root.manager.loggerDict, *packages]:
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _restored_process_state() -> Iterator[None]:
    """Undo what the agent leaves behind, so that a sweep's next job starts like its first."""
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _work(function: str, config: dict[str, Any]) -> Any:
    """One worker's life. It leaves a file while it runs, and one that says why when it fails."""
    folder, rank = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent, int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, _exit_once())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    started = folder / STARTED_FILE
    try:
        started.write_text(str(rank))
        result = pkgutil.resolve_name(function)(OmegaConf.create(config))
        started.unlink()
        return result
    except BaseException as error:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends the others when one has failed
            _leave_failure(folder, rank, error)
        except SystemExit:  # its signal came before it was ignored
            _leave_failure(folder, rank, error)
        raise


def _leave_failure(folder: Path, rank: int, error: BaseException) -> None:
    failure = {
        "time": time.time(),
        "rank": rank,
        "config_error": isinstance(error, ConfigError),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    unfinished = folder / f".{FAILURE_FILE}"
    unfinished.write_text(json.dumps(failure))
    unfinished.replace(folder / FAILURE_FILE)


def _exit_once() -> Callable[[int, FrameType | None], None]:
    """A signal handler that ends the process with its clean-up, which a second signal does not interrupt."""
    exiting = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal exiting
        if not exiting:
            exiting = True
            raise SystemExit(128 + number)

    return handle


def _first_failure(folder: Path, rank: int, failure: Any) -> Exception:
    """The failure that came first: the agent knows the one that it saw first, often a peer's lost connection.

    Args:
        folder: Where the workers' files lie.
        rank: Of the failure that the agent saw first.
        failure: What the agent knows about it.
    """
    failures = [json.loads(path.read_text()) for path in folder.rglob(FAILURE_FILE)]
    first = min(failures, key=lambda each: each["time"], default=None)
    killed = {int(path.read_text()) for path in folder.rglob(STARTED_FILE)} - {each["rank"] for each in failures}
    # the agent too kills a worker that will not go, but only after having waited for it
    if first is None or (killed and time.time() - first["time"] < SHUTDOWN_TIMEOUT_SEC):
        if not killed and failure.exitcode >= 0:
            return WorkerError(f"rank {rank} ended with exit code {failure.exitcode} before its work began")
        culprit = rank if rank in killed or not killed else min(killed)
        by = f" by {failure.signal_name()}" if culprit == rank and failure.exitcode < 0 else ""
        return WorkerError(f"rank {culprit} was killed{by}; it left no traceback")
    if first["config_error"]:
        return ConfigError(first["message"])
    return WorkerError(f"rank {first['rank']} failed:\n{first['traceback'].rstrip()}")
