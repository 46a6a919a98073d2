"""The command line: what is prepared before Hydra runs, how jobs run, and how their errors are printed."""

import atexit
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import config
from lockstep.errors import ConfigError, RunError, Stopped, WorkerError
from lockstep.launch.origin import Launcher, external_launcher, remove_leftovers
from lockstep.launch.signals import StopSignals, exit_on_signals, stop_signals_deferred
from lockstep.launch.timeouts import REPORTING_RANK_SEC
from lockstep.launch.worker import Call, Worker

log = logging.getLogger(__name__)

INSPECTING = {"--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc"}
SILENT_RANK = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none")


class Command:
    """A command line that runs one job, or the jobs of a sweep.

    Args:
        stop_signals: Installed already.
        preload: Module that imports what every worker needs.

    Attributes:
        sweep_dir: The folder of the sweep that this command is, once its first job has begun.
    """

    def __init__(self, stop_signals: StopSignals, preload: str) -> None:
        self.sweep_dir: Path | None = None
        self._started_at = time.time()
        self._stop_signals, self._preload = stop_signals, preload
        self._launcher = external_launcher()
        if self._launcher is not None:
            self._become_worker(self._launcher)
            return
        if leftovers := remove_leftovers():
            print(f"warning: {leftovers}", file=sys.stderr)
        if not INSPECTING & set(sys.argv):
            start_forkserver(preload)  # first of all: its imports take longer than everything below

    def _become_worker(self, launcher: Launcher) -> None:
        """Be a worker of an external launcher, whose main thread may wait for others in C++."""
        exit_on_signals(before=self._print_stop)
        if {"-m", "--multirun"} & set(sys.argv):
            self._end_with(ConfigError(f"{launcher.name} starts one job; allowed: the sweep without {launcher.name}"))
        if launcher.rank > 0:  # rank 0 writes the run's folder; the others write nothing
            sys.argv += SILENT_RANK

    def _print_stop(self, number: int) -> None:
        if self._launcher.rank == 0:
            print(Stopped(number), file=sys.stderr, flush=True)

    def _end_with(self, error: Exception) -> None:
        """End this process; the reporting rank of each node prints an error that all its ranks have.

        torchrun ends all workers at the first exit, so the reporting rank must be the first to exit.
        """
        if isinstance(error, ConfigError) and self._launcher is not None and self._launcher.local_rank > 0:
            time.sleep(REPORTING_RANK_SEC)
            sys.exit(1)
        sys.exit(f"error: {error}")

    def run(self, function: str, cfg: DictConfig) -> Any:
        """Run one job, return what `run` returns, and print what goes wrong.

        Raises:
            SystemExit: If the job failed.
            Exception: Instead, in a sweep: Hydra goes on with the next job, and its exit code is not 0 in the end.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if sweep:
            self.sweep_dir = Path(HydraConfig.get().sweep.dir)
        else:
            cfg.launch.started_at = self._started_at
        try:
            self._check(cfg)
            metrics = run(function, cfg, self._preload, self._stop_signals)
        except Stopped as stop:
            if self._launcher is None or self._launcher.rank == 0:
                self._stop_signals.stop = stop  # says more than the one that the signal raised
            raise
        except (ConfigError, RunError, WorkerError) as error:
            log.error(error)
            if sweep:
                print(f"error: {error}", file=sys.stderr)
                # Hydra keeps the error until the sweep ends, and its frames would keep the job's store
                traceback.clear_frames(error.__traceback__)
                raise
            self._end_with(error)
        if metrics is None and self._launcher is None:
            print(f"done; the results are on the node of rank 0, launch.rdzv_endpoint={cfg.launch.rdzv_endpoint}")
        return metrics

    def _check(self, cfg: DictConfig) -> None:
        launcher, size = self._launcher, config.world_size(cfg)
        if launcher is not None and launcher.world_size != size:
            raise ConfigError(
                f"{launcher.name} started {launcher.world_size} processes; strategy={cfg.strategy.name} with"
                f" trainer.devices={cfg.trainer.devices} and trainer.num_nodes={cfg.trainer.num_nodes} runs {size}"
            )
        config.check(cfg, meets_by_itself=launcher is None)


def run(function: str, cfg: DictConfig, preload: str | None = None, stop_signals: StopSignals | None = None) -> Any:
    """Call a function in every worker process of a job, or in this process if it is a worker already.

    Args:
        function: `package.module:name` of a function of a config and a `Worker`. A name, since only workers import it.
        cfg: The composed config; the workers get it resolved.
        preload: Module that imports what `function` needs, quickly.
        stop_signals: Those of the command.

    Returns:
        Rank 0's value, or None on nodes without rank 0.

    Raises:
        ConfigError: If a worker refused the config.
        WorkerError: If a worker failed; no worker is left then.
        Stopped: If a signal ended the job.
    """
    if cfg.launch.started_at is None:
        cfg.launch.started_at = time.time()
    call = Call(function, OmegaConf.to_container(cfg, resolve=True), preload)
    if (launcher := external_launcher()) is not None:
        value = call(Worker(launcher.name, launcher.rank))
        return value if launcher.rank == 0 else None
    agent = importlib.import_module("lockstep.launch.agent")  # torch, which a mistyped command line must not wait for
    if stop_signals is not None:
        stop_signals.raise_if_stopped()
    return agent.run_in_workers(call)


def start_forkserver(preload: str) -> None:
    """Begin the imports that every worker needs, in a process of their own, while this one goes on.

    The server never touches a device, so workers forked from it can.
    """
    # When a peer exits, torch's C++ code prints warnings with stack traces; it also warns about host names that it does
    # not need. This package says what matters of that; whoever wants it all sets the variable.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    multiprocessing.set_forkserver_preload([preload])
    # A signal to the whole process group, such as Ctrl-C, must leave the server alone: the workers are its children,
    # and only it can say how they ended. The workers inherit the mask, and lift it when they are ready.
    with stop_signals_deferred():
        resource_tracker.ensure_running()  # it lifts the mask
    with stop_signals_deferred():
        forkserver.ensure_running()
    atexit.register(_stop_forkserver, forkserver._forkserver._forkserver_pid)


def _stop_forkserver(pid: int) -> None:
    # It would end by itself, but only after its imports: seconds of work for nothing after a mistyped command line.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
