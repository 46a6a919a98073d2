"""The interpreter lock's contention, where it is known."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import tags
from lockstep.callbacks import GilMonitor


def contention(work: Callable[[], None]) -> float:
    """Return what GilMonitor logs of an epoch in which two threads do this work."""
    logged: dict[str, float] = {}
    strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=lambda tensor: tensor)
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.update(metrics))
    trainer = SimpleNamespace(strategy=strategy, loggers=[logger], is_global_zero=True, current_epoch=0)
    monitor = GilMonitor()
    monitor.on_train_epoch_start(trainer, None)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.on_train_epoch_end(trainer, None)
    return logged[tags.GIL_CONTENTION.format(rank=0)]


def compute() -> None:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        sum(range(1000))


def test_python_threads_contend_and_sleeping_ones_do_not() -> None:
    idle, busy = contention(lambda: time.sleep(1)), contention(compute)
    assert busy > 0.5
    assert idle < busy / 2  # on a busy machine a thread waits for a core too


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_every_rank_is_logged(run_job: Callable[..., Any], tmp_path: Any, strategy: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = "+callbacks.gil._target_=lockstep.callbacks.GilMonitor"
    run_job(f"strategy={strategy}", "trainer.devices=2", monitor)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    found = sorted(tag for tag in accumulator.Tags()["scalars"] if tag.startswith("gil/"))
    assert found == [tags.GIL_CONTENTION.format(rank=rank) for rank in range({"dp": 1, "ddp": 2}[strategy])]
    for tag in found:
        (event,) = accumulator.Scalars(tag)
        assert 0 <= event.value <= 1
