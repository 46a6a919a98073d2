"""How contended Python's global interpreter lock is while a rank trains."""

from typing import Any

from gilknocker import KnockKnock
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lockstep import tags
from lockstep.callbacks.sums import gather_by_name


class GilMonitor(Callback):
    """Logs `gil/contention_rank_<r>` once an epoch: how long a thread waits for the interpreter lock, 0 to 1.

    A thread of gilknocker, the package that dask uses, asks for the lock every `polling_ms` and measures how long it
    takes to get it. Asking disturbs, since a computing thread must let go of the lock each time. So the thread asks for
    `sampling_ms`, then sleeps for `sleeping_ms`. Asking all the time has cost up to nine tenths of the throughput here.

    Args:
        polling_ms: Between two attempts, ms.
        sampling_ms: How long the thread asks, ms.
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
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._knocker = KnockKnock(**self._intervals)
        self._knocker.start()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        if self._knocker is None:  # on all ranks: Lightning resumed at this epoch's very end
            return
        # every rank takes part; only the write is rank 0's
        ranks = gather_by_name(trainer.strategy, {"contention": self._knocker.contention_metric})["contention"]
        if trainer.is_global_zero:
            metrics = {tags.GIL_CONTENTION.format(rank=rank): value for rank, value in enumerate(ranks)}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.current_epoch)

    def _stop(self, *args: Any) -> None:
        if self._knocker is not None and self._knocker.is_running:
            self._knocker.stop()

    on_validation_start = _stop  # only training is measured: one in the middle of an epoch ends the epoch's sample
    on_exception = _stop
