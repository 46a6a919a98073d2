"""The network and the LightningModule that trains it."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]


class CNN(nn.Module):
    """LeNet-5 with ReLU: two 5x5 convolutions, each followed by max-pooling and ReLU, and two linear layers.

    There is no normalisation and no dropout. Without batch statistics and random masks, a step's result depends on the
    whole batch and not on how it is split, so the strategies' losses can be compared to the last digit. After LeCun et
    al., "Gradient-based learning applied to document recognition", 1998.

    Args:
        channels: Output channels of the first and the second convolution.
        hidden: Width of the first linear layer.
    """

    def __init__(self, channels: Sequence[int] = (8, 16), hidden: int = 128) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(1, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.linear1 = nn.Linear(second * 5 * 5, hidden)
        self.linear2 = nn.Linear(hidden, 10)
        # On the CPU, channels-last cuts the time of max-pooling to a sixth and that of a whole step to two thirds.
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) -> (B, 10) logits."""
        # ReLU commutes with max-pooling, and after it has a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))  # (B, first, 14, 14)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # (B, second, 5, 5)
        x = F.relu(self.linear1(x.flatten(1)))  # (B, hidden)
        return self.linear2(x)


class ResidualMLP(nn.Module):
    """Many linear layers of one width, each added to its input: `width` sets the arithmetic per layer.

    With narrow layers, a step is mostly Python and dispatch, which the interpreter lock serialises among threads. With
    wide ones, it is mostly matrix products, during which the lock is free.

    Args:
        depth: Number of residual layers.
        width: Width of each.
    """

    def __init__(self, depth: int = 50, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(28 * 28, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) -> (B, 10) logits."""
        x = F.relu(self.first(images.flatten(1)))  # (B, width)
        for layer in self.layers:
            x = x + F.relu(layer(x)) / len(self.layers)
        return self.last(x)


class LitClassifier(pl.LightningModule):
    """Trains a network with cross-entropy.

    Every step calls `self(images)`, the call that a data-parallel strategy splits among its replicas. Evaluation
    returns one value per sample; `EpochMonitor` sums them over batches and ranks.

    Args:
        net: (B, 1, 28, 28) images -> (B, classes) logits.
        optimizer: Called with the parameters; returns the optimizer.
        scheduler: Called with the optimizer and `total_steps`, the optimizer steps of the whole run; stepped after each
            of them. None means a constant learning rate.
    """

    def __init__(
        self, net: nn.Module, optimizer: Callable[..., Optimizer], scheduler: Callable[..., LRScheduler] | None = None
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
        """Return for each sample, (B,), its loss and whether its class is right."""
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels, reduction="none"), "acc": logits.argmax(1) == labels}

    test_step = validation_step

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        total_steps = self.trainer.estimated_stepping_batches
        if not 0 < total_steps < float("inf"):
            raise MisconfigurationException(
                f"model.scheduler needs the run's number of steps, which is {total_steps}; set trainer.max_epochs or"
                " trainer.max_steps, and trainer.limit_train_batches above 0, or model.scheduler=null"
            )
        scheduler = self.scheduler(optimizer, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # OneCycleLR would take its length from the checkpoint and refuse the first step past it. This run sets the
        # length (`trainer.max_epochs`); the checkpoint gives only the position in it.
        for state in checkpoint.get("lr_schedulers", []):
            for key in ("total_steps", "_schedule_phases"):
                state.pop(key, None)
