"""EpochMonitor's arithmetic, with a fake clock and uneven ranks: no training, no processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import callbacks, tags
from lockstep.callbacks import EpochMonitor, EpochSeed, PhaseTimer, SampleSums


class FakeClock:
    """Says what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(callbacks.time, "time", lambda: self.now)


class FakeStrategy:
    """The collectives of a rank whose peers hold what the test says.

    Args:
        peers: For each collective in turn, what the other ranks bring.
    """

    root_device = torch.device("cpu")
    model = None

    def __init__(self, peers: list[Tensor]) -> None:
        self.peers = peers

    def reduce(self, tensor: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "sum"
        return tensor + self.peers.pop(0) if self.peers else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, self.peers.pop(0)]) if self.peers else tensor


class FakeLogger:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for tag, value in metrics.items():
            self.scalars.setdefault(tag, []).append((step, value))


class FakeModule:
    """Collects what is logged to Lightning."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: float, **kwargs: Any) -> None:
        self.logged[name] = value

    def log_dict(self, metrics: dict[str, float], **kwargs: Any) -> None:
        self.logged |= metrics


def make_trainer(peers: list[Tensor] | None = None, **attributes: Any) -> SimpleNamespace:
    defaults = {
        "strategy": FakeStrategy(peers or []),
        "loggers": [FakeLogger()],
        "world_size": 2 if peers else 1,
        "is_global_zero": True,
        "sanity_checking": False,
        "current_epoch": 0,
        "global_step": 0,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": 1,
    }
    return SimpleNamespace(**defaults | attributes)


def run_epoch(
    monitor: EpochMonitor,
    trainer: SimpleNamespace,
    module: FakeModule,
    clock: FakeClock,
    batches: list[tuple[float, int]],
) -> None:
    """One epoch of (loss, samples) batches: 1 s data, 2 s forward, 4 s backward, 8 s optimizer each."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    monitor.on_train_epoch_start(trainer, module)
    for index, (loss, num_samples) in enumerate(batches):
        batch = (torch.zeros(num_samples, 1), torch.zeros(num_samples))
        clock.now += 1
        monitor.on_train_batch_start(trainer, module, batch, index)
        clock.now += 2
        monitor.on_before_backward(trainer, module, torch.tensor(loss))
        clock.now += 4
        monitor.on_after_backward(trainer, module)
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            monitor.on_before_optimizer_step(trainer, module, optimizer)
            trainer.global_step += 1
        clock.now += 8
        outputs = {"loss": torch.tensor(loss, dtype=torch.float64) / trainer.accumulate_grad_batches}
        monitor.on_train_batch_end(trainer, module, outputs, batch, index)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def finish_epoch(monitor: EpochMonitor, trainer: SimpleNamespace, module: FakeModule) -> dict[str, float]:
    monitor.on_train_epoch_end(trainer, module)
    return monitor.metrics


def test_loss_weighs_samples_not_batches(clock: FakeClock) -> None:
    monitor, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)
    run_epoch(monitor, trainer, module, clock, [(1.0, 3), (5.0, 1)])
    metrics = finish_epoch(monitor, trainer, module)
    assert metrics[tags.TRAIN_LOSS] == (1.0 * 3 + 5.0 * 1) / 4
    assert module.logged == {tags.TRAIN_LOSS: 2.0}


def test_loss_is_the_mean_over_ranks_that_saw_different_amounts(clock: FakeClock) -> None:
    # rank 1: 12 samples of loss 3 in all; its logged step's loss is 7, of which its half comes in
    reduced = torch.tensor([36.0, 12.0, 3.5], dtype=torch.float64)
    #                     loss, samples, train s, data, forward, backward, optimizer
    gathered = torch.tensor([3.0, 12.0, 60.0, 3.0, 4.0, 6.0, 10.0], dtype=torch.float64)
    monitor, trainer, module = EpochMonitor(), make_trainer([reduced, gathered]), FakeModule()
    monitor.on_train_start(trainer, module)
    run_epoch(monitor, trainer, module, clock, [(1.0, 2), (2.0, 2)])
    metrics = finish_epoch(monitor, trainer, module)
    assert metrics[tags.TRAIN_LOSS] == (1 * 2 + 2 * 2 + 36) / 16
    assert metrics[tags.TRAIN_LOSS_RANK.format(rank=0)] == 1.5
    assert metrics[tags.TRAIN_LOSS_RANK.format(rank=1)] == 3.0
    assert metrics[tags.EPOCH_SEC] == 60.0
    assert metrics[tags.EPOCH_SEC_FASTEST_RANK] == 30.0
    assert metrics[tags.SAMPLES_PER_SEC] == 16 / 60
    assert [metrics[tags.PHASE_SEC.format(phase=phase)] for phase in tags.PHASES] == [2.0, 3.0, 5.0, 9.0]
    assert trainer.loggers[0].scalars[tags.TRAIN_LOSS_STEP] == [(2, 2.0 / 2 + 3.5)]
    assert trainer.loggers[0].scalars[tags.LR] == [(2, 0.5)]


@pytest.mark.parametrize("where", ["middle", "end"])
def test_validation_and_checkpoints_are_not_training_time(clock: FakeClock, where: str) -> None:
    monitor, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)

    def validate() -> None:
        monitor.on_validation_start(trainer, module)
        clock.now += 1000
        monitor.on_validation_batch_end(trainer, module, {"loss": torch.ones(2)}, torch.zeros(2), 0)
        monitor.on_validation_epoch_end(trainer, module)
        clock.now += 5000  # ModelCheckpoint writes

    original = monitor.on_train_batch_end

    def batch_end(*args: Any) -> None:
        original(*args)
        if args[-1] == (0 if where == "middle" else 1):
            validate()

    monitor.on_train_batch_end = batch_end
    run_epoch(monitor, trainer, module, clock, [(1.0, 2), (1.0, 2)])
    metrics = finish_epoch(monitor, trainer, module)
    # 15 s a batch; after a validation in the middle, the clock starts again when the next batch is there
    assert metrics[tags.EPOCH_SEC] == (29.0 if where == "middle" else 30.0)
    assert metrics[tags.VAL_SEC] == 1000.0
    assert metrics[tags.PHASE_SEC.format(phase="data")] == (0.5 if where == "middle" else 1.0)
    assert metrics[tags.PHASE_SEC.format(phase="optimizer")] == 8.0


def test_accumulated_losses_are_undivided_and_logged_once_a_step(clock: FakeClock) -> None:
    monitor, trainer, module = EpochMonitor(), make_trainer(accumulate_grad_batches=2), FakeModule()
    monitor.on_train_start(trainer, module)
    run_epoch(monitor, trainer, module, clock, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 1)])
    assert finish_epoch(monitor, trainer, module)[tags.TRAIN_LOSS] == 3.5
    assert trainer.loggers[0].scalars[tags.TRAIN_LOSS_STEP] == [(2, 4.0)]


def test_startup_is_from_the_command_to_the_first_batch_and_logged_once(clock: FakeClock) -> None:
    monitor, trainer, module = EpochMonitor(started_at=clock.now), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)
    clock.now += 6
    for epoch in range(2):
        trainer.current_epoch = epoch
        run_epoch(monitor, trainer, module, clock, [(1.0, 2)])
        finish_epoch(monitor, trainer, module)
    assert trainer.loggers[0].scalars[tags.STARTUP_SEC] == [(0, 7.0)]
    assert [step for step, _ in trainer.loggers[0].scalars[tags.EPOCH_SEC]] == [0, 1]


@pytest.mark.parametrize(("num_batches", "expected"), [([4], 60.0), ([4, 1, 2, 3], 30.0)])
def test_median_leaves_the_first_epoch_out(clock: FakeClock, num_batches: list[int], expected: float) -> None:
    monitor, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)
    for count in num_batches:
        run_epoch(monitor, trainer, module, clock, [(1.0, 2)] * count)
        finish_epoch(monitor, trainer, module)
    monitor.on_train_end(trainer, module)
    assert monitor.metrics[tags.EPOCH_SEC_MEDIAN] == expected
    assert monitor.metrics[tags.SAMPLES_PER_SEC_MEDIAN] == 2 / 15


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_evaluation_is_exact_over_uneven_ranks(clock: FakeClock, stage: str) -> None:
    # acc and loss sums by name, then samples: rank 1 has 1 right of 1
    monitor, module = EpochMonitor(), FakeModule()
    trainer = make_trainer([torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)])
    hooks = [getattr(monitor, f"on_{stage}_{name}") for name in ("start", "batch_end", "epoch_end")]
    hooks[0](trainer, module)
    outputs = {"loss": torch.tensor([1.0, 2.0]), "acc": torch.tensor([True, False])}
    hooks[1](trainer, module, outputs, torch.zeros(2), 0)
    hooks[2](trainer, module)
    short = {"validation": "val", "test": "test"}[stage]
    assert monitor.metrics[f"{short}/acc"] == 2 / 3
    assert monitor.metrics[f"{short}/loss"] == 3.5 / 3
    assert module.logged == {f"{short}/acc": 2 / 3, f"{short}/loss": 3.5 / 3}
    assert set(trainer.loggers[0].scalars) >= {f"{short}/acc", f"{short}/loss"}


def test_other_ranks_take_part_and_write_nothing(clock: FakeClock) -> None:
    reduced, gathered = torch.zeros(2, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    trainer = make_trainer([reduced, gathered], is_global_zero=False, log_every_n_steps=100)
    monitor, module = EpochMonitor(), FakeModule()
    monitor.on_train_start(trainer, module)
    run_epoch(monitor, trainer, module, clock, [(1.0, 2)])
    assert finish_epoch(monitor, trainer, module) == {}
    assert trainer.strategy.peers == []  # both collectives were entered
    assert trainer.loggers[0].scalars == {}
    assert module.logged == {tags.TRAIN_LOSS: 1.0}


def test_ddps_own_measurement_is_averaged_over_ranks(clock: FakeClock) -> None:
    data = {
        "iteration": 10,
        "avg_backward_comm_time": 2_000_000,
        "avg_backward_compute_comm_overlap_time": 500_000,
    }
    reduced = torch.zeros(2, dtype=torch.float64)
    gathered = torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0.004, 0.75], dtype=torch.float64)
    trainer = make_trainer([reduced, gathered], log_every_n_steps=100)
    rates: list[int] = []
    trainer.strategy.model = SimpleNamespace(
        _get_ddp_logging_data=lambda: data, _set_ddp_runtime_logging_sample_rate=rates.append
    )
    monitor, module = EpochMonitor(), FakeModule()
    monitor.on_train_start(trainer, module)
    run_epoch(monitor, trainer, module, clock, [(1.0, 2)])
    metrics = finish_epoch(monitor, trainer, module)
    assert metrics[tags.ALL_REDUCE_SEC] == pytest.approx(0.003)
    assert metrics[tags.OVERLAP_FRACTION] == pytest.approx(0.5)
    assert rates == [10]


def test_ddps_running_means_become_each_epochs_own() -> None:
    data: dict[str, float] = {}
    model = SimpleNamespace(_get_ddp_logging_data=lambda: data, _set_ddp_runtime_logging_sample_rate=lambda every: None)
    comm = callbacks.DDPComm(model)
    # ten samples of 8 ms, then thirty of 2 ms, of which 1 ms was hidden: together 40 with a mean of 3.5 ms
    data |= {"iteration": 10, "avg_backward_comm_time": 8e6, "avg_backward_compute_comm_overlap_time": 0}
    assert comm.take(1) == {tags.ALL_REDUCE_SEC: pytest.approx(0.008), tags.OVERLAP_FRACTION: 0.0}
    data |= {"iteration": 310, "avg_backward_comm_time": 3.5e6, "avg_backward_compute_comm_overlap_time": 0.75e6}
    assert comm.take(2) == {tags.ALL_REDUCE_SEC: pytest.approx(0.001), tags.OVERLAP_FRACTION: pytest.approx(0.5)}
    assert callbacks.DDPComm(None).take(1) == {}


def test_nothing_reads_a_value_back_during_an_epoch(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """`item`, `tolist` and the like wait for the device; per batch there must be none."""
    monitor, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)

    def refuse(*args: Any) -> None:
        raise AssertionError("the host waited for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
            patch.setattr(Tensor, name, refuse)
        run_epoch(monitor, trainer, module, clock, [(1.0, 2)] * 3)
    finish_epoch(monitor, trainer, module)


def test_sums_are_kept_in_float64() -> None:
    sums = SampleSums()
    for _ in range(3):
        sums.add({"loss": torch.tensor(0.1, dtype=torch.float32)}, 10_000_001)
    vector = sums.vector(torch.device("cpu"))
    assert vector.dtype == torch.float64
    assert sums.means(vector)["loss"] == pytest.approx(float(torch.tensor(0.1)), abs=1e-15)


def test_phase_timer_asks_for_times_only_at_the_end() -> None:
    marks = iter(range(100))
    asked: list[tuple[int, int]] = []

    def seconds(start: int, end: int) -> float:
        asked.append((start, end))
        return end - start

    timer = PhaseTimer(lambda: next(marks), seconds)
    timer.lap("data")  # no start yet: not counted
    timer.start()
    timer.lap("forward")
    timer.stop()
    timer.lap("backward")  # after a stop: not counted
    timer.lap("optimizer")
    assert asked == []
    assert timer.totals() == {"data": 0.0, "forward": 1.0, "backward": 0.0, "optimizer": 1.0}
    assert set(timer.totals().values()) == {0.0}


def test_random_state_follows_from_seed_epoch_and_rank() -> None:
    def draw(seed: int, epoch: int, rank: int) -> float:
        EpochSeed(seed).on_train_epoch_start(SimpleNamespace(current_epoch=epoch, global_rank=rank), None)
        return torch.rand(()).item()

    draws = [draw(seed, epoch, rank) for seed in range(2) for epoch in range(3) for rank in range(3)]
    assert len(set(draws)) == 18
    assert draw(1, 2, 1) == draws[16]
