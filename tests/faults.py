"""What goes wrong on purpose in the tests' workers, and models that only the tests use."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn


class FailAt(pl.Callback):
    """Ends one rank at the start of one step.

    Args:
        rank: Which.
        step: Global step.
        how: `raise`, `kill` or `exit`.
    """

    def __init__(self, rank: int, step: int, how: str = "raise") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step):
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken on purpose")


class SlowRank(pl.Callback):
    """Delays every batch of one rank by `seconds`."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank:
            time.sleep(self.seconds)


class BatchNormNet(nn.Module):
    """(B, 1, 28, 28) -> (B, 10), with buffers that depend on the batches seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 5, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12 * 12, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class DropoutNet(nn.Module):
    """(B, 1, 28, 28) -> (B, 10), with random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def environment(cfg: Any) -> dict[str, str]:
    """What a worker sees of the launcher; run in place of training."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return {name: os.environ[name] for name in names}
