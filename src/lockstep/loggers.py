"""TensorBoard, one event file per run."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lockstep import tags

# The charts of TensorBoard's Custom Scalars page; tags are regular expressions, one line per run and tag.
LAYOUT = {
    "strategies": {
        "loss by strategy": ["Multiline", [f"^{tags.TRAIN_LOSS}$"]],
        "epoch seconds by strategy": ["Multiline", [f"^{tags.EPOCH_SEC}$"]],
        "samples per second by strategy": ["Multiline", [f"^{tags.SAMPLES_PER_SEC}$"]],
    },
    "the loss pitfall": {
        "all-reduced loss and each rank's own": ["Multiline", [f"^{tags.TRAIN_LOSS}(_rank_[0-9]+)?$"]],
    },
}


class RunLogger(TensorBoardLogger):
    """A TensorBoardLogger whose run outlives `fit`.

    Lightning finalizes its loggers at the end of `fit` and again after `test`; the writer that it closes in between
    would come back with a second event file. This one stays open until `close`.

    Args: as for `lightning.pytorch.loggers.TensorBoardLogger`.
    """

    _earlier: set[str] | None = None  # the event files that were there when this one was begun

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        if self._experiment is None:
            self._earlier = {path.name for path in self._event_files()}
            super().experiment.add_custom_scalars(LAYOUT)
        return super().experiment

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()

    @override
    @rank_zero_only
    def save(self) -> None:
        if self._experiment is not None:
            self.experiment.flush()

    @rank_zero_only
    def lengths(self, before: float = float("inf")) -> dict[str, int]:
        """How long this run's event files are, by name, bytes: what is logged from now on comes after that.

        Args:
            before: Leave out files that were written to since then, unix time in seconds.
        """
        self.save()
        stats = {path.name: path.stat() for path in self._event_files()}
        return {name: stat.st_size for name, stat in stats.items() if stat.st_mtime < before}

    @rank_zero_only
    def rewind(self, lengths: dict[str, int]) -> None:
        """Take back what was logged after `lengths` was asked: what comes next will be logged again.

        Args:
            lengths: Bytes by file name; a file that is not in it is removed.
        """
        for path in self._event_files():
            if self._earlier is not None and path.name not in self._earlier:
                continue  # this attempt's own, just begun
            if path.name in lengths:
                os.truncate(path, lengths[path.name])
            else:
                path.unlink()

    def _event_files(self) -> list[Path]:
        return list(Path(self.log_dir).glob("events.out.tfevents.*"))

    @rank_zero_only
    def close(self, params: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write the run's row of the HParams page and end the event file.

        Args:
            params: The columns that tell runs apart.
            metrics: The columns that are compared. The page reads their values from the scalars of the same name.
        """
        writer = self.experiment._get_file_writer()
        for summary in hparams(params, metrics):
            writer.add_summary(summary)
        self.experiment.close()


class RewindEvents(pl.Callback):
    """Lets a run that goes on in its own folder from a checkpoint take back what it had logged after that checkpoint.

    So the curves of a restarted run have every step once. A run resumed into another folder leaves the old one alone.
    """

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["event_files"] = {logger.log_dir: logger.lengths() for logger in run_loggers(trainer)}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":  # the best checkpoint is loaded for the test, which comes after all epochs
            return
        for logger in run_loggers(trainer):
            lengths = checkpoint.get("event_files", {}).get(logger.log_dir)
            if lengths is not None:
                logger.rewind(lengths)


def run_loggers(trainer: pl.Trainer) -> list[RunLogger]:
    """Those of a Trainer's loggers whose files this project looks after."""
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]
