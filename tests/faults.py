"""What goes wrong on purpose in the tests' workers, and models that only the tests use."""

import gc
import hashlib
import json
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lockstep import host, tags, training
from lockstep.callbacks import EpochMonitor
from lockstep.data import Images, MNISTSampleDataModule, mnist
from lockstep.launch import external_launcher, restart_count
from lockstep.launch.store import JobStore
from lockstep.launch.worker import Worker
from lockstep.model import LitClassifier
from lockstep.plugins import DurableCheckpointIO


def note_that_it_strikes(trainer: pl.Trainer) -> None:
    """Leave a file whose time is the fault's."""
    folder = Path(trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "struck").touch()


class FailAt(pl.Callback):
    """Something happens to one rank at the start of one step, in the first attempt of a job.

    Args:
        rank: Which.
        step: Global step.
        how: `raise`, `kill` (SIGKILL), `freeze` (SIGSTOP), `terminate` (SIGTERM), `stop` (ask Lightning to).
    """

    SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "terminate": signal.SIGTERM}

    def __init__(self, rank: int, step: int, how: str = "raise") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step, restart_count()) != (self.rank, self.step, 0):
            return
        note_that_it_strikes(trainer)
        if self.how in self.SIGNALS:
            os.kill(os.getpid(), self.SIGNALS[self.how])
        elif self.how == "stop":
            trainer.should_stop = True
        else:
            raise RuntimeError("broken on purpose")


class KillIn(pl.Callback):
    """Kills one rank when it first comes to a hook, in the first attempt of a job.

    Args:
        rank: Which.
        hook: A Callback method, such as `on_validation_start`.
    """

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self._kill)

    def _kill(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == self.rank and restart_count() == 0:
            note_that_it_strikes(trainer)
            os.kill(os.getpid(), signal.SIGKILL)


class KilledWhileSaving(DurableCheckpointIO):
    """Killed in the middle of the `number`-th checkpoint that it writes, in the first attempt of a job."""

    def __init__(self, number: int) -> None:
        self.left = number

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and restart_count() == 0:
            torch.save = self._save_half
        super().save_checkpoint(checkpoint, path, storage_options)

    def _save_half(self, checkpoint: dict[str, Any], file: Any) -> None:
        file.write(b"PK half a checkpoint")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class SpoiltLoss(LitClassifier):
    """The loss of one rank's batch is not a number.

    Args:
        rank, step: Which.
        value: What it is instead, such as `nan`.
    """

    def __init__(self, rank: int, step: int, value: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place, self.value = (rank, step), float(value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if (self.trainer.global_rank, self.trainer.global_step) == self.place else loss


class BrokenImages(Images):
    """Fails on the first batch of one loader process."""

    def __getitems__(self, indices: list[int]) -> Any:
        if torch.utils.data.get_worker_info() is not None and os.environ["RANK"] == "1":
            raise OSError("broken on purpose")
        return super().__getitems__(indices)


class BrokenData(MNISTSampleDataModule):
    """The sample, with training images that rank 1's loader processes cannot read."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train_set = BrokenImages(*self.train_set[:])


class NotedData(MNISTSampleDataModule):
    """The sample; notes in which attempts of the job it was set up."""

    def setup(self, stage: str) -> None:
        with Path(self.trainer.default_root_dir, "attempts").open("a") as file:
            file.write(str(restart_count()))
        super().setup(stage)


class SlowDownload(MNISTSampleDataModule):
    """The sample, which takes `seconds` to be had."""

    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def prepare_data(self) -> None:
        time.sleep(self.seconds)
        self.seconds = 0


class SlowSteps(pl.Callback):
    """Every step takes `seconds` longer, and the first touches a file: now is the time for a signal from outside."""

    def __init__(self, seconds: float, started: str) -> None:
        self.seconds, self.started = seconds, Path(started)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        time.sleep(self.seconds)
        if trainer.global_step == 2:
            self.started.touch()


class NoteSteps(pl.Callback):
    """Leaves each rank's number of optimizer steps in a file."""

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        Path(trainer.default_root_dir, f"steps_{trainer.global_rank}").write_text(str(trainer.global_step))


class SlowRank(pl.Callback):
    """Delays every batch of one rank by `seconds`."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank:
            time.sleep(self.seconds)


class BatchNormNet(nn.Module):
    """(B, 1, 28, 28) -> (B, 10), with buffers that depend on the batches seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 5, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12 * 12, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class DropoutNet(nn.Module):
    """(B, 1, 28, 28) -> (B, 10), with random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def environment(cfg: DictConfig, worker: Worker) -> dict[str, str]:
    """What a worker sees of the launcher; run in place of training."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return {name: os.environ[name] for name in names}


def who_am_i(cfg: DictConfig, worker: Worker) -> dict[str, Any]:
    """What a worker takes itself for; run in place of training."""
    return {"launcher": worker.launcher, "rank": worker.rank, "external": external_launcher()}


class StopAfter(pl.Callback):
    """Ends the run after so many epochs, on all ranks."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


class LossHistory(pl.Callback):
    """Writes every epoch's `train/loss` in full precision to the run's folder: TensorBoard holds float32."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            (monitor,) = (callback for callback in trainer.callbacks if isinstance(callback, EpochMonitor))
            self.losses.append(monitor.metrics[tags.TRAIN_LOSS])
            Path(trainer.default_root_dir, "losses.json").write_text(json.dumps(self.losses))


class FewTestImages(MNISTSampleDataModule):
    """The sample with its test set cut to `test_size` images."""

    def __init__(self, test_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.test_size = test_size

    def load(self) -> tuple[Images, Images]:
        train, test = super().load()
        return train, Images(*test[: self.test_size])


class NotePid(pl.Callback):
    """Leaves a file named for this process."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, *args: Any) -> None:
        (self.folder / str(os.getpid())).touch()


def process(cfg: DictConfig, worker: Worker) -> dict[str, Any]:
    """What a worker is once training has set it up; run in place of training."""
    training.set_up_process(cfg, worker)
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "collects_garbage": gc.isenabled(),
        "frozen_objects": gc.get_freeze_count(),
        "page_faults": _page_faults(steps=20),
    }


def _page_faults(steps: int) -> int:
    """How often the system had to clear a page for buffers that are freed and made again, after the first step."""
    for step in range(steps):
        if step == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [torch.zeros(6_000_000) for _ in range(4)]  # 24 MB each
        del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def accelerator(cfg: DictConfig, worker: Worker) -> str:
    """The accelerator that training would choose; run in place of training."""
    return host.accelerator(cfg)


def rank_one_first(cfg: DictConfig, worker: Worker) -> None:
    """Rank 1 is done; then rank 0 fails. Run in place of training."""
    if os.environ["RANK"] == "0":
        time.sleep(1)
        raise OSError("broken on purpose")


def note_attempt_and_fail(cfg: DictConfig, worker: Worker) -> None:
    """Fails in every attempt. Run in place of training."""
    folder = Path(cfg.run_dir)
    folder.mkdir(exist_ok=True)
    with (folder / "attempts").open("a") as file:
        file.write(str(restart_count()))
    raise OSError(f"broken on purpose, attempt {restart_count()}")


class AskToStop(pl.Callback):
    """One rank asks Lightning to stop in a hook of the first epoch."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self._ask)

    def _ask(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank:
            trainer.should_stop = True


def fetch_in_a_race(cfg: DictConfig, worker: Worker) -> str:
    """One process of the node fetches small files from a slow source. Run in place of training."""
    content = {name: f"content of {name}".encode() for name in mnist.RAW_FILES}
    mnist.RAW_FILES = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in content.items()}

    def slow(folder: Path) -> None:
        for name, text in content.items():
            time.sleep(0.2)
            (folder / name).write_bytes(text)

    mnist.SOURCES = {"slow": slow}
    sources: list[str] = []
    JobStore.connect(60).once_per_node(lambda: sources.append(mnist.fetch(Path(cfg.race.root))))
    assert bool(sources) == (os.environ["LOCAL_RANK"] == "0")
    assert not mnist._broken_files(Path(cfg.race.root) / "MNIST" / "raw")  # in every rank, once it may go on
    return "".join(sources)


def listeners(cfg: DictConfig, worker: Worker) -> list[str]:
    """The addresses that rank 0 and the launcher listen on once the process group is made. Run in place of training."""
    JobStore.connect(60)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    sockets = set()
    for pid in (os.getpid(), cfg.launch.agent_pid):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                packed = bytes.fromhex(local.partition(":")[0])
                found.append(socket.inet_ntoa(packed[::-1]) if table == "tcp" else local)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def die_after_the_work(cfg: DictConfig, worker: Worker) -> int:
    """Rank 1 returns, and is killed before its process has ended. Run in place of training."""
    if worker.rank == 1:
        Finalize(None, lambda: os.kill(os.getpid(), signal.SIGKILL), exitpriority=0)
    return worker.rank


def fail_in_the_first_attempt(cfg: DictConfig, worker: Worker) -> int:
    """Rank 0 fails while the others are busy. Run in place of training."""
    if restart_count() == 0:
        time.sleep(0.3 if os.environ["RANK"] == "0" else 20)
        raise OSError("broken on purpose")
    return restart_count()
