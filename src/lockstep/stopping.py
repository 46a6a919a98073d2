"""How a run ends before its time: all ranks together, saying where."""

import math
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lockstep.files import shortest
from lockstep.signals import Stopped, handle_stop_signals
from lockstep.worker import RunError, record_failure

SHOULD_STOP = 1  # what a rank asks for beside signals, which ask with their numbers


class StopTogether(pl.Callback):
    """Ends training after the same step on all ranks when a signal or a callback asks one of them to.

    A signal writes a checkpoint first, from which the run resumes with the next batch, and raises `signals.Stopped`; it
    acts at an epoch's end too, before the test. A callback's `trainer.should_stop` ends training as Lightning does, on
    all ranks instead of on its own.

    The ranks tell each other every `every_n_steps` optimizer steps what they have been asked for, in one all-reduce
    that nobody waits for: the answer is read the next time. Lightning broadcasts rank 0's answer before every batch and
    waits for it, broadcasts once more inside the signal handler, and does not hear the other ranks (pytorch-lightning
    issues 20806, 21487); both are switched off.

    Args:
        checkpoint: Where to write it, if the run writes checkpoints.
        every_n_steps: How often the ranks tell each other; a run ends at most twice as many steps after the request.
    """

    def __init__(self, checkpoint: str, every_n_steps: int = 5) -> None:
        self.checkpoint = checkpoint
        self.every_n_steps = every_n_steps
        self._wish = 0
        self._vote: _Vote | None = None
        self._last_step = 0
        self._handlers: dict[int, Any] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer._signal_connector._sigterm_notifier_fn = _do_nothing
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        self._handlers = handle_stop_signals(self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._wish <= SHOULD_STOP:  # the first signal counts
            self._wish = number

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.should_stop:  # asked on this rank alone, for all that is known
            trainer.should_stop = False
            self._wish = max(self._wish, SHOULD_STOP)
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        asked = self._vote.result() if self._vote is not None else 0
        self._vote = _Vote(self._wish, trainer.strategy.root_device)
        if not trainer.is_last_batch and step != trainer.max_steps:  # else the epoch's end is near, a better place
            self._obey(trainer, asked)

    def _obey(self, trainer: pl.Trainer, asked: int) -> None:
        if asked == SHOULD_STOP:
            trainer.should_stop = True
        elif asked:
            self._stop(trainer, asked)

    def _stop(self, trainer: pl.Trainer, signum: int) -> None:
        place = f" after step {trainer.global_step}, in epoch {trainer.current_epoch}"
        if trainer.checkpoint_callbacks:
            trainer.save_checkpoint(self.checkpoint)
            place += f"; resume with ckpt_path={shortest(Path(self.checkpoint))}"
        raise Stopped(signum, place)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # here and at an epoch's end all ranks are at the same point, so they can wait for the answer
        if trainer.state.fn == TrainerFn.FITTING:
            wish = trainer.should_stop or self._wish == SHOULD_STOP
            trainer.should_stop = bool(_Vote(int(wish), trainer.strategy.root_device).result())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wish = max(self._wish, SHOULD_STOP if trainer.should_stop else 0)
        self._obey(trainer, _Vote(wish, trainer.strategy.root_device).result())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore_handlers()
        if self._vote is not None:
            self._vote.result()
            self._vote = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class _Vote:
    """The largest of what the ranks ask for, on all of them.

    Args:
        wish: What this rank asks for.
        device: That the process group communicates on.
    """

    def __init__(self, wish: int, device: torch.device) -> None:
        self._answer = torch.tensor(wish, device=device)
        group = dist.is_initialized() and dist.get_world_size() > 1
        self._work = dist.all_reduce(self._answer, dist.ReduceOp.MAX, async_op=True) if group else None

    def result(self) -> int:
        if self._work is not None:
            self._work.wait()
        return int(self._answer)


def _do_nothing(*args: Any) -> None:
    """In the place of a Lightning method that `StopTogether` replaces."""


class FiniteLoss(pl.Callback):
    """Ends the run on the first loss that is not finite, before anything is saved that has learned from it.

    On the CPU every loss is looked at before its backward pass. Elsewhere that would make each step wait for the
    device, so they are looked at together every `every_n_batches`, and before a checkpoint is written.

    Args:
        every_n_batches: How often, on devices other than the CPU.
    """

    def __init__(self, every_n_batches: int = 50) -> None:
        self.every_n_batches = every_n_batches
        self._unseen: list[tuple[Place, Tensor]] = []

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._unseen.append((Place.of(trainer), loss.detach()))
        if trainer.strategy.root_device.type == "cpu" or len(self._unseen) >= self.every_n_batches:
            self._look()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._look()

    def _look(self) -> None:
        unseen, self._unseen = self._unseen, []
        losses = torch.stack([loss for _, loss in unseen]).tolist() if unseen else []
        for (place, _), loss in zip(unseen, losses, strict=True):
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} {place}")


class FailureNote(pl.Callback):
    """Adds to every exception where in the run it happened, and has it recorded before Lightning cleans up."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, MisconfigurationException):  # becomes a ConfigError
            return
        if trainer.state.fn == TrainerFn.FITTING and isinstance(exception, Exception):
            exception.add_note(str(Place.of(trainer)))
        record_failure(exception)


class Place(NamedTuple):
    """What training is at, each counted from 0; as a text only where it is needed, since every batch has one."""

    epoch: int
    batch: int
    step: int
    rank: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Place":
        batch = max(trainer.fit_loop.batch_idx, 0)
        return cls(trainer.current_epoch, batch, trainer.global_step, trainer.global_rank)

    def __str__(self) -> str:
        return f"in epoch {self.epoch}, batch {self.batch}, step {self.step}, on rank {self.rank}"
