"""What lets a run resumed from a checkpoint, or restarted, go on as if nothing had happened."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lockstep.callbacks.sums import gather_ranks
from lockstep.position import batches_into_epoch


class EpochSeed(Callback):
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
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restored is None:
            return
        if len(self._restored) == trainer.world_size:
            _set_random_state(self._restored[trainer.global_rank], trainer.strategy.root_device)
        else:  # another number of ranks cannot go on with these states, but must not draw alike either
            self._seed(trainer, trainer.global_step)
        self._restored = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed(trainer)

    def _seed(self, trainer: Trainer, *more: int) -> None:
        sequence = np.random.SeedSequence([self.seed, trainer.current_epoch, trainer.global_rank, *more])
        seed_everything(int(sequence.generate_state(1)[0]), verbose=False)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if batches_into_epoch(trainer):
            state = _random_state(trainer.strategy.root_device)
            checkpoint["random_states"] = gather_ranks(trainer.strategy, state)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get("random_states")


def _random_state(device: torch.device) -> Tensor:
    """Return torch's state on the CPU, then on `device`, uint8. No training step draws from Python or NumPy."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())  # torch crashes on a view that does not begin its storage
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)


class RewindEvents(Callback):
    """Takes back what a run logged after the checkpoint that it goes on from, in its own folder.

    So the curves of a restarted run have every step once. A run resumed into another folder leaves the old one alone.
    Loggers take part that have `lengths` and `rewind`, such as `lockstep.loggers.RunLogger`.
    """

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["event_files"] = {logger.log_dir: logger.lengths() for logger in _rewindable(trainer)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # the test loads the best checkpoint, after all epochs
            return
        for logger in _rewindable(trainer):
            lengths = checkpoint.get("event_files", {}).get(logger.log_dir)
            if lengths is not None:
                logger.rewind(lengths)


def _rewindable(trainer: Trainer) -> list[Any]:
    return [logger for logger in trainer.loggers if hasattr(logger, "lengths") and hasattr(logger, "rewind")]
