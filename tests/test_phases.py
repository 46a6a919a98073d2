"""The training clock, phases and overhead, with a clock that the test sets."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import tags
from lockstep.callbacks.phases import DDPComm, Stopwatch, TrainingTimes

CPU = torch.device("cpu")


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_a_stopwatch_counts_while_it_runs(clock: FakeClock) -> None:
    watch = Stopwatch(CPU)
    for seconds in (1, 2):
        watch.start()
        assert watch.running
        clock.now += seconds
        watch.stop()
        assert not watch.running
        clock.now += 1000
    assert watch.seconds == 3.0


def test_laps_are_summed_by_name(clock: FakeClock) -> None:
    watch = Stopwatch(CPU)
    watch.start()
    for name, seconds in (("a", 1), ("b", 2), ("a", 4)):
        clock.now += seconds
        watch.lap(name)
    clock.now += 8
    watch.stop()
    clock.now += 16
    watch.lap("b")  # stopped: not counted
    assert watch.take_laps() == {"a": 5.0, "b": 2.0}
    assert watch.take_laps() == {}
    assert watch.seconds == 15.0


def test_the_device_is_waited_for_at_start_and_stop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    marks = iter(range(100))
    asked: list[tuple[int, int]] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def elapsed_time(self, end: Any) -> float:
            asked.append((self.mark, end.mark))
            return 1000.0 * (end.mark - self.mark)

    def record_event(event: Event) -> Event:
        event.mark = next(marks)
        return event

    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=record_event))
    watch = Stopwatch(device := torch.device("cuda"))
    watch.start()
    watch.lap("data")
    watch.lap("forward")
    assert waits == [device]
    watch.stop()
    assert waits == [device] * 2
    assert asked == []
    assert watch.take_laps() == {"data": 1.0, "forward": 1.0}
    assert asked == [(0, 1), (1, 2)]


def train(times: TrainingTimes, clock: FakeClock, batches: int) -> None:
    """Train batches of 1 s data, 2 s forward, 4 s backward and 8 s optimizer."""
    for _ in range(batches):
        times.resume()
        for seconds, phase in zip((1, 2, 4, 8), tags.PHASES, strict=True):
            clock.now += seconds
            times.watch.lap(phase)
        times.num_batches += 1


def test_a_pause_is_neither_training_nor_part_of_a_phase(clock: FakeClock) -> None:
    times = TrainingTimes(SimpleNamespace(root_device=CPU, model=None))
    times.start_epoch()
    train(times, clock, 2)
    times.pause()
    times.pause()  # a checkpoint in a validation
    clock.now += 1000
    train(times, clock, 1)
    times.pause()
    assert times.watch.seconds == 45.0
    assert times.per_batch(1) == {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 8.0}


def test_each_epoch_starts_from_zero_and_a_resumed_one_from_what_it_had_taken(clock: FakeClock) -> None:
    times = TrainingTimes(SimpleNamespace(root_device=CPU, model=None))
    for before in (0.0, 30.0):
        times.start_epoch(before)
        train(times, clock, 1)
        times.pause()
        assert times.watch.seconds == before + 15.0
        assert times.per_batch(1)["optimizer"] == 8.0


def test_only_the_overhead_of_training_counts(clock: FakeClock) -> None:
    spent = {"dp/gather_sec": 100.0}  # before training

    def take() -> dict[str, float]:
        taken = dict(spent)
        spent.clear()
        return taken

    times = TrainingTimes(SimpleNamespace(root_device=CPU, model=None, take_phase_seconds=take))
    times.start_epoch()
    for seconds in (3.0, 5.0):
        train(times, clock, 1)
        spent["dp/gather_sec"] = seconds
        times.pause()
        spent["dp/gather_sec"] = 100.0  # in a validation
    assert times.per_batch(1)["dp/gather_sec"] == 4.0
    times.start_epoch()
    train(times, clock, 1)
    times.pause()
    assert "dp/gather_sec" not in times.per_batch(1)


def test_ddps_running_means_become_each_epochs_own() -> None:
    data: dict[str, float] = {}
    rates: list[int] = []
    model = SimpleNamespace(
        _get_ddp_logging_data=lambda: data, _set_ddp_runtime_logging_sample_rate=lambda every: rates.append(every)
    )
    comm = DDPComm(model)
    # ten samples of 8 ms, then thirty of 2 ms, of which 1 ms was hidden: together 40 with a mean of 3.5 ms
    data |= {"iteration": 10, "avg_backward_comm_time": 8e6, "avg_backward_compute_comm_overlap_time": 0}
    assert comm.take(1) == {tags.ALL_REDUCE_SEC: pytest.approx(0.008), tags.OVERLAP_FRACTION: 0.0}
    data |= {"iteration": 310, "avg_backward_comm_time": 3.5e6, "avg_backward_compute_comm_overlap_time": 0.75e6}
    assert comm.take(2) == {tags.ALL_REDUCE_SEC: pytest.approx(0.001), tags.OVERLAP_FRACTION: pytest.approx(0.5)}
    assert rates == [DDPComm.SAMPLE_EVERY]
    assert DDPComm(None).take(1) == {}
