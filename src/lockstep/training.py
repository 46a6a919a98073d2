"""Builds, fits and tests one run. Runs once in every worker process."""

import logging
import platform
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

from lockstep import host, tags
from lockstep.callbacks import EpochMonitor, FailureNote, StopTogether
from lockstep.config import replicas, world_size
from lockstep.errors import ConfigError, first_line
from lockstep.files import write_json
from lockstep.launch import restart_count
from lockstep.launch.store import JobStore
from lockstep.launch.worker import Worker
from lockstep.loggers import run_loggers

log = logging.getLogger(__name__)

# Third-party warnings that say nothing about this run, each with its reason.
EXPECTED_WARNINGS = (
    r".*does not have many workers.*",  # a batch is one index operation: workers only add copies
    r".*recommended to use `self\.log\(.*sync_dist=True\)`.*",  # EpochMonitor logs what it has reduced already
    r"The dirpath has changed from.*",  # a resumed run writes its checkpoints to its own folder
    r".*Checkpoint directory .* exists and is not empty.*",  # a restarted run goes on in its own folder
    r".*is smaller than the logging interval.*",  # a short run has no curve per step, and needs none
    r".*your dataloader is not resumable.*",  # its batch sampler is: it leaves out the batches that were seen
)


def train(cfg: DictConfig, worker: Worker) -> dict[str, float]:
    """Train, then test the best checkpoint.

    Args:
        cfg: The composed and resolved config, the same in every process.
        worker: This process as one rank of the job.

    Returns:
        The final value of every tag on rank 0; incomplete on the other ranks.

    Raises:
        ConfigError: If the config cannot run on this machine or with this data.
    """
    set_up_process(cfg, worker)
    store = JobStore.connect(cfg.launch.timeout_sec)
    if cfg.trainer.num_nodes > 1:
        store.check_nodes_agree(OmegaConf.to_container(cfg))
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    try:
        trainer = build_trainer(cfg, worker)
        datamodule = instantiate(cfg.data)
        store.once_per_node(datamodule.prepare_data)
        model = build_model(cfg, trainer)
        check_checkpoint(cfg.ckpt_path, model, datamodule)
        start = store.from_rank_zero("resume_path", resume_path(cfg, worker, trainer))
        trainer.fit(model, datamodule, ckpt_path=start, weights_only=True)
        trainer.test(model, datamodule, ckpt_path=best_checkpoint(trainer), weights_only=True, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    return finish(cfg, trainer)


def set_up_process(cfg: DictConfig, worker: Worker) -> None:
    """Prepare this process: its resources, warnings and logs."""
    host.take_resources(cfg)
    for pattern in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    # Lightning still calls torch functions by their old names; that is for Lightning to fix
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if worker.rank == 0:
        log_to(Path(cfg.run_dir))


def log_to(run_dir: Path) -> None:
    """Send this package's log to the terminal, bare, and to the run's train.log, with the time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(run_dir / "train.log")
    file.setFormatter(logging.Formatter("[%(asctime)s][%(levelname)s] %(message)s"))
    package = logging.getLogger("lockstep")
    package.setLevel(logging.INFO)
    for handler in package.handlers:
        handler.close()
    package.handlers, package.propagate = [logging.StreamHandler(sys.stdout), file], False


def build_trainer(cfg: DictConfig, worker: Worker) -> pl.Trainer:
    """Return the Trainer with its loggers, callbacks and strategy plugin, all from the config."""
    options: dict[str, Any] = instantiate(cfg.trainer, _convert_="all") | {
        "accelerator": host.accelerator(cfg),
        "devices": cfg.strategy.devices,
        "strategy": instantiate(cfg.strategy).plugin,  # a name or an object
        "logger": instantiate(cfg.logger) if "logger" in cfg else False,  # `~logger` on the command line
    }
    try:
        return pl.Trainer(**options, callbacks=build_callbacks(cfg, worker))
    except (TypeError, ValueError) as error:  # what the Trainer says of its arguments names them
        raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error


def build_callbacks(cfg: DictConfig, worker: Worker) -> list[pl.Callback]:
    """Return the config's callbacks in the order in which they are called, and those that every run has."""
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    # Lightning would refuse the contradiction
    switches = {ProgressBar: cfg.trainer.enable_progress_bar, Checkpoint: cfg.trainer.enable_checkpointing}
    unwanted = tuple(kind for kind, wanted in switches.items() if not wanted)
    callbacks = [callback for callback in callbacks if not isinstance(callback, unwanted)]
    callbacks.sort(key=lambda callback: isinstance(callback, StopTogether))  # last: it hears what the others ask for
    return [*callbacks, FailureNote(worker), LambdaCallback(on_train_start=lambda trainer, _: announce(cfg, trainer))]


def build_model(cfg: DictConfig, trainer: pl.Trainer) -> pl.LightningModule:
    """Return the model, with weights in the type in which they are trained.

    Lightning restores a checkpoint before it converts the module, which would round float64 weights to float32.
    """
    with trainer.precision_plugin.tensor_init_context():
        model = instantiate(cfg.model, _convert_="all")
    model.save_hyperparameters(OmegaConf.to_container(cfg), logger=False)
    return model


def announce(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Print on rank 0 what is about to run, in one line."""
    processes, batch_size = trainer.world_size, cfg.data.batch_size
    device = host.device_name(trainer.strategy.root_device)
    if trainer.is_global_zero:
        log.info(
            f"{cfg.strategy.name}: {_count(processes, 'process', 'processes')} x"
            f" {_count(replicas(cfg), 'replica', 'replicas')}, {_count(host.num_threads(cfg), 'thread', 'threads')}"
            f" each | batch {batch_size} = {processes} x {batch_size // processes} | {device}"
            f" | MNIST from {trainer.datamodule.source}"
        )


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun if number == 1 else plural}"


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
        reason = first_line(error)
        raise ConfigError(f"ckpt_path={path} is not a checkpoint that can be opened weights-only ({reason})") from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "optimizer_states", "loops"} <= checkpoint.keys():
        raise ConfigError(f"ckpt_path={path} is not a checkpoint of a training run; allowed: last.ckpt or best.ckpt")
    if "epoch_sums" in checkpoint and type(datamodule).__qualname__ not in checkpoint:  # which tells the position
        raise ConfigError(
            f"ckpt_path={path} was written within an epoch of other data; allowed: the same data, or a checkpoint"
            " from an epoch's end"
        )
    there, here = (
        {name: tuple(value.shape) for name, value in state.items()}
        for state in (checkpoint["state_dict"], model.state_dict())
    )
    if there != here:
        name = min(name for name, _ in there.items() ^ here.items())
        raise ConfigError(
            f"ckpt_path={path} is of another model: {name} has shape {there.get(name)} there and {here.get(name)} here;"
            " allowed: a checkpoint of the same model"
        )


def resume_path(cfg: DictConfig, worker: Worker, trainer: pl.Trainer) -> str | None:
    """Return the checkpoint to start from: `ckpt_path`, or after a restart the one that this run wrote itself.

    Only rank 0's answer counts. It alone writes checkpoints: another node has no such file and may not have been
    restarted.
    """
    start = cfg.ckpt_path or "the start"
    if not restart_count() or worker.rank > 0:
        return cfg.ckpt_path
    if worker.launcher != "lockstep":
        log.warning("%s has started this job again, from %s; only launch.max_restarts resumes", worker.launcher, start)
        return cfg.ckpt_path
    path = own_checkpoint(cfg)
    if path is None:
        for logger in run_loggers(trainer):
            logger.rewind(logger.lengths(before=cfg.launch.started_at))
    log.warning("restart %d of %d, from %s", restart_count(), cfg.launch.max_restarts, path or start)
    return path or cfg.ckpt_path


def own_checkpoint(cfg: DictConfig) -> str | None:
    """Return the last checkpoint if this command wrote it: an older file in the folder belongs to another run."""
    path = Path(cfg.last_checkpoint)
    return str(path) if path.exists() and path.stat().st_mtime >= cfg.launch.started_at else None


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return where this run's best weights are; None, for the weights at hand, if it wrote none.

    A resumed ModelCheckpoint still knows the best file of the run that it was resumed from, which is not this run's.
    """
    callback = trainer.checkpoint_callback
    best = getattr(callback, "best_model_path", "")
    return best if best and Path(best).parent == Path(callback.dirpath) else None


def finish(cfg: DictConfig, trainer: pl.Trainer) -> dict[str, float]:
    """Write `metrics.json` and the row of TensorBoard's HParams page on rank 0, and return the metrics."""
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, EpochMonitor)]
    metrics = {tag: value for monitor in monitors for tag, value in sorted(monitor.metrics.items())}
    if trainer.is_global_zero:
        write_json(Path(cfg.run_dir) / "metrics.json", metrics | provenance(cfg, trainer))
        summary = {tag: metrics[tag] for tag in tags.SUMMARY if tag in metrics}
        for logger in run_loggers(trainer):
            logger.close(hyperparameters(cfg), summary)
    return metrics


def provenance(cfg: DictConfig, trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a comparison needs to know of a run beside its config."""
    packages = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
    return {
        tags.SOURCE: trainer.datamodule.source,
        tags.THREADS: host.num_threads(cfg),
        tags.DEVICE: host.device_name(trainer.strategy.root_device),
        tags.HARDWARE: host.hardware(),
        tags.VERSIONS: ", ".join(f"{name} {version}" for name, version in packages.items()),
    }


def hyperparameters(cfg: DictConfig) -> dict[str, Any]:
    """Return what tells runs apart, for TensorBoard's HParams page."""
    return {
        "strategy": cfg.strategy.name,
        "devices": cfg.strategy.devices,
        "world_size": world_size(cfg),
        "global_batch_size": cfg.data.batch_size,
        "per_process_batch_size": cfg.data.batch_size // world_size(cfg),
        "threads": host.num_threads(cfg),
        "model": model_name(cfg),
        "seed": cfg.seed,
    }


def model_name(cfg: DictConfig) -> str:
    """Return the network's class and arguments, such as `CNN(channels=[8, 16], hidden=128)`."""
    net = OmegaConf.to_container(cfg.model.get("net", cfg.model))
    name = net.pop("_target_").rpartition(".")[2]
    return f"{name}({', '.join(f'{key}={value}' for key, value in net.items())})"
