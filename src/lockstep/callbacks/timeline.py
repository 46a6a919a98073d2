"""A few real steps, recorded with torch.profiler: what every process and thread did, and when."""

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import profile, record_function
from typing_extensions import override

from lockstep import tags


class StepTimeline(Callback):
    """Records `num_steps` training steps on every rank and merges them into one trace, `trace.json`.

    Perfetto and chrome://tracing open it: processes are ranks, lanes are threads. It marks the phases between
    Lightning's hooks, and `ThreadedDataParallel` marks its own. Recording slows its epoch down, so it happens in the
    first, which comparisons leave out.

    Args:
        folder: The run's folder.
        first_batch: The batch of the first trained epoch at which recording starts, past the warm-up; earlier if the
            epoch is too short.
        num_steps: How many batches are recorded.
    """

    def __init__(self, folder: str, first_batch: int = 20, num_steps: int = 3) -> None:
        self.folder, self.first_batch, self.num_steps = Path(folder), first_batch, num_steps
        self._left = 0
        self._profiler: profile | None = None  # while recording
        self._phase = ExitStack()
        self._trace: dict[str, Any] | None = None  # None before recording, empty once written

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        first = min(self.first_batch, max(0, int(trainer.num_training_batches) - self.num_steps))
        if self._trace is None and self._profiler is None and batch_idx >= first:
            self._left = self.num_steps
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report on itself, and on missing GPUs
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profiler = profile(experimental_config=all_threads)
            self._profiler.start()
        self._begin("forward")

    @override
    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self._begin("backward")

    @override
    def on_after_backward(self, trainer: Trainer, *args: Any) -> None:
        self._begin("optimizer")

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop()
        self._begin("data")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()  # the epoch may have been too short
        if self._trace:  # the same on all ranks
            # every rank takes part; only the write is rank 0's
            traces = [trainer.strategy.broadcast(self._trace, src=rank) for rank in range(trainer.world_size)]
            if trainer.is_global_zero:
                (self.folder / tags.TRACE_FILE).write_text(json.dumps(merge(traces)))
            self._trace = {}

    def _begin(self, phase: str) -> None:
        self._phase.close()
        if self._profiler is not None:
            self._phase.enter_context(record_function(phase))

    def _stop(self) -> None:
        if self._profiler is None:
            return
        self._phase.close()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / tags.TRACE_FILE
            self._profiler.export_chrome_trace(str(path))
            self._trace = json.loads(path.read_text())
        self._profiler = None


def merge(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ranks' Chrome traces as one: processes named after their ranks, times from one moment on, us."""
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
    name = {"ph": "M", "name": "process_name"}
    names = [{**name, "pid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(traces))]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
