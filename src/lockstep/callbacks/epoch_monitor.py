"""Measures training epoch by epoch, over all ranks."""

import time
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from lockstep import tags
from lockstep.callbacks.phases import Stopwatch, TrainingTimes
from lockstep.callbacks.sums import LossCurve, SampleSums, gather_by_name, gather_ranks, redistribute
from lockstep.launch import restart_count
from lockstep.position import batches_into_epoch


class EpochMonitor(Callback):
    """Averages losses over the ranks, times the epochs, and logs both.

    DDP averages gradients, not losses: what a rank logs by itself is the mean over its own shard. Here every rank adds
    up `loss * n` and `n` on its device. Once per epoch all ranks take part in one SUM of `[loss_sum, n]` in float64 and
    one gather of their own means and times, and rank 0 writes. Lightning's own `self.log(sync_dist=True)` truncates the
    averaged sample count to an integer (pytorch-lightning issue 21859), so the means do not use it.

    Training time excludes checkpoints and validation, which Lightning runs inside the last batch. The clock is read
    once the device is done. An epoch takes as long as its slowest rank.

    | tag | meaning, unit | x |
    | --- | --- | --- |
    | `train/loss` | sample-weighted mean of the epoch over all ranks | epoch |
    | `train/loss_rank_<r>` | rank r's own mean: what DDP alone would show | epoch |
    | `val/*`, `test/*` | mean over all samples of each value that the step returns | epoch |
    | `train/loss_step`, `lr` | every `log_every_n_steps`: mean over all ranks of the step's last batch; its learning
    rate | global step |
    | `time/epoch_sec`, `time/epoch_sec_fastest_rank` | training only, slowest and fastest rank, s | epoch |
    | `time/val_sec` | validation, s | epoch |
    | `time/startup_sec` | from the command's start to the first training batch, s | once |
    | `time/epoch_sec_median` | of the epochs but the first, s | once |
    | `throughput/samples_per_sec` (and `_median`) | global, of the epoch, 1/s | epoch |
    | `phase/{data,forward,backward,optimizer}_sec` | mean per step over the ranks, s | epoch |
    | `dp/{scatter,replicate,gather,reduce}_sec` | per step, inside forward and backward, s; under dp only | epoch |
    | `comm/all_reduce_sec`, `comm/overlap_fraction` | per batch, from DDP's logging data; under DDP only | epoch |

    Args:
        started_at: When the command was started, unix time in seconds. None: when this callback was made.

    Attributes:
        metrics: The latest value of every tag but those per step, in full precision, on rank 0.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self._command = started_at  # tells this run from others
        # a restarted job's start-up counts from the restart
        self.started_at = time.time() if started_at is None or restart_count() else started_at
        self.metrics: dict[str, float] = {}
        self._epochs: list[tuple[float, float]] = []  # seconds, samples per second
        self._startup_seconds: float | None = None
        self._times: TrainingTimes | None = None  # before training
        self._restored: Tensor | None = None  # (ranks, 3), as `redistribute` takes it

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._times = TrainingTimes(trainer.strategy)
        self._losses = LossCurve(trainer.log_every_n_steps, trainer.global_step)
        # Lightning leaves `on_train_epoch_start` out when it resumes within an epoch or at its very end.
        self.on_train_epoch_start(trainer, pl_module)
        if self._restored is not None:
            own = redistribute(self._restored, trainer.world_size)[trainer.global_rank]
            loss, num_samples, seconds = own.to(trainer.strategy.root_device)
            self._losses.start_epoch(SampleSums({"loss": loss}, int(num_samples)))
            self._times.start_epoch(float(seconds))
            self._restored = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses.start_epoch(SampleSums())
        self._times.start_epoch()

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self._startup_seconds is None:
            self._startup_seconds = time.time() - self.started_at
        self._times.resume()  # after a validation or a checkpoint in the middle of the epoch
        self._times.watch.lap("data")

    @override
    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self._times.watch.lap("forward")

    @override
    def on_after_backward(self, trainer: Trainer, *args: Any) -> None:
        self._times.watch.lap("backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # read here, since the scheduler has moved on by the end of the batch
        self._losses.lr = float(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._times.watch.lap("optimizer")
        self._times.num_batches += 1
        if outputs:  # else the step was skipped by returning None
            loss = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning has divided it
            self._losses.add(loss, extract_batch_size(batch), trainer.global_step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._times.pause()
        if self._times.num_batches == 0:  # on all ranks: nothing was left of the epoch that was resumed
            return
        # Every rank takes part in the two collectives; only the write is rank 0's.
        loss, own_loss = self._reduce_losses(trainer)
        own = {"loss": own_loss, "samples": self._losses.sums.num_samples, "seconds": self._times.watch.seconds}
        ranks = gather_by_name(trainer.strategy, own | self._times.per_batch(trainer.accumulate_grad_batches))
        pl_module.log(tags.TRAIN_LOSS, loss, prog_bar=True, logger=False)
        if trainer.is_global_zero:
            metrics = {tags.TRAIN_LOSS: loss} | epoch_metrics(ranks)
            self._epochs.append((metrics[tags.EPOCH_SEC], metrics[tags.SAMPLES_PER_SEC]))
            if len(self._epochs) == 1 and self._startup_seconds is not None:
                metrics[tags.STARTUP_SEC] = self._startup_seconds
            self._record(trainer, metrics)

    def _reduce_losses(self, trainer: Trainer) -> tuple[float, float]:
        """Write the logged steps' losses; return the epoch's mean so far, over all ranks and over this one."""
        mean, own, steps = self._losses.reduce(trainer.strategy, trainer.world_size)
        if trainer.is_global_zero:
            for step, loss, lr in steps:
                _write(trainer, {tags.TRAIN_LOSS_STEP: loss, tags.LR: lr}, step)
        return mean, own

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._epochs and tags.EPOCH_SEC_MEDIAN not in self.metrics:
            # the first epoch warms up caches, allocators and DDP's buckets
            seconds, rates = zip(*(self._epochs[1:] or self._epochs), strict=True)
            self._record(trainer, {tags.EPOCH_SEC_MEDIAN: median(seconds), tags.SAMPLES_PER_SEC_MEDIAN: median(rates)})

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        seconds, rates = ([epoch[i] for epoch in self._epochs] for i in range(2))
        history = {"metrics": self.metrics, "seconds": seconds, "rates": rates}
        checkpoint["monitor"] = {"command": self._command} | history
        if batches_into_epoch(trainer):
            self._times.pause()
            self._reduce_losses(trainer)  # the steps so far belong before this checkpoint
            sums = self._losses.sums.vector(trainer.strategy.root_device)
            own = torch.cat([sums, sums.new_tensor([self._times.watch.seconds])])
            checkpoint["epoch_sums"] = gather_ranks(trainer.strategy, own)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get("epoch_sums")
        before = checkpoint.get("monitor", {})
        # after a restart the same run goes on; one resumed by `ckpt_path` is another
        if self._command is not None and before.get("command") == self._command:
            self.metrics = dict(before["metrics"]) | self.metrics
            self._epochs = self._epochs or list(zip(before["seconds"], before["rates"], strict=True))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._times is not None:
            self._times.pause()
        self._start_evaluation(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_end(trainer, pl_module)  # after a restart there may have been nothing left to train
        self._start_evaluation(trainer)

    def _start_evaluation(self, trainer: Trainer) -> None:
        self._eval_sums, self._eval_watch = SampleSums(), Stopwatch(trainer.strategy.root_device)
        self._eval_watch.start()

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self._eval_sums.add(outputs, extract_batch_size(batch))

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self._evaluation_metrics(trainer, pl_module, "val")
        self._record(trainer, metrics | {tags.VAL_SEC: self._eval_watch.seconds})

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, self._evaluation_metrics(trainer, pl_module, "test"))

    def _evaluation_metrics(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> dict[str, float]:
        means, _ = self._eval_sums.reduce(trainer.strategy)
        self._eval_watch.stop()  # no rank leaves the SUM before the slowest has come
        metrics = {f"{stage}/{name}": mean for name, mean in means.items()}
        # Lightning's own copy, for ModelCheckpoint and the progress bar; the same on every rank already
        pl_module.log_dict(metrics, prog_bar=True, logger=False)
        return metrics

    def _record(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Keep and write an epoch's metrics, on rank 0."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            self.metrics |= metrics
            _write(trainer, metrics, trainer.current_epoch)


def _write(trainer: Trainer, metrics: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)


def epoch_metrics(ranks: Mapping[str, list[float]]) -> dict[str, float]:
    """Return an epoch's metrics by tag, from what the ranks have measured."""
    metrics = {
        tags.EPOCH_SEC: max(ranks["seconds"]),
        tags.EPOCH_SEC_FASTEST_RANK: min(ranks["seconds"]),
        tags.SAMPLES_PER_SEC: sum(ranks["samples"]) / max(ranks["seconds"]),
    }
    metrics |= {tags.TRAIN_LOSS_RANK.format(rank=rank): loss for rank, loss in enumerate(ranks["loss"])}
    metrics |= {tags.PHASE_SEC.format(phase=phase): fmean(ranks[phase]) for phase in tags.PHASES}
    return metrics | {tag: fmean(ranks[tag]) for tag in tags.PER_STRATEGY if tag in ranks}
