"""Images in memory as whole batches: which process sees which samples, and where in an epoch training resumes."""

from collections.abc import Iterator
from itertools import islice

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, SequentialSampler

from lockstep.config import per_process_batch_size
from lockstep.errors import ConfigError
from lockstep.position import batches_into_epoch

Batch = tuple[Tensor, Tensor]


class Images(Dataset[Batch]):
    """Images, uint8 (N, C, H, W), and labels, int64 (N,), in memory; a batch is one index operation."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a whole batch, (B, C, H, W) and (B,). DataLoader calls this instead of `__getitem__` B times."""
        index = torch.tensor(indices, dtype=torch.int64)  # without the dtype an empty list becomes float32
        # Copies whole rows. `images[index]` computes the place of every pixel and takes fifteen times as long.
        return self.images.index_select(0, index), self.labels.index_select(0, index)


class ResumableBatches(BatchSampler):
    """A BatchSampler that can skip the first batches of one epoch.

    Args:
        sampler: Yields sample indices.
        batch_size: In samples; an incomplete last batch is dropped.
        skip: Number of batches that the next iteration skips; later iterations skip none.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, skip: int = 0) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self.skip = skip

    def __iter__(self) -> Iterator[list[int]]:
        # A generator runs this only when the first batch is taken. A DataLoader with workers makes two iterators and
        # drops one unused; that one must not use up `skip`.
        skip, self.skip = self.skip, 0
        yield from islice(super().__iter__(), skip, None)


class ShardedBatches(Sampler[list[int]]):
    """Evaluation batches that count each sample exactly once, for any number of processes.

    The samples are cut into the fewest global batches of at most `batch_size`, evenly sized. Each process takes every
    `world_size`-th sample of each. So all processes take the same number of steps, and the k-th global batch is the
    same for every `world_size`. DistributedSampler would pad instead and count some samples twice.

    Args:
        num_samples: Samples to share out.
        batch_size: The global batch, in samples.
        world_size: Processes over all nodes.
        rank: This process, 0..world_size-1.
    """

    def __init__(self, num_samples: int, batch_size: int, world_size: int, rank: int) -> None:
        num_batches = -(-num_samples // batch_size)
        bounds = [num_samples * k // num_batches for k in range(num_batches + 1)]
        self.shards = [range(low + rank, high, world_size) for low, high in zip(bounds, bounds[1:], strict=False)]

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(shard) for shard in self.shards)


class InMemoryDataModule(pl.LightningDataModule):
    """Shares in-memory samples among the processes, and resumes within an epoch.

    A subclass sets `source`, and in `setup` the `Images` `train_set`, `val_set` and `test_set`.

    Args:
        batch_size: Global training batch, in samples; must divide among the processes.
        eval_batch_size: Global validation and test batch, in samples.
        num_workers: Loader processes. A batch is one index operation, so 0 is fastest.
        seed: Of the order of the training samples.
    """

    def __init__(self, batch_size: int = 256, eval_batch_size: int = 2000, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.source: str | None = None  # where the images came from, once they are there
        self._position = {"epoch": 0, "batches": 0}  # where training starts or resumes

    def state_dict(self) -> dict[str, int]:
        """Return the current epoch, the number of its batches that are done, and what these were cut from."""
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        return {"epoch": epoch, "batches": batches_into_epoch(self.trainer), **self._cut()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume with the first batch not yet trained on; raise ConfigError if batches are cut differently now."""
        for key, now in self._cut().items():
            if state_dict["batches"] and state_dict[key] != now:
                raise ConfigError(
                    f"data.{key}={now}; the checkpoint was written after {state_dict['batches']} batches of an epoch"
                    f" with data.{key}={state_dict[key]}; allowed: the same, or a checkpoint from an epoch's end"
                )
        self._position = {key: state_dict[key] for key in self._position}

    def _cut(self) -> dict[str, int]:
        """Return the arguments that decide which samples are in the k-th batch of an epoch."""
        return {"batch_size": self.batch_size, "seed": self.seed}

    def train_dataloader(self) -> DataLoader:
        dataset, shuffle = self.train_set, not self.trainer.overfit_batches
        # With one process DistributedSampler is the plain permutation. With more, the ranks' k-th batches together are
        # one process's k-th batch. An incomplete last batch is dropped, so that all ranks always weigh the same.
        world_size, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(dataset, world_size, rank, shuffle, self.seed, drop_last=True)
        # Lightning sets the epoch when it begins, but loader processes ask for the first batches before that.
        sampler.set_epoch(self._position["epoch"])
        if not shuffle:
            # Lightning replaces any sampler but a sequential one, and would show all ranks the same samples.
            dataset = Images(*dataset.__getitems__(list(sampler)))
            sampler = SequentialSampler(dataset)
        batch_size = per_process_batch_size("data.batch_size", self.batch_size, world_size)
        batches = ResumableBatches(sampler, batch_size, skip=self._position["batches"])
        self._position["batches"] = 0
        return self._loader(dataset, batches)

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader(self.test_set)

    def _eval_loader(self, dataset: Images) -> DataLoader:
        world_size, rank = self.trainer.world_size, self.trainer.global_rank
        return self._loader(dataset, ShardedBatches(len(dataset), self.eval_batch_size, world_size, rank))

    def _loader(self, dataset: Images, batches: Sampler[list[int]]) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=tuple,  # what `Images` returns is a batch already
            num_workers=self.num_workers,
            # A generator of its own: starting an iterator must not advance the model's random state.
            generator=torch.Generator(),
        )
