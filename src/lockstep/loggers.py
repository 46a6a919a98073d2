"""TensorBoard, one event file per run."""

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override


class RunLogger(TensorBoardLogger):
    """A TensorBoardLogger whose run outlives `fit`.

    Lightning finalizes its loggers at the end of `fit` and again after `test`; the writer that it closes in between
    would come back with a second event file. This one stays open until `close`.

    Args: as for `lightning.pytorch.loggers.TensorBoardLogger`.
    """

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
