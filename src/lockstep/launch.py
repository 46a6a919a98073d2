"""Runs a function in fresh worker processes, one per rank, through torch.distributed.elastic.

Lightning's own launcher starts rank 1 by running the command line again, which in a Hydra sweep is the whole sweep.
Here every job, with one process or with many, runs in workers forked from a forkserver that has imported torch and
Lightning once; Lightning finds their environment set and starts nothing. This module imports torch only when a job is
launched.
"""

import atexit
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.addresses import NodeAddress, loopback, node_address
from lockstep.config import ConfigError, world_size
from lockstep.signals import STOP_SIGNALS, Stopped, raise_if_stopped
from lockstep.worker import (
    DONE_FILE,
    SHUTDOWN_TIMEOUT_SEC,
    STARTED_FILE,
    WorkerError,
    as_exception,
    ends,
    final_end,
    is_alive,
    left_behind,
    work,
)

log = logging.getLogger(__name__)

SPEAKING_TIME_SEC = 10.0  # by which processes started together may come to the same error apart

# What launchers set for their workers. In a process that none has started it is left from an image, a scheduler's
# allocation or a notebook.
LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
}


def start_forkserver() -> None:
    """Begin the imports that every worker needs, in a process of their own, while this one goes on.

    The server never touches a device, so workers forked from it can.
    """
    # Torch's C++ warns, with a stack trace, of what follows from a peer's end and of names it need not know. What
    # matters of that is said by this package; whoever wants it all sets the variable.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    multiprocessing.set_forkserver_preload(["lockstep.preload"])
    # A signal to the whole process group, such as Ctrl-C, must leave the server alone: the workers are its children,
    # and only it can say how they ended. The workers inherit the mask, and lift it when they are ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # it lifts the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    atexit.register(_stop_forkserver, forkserver._forkserver._forkserver_pid)


def _stop_forkserver(pid: int) -> None:
    # It would end by itself, but only after its imports: seconds of work for nothing after a mistyped command line.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def external_launcher(environ: dict[str, str] | os._Environ[str] = os.environ) -> tuple[str, int, int] | None:
    """Who started this interpreter as a worker, if anybody: launcher, world size, rank."""
    if {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"} <= environ.keys():
        return "torchrun", int(environ["WORLD_SIZE"]), int(environ["RANK"])
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "srun", int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_PROCID"])
    return None


def remove_leftovers(environ: dict[str, str] | os._Environ[str] = os.environ) -> str | None:
    """Take a launcher's variables out of the environment of a command that no launcher has started.

    Returns:
        One line that names them, or None if there were none.
    """
    named = sorted(name for name in environ if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"))
    slurm = [name for name in environ if name.startswith("SLURM_")]
    if not named and not slurm:
        return None
    found = [f"{name}={environ[name]}" for name in named] + ([f"{len(slurm)} SLURM_* variables"] if slurm else [])
    for name in (*named, *slurm):
        del environ[name]
    return (
        f"ignored in the environment: {', '.join(found)}; this command starts its own workers, and"
        " launch.threads_per_process sets their threads"
    )


def rank() -> int:
    """This process's rank in its job: 0 for the only one."""
    launcher = external_launcher()
    return launcher[2] if launcher is not None else 0


def say_stopped(signum: int) -> None:
    """On rank 0, what a signal did to a worker of an external launcher."""
    if rank() == 0:
        print(Stopped(signum), file=sys.stderr, flush=True)


def speaks_for(error: Exception) -> bool:
    """Whether this process is the one to tell an error, of those that an external launcher has started.

    A config is the same in all of them, and so is what is wrong with it on this machine.
    """
    launcher = external_launcher()
    local_rank = os.environ.get({"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID"}[launcher[0]]) if launcher else "0"
    return local_rank == "0" or not isinstance(error, ConfigError)


def leave_it_to_the_speaker() -> None:
    """Wait, in a process that does not tell an error, for the one that does.

    torchrun ends all the others at the first exit, so the one that has something to say must be the first to exit.
    """
    time.sleep(SPEAKING_TIME_SEC)


def restart_count() -> int:
    """How often the launcher has started this job's workers again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


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
        Stopped: If a signal ended the job.
    """
    started_at = time.time()
    if cfg.launch.started_at is None:
        cfg.launch.started_at = started_at
    config = OmegaConf.to_container(cfg, resolve=True)
    if (launcher := external_launcher()) is not None:
        import lockstep.preload  # noqa: F401  as the fork server does for its workers

        result = pkgutil.resolve_name(function)(OmegaConf.create(config))
        return result if launcher[2] == 0 else None
    return _run_in_workers(function, config)


def check_size(cfg: DictConfig) -> None:
    """Refuse a launcher that has started another number of processes than the config runs.

    Raises:
        ConfigError: With both numbers.
    """
    launcher = external_launcher()
    if launcher is not None and launcher[1] != world_size(cfg):
        name, size, _ = launcher
        raise ConfigError(
            f"{name} started {size} processes; strategy={cfg.strategy.name} with trainer.devices="
            f"{cfg.trainer.devices} and trainer.num_nodes={cfg.trainer.num_nodes} runs {world_size(cfg)}"
        )


def _run_in_workers(function: str, config: dict[str, Any]) -> Any:
    # here and not above: these import torch, which a mistyped command line must not wait for
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import lockstep.rendezvous  # noqa: F401  registers the rendezvous of one node

    raise_if_stopped()
    _silence("torch.distributed.elastic", "torch.multiprocessing")
    launch, num_nodes = config["launch"], config["trainer"]["num_nodes"]
    timeout = launch["timeout_sec"]
    node = loopback() if num_nodes == 1 else node_address(launch["rdzv_endpoint"], launch["local_addr"])
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _restored_environment():
        # across nodes too, each attempt gets a store of its own, without the addresses of the dead
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launch_config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=launch["nproc_per_node"],
            run_id=launch["rdzv_id"] or "lockstep",
            rdzv_backend="loopback" if num_nodes == 1 else "nodes",
            rdzv_endpoint=launch["rdzv_endpoint"] or "",
            rdzv_configs={"join_timeout": timeout, "read_timeout": timeout, "is_host": node.hosts},
            local_addr=node.address,
            max_restarts=launch["max_restarts"],
            monitor_interval=0.1,
            start_method=launch["start_method"],
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=SHUTDOWN_TIMEOUT_SEC,
            # none: the agent's own handler lets a second Ctrl-C interrupt the ending of the workers
            signals_to_handle="",
        )
        try:
            with _no_wait_for_the_dead(Path(folder)):
                results = elastic_launch(launch_config, work)(function, config, _worker_environment(node))
        except ChildFailedError as error:
            raise _first_failure(Path(folder), *error.get_first_failure()) from None
        except RendezvousError as error:
            late = f"not all came within launch.timeout_sec={timeout}"
            reason = str(error.__cause__ or error).partition("\n")[0] or late
            endpoint = launch["rdzv_endpoint"]
            raise WorkerError(f"{num_nodes} nodes did not meet at launch.rdzv_endpoint={endpoint}: {reason}") from None
        except Stopped as stop:  # this command was told to, and has told its workers
            raise Stopped(stop.signum, _how_it_stopped(Path(folder))) from None
        if (end := final_end(_attempts(Path(folder)))) is not None:
            raise as_exception(end)
    return results.get(0)


@contextmanager
def _no_wait_for_the_dead(folder: Path) -> Iterator[None]:
    """Break a wait of torch's agent that would never end.

    A worker that has returned its value waits until the agent has read all of them. If it is killed there, the agent
    waits for it to wake up (multiprocessing.Event.set). A signal to itself interrupts that.

    Raises:
        WorkerError: Naming the rank.
    """
    ended = threading.Event()
    dead: list[int] = []

    def watch() -> None:
        seen = 0
        while not ended.wait(0.5):
            with suppress(FileNotFoundError):  # it ends in an orderly way at this very moment
                rank = _dead_after_its_work(folder)
                seen = seen + 1 if rank is not None else 0
            if seen == 4:  # the agent would have seen it by itself
                dead.append(rank)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if dead:
            raise WorkerError(f"rank {dead[0]} was killed after its work was done; it left no traceback")
        signal.signal(number, before)  # somebody else's, who means what it meant before
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    before = signal.signal(signal.SIGUSR2, interrupt)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        signal.signal(signal.SIGUSR2, before)


def _dead_after_its_work(folder: Path) -> int | None:
    """A rank that has returned its value and is gone without having come to its orderly end."""
    workers = left_behind(_last_attempt(folder), DONE_FILE)
    return min((worker["rank"] for worker in workers if not is_alive(worker["pid"])), default=None)


def _worker_environment(node: NodeAddress) -> dict[str, str]:
    # left to itself, Gloo listens on whatever address this machine's host name means
    return {} if node.interface is None else {"GLOO_SOCKET_IFNAME": node.interface}


def _silence(*packages: str) -> None:
    """What they have to say about a failure is said here, once. Torch gives each of its loggers a level of its own."""
    for name in [*logging.root.manager.loggerDict, *packages]:
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Undo what the agent leaves behind, so that a sweep's next job starts like its first."""
    environ = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)


# ------------------------------------------------------------------------------------------------ how the workers ended


def _attempts(folder: Path) -> Path:
    """The folder, within the agent's, of all attempts."""
    return next(folder.glob("*/attempt_*"), folder / "none").parent


def _last_attempt(folder: Path) -> Path:
    numbered = {int(path.name.removeprefix("attempt_")): path for path in folder.glob("*/attempt_*")}
    return numbered[max(numbered)] if numbered else folder


def _how_it_stopped(folder: Path) -> str:
    """What to say beside the signal: where the ranks stopped together, or what went wrong in that."""
    last = ends(_last_attempt(folder))
    wrong = next((end["message"] for end in last if end["kind"] in ("run", "error")), "").partition("\n")[0]
    return max((end["where"] for end in last if end["kind"] == "stopped"), default="") or (wrong and f", but: {wrong}")


def _first_failure(folder: Path, rank: int, failure: Any) -> BaseException:
    """The failure that came first: the agent knows the one that it saw first, often a peer's lost connection.

    Args:
        folder: Where the workers' files lie.
        rank: Of the failure that the agent saw first.
        failure: What the agent knows about it.
    """
    attempt = _last_attempt(folder)
    last = ends(attempt)
    ended = {end["rank"] for end in last}
    if failure.exitcode < 0 and rank not in ended:
        return WorkerError(f"rank {rank} was killed by {failure.signal_name()}; it left no traceback")
    started = {worker["rank"] for worker in left_behind(attempt, STARTED_FILE)}
    # the agent too kills a worker that will not go, but only after having waited for it
    if (killed := started - ended) and (not last or time.time() - last[0]["time"] < SHUTDOWN_TIMEOUT_SEC):
        return WorkerError(f"rank {min(killed)} was killed; it left no traceback")
    if not last:
        return WorkerError(f"rank {rank} ended with exit code {failure.exitcode} before its work began")
    return as_exception(last[0])
