"""What goes wrong on purpose in the tests' workers, and models that only the tests use."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lockstep import tags, training
from lockstep.callbacks import EpochMonitor
from lockstep.data import Images, MNISTSampleDataModule


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


def environment(cfg: DictConfig) -> dict[str, str]:
    """What a worker sees of the launcher; run in place of training."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return {name: os.environ[name] for name in names}


class StopAfter(pl.Callback):
    """Ends the run after so many epochs, on all ranks."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


class LossHistory(pl.Callback):
    """Writes every epoch's `train/loss` in full precision to the run's folder: TensorBoard holds float32."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            (monitor,) = (callback for callback in trainer.callbacks if isinstance(callback, EpochMonitor))
            self.losses.append(monitor.metrics[tags.TRAIN_LOSS])
            Path(trainer.default_root_dir, "losses.json").write_text(json.dumps(self.losses))


class FewTestImages(MNISTSampleDataModule):
    """The sample with its test set cut to `test_size` images."""

    def __init__(self, test_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.test_size = test_size

    def load(self) -> tuple[Images, Images]:
        train, test = super().load()
        return train, Images(*test[: self.test_size])


class NotePid(pl.Callback):
    """Leaves a file named for this process."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, *args: Any) -> None:
        (self.folder / str(os.getpid())).touch()


def process(cfg: DictConfig) -> dict[str, int]:
    """What a worker is once training has set it up; run in place of training."""
    training.set_up_process(cfg)
    return {"pid": os.getpid(), "threads": torch.get_num_threads()}


def accelerator(cfg: DictConfig) -> str:
    """The accelerator that training would choose; run in place of training."""
    return training.accelerator(cfg)


def rank_one_first(cfg: DictConfig) -> None:
    """Rank 1 is done; then rank 0 fails. Run in place of training."""
    if os.environ["RANK"] == "0":
        time.sleep(1)
        raise OSError("broken on purpose")
