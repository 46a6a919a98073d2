"""How a run ends before its time: on all ranks after the same step, with a message that says where."""

import math
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lockstep.errors import RunError, Stopped
from lockstep.files import shortest_path
from lockstep.launch import handle_stop_signals
from lockstep.position import Position

SHOULD_STOP = 1  # the stop request of `trainer.should_stop`; a signal's is its number, 0 is none


class StopTogether(Callback):
    """Ends training after the same step on all ranks when a signal or a callback asks one of them to.

    A signal writes a checkpoint first, from which the run resumes with the next batch, and raises `Stopped`. In an
    epoch's last steps it acts at the epoch's end, before the test. A callback's `trainer.should_stop` ends training as
    Lightning does, but on all ranks.

    Every `every_n_steps` optimizer steps the ranks exchange their stop requests, in one all-reduce that nobody waits
    for: its result is read the next time. Lightning broadcasts rank 0's request before every batch and waits for it,
    broadcasts once more inside the signal handler, and ignores the other ranks (pytorch-lightning issues 20806, 21487);
    both are switched off.

    Args:
        checkpoint: Where a signal writes it, if the run writes checkpoints.
        every_n_steps: Steps between two exchanges; a run ends at most twice as many steps after the request.
    """

    def __init__(self, checkpoint: str, every_n_steps: int = 5) -> None:
        self.checkpoint, self.every_n_steps = checkpoint, every_n_steps
        self._request = 0
        self._consensus: _Consensus | None = None
        self._last_step = 0
        self._handlers: dict[int, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer._signal_connector._sigterm_notifier_fn = lambda *args: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda *args: None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        self._handlers = handle_stop_signals(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._request <= SHOULD_STOP:  # the first signal counts
            self._request = number

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.should_stop:  # perhaps on this rank alone
            trainer.should_stop = False
            self._request = max(self._request, SHOULD_STOP)
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        request = self._consensus.result() if self._consensus is not None else 0
        self._consensus = _Consensus(self._request, trainer.strategy.root_device)
        if not trainer.is_last_batch and step != trainer.max_steps:  # else the epoch's end is near, a better place
            self._act_on(request, trainer)

    def _act_on(self, request: int, trainer: Trainer) -> None:
        if request == SHOULD_STOP:
            trainer.should_stop = True
        elif request:
            where = f" after step {trainer.global_step}, in epoch {trainer.current_epoch}"
            if trainer.checkpoint_callbacks:
                trainer.save_checkpoint(self.checkpoint)
                where += f"; resume with ckpt_path={shortest_path(Path(self.checkpoint))}"
            raise Stopped(request, where)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # here and at an epoch's end all ranks are at the same point, so they can wait for the result
        if trainer.state.fn == TrainerFn.FITTING:
            request = trainer.should_stop or self._request == SHOULD_STOP
            trainer.should_stop = bool(_Consensus(int(request), trainer.strategy.root_device).result())

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        request = max(self._request, SHOULD_STOP if trainer.should_stop else 0)
        self._act_on(_Consensus(request, trainer.strategy.root_device).result(), trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handlers()
        if self._consensus is not None:
            self._consensus.result()
            self._consensus = None

    def _restore_handlers(self, *args: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    on_exception = _restore_handlers


class _Consensus:
    """Exchanges the ranks' stop requests. All ranks must make one; only `result`, the largest request, waits."""

    def __init__(self, request: int, device: torch.device) -> None:
        self._largest = torch.tensor(request, device=device)
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._work = dist.all_reduce(self._largest, dist.ReduceOp.MAX, async_op=True) if several else None

    def result(self) -> int:
        if self._work is not None:
            self._work.wait()
        return int(self._largest)


class FiniteLoss(Callback):
    """Ends the run on the first loss that is not finite, before anything is saved that has learned from it.

    On the CPU every loss is checked before its backward pass. Elsewhere each check would wait for the device, so the
    losses are checked together, every `every_n_batches` and before a checkpoint is written.
    """

    def __init__(self, every_n_batches: int = 50) -> None:
        self.every_n_batches = every_n_batches
        self._unchecked: list[tuple[Position, Tensor]] = []

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._unchecked.append((Position.of(trainer), loss.detach()))
        if trainer.strategy.root_device.type == "cpu" or len(self._unchecked) >= self.every_n_batches:
            self._check()

    def _check(self, *args: Any) -> None:
        unchecked, self._unchecked = self._unchecked, []
        losses = torch.stack([loss for _, loss in unchecked]).tolist() if unchecked else []
        for (position, _), loss in zip(unchecked, losses, strict=True):
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} {position}")

    on_train_epoch_end = on_save_checkpoint = _check


class FailureNote(Callback):
    """Adds to an exception where in the run it happened, and reports it before Lightning cleans up.

    Args:
        worker: Its `report` takes the exception.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, MisconfigurationException):  # becomes a ConfigError
            return
        if trainer.state.fn == TrainerFn.FITTING and isinstance(exception, Exception):
            exception.add_note(str(Position.of(trainer)))
        self._worker.report(exception)
