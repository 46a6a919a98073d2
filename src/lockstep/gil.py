"""How contended Python's global interpreter lock is while a rank trains."""

import lightning.pytorch as pl
import torch
from gilknocker import KnockKnock
from typing_extensions import override

from lockstep import tags


class GilMonitor(pl.Callback):
    """Logs `gil/contention_rank_<r>`, 0 to 1, once an epoch: how long a thread that wants the interpreter lock waits.

    A thread of gilknocker (the package that dask uses) asks for the lock every `polling_ms` and notes how long it takes
    to get it. Asking disturbs: each time, a thread that computes must let go of the lock. So it asks during
    `sampling_ms`, then sleeps for `sleeping_ms`; asking all the time has cost up to nine tenths of the throughput here.

    Args:
        polling_ms: Between two attempts, ms.
        sampling_ms: How long it asks, ms.
        sleeping_ms: How long it then sleeps, ms.
    """

    def __init__(self, polling_ms: float = 1.0, sampling_ms: float = 10.0, sleeping_ms: float = 90.0) -> None:
        self._intervals = {
            "polling_interval_micros": round(1000 * polling_ms),
            "sampling_interval_micros": round(1000 * sampling_ms),
            "sleeping_interval_micros": round(1000 * sleeping_ms),
        }
        self._knocker: KnockKnock | None = None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._knocker = KnockKnock(**self._intervals)
        self._knocker.start()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()  # training is what is measured; a validation in the middle of an epoch ends the epoch's sample

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if self._knocker is None:  # the same on all ranks: Lightning resumed at this epoch's very end
            return
        own = self._knocker.contention_metric
        # every rank takes part; only the write is rank 0's
        ranks = trainer.strategy.all_gather(torch.tensor([own], device=trainer.strategy.root_device)).flatten().tolist()
        if trainer.is_global_zero:
            metrics = {tags.GIL_CONTENTION.format(rank=rank): value for rank, value in enumerate(ranks)}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.current_epoch)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._knocker is not None and self._knocker.is_running:
            self._knocker.stop()
