"""Train one CNN on MNIST, and choose what it is trained with.

    python train.py                                          one device
    python train.py strategy=dp trainer.devices=2            one process, two replicas in two threads
    python train.py strategy=ddp trainer.devices=2           two processes
    python train.py -m strategy=single,dp,ddp                a sweep: one job after the other
    python train.py ckpt_path=FILE trainer.max_epochs=10     resume, also under another strategy
    torchrun --nproc-per-node 2 train.py strategy=ddp trainer.devices=2
    python train.py --cfg job                                the config, without running anything

Two machines, the same command on each, HOST being the first:

    python train.py strategy=ddp trainer.num_nodes=2 launch.rdzv_endpoint=HOST:29400
"""

import atexit
import sys

from lockstep import signals

if __name__ == "__main__":  # before anything that takes time
    atexit.register(signals.print_stop)
    signals.stop_on_signals()

import logging
import time
from pathlib import Path

from lockstep import launch

STARTED_AT = time.time()
INSPECTING = {"--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc"}

if __name__ == "__main__":
    launcher = launch.external_launcher()
    if launcher is None and (leftovers := launch.remove_leftovers()):
        print(f"warning: {leftovers}", file=sys.stderr)
    if launcher is None and not INSPECTING & set(sys.argv):
        launch.start_forkserver()  # first of all: its imports take longer than everything below
    if launcher is not None:
        name, _, rank = launcher
        signals.exit_on_signals(before=launch.say_stopped)  # the main thread of a worker waits for others in C++
        if {"-m", "--multirun"} & set(sys.argv):
            if rank > 0:
                launch.leave_it_to_the_speaker()
                sys.exit(1)
            sys.exit(f"error: {name} starts one job; allowed: the sweep without {name}")
        if rank > 0:  # rank 0 writes the run's folder; the others write nothing
            atexit.unregister(signals.print_stop)
            sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lockstep import config, report
from lockstep.worker import RunError, WorkerError

log = logging.getLogger(__name__)


sweep_dir: Path | None = None  # of the sweep that this command is, once it has begun


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    global sweep_dir
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep:
        sweep_dir = Path(HydraConfig.get().sweep.dir)
    else:
        cfg.launch.started_at = STARTED_AT
    try:
        launch.check_size(cfg)
        config.check(cfg, meets_by_itself=launch.external_launcher() is None)
        metrics = launch.run("lockstep.training:train", cfg)
    except signals.Stopped as stop:
        signals.raise_stop(stop)
    except (config.ConfigError, RunError, WorkerError) as error:
        log.error(error)
        if launch.speaks_for(error):
            print(f"error: {error}", file=sys.stderr)
        else:
            launch.leave_it_to_the_speaker()
        if sweep:
            raise  # Hydra goes on with the next job, and ends the sweep with an exit code that is not 0
        sys.exit(1)
    if metrics is None:
        if launch.external_launcher() is None:
            print(f"done; the results are on the node of rank 0, launch.rdzv_endpoint={cfg.launch.rdzv_endpoint}")
        return None
    report.print_result(metrics, Path(cfg.run_dir))
    return metrics.get(cfg.optimized_metric)


if __name__ == "__main__":
    try:
        main()
    finally:  # a failed job ends the command with an exception; what the others did is compared all the same
        if sweep_dir is not None:
            report.write_comparison([sweep_dir], sweep_dir)
