"""Sums over samples and ranks, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.callbacks.sums import LossCurve, SampleSums, gather_by_name, gather_ranks, redistribute

CPU = torch.device("cpu")


def strategy_with(peer: list[float] | None = None) -> Any:
    """Return the collectives of rank 0, whose only peer contributes `peer`."""
    tensor = None if peer is None else torch.tensor(peer, dtype=torch.float64)

    def reduce(values: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "sum"
        return values if tensor is None else values + tensor

    def all_gather(values: Tensor) -> Tensor:
        return values if tensor is None else torch.stack([values, tensor])

    return SimpleNamespace(root_device=CPU, reduce=reduce, all_gather=all_gather)


def test_a_batch_counts_by_its_samples() -> None:
    sums = SampleSums()
    sums.add({"loss": torch.tensor(1.0), "acc": torch.tensor([True, True, False])}, 3)
    sums.add({"loss": torch.tensor(5.0), "acc": torch.tensor([False])}, 1)
    assert sums.vector(CPU).tolist() == [2.0, 8.0, 4.0]  # acc, loss, samples
    assert sums.reduce(strategy_with()) == ({"acc": 0.5, "loss": 2.0}, [])


def test_one_sum_over_ranks_takes_more_along() -> None:
    sums = SampleSums({"loss": torch.tensor(6.0)}, 3)
    assert sums.reduce(strategy_with([10.0, 1.0, 7.0]), torch.tensor(2.0)) == ({"loss": 4.0}, [9.0])


def test_an_empty_shard_weighs_nothing() -> None:
    sums = SampleSums()
    sums.add({"loss": torch.tensor([])}, 0)
    assert sums.reduce(strategy_with([10.0, 4.0])) == ({"loss": 2.5}, [])


def test_sums_are_kept_in_float64() -> None:
    sums = SampleSums()
    for _ in range(3):
        sums.add({"loss": torch.tensor(0.1, dtype=torch.float32)}, 10_000_001)
    assert sums.vector(CPU).dtype == torch.float64
    means, _ = sums.reduce(strategy_with())
    assert means["loss"] == pytest.approx(float(torch.tensor(0.1)), abs=1e-15)


def test_adding_needs_no_graph() -> None:
    sums = SampleSums()
    sums.add({"loss": torch.tensor(1.0, requires_grad=True) * 2}, 1)
    assert not sums.sums["loss"].requires_grad


def test_the_curve_holds_every_nth_step_with_its_learning_rate() -> None:
    curve = LossCurve(every_n_steps=2, step=0)
    for step in range(1, 6):
        curve.lr = step / 10
        curve.add(torch.tensor(float(step)), num_samples=1, step=step)
    mean, own, steps = curve.reduce(strategy_with([0.0, 5.0, 1.0, 2.0]), world_size=2)
    assert (mean, own) == (1.5, 3.0)
    assert steps == [(2, 2 / 2 + 1.0, 0.2), (4, 4 / 2 + 2.0, 0.4)]
    assert curve.reduce(strategy_with(), world_size=1) == (3.0, 3.0, [])  # the sums stay, the points are told


def test_a_step_is_one_point_however_many_batches_follow_it() -> None:
    curve = LossCurve(every_n_steps=2, step=2)
    for step in (2, 3, 4, 4):  # the first belongs to a step from before
        curve.add(torch.tensor(float(step)), num_samples=1, step=step)
    curve.start_epoch(SampleSums())
    curve.add(torch.tensor(9.0), num_samples=1, step=4)
    assert curve.reduce(strategy_with(), world_size=1) == (9.0, 9.0, [])


def test_no_curve_where_nothing_is_logged() -> None:
    curve = LossCurve(every_n_steps=0, step=0)
    curve.add(torch.tensor(1.0), num_samples=1, step=1)
    assert curve.reduce(strategy_with(), world_size=1) == (1.0, 1.0, [])


def test_a_steps_loss_is_averaged_in_float64() -> None:
    curve = LossCurve(every_n_steps=1, step=0)
    curve.add(torch.tensor(0.1), num_samples=1, step=1)
    _, _, steps = curve.reduce(strategy_with(), world_size=3)
    assert steps[0][1] == float(torch.tensor(0.1)) / 3


def test_ranks_are_gathered_in_order() -> None:
    own = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert gather_ranks(strategy_with(), own).tolist() == [[1.0, 2.0]]
    assert gather_ranks(strategy_with([3.0, 4.0]), own).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    by_name = gather_by_name(strategy_with([3.0, 4.0]), {"loss": 1.0, "samples": 2})
    assert by_name == {"loss": [1.0, 3.0], "samples": [2.0, 4.0]}


def test_another_number_of_ranks_gets_the_same_totals() -> None:
    ranks = torch.tensor([[4.0, 2.0, 30.0], [5.0, 3.0, 40.0]])  # loss sum, samples, seconds
    assert redistribute(ranks, 2) is ranks
    assert redistribute(ranks, 1).tolist() == [[9.0, 5.0, 40.0]]
    assert redistribute(ranks, 3).tolist() == [[9.0, 5.0, 40.0], [0.0, 0.0, 40.0], [0.0, 0.0, 40.0]]
