"""Means over samples and ranks, without waiting for the device between batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


@dataclass
class SampleSums:
    """Sums over samples, kept on the device: adding a batch never waits for it."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0

    def add(self, values: Mapping[str, Tensor], num_samples: int) -> None:
        """Add a batch of B samples: by name, either one value per sample, (B,), or their mean, ()."""
        self.num_samples += num_samples
        for name, value in values.items():
            value = value.detach().to(_dtype(value.device))
            total = value.sum() if value.ndim else value * num_samples
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def vector(self, device: torch.device) -> Tensor:
        """Return the sums, sorted by name, then the sample count, for one SUM over the ranks."""
        values = [self.sums[name].item() for name in sorted(self.sums)]
        return torch.tensor([*values, self.num_samples], dtype=_dtype(device), device=device)

    def reduce(self, strategy: Strategy, *more: Tensor) -> tuple[dict[str, float], list[float]]:
        """Return the means over all ranks by name, and the totals of `more`, in one SUM."""
        own = self.vector(strategy.root_device)
        local = torch.cat([own, *(value.reshape(1) for value in more)])
        total = strategy.reduce(local, reduce_op="sum").tolist()
        *sums, num_samples = total[: len(own)]
        means = {name: value / num_samples for name, value in zip(sorted(self.sums), sums, strict=True)}
        return means, total[len(own) :]


class LossCurve:
    """Collects an epoch's losses: their sum over samples, and one point per logged step.

    Args:
        every_n_steps: Logs every n-th step; 0 logs none.
        step: The global step at which training begins. It is not logged.
    """

    def __init__(self, every_n_steps: int, step: int) -> None:
        self.every_n_steps, self._logged_step = every_n_steps, step
        self.lr = float("nan")  # of the next step
        self.start_epoch(SampleSums())

    def start_epoch(self, sums: SampleSums) -> None:
        """Forget the last epoch. `sums` is what this one has summed up already, if it was resumed."""
        self.sums = sums
        self._points: list[tuple[int, Tensor, float]] = []  # global step, this rank's loss, learning rate

    def add(self, loss: Tensor, num_samples: int, step: int) -> None:
        """Add a batch's mean loss. `step` is the global step after it."""
        self.sums.add({"loss": loss}, num_samples)
        # with accumulation, the batches that follow a step see its number too
        if self.every_n_steps and step != self._logged_step and step % self.every_n_steps == 0:
            self._logged_step = step
            self._points.append((step, loss, self.lr))

    def reduce(self, strategy: Strategy, world_size: int) -> tuple[float, float, list[tuple[int, float, float]]]:
        """Return the mean so far, over all ranks and over this one, and the points since the last call, in one SUM.

        A point is a global step, its loss over all ranks and its learning rate.
        """
        # all ranks train on batches of one size, so a step's mean is the plain mean of theirs
        points, self._points = self._points, []
        shares = (loss.to(_dtype(loss.device)) / world_size for _, loss, _ in points)
        means, losses = self.sums.reduce(strategy, *shares)
        own = float(self.sums.sums["loss"]) / self.sums.num_samples
        steps = [(step, loss, lr) for (step, _, lr), loss in zip(points, losses, strict=True)]
        return means["loss"], own, steps


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def gather_ranks(strategy: Strategy, values: Tensor) -> Tensor:
    """Return every rank's (n,) as (world size, n) on the CPU. All ranks must call it."""
    gathered = strategy.all_gather(values.to(strategy.root_device))
    return gathered.reshape(-1, len(values)).cpu()


def gather_by_name(strategy: Strategy, values: Mapping[str, float]) -> dict[str, list[float]]:
    """Return each value of every rank, by name, in the order of the ranks. All ranks must call it."""
    own = torch.tensor(list(values.values()), dtype=_dtype(strategy.root_device))
    return dict(zip(values, gather_ranks(strategy, own).T.tolist(), strict=True))


def redistribute(ranks: Tensor, world_size: int) -> Tensor:
    """Return what the ranks of a checkpoint had summed up, (ranks, 3), for another number of ranks, (world size, 3).

    The columns are loss sum and sample count, whose totals stay, and training seconds, of which all get the largest.
    """
    if len(ranks) == world_size:
        return ranks
    shares = ranks.new_zeros(world_size, 3)
    shares[0] = ranks.sum(0)
    shares[:, 2] = ranks[:, 2].max()
    return shares
