"""The network and the LightningModule that trains it."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]


class CNN(nn.Module):
    """Two convolutions, each followed by max-pooling and ReLU, and one linear layer. No normalisation, no dropout.

    Without batch statistics and random masks the result of a step depends on the whole batch alone, not on how it is
    shared out: that is what lets the strategies' losses be compared to the last digit.

    Args:
        channels: Output channels of the first and the second convolution.
        kernel_size: Side of both kernels, odd.
    """

    def __init__(self, channels: Sequence[int] = (8, 16), kernel_size: int = 5) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(1, first, kernel_size, padding=kernel_size // 2)
        self.conv2 = nn.Conv2d(first, second, kernel_size, padding=kernel_size // 2)
        self.linear = nn.Linear(second * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) -> (B, 10) logits."""
        # pooling first: ReLU commutes with it and then has a quarter of the work
        x = F.relu(F.max_pool2d(self.conv1(images), 2))  # (B, first, 14, 14)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # (B, second, 7, 7)
        return self.linear(x.flatten(1))


class LitClassifier(pl.LightningModule):
    """Trains a network with cross-entropy.

    Every step calls `self(images)`, which is what a data-parallel strategy shares out. Evaluation returns one value per
    sample; `EpochMonitor` adds them up over batches and ranks.

    Args:
        net: (B, 1, 28, 28) images -> (B, classes) logits.
        optimizer: Called with the parameters.
        scheduler: Called with the optimizer and `total_steps`, the run's optimizer steps; stepped after each of them.
            None: a constant learning rate.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.scheduler = scheduler

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Per sample, (B,) each: the loss, and 1 where the class is right."""
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels, reduction="none"), "acc": logits.argmax(1) == labels}

    test_step = validation_step

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # OneCycleLR would take its length from the checkpoint and refuse the first step past it. The length belongs to
        # this run (`trainer.max_epochs`); only the position in it belongs to the checkpoint.
        for state in checkpoint.get("lr_schedulers", []):
            for key in ("total_steps", "_schedule_phases"):
                state.pop(key, None)
