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

from lockstep import launch

# first of all, since what follows takes time
command = launch.prepare(preload="lockstep.preload") if __name__ == "__main__" else None

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep import report


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Run one job, and return what a Hydra sweeper optimises."""
    metrics = command.run("lockstep.training:train", cfg)
    if metrics is None:  # another node or rank has them
        return None
    report.print_result(metrics, Path(cfg.run_dir))
    return metrics.get(cfg.optimized_metric)


if __name__ == "__main__":
    try:
        main()
    finally:  # a failed job ends the command with an exception; the others are compared all the same
        if command.sweep_dir is not None:
            report.write_comparison([command.sweep_dir], command.sweep_dir)
