"""TensorBoard, one event file per run."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lockstep import tags

# The charts of TensorBoard's Custom Scalars page. Tags are regular expressions; each run and tag is one line.
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
    """A TensorBoardLogger whose event file stays open until `close`.

    Lightning finalizes its loggers at the end of `fit` and again after `test`. TensorBoardLogger closes its writer
    each time, and logging after that starts a second event file. Arguments are those of TensorBoardLogger.
    """

    _earlier: set[str] | None = None  # event files older than this writer's own; None: the writer is not open yet

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        if self._earlier is None:
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
        if self._earlier is not None:
            self.experiment.flush()

    @rank_zero_only
    def lengths(self, before: float = float("inf")) -> dict[str, int]:
        """Return the lengths of the event files last written before a unix time in seconds, in bytes by file name."""
        self.save()
        stats = {path.name: path.stat() for path in self._event_files()}
        return {name: stat.st_size for name, stat in stats.items() if stat.st_mtime < before}

    @rank_zero_only
    def rewind(self, lengths: dict[str, int]) -> None:
        """Cut the event files of earlier attempts back to `lengths`; remove those that it does not name."""
        for path in self._event_files():
            if self._earlier is not None and path.name not in self._earlier:
                continue  # this attempt's own
            if path.name in lengths:
                os.truncate(path, lengths[path.name])
            else:
                path.unlink()

    def _event_files(self) -> list[Path]:
        return list(Path(self.log_dir).glob("events.out.tfevents.*"))

    @rank_zero_only
    def close(self, params: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write the run's row of the HParams page and close the event file.

        The columns are `params`, which tell runs apart, and `metrics`, which are compared.
        """
        # `SummaryWriter.add_hparams` would start a second event file. TensorBoard reads the values of the metrics from
        # the scalars of the same name.
        for summary in hparams(params, metrics):
            self.experiment.file_writer.add_summary(summary)
        self.experiment.close()


def run_loggers(trainer: pl.Trainer) -> list[RunLogger]:
    """Return those of a Trainer's loggers whose event files this project manages."""
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]
