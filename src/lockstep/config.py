"""Check a config before anything expensive starts.

Imports neither torch nor Lightning, so that a mistake is answered at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import tags
from lockstep.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[2]

# The smallest value allowed for each key that must be a whole number.
MINIMA = {
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "data.batch_size": 1,
    "data.eval_batch_size": 1,
    "launch.timeout_sec": 1,
    "strategy.devices": 1,
    "strategy.processes": 1,
    "launch.max_restarts": 0,
    "data.num_workers": 0,
}


def _project(path: str) -> str:
    return str(PROJECT / path)


# `${project:outputs}` is a folder of this project, whatever the working directory of the command.
OmegaConf.register_new_resolver("project", _project, replace=True)


def world_size(cfg: DictConfig) -> int:
    """Return the number of worker processes over all nodes."""
    return cfg.launch.nproc_per_node * cfg.trainer.num_nodes


def replicas(cfg: DictConfig) -> int:
    """Return the number of model replicas in one process, each with a device of its own."""
    return cfg.strategy.devices // cfg.strategy.processes


def per_process_batch_size(key: str, batch_size: int, world_size: int) -> int:
    """Return the share of a global batch that one process takes, in samples.

    Args:
        key: The config key of `batch_size`, for the message.
        batch_size: The global batch.
        world_size: Processes over all nodes.

    Raises:
        ConfigError: If `batch_size` does not divide.
    """
    if batch_size % world_size:
        raise ConfigError(
            f"{key}={batch_size} does not divide among {world_size} processes; allowed: a multiple of {world_size},"
            f" such as {max(batch_size // world_size, 1) * world_size}"
        )
    return batch_size // world_size


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as they are typed on the command line: `{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def check(cfg: DictConfig, meets_by_itself: bool = True) -> None:
    """Refuse a composed config that cannot run.

    Args:
        meets_by_itself: True if this command starts its workers, which then must find those of other nodes.

    Raises:
        ConfigError: On the first key that is wrong.
    """
    for key, minimum in MINIMA.items():
        _check_count(cfg, key, minimum)
    for key in ("launch.threads_per_process", "data.val_size"):
        if OmegaConf.select(cfg, key) is not None:
            _check_count(cfg, key, minimum=1)
    _check_count(cfg, "seed", minimum=0, maximum=2**32 - 1)  # NumPy takes no other seeds
    _check_sizes(cfg, meets_by_itself)
    if cfg.ckpt_path is not None and not Path(cfg.ckpt_path).is_file():  # what is inside, the workers check
        allowed = "a file such as RUN_FOLDER/checkpoints/last.ckpt"
        raise ConfigError(f"ckpt_path={cfg.ckpt_path} does not exist; allowed: {allowed}")
    _check_choice(cfg, "launch.start_method", ("forkserver", "spawn"))
    _check_choice(cfg, "optimized_metric", tags.FINAL)


def _check_count(cfg: DictConfig, key: str, minimum: int, maximum: int | None = None) -> None:
    value = OmegaConf.select(cfg, key)
    # bool is an int in Python, but nobody means `devices=true` as 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{key}={value}; allowed: a whole number >= {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{key}={value}; allowed: up to {maximum}")


def _check_choice(cfg: DictConfig, key: str, allowed: tuple[str, ...]) -> None:
    value = OmegaConf.select(cfg, key)
    if value not in allowed:
        raise ConfigError(f"{key}={value}; allowed: {', '.join(allowed)}")


def _check_sizes(cfg: DictConfig, meets_by_itself: bool) -> None:
    strategy, num_nodes = cfg.strategy, cfg.trainer.num_nodes
    if strategy.num_nodes != num_nodes:
        raise ConfigError(
            f"trainer.num_nodes={num_nodes}; strategy={strategy.name} runs on {strategy.num_nodes} node;"
            f" allowed: trainer.num_nodes={strategy.num_nodes}, or strategy=ddp"
        )
    if cfg.launch.nproc_per_node != strategy.processes:
        raise ConfigError(
            f"launch.nproc_per_node={cfg.launch.nproc_per_node}; strategy={strategy.name} with"
            f" trainer.devices={cfg.trainer.devices} runs {strategy.processes} per node; allowed: {strategy.processes}"
        )
    if meets_by_itself and num_nodes > 1 and cfg.launch.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.rdzv_endpoint=null with trainer.num_nodes={num_nodes}; allowed: HOST:PORT of node 0,"
            " the same on every node"
        )
    for key in ("launch.rdzv_endpoint", "launch.local_addr"):
        if num_nodes == 1 and OmegaConf.select(cfg, key) is not None:
            raise ConfigError(
                f"{key}={OmegaConf.select(cfg, key)} with trainer.num_nodes=1; allowed: null, or more than one node"
            )
    per_process_batch_size("data.batch_size", cfg.data.batch_size, world_size(cfg))
