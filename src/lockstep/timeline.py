"""A few real steps, recorded with torch.profiler: what every process and thread did, and when."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity
from typing_extensions import override

from lockstep import tags


class StepTimeline(pl.Callback):
    """Records `num_steps` training steps on every rank and merges them into one trace, `trace.json`.

    Perfetto and chrome://tracing open it: processes are ranks, lanes are threads. The phases between Lightning's hooks
    are marked, and what `ThreadedDataParallel` marks itself. Recording slows its epoch down, so it happens in the
    first, which comparisons leave out.

    Args:
        folder: The run's folder.
        first_batch: Batch of the first trained epoch before which the recording starts, past the warm-up; earlier where
            the epoch is too short.
        num_steps: How many batches are recorded.
    """

    def __init__(self, folder: str, first_batch: int = 20, num_steps: int = 3) -> None:
        self.folder = Path(folder)
        self.first_batch, self.num_steps = first_batch, num_steps
        self._left = 0
        self._profiler: torch.profiler.profile | None = None
        self._mark: record_function | None = None
        self._trace: dict[str, Any] | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        first = min(self.first_batch, max(0, int(trainer.num_training_batches) - self.num_steps))
        if self._trace is None and self._profiler is None and batch_idx >= first:
            self._left = self.num_steps
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report on itself, and on missing GPUs
            self._profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
                experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
            )
            self._profiler.start()
        self._enter("forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._left -= 1
        if self._profiler is not None and self._left == 0:
            self._stop()
        self._enter("data")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profiler is not None:  # the epoch was shorter
            self._stop()
        if not self._trace:  # nothing yet, or told already: the same on all ranks
            return
        # every rank takes part; only the write is rank 0's
        traces = [trainer.strategy.broadcast(self._trace, src=rank) for rank in range(trainer.world_size)]
        if trainer.is_global_zero:
            (self.folder / tags.TRACE_FILE).write_text(json.dumps(merge(traces)))
        self._trace = {}

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._profiler is not None:
            self._mark = record_function(phase)
            self._mark.__enter__()

    def _leave(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _stop(self) -> None:
        assert self._profiler is not None
        self._leave()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / tags.TRACE_FILE
            self._profiler.export_chrome_trace(str(path))
            self._trace = json.loads(path.read_text())
        self._profiler = None


def merge(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' Chrome traces as one: each rank's process gets its name, and all count time from one moment, us."""
    events = []
    for rank, trace in enumerate(traces):
        base = trace.get("baseTimeNanoseconds", 0) / 1000
        for event in trace["traceEvents"]:
            # a GPU's trace shows each marked range a second time, on the device
            if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
                events.append({**event, "ts": event["ts"] + base, "pid": rank})
    start = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] -= start
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(traces))
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
