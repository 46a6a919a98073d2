"""EpochMonitor with a fake clock, a fake Trainer and uneven ranks: no training, no processes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import tags
from lockstep.callbacks import EpochMonitor


class FakeClock:
    """Returns the time that the test has set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)


class FakeStrategy:
    """Reduces and gathers with a peer that contributes what the test has set.

    Args:
        peers: The peer's tensor for each collective, in turn.
    """

    root_device = torch.device("cpu")
    model = None

    def __init__(self, peers: list[Tensor]) -> None:
        self.peers = peers
        self.collectives: list[str] = []

    def reduce(self, tensor: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "sum"
        self.collectives.append("reduce")
        return tensor + self.peers.pop(0) if self.peers else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.collectives.append("all_gather")
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
        "global_rank": 0,
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
    """Run an epoch of (loss, samples) batches: 1 s data, 2 s forward, 4 s backward, 8 s optimizer each."""
    monitor.on_train_epoch_start(trainer, module)
    run_batches(monitor, trainer, module, clock, batches)


def run_batches(
    monitor: EpochMonitor,
    trainer: SimpleNamespace,
    module: FakeModule,
    clock: FakeClock,
    batches: list[tuple[float, int]],
) -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
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
    assert trainer.strategy.collectives == ["reduce", "all_gather"]
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


# ------------------------------------------------------------------------------------------------ checkpoints


def within_epoch(batches: int) -> SimpleNamespace:
    """Return the progress that Lightning keeps: so many batches of the first epoch are done."""
    epochs = SimpleNamespace(current=SimpleNamespace(processed=0, ready=1))
    progress = SimpleNamespace(is_last_batch=False, current=SimpleNamespace(ready=batches))
    return SimpleNamespace(epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=progress))


def save(monitor: EpochMonitor, trainer: SimpleNamespace, batches: int) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {}
    trainer.fit_loop = within_epoch(batches)
    monitor.on_save_checkpoint(trainer, FakeModule(), checkpoint)
    return checkpoint


def resume(trainer: SimpleNamespace, checkpoint: dict[str, Any], started_at: float | None = None) -> EpochMonitor:
    """Return a monitor that goes on from a checkpoint as under Lightning: without `on_train_epoch_start`."""
    monitor = EpochMonitor(started_at)
    monitor.on_load_checkpoint(trainer, FakeModule(), checkpoint)
    monitor.on_train_start(trainer, FakeModule())
    return monitor


def test_an_epoch_goes_on_from_a_checkpoint_within_it(clock: FakeClock) -> None:
    first, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    first.on_train_start(trainer, module)
    run_epoch(first, trainer, module, clock, [(1.0, 3), (2.0, 3)])
    checkpoint = save(first, trainer, batches=2)
    assert checkpoint["epoch_sums"].tolist() == [[9.0, 6.0, 30.0]]
    assert trainer.loggers[0].scalars[tags.TRAIN_LOSS_STEP] == [(2, 2.0)]  # written before the checkpoint
    clock.now += 1000
    trainer = make_trainer(global_step=2)
    monitor = resume(trainer, checkpoint)
    run_batches(monitor, trainer, module, clock, [(6.0, 1)])
    metrics = finish_epoch(monitor, trainer, module)
    assert metrics[tags.TRAIN_LOSS] == 15.0 / 7
    assert metrics[tags.EPOCH_SEC] == 45.0
    assert metrics[tags.PHASE_SEC.format(phase="optimizer")] == 8.0  # of the batches since


def test_an_epoch_goes_on_with_another_number_of_ranks(clock: FakeClock) -> None:
    sums = torch.tensor([[4.0, 2.0, 30.0], [5.0, 3.0, 40.0]], dtype=torch.float64)
    trainer, module = make_trainer(), FakeModule()
    monitor = resume(trainer, {"epoch_sums": sums})
    run_batches(monitor, trainer, module, clock, [(6.0, 1)])
    metrics = finish_epoch(monitor, trainer, module)
    assert metrics[tags.TRAIN_LOSS] == (4 + 5 + 6) / (2 + 3 + 1)
    assert metrics[tags.EPOCH_SEC] == 55.0


def test_a_checkpoint_in_an_epoch_pauses_the_clock(clock: FakeClock) -> None:
    monitor, trainer, module = EpochMonitor(), make_trainer(), FakeModule()
    monitor.on_train_start(trainer, module)
    run_batches(monitor, trainer, module, clock, [(1.0, 1)])
    save(monitor, trainer, batches=1)
    clock.now += 1000
    run_batches(monitor, trainer, module, clock, [(1.0, 1)])
    assert finish_epoch(monitor, trainer, module)[tags.EPOCH_SEC] == 29.0  # runs again once the next batch is there


def test_a_checkpoint_between_epochs_holds_no_sums(clock: FakeClock) -> None:
    monitor, trainer = EpochMonitor(), make_trainer()
    monitor.on_train_start(trainer, FakeModule())
    assert save(monitor, trainer, batches=0).keys() == {"monitor"}
    assert trainer.strategy.collectives == []


def test_nothing_is_left_of_an_epoch_resumed_at_its_end(clock: FakeClock) -> None:
    trainer = make_trainer(is_global_zero=True)
    monitor = resume(trainer, {})
    assert finish_epoch(monitor, trainer, FakeModule()) == {}
    assert trainer.strategy.collectives == []


def test_a_step_is_not_logged_again_after_resuming(clock: FakeClock) -> None:
    # the first batch after step 2 takes no step of its own
    trainer = make_trainer(accumulate_grad_batches=2, global_step=2)
    monitor = resume(trainer, {"epoch_sums": torch.zeros(1, 3, dtype=torch.float64)})
    run_batches(monitor, trainer, FakeModule(), clock, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)])
    finish_epoch(monitor, trainer, FakeModule())
    assert trainer.loggers[0].scalars[tags.TRAIN_LOSS_STEP] == [(4, 4.0)]


@pytest.mark.parametrize(("command", "accuracy", "median"), [(100.0, 0.5, 45.0), (200.0, None, 60.0)])
def test_a_restart_goes_on_with_the_runs_history(
    clock: FakeClock, command: float, accuracy: float | None, median: float
) -> None:
    first, trainer, module = EpochMonitor(100.0), make_trainer(), FakeModule()
    first.on_train_start(trainer, module)
    for count in (1, 2):
        run_epoch(first, trainer, module, clock, [(1.0, 2)] * count)
        finish_epoch(first, trainer, module)
    first.metrics["val/acc"] = 0.5
    monitor = resume(trainer, save(first, trainer, batches=0), started_at=command)
    assert monitor.metrics.get("val/acc") == accuracy
    run_epoch(monitor, trainer, module, clock, [(1.0, 2)] * 4)
    assert finish_epoch(monitor, trainer, module)[tags.EPOCH_SEC] == 60.0
    monitor.on_train_end(trainer, module)
    assert monitor.metrics[tags.EPOCH_SEC_MEDIAN] == median


def test_a_restarts_startup_counts_from_the_restart(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EpochMonitor(5.0).started_at == 5.0
    assert EpochMonitor().started_at == clock.now
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert EpochMonitor(5.0).started_at == clock.now
