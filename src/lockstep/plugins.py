"""What the Trainer uses in place of Lightning's own: checkpoint files, and a profiler that does nothing."""

import io
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

from lockstep.errors import RunError, first_line
from lockstep.files import atomic_write


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints that survive a kill at any moment, and reads them on rank 0 only.

    Lightning renames a finished file into place but does not wait until its content is on the disk. And it lets every
    rank read the path, which another node need not have.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint in full, or raise RunError and keep the file that was there."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(Path(path)) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch wraps what the file's own `write` says
            reason = first_line(error.__context__ or error)
            raise RunError(f"the checkpoint {path} could not be written ({reason})") from error

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what rank 0 reads, on all ranks. Raise OSError on all of them if it cannot read the file."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        content: list[Any] = [None]
        if not several or dist.get_rank() == 0:
            try:
                content = [Path(path).read_bytes()]
            except OSError as error:  # sent to the others, which wait for the content
                content = [error]
        if several:
            dist.broadcast_object_list(content)
        if isinstance(content[0], OSError):
            raise content[0]
        return torch.load(io.BytesIO(content[0]), map_location=map_location, weights_only=weights_only)


class NoProfiler(PassThroughProfiler):
    """Measures nothing, and faster: Lightning enters a profiler's context eighty times per batch, once for each hook.

    `PassThroughProfiler` makes a generator each time, 0.1 ms per batch on the CPU of `docs/performance.md`.
    """

    _nothing = nullcontext()

    @override
    def profile(self, action_name: str) -> AbstractContextManager[None]:
        return self._nothing
