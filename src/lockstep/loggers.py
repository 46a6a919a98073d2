"""TensorBoard, one event file per run."""

from typing import Any

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

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        if self._experiment is None:
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
