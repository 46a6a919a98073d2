"""Builds, fits and tests one run. Runs once in every worker process."""

import ctypes
import json
import logging
import os
import platform
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from lockstep import launch, report, tags
from lockstep.callbacks import EpochMonitor
from lockstep.config import ConfigError, replicas, world_size
from lockstep.files import whole_file
from lockstep.loggers import run_loggers
from lockstep.rendezvous import check_nodes_agree, connect, from_rank_zero, once_per_node
from lockstep.stopping import StopTogether
from lockstep.worker import is_worker

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

# Third-party warnings that say nothing about this run, each with its reason.
EXPECTED_WARNINGS = (
    r".*does not have many workers.*",  # a batch is one index operation: workers only add copies
    r".*recommended to use `self\.log\(.*sync_dist=True\)`.*",  # EpochMonitor logs what it has reduced already
    r"The dirpath has changed from.*",  # a resumed run writes its checkpoints to its own folder
    r".*Checkpoint directory .* exists and is not empty.*",  # a restarted run goes on in its own folder
    r".*is smaller than the logging interval.*",  # a short run has no curve per step, and needs none
    r".*your dataloader is not resumable.*",  # its batch sampler is: it leaves out the batches that were seen
)


def train(cfg: DictConfig) -> dict[str, float]:
    """Train, then test the best checkpoint.

    Args:
        cfg: The composed and resolved config, the same in every process.

    Returns:
        The final value of every tag, on rank 0; what the other ranks return is not complete.

    Raises:
        ConfigError: If the config cannot run on this machine or with this data.
    """
    set_up_process(cfg)
    connect(cfg.launch.timeout_sec)
    if cfg.trainer.num_nodes > 1:
        check_nodes_agree(OmegaConf.to_container(cfg))
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    try:
        trainer = build_trainer(cfg)
        datamodule = instantiate(cfg.data)
        once_per_node(datamodule.prepare_data)
        # Weights are made in the type they are trained in: Lightning restores a checkpoint before it converts the
        # module, which would round float64 weights to float32.
        with trainer.precision_plugin.tensor_init_context():
            model = instantiate(cfg.model, _convert_="all")
        model.save_hyperparameters(OmegaConf.to_container(cfg), logger=False)
        check_checkpoint(cfg.ckpt_path, model, datamodule)
        trainer.fit(model, datamodule, ckpt_path=where_to_go_on(cfg, trainer), weights_only=True)
        trainer.test(model, datamodule, ckpt_path=best_checkpoint(trainer), weights_only=True, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    return finish(cfg, trainer)


def set_up_process(cfg: DictConfig) -> None:
    """Threads, memory, logging and warnings of this process, whatever ran in it or in its parent before."""
    torch.set_num_threads(num_threads(cfg))
    keep_freed_memory()
    if accelerator(cfg) == "cpu":
        # Before every step an optimizer asks torch for GPUs, and with Lightning imported torch opens NVML to answer.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for pattern in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    # what Lightning calls of torch that torch has renamed since is Lightning's to change
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    if launch.rank() == 0:
        log_to(Path(cfg.run_dir))


def keep_freed_memory() -> None:
    """Have glibc, where that is the C library, keep what a step frees for the next one (mallopt(3)).

    Left to itself it hands large buffers back to the system, which has to clear them before it gives them out again: up
    to a fifth of a step. At most 1 GiB is kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**30)


def log_to(run_dir: Path) -> None:
    """Send this package's log to the terminal, bare, and to the run's train.log, with the time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    package = logging.getLogger("lockstep")
    package.setLevel(logging.INFO)
    terminal = logging.StreamHandler(sys.stdout)
    file = logging.FileHandler(run_dir / "train.log")
    file.setFormatter(logging.Formatter("[%(asctime)s][%(levelname)s] %(message)s"))
    for handler in package.handlers:
        handler.close()
    package.handlers, package.propagate = [terminal, file], False


def where_to_go_on(cfg: DictConfig, trainer: pl.Trainer) -> str | None:
    """The checkpoint to begin with: `ckpt_path`, or after a restart what this run has written itself.

    Rank 0 decides, since only it writes them: another node neither has the file nor need have been restarted.
    """
    path, written = cfg.ckpt_path, Path(cfg.last_checkpoint)
    if launch.restart_count() and not is_worker():
        log.warning(
            "torchrun has started this job again, from %s; only launch.max_restarts resumes", path or "the start"
        )
    elif launch.rank() == 0 and launch.restart_count():
        # a file from before this command is another run's, which the folder may have been used for
        if written.exists() and written.stat().st_mtime >= cfg.launch.started_at:
            path = str(written)
        else:
            for logger in run_loggers(trainer):
                logger.rewind(logger.lengths(before=cfg.launch.started_at))
        log.warning("restart %d of %d, from %s", launch.restart_count(), cfg.launch.max_restarts, path or "the start")
    return from_rank_zero("where_to_go_on", path)


def num_threads(cfg: DictConfig) -> int:
    """Intra-op threads of one replica: an even share of this machine's cores."""
    if cfg.launch.threads_per_process is not None:
        return cfg.launch.threads_per_process
    return max(1, num_cores() // (cfg.launch.nproc_per_node * replicas(cfg)))


def num_cores() -> int:
    """Cores that this process may use; macOS cannot tell, and says how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerator(cfg: DictConfig) -> str:
    """`trainer.accelerator` with `auto` decided: the GPUs if there are enough of them, else the CPU.

    Raises:
        ConfigError: If GPUs are asked for by name and there are too few.
    """
    name, devices, available = cfg.trainer.accelerator, cfg.strategy.devices, torch.cuda.device_count()
    if name == "auto":
        return "cuda" if available >= devices else "cpu"
    if name in ("gpu", "cuda") and available < devices:
        raise ConfigError(
            f"trainer.accelerator={name} with strategy={cfg.strategy.name} needs {devices} GPUs and this machine has"
            f" {available}; allowed: a smaller trainer.devices, or trainer.accelerator=cpu"
        )
    return name


def build_trainer(cfg: DictConfig) -> pl.Trainer:
    """The Trainer, its logger, its callbacks and the strategy's plugin, all from the config."""
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    # Lightning refuses the contradiction instead
    switches = {ProgressBar: cfg.trainer.enable_progress_bar, Checkpoint: cfg.trainer.enable_checkpointing}
    unwanted = tuple(kind for kind, wanted in switches.items() if not wanted)
    callbacks = [callback for callback in callbacks if not isinstance(callback, unwanted)]
    callbacks.sort(key=lambda callback: isinstance(callback, StopTogether))  # last: it hears what the others ask for
    callbacks.append(LambdaCallback(on_train_start=lambda trainer, _: announce(cfg, trainer)))
    options: dict[str, Any] = instantiate(cfg.trainer, _convert_="all") | {
        "accelerator": accelerator(cfg),
        "devices": cfg.strategy.devices,
        "strategy": instantiate(cfg.strategy).plugin,  # a name or an object
    }
    logger = instantiate(cfg.logger) if "logger" in cfg else False  # `~logger` on the command line
    try:
        return pl.Trainer(**options, callbacks=callbacks, logger=logger)
    except (TypeError, ValueError) as error:  # what the Trainer says of its arguments names them
        raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error


def announce(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Say on rank 0 what is about to run."""
    if trainer.is_global_zero:
        log.info(
            report.opening_line(
                strategy=cfg.strategy.name,
                processes=trainer.world_size,
                replicas=replicas(cfg),
                threads=num_threads(cfg),
                batch_size=cfg.data.batch_size,
                device=device_name(trainer.strategy.root_device),
                source=trainer.datamodule.source,
            )
        )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_checkpoint(path: str | None, model: pl.LightningModule, datamodule: pl.LightningDataModule) -> None:
    """Refuse a file that Lightning could not resume this model from.

    Raises:
        ConfigError: Naming `ckpt_path`.
    """
    if path is None:
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises whatever the file's content provokes
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"ckpt_path={path} is not a checkpoint that can be opened weights-only ({reason})") from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "optimizer_states", "loops"} <= checkpoint.keys():
        raise ConfigError(f"ckpt_path={path} is not a checkpoint of a training run; allowed: last.ckpt or best.ckpt")
    if "epoch_sums" in checkpoint and type(datamodule).__qualname__ not in checkpoint:  # which tells the position
        raise ConfigError(
            f"ckpt_path={path} was written within an epoch of other data; allowed: the same data, or a checkpoint"
            " from an epoch's end"
        )
    states = (checkpoint["state_dict"], model.state_dict())
    there, here = ({name: tuple(value.shape) for name, value in state.items()} for state in states)
    if there != here:
        name = min(name for name, _ in there.items() ^ here.items())
        raise ConfigError(
            f"ckpt_path={path} is of another model: {name} has shape {there.get(name)} there and {here.get(name)} here;"
            " allowed: a checkpoint of the same model"
        )


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """Where this run's best weights lie; None, the weights at hand, where it has written none.

    A resumed ModelCheckpoint still knows the best file of the run that it was resumed from; that is not this run's.
    """
    callback = trainer.checkpoint_callback
    best = getattr(callback, "best_model_path", "")
    return best if best and Path(best).parent == Path(callback.dirpath) else None


def finish(cfg: DictConfig, trainer: pl.Trainer) -> dict[str, float]:
    """Write `metrics.json` and the HParams row, on rank 0."""
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, EpochMonitor)]
    metrics = {tag: value for monitor in monitors for tag, value in sorted(monitor.metrics.items())}
    if trainer.is_global_zero:
        final = metrics | circumstances(cfg, trainer)
        with whole_file(Path(cfg.run_dir) / "metrics.json") as file:
            file.write(f"{json.dumps(final, indent=2)}\n".encode())
        log_hyperparameters(cfg, trainer, metrics)
    return metrics


def circumstances(cfg: DictConfig, trainer: pl.Trainer) -> dict[str, Any]:
    """What a comparison needs to know of a run beside its config."""
    packages = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
    return {
        tags.SOURCE: trainer.datamodule.source,
        tags.THREADS: num_threads(cfg),
        tags.DEVICE: device_name(trainer.strategy.root_device),
        tags.HARDWARE: f"{num_cores()} cores of {cpu_name()}",
        tags.VERSIONS: ", ".join(f"{name} {version}" for name, version in packages.items()),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def model_name(cfg: DictConfig) -> str:
    """The network's class and its arguments, such as `CNN(channels=[8, 16], hidden=128)`."""
    net = OmegaConf.to_container(cfg.model.get("net", cfg.model))
    name = net.pop("_target_").rpartition(".")[2]
    return f"{name}({', '.join(f'{key}={value}' for key, value in net.items())})"


def log_hyperparameters(cfg: DictConfig, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """One row of TensorBoard's HParams page: what tells runs apart against what is compared."""
    params = {
        "strategy": cfg.strategy.name,
        "devices": cfg.strategy.devices,
        "world_size": world_size(cfg),
        "global_batch_size": cfg.data.batch_size,
        "per_process_batch_size": cfg.data.batch_size // world_size(cfg),
        "threads": num_threads(cfg),
        "model": model_name(cfg),
        "seed": cfg.seed,
    }
    for logger in run_loggers(trainer):
        logger.close(params, {tag: metrics[tag] for tag in tags.SUMMARY if tag in metrics})
