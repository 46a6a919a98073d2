"""Who started this interpreter: a person, a launcher, or Lockstep itself."""

import multiprocessing
import os
from collections.abc import MutableMapping
from typing import NamedTuple

# What launchers set for their workers. Where no launcher runs, an image, an allocation or a notebook left them behind.
LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
}


class Launcher(NamedTuple):
    """An external launcher, and which of its workers this process is."""

    name: str
    world_size: int
    rank: int
    local_rank: int


def external_launcher(environ: MutableMapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this interpreter as a worker, or None.

    A child of `multiprocessing` does not count: Lockstep's own workers and those of process pools inherit their
    environment.
    """
    if multiprocessing.parent_process() is not None:
        return None
    if {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"} <= environ.keys():
        return Launcher("torchrun", *(int(environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")))
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
        return Launcher("srun", *(int(environ.get(name, 0)) for name in names))
    return None


def restart_count() -> int:
    """Return how often the launcher has restarted this job's workers after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def remove_leftovers(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Remove a launcher's variables from the environment of a command that no launcher started.

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
