"""A stopwatch for both sides of a comparison, with and without EpochMonitor."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Clock(pl.Callback):
    """Writes each epoch's seconds, from its first batch to its last, into the run's folder."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "clock.json").write_text(json.dumps(self.seconds))
