"""Random states and event files of a run that goes on from a checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.callbacks import EpochSeed, RewindEvents


def test_random_state_follows_from_seed_epoch_and_rank() -> None:
    def draw(seed: int, epoch: int, rank: int) -> float:
        EpochSeed(seed).on_train_epoch_start(SimpleNamespace(current_epoch=epoch, global_rank=rank), None)
        return torch.rand(()).item()

    draws = [draw(seed, epoch, rank) for seed in range(2) for epoch in range(3) for rank in range(3)]
    assert len(set(draws)) == 18
    assert draw(1, 2, 1) == draws[16]


def trainer_within_epoch(batches: int, **attributes: Any) -> SimpleNamespace:
    epochs = SimpleNamespace(current=SimpleNamespace(processed=0, ready=1))
    progress = SimpleNamespace(is_last_batch=False, current=SimpleNamespace(ready=batches))
    return SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=SimpleNamespace(root_device=torch.device("cpu"), all_gather=lambda tensor: tensor),
        **{"world_size": 1, "global_rank": 0, "global_step": 5, "current_epoch": 0} | attributes,
    )


def test_a_checkpoint_within_an_epoch_restores_the_random_state() -> None:
    checkpoint: dict[str, Any] = {}
    EpochSeed(0).on_save_checkpoint(trainer := trainer_within_epoch(3), None, checkpoint)
    expected = torch.rand(3)
    seed = EpochSeed(0)
    seed.on_load_checkpoint(trainer, None, checkpoint)
    seed.on_train_start(trainer, None)
    assert torch.equal(torch.rand(3), expected)
    EpochSeed(0).on_save_checkpoint(trainer_within_epoch(0), None, between := {})
    assert between == {}


def test_with_another_number_of_ranks_no_two_draw_the_same() -> None:
    state = torch.get_rng_state()
    draws = set()
    for rank in range(2):
        torch.set_rng_state(state)
        seed = EpochSeed(0)
        trainer = trainer_within_epoch(3, world_size=2, global_rank=rank)
        seed.on_load_checkpoint(trainer, None, {"random_states": state.reshape(1, -1)})
        seed.on_train_start(trainer, None)
        draws.add(torch.rand(()).item())
        seed.on_train_epoch_start(trainer, None)
        draws.add(torch.rand(()).item())  # nor again what the epoch's start has drawn
    assert len(draws) == 4


class FakeEventFiles:
    """A logger that can take back what it wrote."""

    def __init__(self, log_dir: str, length: int) -> None:
        self.log_dir, self.length = log_dir, length

    def lengths(self) -> dict[str, int]:
        return {"events": self.length}

    def rewind(self, lengths: dict[str, int]) -> None:
        self.length = lengths["events"]


@pytest.mark.parametrize(("function", "log_dir", "length"), [("fit", "a", 10), ("test", "a", 30), ("fit", "b", 30)])
def test_events_after_the_checkpoint_are_taken_back(function: str, log_dir: str, length: int) -> None:
    checkpoint: dict[str, Any] = {}
    other = SimpleNamespace(log_dir="a")  # a logger that cannot
    RewindEvents().on_save_checkpoint(SimpleNamespace(loggers=[FakeEventFiles("a", 10), other]), None, checkpoint)
    assert checkpoint == {"event_files": {"a": {"events": 10}}}
    logger = FakeEventFiles(log_dir, 30)
    trainer = SimpleNamespace(loggers=[logger, other], state=SimpleNamespace(fn=function))
    RewindEvents().on_load_checkpoint(trainer, None, checkpoint)
    assert logger.length == length
