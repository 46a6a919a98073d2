"""How checkpoints are written and read, so that a run goes on as if nothing had happened."""

import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lockstep.files import whole_file
from lockstep.worker import RunError


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoints that survive a kill while they are written, and that only rank 0 reads.

    Lightning renames a finished file into its place but leaves it to the system when the content reaches the disk; and
    it lets every rank read the path, which another node need not have.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint in full or not at all.

        Raises:
            RunError: If it cannot be written; the one that was there before still is.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with whole_file(Path(path)) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch wraps what the file's own `write` says
            reason = str(error.__context__ or error).partition("\n")[0]
            raise RunError(f"the checkpoint {path} could not be written ({reason})") from error

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read on rank 0 and sent to the others, which all call this.

        Raises:
            OSError: On every rank, if rank 0 cannot read `path`.
        """
        content = [_content(path) if _rank() == 0 else None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(content)
        if isinstance(content[0], OSError):
            raise content[0]
        return torch.load(io.BytesIO(content[0]), map_location=map_location, weights_only=weights_only)


def _content(path: str | Path) -> bytes | OSError:
    try:
        return Path(path).read_bytes()
    except OSError as error:  # told to the others, which would wait for the content
        return error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batches_into_epoch(trainer: pl.Trainer) -> int:
    """Batches of the unfinished epoch that are trained on already, as of now: 0 between epochs.

    What a checkpoint written now must hold beside Lightning's own state depends on it.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    finished = batches.is_last_batch or epochs.processed == epochs.ready
    return 0 if finished else batches.current.ready


def gather_ranks(trainer: pl.Trainer, values: torch.Tensor) -> torch.Tensor:
    """(n,) on every rank -> (world size, n) on the CPU. A collective, also under strategies of one process."""
    gathered = trainer.strategy.all_gather(values.to(trainer.strategy.root_device))
    return gathered.reshape(trainer.world_size, len(values)).cpu()
