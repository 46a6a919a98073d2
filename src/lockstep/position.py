"""Where in a run training is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Position(NamedTuple):
    """Epoch, batch and optimizer step, counted from 0, and the rank.

    Every batch has a position; it becomes text only where a message needs it.
    """

    epoch: int
    batch: int
    step: int
    rank: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Position:
        """Return the present position of a Trainer in `fit`."""
        batch = max(trainer.fit_loop.batch_idx, 0)
        return cls(trainer.current_epoch, batch, trainer.global_step, trainer.global_rank)

    def __str__(self) -> str:
        return f"in epoch {self.epoch}, batch {self.batch}, step {self.step}, on rank {self.rank}"


def batches_into_epoch(trainer: pl.Trainer) -> int:
    """Return how many batches of an unfinished epoch are done; 0 between epochs.

    A checkpoint written now must hold more than Lightning's own state if the answer is not 0.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    finished = batches.is_last_batch or epochs.processed == epochs.ready
    return 0 if finished else batches.current.ready
