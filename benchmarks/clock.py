"""Stopwatches for `bench.py`: of an epoch, with whatever callbacks are on, and of the loader within it.

They write into the working directory, which `bench.py` makes anew for each run.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import Profiler


class Clock(pl.Callback):
    """Writes each epoch's seconds, from its first batch to its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        if trainer.is_global_zero:
            Path("clock.json").write_text(json.dumps(self.seconds))


class FirstStep(pl.Callback):
    """Writes how long after the command's start the first optimizer step was done, s."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 1:
            seconds = time.time() - float(os.environ["BENCH_STARTED_AT"])
            Path("first.json").write_text(json.dumps(seconds))


class LoaderClock(Profiler):
    """Writes which share of the training epochs went into fetching batches and making them ready on the device."""

    EPOCH = "run_training_epoch"
    LOADER = ("[_TrainingEpochLoop].train_dataloader_next", "[Strategy]SingleDeviceStrategy.batch_to_device")

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def start(self, action_name: str) -> None:
        self.seconds[action_name] -= time.perf_counter()

    def stop(self, action_name: str) -> None:
        self.seconds[action_name] += time.perf_counter()

    def describe(self) -> None:
        """Lightning calls this at the end of fit, when no epoch is running, and at the end of test."""
        loader = sum(self.seconds[action] for action in self.LOADER)
        Path("loader.json").write_text(json.dumps(loader / self.seconds[self.EPOCH]))
