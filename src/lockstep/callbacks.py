"""What Lightning and DDP leave to the user: losses over all ranks, honest epoch times, reproducible epochs."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from lockstep import launch, tags
from lockstep.checkpoints import batches_into_epoch, gather_ranks


class EpochSeed(pl.Callback):
    """Sets the random state at each epoch's start from seed, epoch and rank alone.

    So a run resumed at an epoch's end draws what the undisturbed run draws, and no two ranks draw the same dropout
    masks. A checkpoint from within an epoch holds every rank's random state.

    Args:
        seed: The run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._restored: Tensor | None = None  # (ranks, bytes)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._restored is None:
            return
        if len(self._restored) == trainer.world_size:
            _set_random_state(self._restored[trainer.global_rank], trainer.strategy.root_device)
        else:  # another number of ranks: nothing to go on with, but still no two that draw the same
            self._seed(trainer, trainer.global_step)
        self._restored = None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed(trainer)

    def _seed(self, trainer: pl.Trainer, *more: int) -> None:
        sequence = np.random.SeedSequence([self.seed, trainer.current_epoch, trainer.global_rank, *more])
        pl.seed_everything(int(sequence.generate_state(1)[0]), verbose=False)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if batches_into_epoch(trainer):
            checkpoint["random_states"] = gather_ranks(trainer, _random_state(trainer.strategy.root_device))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint.get("random_states")


def _random_state(device: torch.device) -> Tensor:
    """Torch's, of the CPU and then of `device`, uint8. Nothing in a training step draws from Python or NumPy."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())  # torch crashes on a view that does not begin its storage
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)


class SampleSums:
    """Sums over samples, kept on the device: adding a batch never waits for it."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor], num_samples: int) -> None:
        """Add one batch.

        Args:
            values: By name, either one value per sample, (B,), or their mean, ().
            num_samples: B.
        """
        self.num_samples += num_samples
        for name, value in values.items():
            value = value.detach().to(_sum_dtype(value.device))
            total = value.sum() if value.ndim else value * num_samples
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def vector(self, device: torch.device) -> Tensor:
        """The sums by sorted name, then the sample count: what one SUM over the ranks needs."""
        values = [self.sums[name].item() for name in sorted(self.sums)]
        return torch.tensor([*values, self.num_samples], dtype=_sum_dtype(device), device=device)

    def means(self, vector: Tensor) -> dict[str, float]:
        """`vector`, summed over the ranks or not, as a mean by name."""
        *sums, num_samples = vector.tolist()
        return {name: total / num_samples for name, total in zip(sorted(self.sums), sums, strict=True)}


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


class PhaseTimer:
    """Sums the time between marks by phase, without waiting for the device.

    Args:
        mark: Takes a point in time, in the order of the device's work.
        seconds: The time between two marks, s; called after the device has been waited for.
    """

    def __init__(self, mark: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        self._mark, self._seconds = mark, seconds
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    @classmethod
    def on(cls, device: torch.device) -> "PhaseTimer":
        """Host clock, or CUDA events, which the device passes in its own time."""
        if device.type == "cuda":
            return cls(_record_cuda_event, lambda start, end: start.elapsed_time(end) / 1000)
        return cls(time.perf_counter, lambda start, end: end - start)

    def start(self) -> None:
        """What comes next is not part of the phase before."""
        self._last = self._mark()

    def stop(self) -> None:
        """The next lap has no start until `start` is called."""
        self._last = None

    def lap(self, phase: str) -> None:
        """What has happened since the last mark was `phase`."""
        mark = self._mark()
        if self._last is not None:
            self._laps.append((phase, self._last, mark))
        self._last = mark

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        totals = dict.fromkeys(tags.PHASES, 0.0)
        for phase, start, end in self._laps:
            totals[phase] += self._seconds(start, end)
        self._laps.clear()
        return totals


def _record_cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class EpochMonitor(pl.Callback):
    """All-reduces the loss, times the epoch, and logs both.

    DDP averages gradients, not losses: what a rank logs by itself is the mean over its own shard. Here every rank adds
    up `loss * n` and `n` on its device, and once per epoch all ranks take part in one SUM of `[loss_sum, n]` in float64
    and one gather of their own means and times. Rank 0 writes. Lightning's own `self.log(sync_dist=True)` truncates the
    averaged sample count to an integer (pytorch-lightning issue 21859), so it is not used for the means.

    Training time excludes validation, which Lightning runs inside the last batch, and checkpoints; the device is waited
    for before the clock is read; the epoch's time is the slowest rank's.

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
        # what a restarted job took to get going again is counted from the restart
        self.started_at = time.time() if started_at is None or launch.restart_count() else started_at
        self.metrics: dict[str, float] = {}
        self._epoch_seconds: list[float] = []
        self._epoch_rates: list[float] = []
        self._startup_seconds: float | None = None
        self._segment_start: float | None = None  # None: the training clock stands still
        self._logged_step = 0
        self._restored: Tensor | None = None  # (ranks, 3): what they had summed up when the checkpoint was written

    # ------------------------------------------------------------------------------------------------ training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phases = PhaseTimer.on(trainer.strategy.root_device)
        self._comm = DDPComm(trainer.strategy.model)
        self._lr = float("nan")
        # Lightning leaves `on_train_epoch_start` out when it resumes within an epoch or at its very end.
        self.on_train_epoch_start(trainer, pl_module)
        self._restore_sums(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = SampleSums()
        self._num_batches = 0
        self._steps: dict[int, tuple[Tensor, float]] = {}  # global step -> this rank's loss, learning rate
        self._train_seconds = 0.0
        self._inner_seconds: dict[str, float] = defaultdict(float)
        self._resume_clock(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._startup_seconds is None:
            self._startup_seconds = time.time() - self.started_at
        if self._segment_start is None:  # back from a validation in the middle of the epoch
            self._resume_clock(trainer)
        self._phases.lap("data")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._phases.lap("forward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phases.lap("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # read here, since the scheduler has moved on by the end of the batch
        self._lr = float(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._phases.lap("optimizer")
        self._num_batches += 1
        if not outputs:  # the step was skipped by returning None
            return
        loss = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning has divided it
        self._sums.add({"loss": loss}, extract_batch_size(batch))
        # with accumulation, the batches that follow a step see its number too
        every, step = trainer.log_every_n_steps, trainer.global_step
        if every and step != self._logged_step and step % every == 0:
            self._logged_step = step
            self._steps[step] = (loss, self._lr)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause_clock(trainer)
        if self._num_batches == 0:  # the same on all ranks: nothing was left of the epoch that was resumed
            return
        # Every rank takes part in the two collectives; only the write is rank 0's.
        loss = self._all_reduce_losses(trainer)
        ranks = self._gather_ranks(trainer)
        pl_module.log(tags.TRAIN_LOSS, loss, prog_bar=True, logger=False)
        if trainer.is_global_zero:
            self._record(trainer, {tags.TRAIN_LOSS: loss} | self._epoch_metrics(ranks))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["monitor"] = {
            "command": self._command,
            "metrics": self.metrics,
            "seconds": self._epoch_seconds,
            "rates": self._epoch_rates,
        }
        if batches_into_epoch(trainer) == 0:
            return
        self._pause_clock(trainer)
        self._all_reduce_losses(trainer)  # the steps so far belong before this checkpoint
        sums = self._sums.vector(trainer.strategy.root_device)
        checkpoint["epoch_sums"] = gather_ranks(trainer, torch.cat([sums, sums.new_tensor([self._train_seconds])]))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint.get("epoch_sums")
        before = checkpoint.get("monitor", {})
        # the same run goes on after a restart; a resumed one is another
        if self._command is not None and before.get("command") == self._command:
            self.metrics = dict(before["metrics"]) | self.metrics
            self._epoch_seconds = self._epoch_seconds or list(before["seconds"])
            self._epoch_rates = self._epoch_rates or list(before["rates"])

    def _restore_sums(self, trainer: pl.Trainer) -> None:
        """Go on from what a checkpoint from within this epoch held; the numbers of ranks may differ."""
        if self._restored is None:
            return
        ranks, self._restored = self._restored, None
        if len(ranks) != trainer.world_size:  # the sum over all ranks is what must stay right
            seconds = ranks[:, 2].max()
            ranks = torch.cat([ranks.sum(0, keepdim=True), ranks.new_zeros(trainer.world_size - 1, ranks.shape[1])])
            ranks[:, 2] = seconds
        loss, num_samples, seconds = ranks[trainer.global_rank].to(trainer.strategy.root_device)
        self._sums.sums, self._sums.num_samples = {"loss": loss}, int(num_samples)
        self._train_seconds = float(seconds)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_medians(trainer)

    def _write_medians(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and self._epoch_seconds and tags.EPOCH_SEC_MEDIAN not in self.metrics:
            # the first epoch warms up caches, allocators and DDP's buckets
            summary = {
                tags.EPOCH_SEC_MEDIAN: median(self._epoch_seconds[1:] or self._epoch_seconds),
                tags.SAMPLES_PER_SEC_MEDIAN: median(self._epoch_rates[1:] or self._epoch_rates),
            }
            self._record(trainer, summary)

    def _resume_clock(self, trainer: pl.Trainer) -> None:
        _synchronize(trainer.strategy.root_device)
        _inner_seconds(trainer)  # what the strategy did since the clock stood still was not training
        self._segment_start = time.perf_counter()
        self._phases.start()

    def _pause_clock(self, trainer: pl.Trainer) -> None:
        if self._segment_start is None:
            return
        _synchronize(trainer.strategy.root_device)
        self._train_seconds += time.perf_counter() - self._segment_start
        self._segment_start = None
        self._phases.stop()
        for tag, seconds in _inner_seconds(trainer).items():
            self._inner_seconds[tag] += seconds

    def _all_reduce_losses(self, trainer: pl.Trainer) -> float:
        """The mean over all ranks of the epoch so far, in one SUM with that of each logged step, which is written."""
        device = trainer.strategy.root_device
        self._own_means = self._sums.means(own := self._sums.vector(device))
        steps = [loss.to(own.dtype) for loss, _ in self._steps.values()]
        # all ranks train on batches of one size, so a step's mean is the plain mean of theirs
        local = torch.cat([own, *(loss.reshape(1) / trainer.world_size for loss in steps)])
        total = trainer.strategy.reduce(local, reduce_op="sum")
        if trainer.is_global_zero:
            for (step, (_, lr)), loss in zip(self._steps.items(), total[len(own) :].tolist(), strict=True):
                _write(trainer, {tags.TRAIN_LOSS_STEP: loss, tags.LR: lr}, step)
        self._steps.clear()
        return self._sums.means(total[: len(own)])["loss"]

    def _gather_ranks(self, trainer: pl.Trainer) -> list[dict[str, float]]:
        """Each rank's own loss, times and sample count."""
        own = {
            "loss": self._own_means["loss"],
            "num_samples": self._sums.num_samples,
            "train_sec": self._train_seconds,
            **{phase: seconds / self._num_batches for phase, seconds in self._phases.totals().items()},
            **{tag: seconds / self._num_batches for tag, seconds in self._inner_seconds.items()},
            **self._comm.take(trainer.accumulate_grad_batches),
        }
        values = torch.tensor(list(own.values()), dtype=_sum_dtype(trainer.strategy.root_device))
        gathered = gather_ranks(trainer, values)
        return [dict(zip(own, rank, strict=True)) for rank in gathered.tolist()]

    def _epoch_metrics(self, ranks: list[dict[str, float]]) -> dict[str, float]:
        """What rank 0 writes at the end of an epoch, from what all ranks measured."""
        by_name = defaultdict(list)
        for rank in ranks:
            for name, value in rank.items():
                by_name[name].append(value)
        seconds = max(by_name["train_sec"])
        rate = sum(by_name["num_samples"]) / seconds
        self._epoch_seconds.append(seconds)
        self._epoch_rates.append(rate)
        metrics = {
            tags.EPOCH_SEC: seconds,
            tags.EPOCH_SEC_FASTEST_RANK: min(by_name["train_sec"]),
            tags.SAMPLES_PER_SEC: rate,
        }
        metrics |= {tags.TRAIN_LOSS_RANK.format(rank=rank): loss for rank, loss in enumerate(by_name["loss"])}
        metrics |= {tags.PHASE_SEC.format(phase=phase): _mean(by_name[phase]) for phase in tags.PHASES}
        metrics |= {tag: _mean(by_name[tag]) for tag in tags.INNER if tag in by_name}
        if len(self._epoch_seconds) == 1 and self._startup_seconds is not None:
            metrics[tags.STARTUP_SEC] = self._startup_seconds
        return metrics

    # ------------------------------------------------------------------------------------------------ evaluation

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause_clock(trainer)
        self._start_evaluation(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._eval_sums.add(outputs, extract_batch_size(batch))

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation(trainer, pl_module, "val")

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_medians(trainer)  # after a restart there may have been nothing left to train
        self._start_evaluation(trainer)

    on_test_batch_end = on_validation_batch_end

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation(trainer, pl_module, "test")

    def _start_evaluation(self, trainer: pl.Trainer) -> None:
        _synchronize(trainer.strategy.root_device)
        self._eval_sums = SampleSums()
        self._eval_start = time.perf_counter()

    def _end_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        sums = self._eval_sums
        means = sums.means(trainer.strategy.reduce(sums.vector(trainer.strategy.root_device), reduce_op="sum"))
        metrics = {f"{stage}/{name}": mean for name, mean in means.items()}
        # Lightning's own copy, which ModelCheckpoint and the progress bar read; the same on every rank already
        pl_module.log_dict(metrics, prog_bar=True, logger=False)
        if stage == "val":
            # after the SUM, which no rank leaves before the slowest has come
            metrics[tags.VAL_SEC] = time.perf_counter() - self._eval_start
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._record(trainer, metrics)

    def _record(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        _write(trainer, metrics, trainer.current_epoch)


def _write(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _inner_seconds(trainer: pl.Trainer) -> dict[str, float]:
    """What the strategy has added inside the phases since it was last asked, s by tag; empty for most strategies."""
    return getattr(trainer.strategy, "take_phase_seconds", dict)()


class DDPComm:
    """DDP's own measurement of the all-reduce, epoch by epoch; nothing where the model is not wrapped by DDP.

    DistributedDataParallel samples its first ten steps and then every n-th, and tells the mean since the start, in ns.

    Args:
        model: What the strategy trains.
    """

    SAMPLE_EVERY = 10

    def __init__(self, model: Any) -> None:
        self._data: Callable[[], dict[str, Any]] | None = getattr(model, "_get_ddp_logging_data", None)
        if self._data is not None:
            model._set_ddp_runtime_logging_sample_rate(self.SAMPLE_EVERY)
        self._before = (0, 0.0, 0.0)  # samples, comm, overlap: sums since the start

    def take(self, accumulate_grad_batches: int) -> dict[str, float]:
        """The means of the samples since the last call, by tag; per batch, of which accumulation reduces only some."""
        if self._data is None:
            return {}
        data = self._data()
        iteration = data.get("iteration", 0)
        samples = min(iteration, 10) + max(0, iteration - 10) // self.SAMPLE_EVERY
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")
        now = (samples, *(samples * data.get(name, 0) for name in names))
        count, comm, overlap = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return {
            tags.ALL_REDUCE_SEC: max(0.0, comm) / max(count, 1) / 1e9 / accumulate_grad_batches,
            tags.OVERLAP_FRACTION: min(1.0, max(0.0, overlap / comm)) if comm > 0 else 0.0,
        }
