"""Where a rank's training time goes: in all, by phase of a step, and inside the phases."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from lockstep import tags


class Stopwatch:
    """Adds up the seconds between start and stop, and those of laps by name.

    Start and stop wait for the device, so that its work counts where it was begun. Laps never wait: CUDA events time
    them, or the host's clock on other devices.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self.seconds, self.running = seconds, False
        self._laps: list[tuple[str, Any, Any]] = []  # name, first and last mark

    def start(self) -> None:
        """Count from now on, and begin a lap."""
        self._started, self._last, self.running = self._now(), self._mark(), True

    def lap(self, name: str) -> None:
        """End the lap that began at the start or with the last lap."""
        mark = self._mark()
        if self.running:
            self._laps.append((name, self._last, mark))
        self._last = mark

    def stop(self) -> None:
        """Add the time since the start; what follows the last lap belongs to none."""
        self.seconds += self._now() - self._started
        self.running = False

    def take_laps(self) -> dict[str, float]:
        """Return the seconds by name since the last call; call it stopped."""
        seconds: Counter[str] = Counter()
        for name, first, last in self._laps:
            seconds[name] += self._between(first, last)
        self._laps.clear()
        return dict(seconds)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000 if self._device.type == "cuda" else last - first


class DDPComm:
    """Reads DDP's own measurement of its all-reduce, epoch by epoch; nothing if DDP does not wrap the model.

    DistributedDataParallel samples its first ten steps and then every n-th, and reports the mean since the start, ns.
    """

    SAMPLE_EVERY = 10

    def __init__(self, model: Any) -> None:
        self._data: Callable[[], dict[str, Any]] | None = getattr(model, "_get_ddp_logging_data", None)
        if self._data is not None:
            model._set_ddp_runtime_logging_sample_rate(self.SAMPLE_EVERY)
        self._before = (0, 0.0, 0.0)  # samples, communication, overlap: sums since the start

    def take(self, accumulate_grad_batches: int) -> dict[str, float]:
        """Return the means since the last call by tag; per batch, also those that only accumulate gradients."""
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


class TrainingTimes:
    """Measures a rank's training, epoch by epoch: the whole, the phases, and the strategy's overhead inside them.

    Args:
        strategy: May have `take_phase_seconds`, which returns its overhead since the last call, s by tag.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._device = strategy.root_device
        self._comm = DDPComm(strategy.model)
        self._take_overhead: Callable[[], dict[str, float]] = getattr(strategy, "take_phase_seconds", dict)

    def start_epoch(self, seconds: float = 0.0) -> None:
        """Start from zero, or from what a resumed epoch had taken before."""
        self.num_batches = 0
        self.watch = Stopwatch(self._device, seconds)
        self._overhead: Counter[str] = Counter()
        self.resume()

    def resume(self) -> None:
        """Count again after a pause."""
        if not self.watch.running:
            self._take_overhead()  # what the strategy did meanwhile was not training
            self.watch.start()

    def pause(self) -> None:
        """Count nothing until `resume`."""
        if self.watch.running:
            self.watch.stop()
            self._overhead.update(self._take_overhead())

    def per_batch(self, accumulate_grad_batches: int) -> dict[str, float]:
        """Return the epoch's means per batch, s by phase and by tag. Call it once per epoch, in a pause."""
        totals = dict.fromkeys(tags.PHASES, 0.0) | self.watch.take_laps() | dict(self._overhead)
        means = {name: seconds / self.num_batches for name, seconds in totals.items()}
        return means | self._comm.take(accumulate_grad_batches)
