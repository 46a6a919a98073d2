"""What the benchmarks compare is the same, their commands can be run, and their arithmetic is right."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lockstep import config, tags
from lockstep.model import CNN

BENCHMARKS = config.PROJECT / "benchmarks"
MakeConfig = Callable[..., DictConfig]


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    yield load(BENCHMARKS / "bench.py", "bench")
    del sys.modules["bench"]


@pytest.fixture(scope="module")
def hand_written() -> Iterator[ModuleType]:
    yield load(BENCHMARKS / "hand_written.py", "hand_written")
    del sys.modules["hand_written"]


@pytest.mark.parametrize("model", ["cnn", "cnn_wide"])
def test_the_hand_written_net_is_ours(hand_written: ModuleType, make_config: MakeConfig, model: str) -> None:
    cfg = make_config(f"model={model}").model
    channels, hidden, lr = hand_written.CHANNELS[model]
    assert (list(channels), hidden, lr) == (cfg.net.channels, cfg.net.hidden, cfg.optimizer.lr)
    ours, theirs = CNN(channels, hidden), hand_written.CNN(*channels, hidden).to(memory_format=torch.channels_last)
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(4, 1, 28, 28)
    torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=0)


def test_the_usual_net_has_our_layers() -> None:
    usual = load(BENCHMARKS / "usual" / "train.py", "usual_train")
    ours, theirs = CNN(), usual.LitMNIST(lr=0.1)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    images = torch.rand(4, 1, 28, 28)
    torch.testing.assert_close(theirs.net(images), ours(images))
    del sys.modules["usual_train"]


RESULTS = {
    "metrics.json": defaultdict(lambda: 1.0),
    "seconds.json": {"first_step": 1.0},
    "clock.json": [1.0, 1.0, 1.0],
    "first.json": 1.0,
    "loader.json": 0.01,
}


def test_every_command_is_one_that_its_program_takes(
    bench: ModuleType, hand_written: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], results: str | None = None) -> Any:
        commands.append([argument.replace("{run}", "folder") for argument in command])
        if any("hand_written.py" in argument for argument in command):
            return bench.Run(1.0, [1.0, 1.0, 1.0])
        return bench.Run(1.0, RESULTS.get(results))

    monkeypatch.setattr(bench, "run", run)
    sides = bench.Sides("cpu", Path("data"))
    for row in bench.ROWS.values():
        row.numerator(sides)
        if row.denominator is not None:
            row.denominator(sides)
    kinds: dict[str, list[list[str]]] = defaultdict(list)
    for command in commands:
        (script,) = (argument for argument in command if argument.endswith(".py"))
        kinds[script].append(command[command.index(script) + 1 :])
    assert set(kinds) == {bench.TRAIN, str(BENCHMARKS / "usual" / "train.py"), str(BENCHMARKS / "hand_written.py")}
    for overrides in kinds[bench.TRAIN]:
        single = [override for override in overrides if override not in ("--multirun", "strategy=single,dp,ddp")]
        with initialize_config_dir(str(config.PROJECT / "conf"), version_base="1.3"):
            compose("config", single)
    for overrides in kinds[str(BENCHMARKS / "usual" / "train.py")]:
        with initialize_config_dir(str(BENCHMARKS / "usual"), version_base="1.3"):
            compose("config", overrides)
    for arguments in kinds[str(BENCHMARKS / "hand_written.py")]:
        hand_written.parse(arguments)


def test_a_ratio_is_the_median_of_pairs_that_take_turns(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def side(name: str, *seconds: float) -> Callable[[Any], float]:
        left = iter(seconds)

        def measure(sides: Any) -> float:
            order.append(name)
            return next(left)

        return measure

    def row(**options: Any) -> Any:
        return bench.Row("a / b", 1.5, side("a", 2, 9, 4), side("b", 1, 3, 4), **options)

    monkeypatch.setitem(bench.ROWS, "1", row())
    result = bench.measure("1", 3, None)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (result.median, result.smallest, result.largest, result.met) == (2, 1, 3, False)
    assert result.cells() == ("a / b", "<= 1.50", "2.000", "1.000 to 3.000", "4.00 s / 3.00 s", "no")
    monkeypatch.setitem(bench.ROWS, "1", row(at_most=False))
    assert bench.measure("1", 3, None).met
    monkeypatch.setitem(bench.ROWS, "1", bench.Row("a", 0.02, side("a", 0.01)))
    assert bench.measure("1", 1, None).cells() == ("a", "<= 0.02", "0.010", "0.010 to 0.010", "", "yes")


def test_an_epochs_arithmetic_is_the_nets(bench: ModuleType) -> None:
    """Per image: two convolutions and two linear layers, forward and backward; the images need no gradient."""
    first, rest = 28 * 28 * 8 * 25, 10 * 10 * 16 * 8 * 25 + 400 * 128 + 128 * 10
    share = bench.arithmetic_share(epoch_sec=2.0)
    assert share["epoch_gflop"] == pytest.approx(214 * 256 * 2 * (2 * first + 3 * rest) / 1e9)
    assert share["share"] == pytest.approx(share["epoch_gflop"] / share["gemm_gflops"] / 2.0)


@pytest.mark.slow
def test_the_clocks_of_the_benchmarks(tmp_path: Path) -> None:
    train = [sys.executable, str(config.PROJECT / "train.py"), "data=mnist_sample", "trainer.accelerator=cpu"]
    clocks = ["+callbacks.clock._target_=clock.Clock", "+callbacks.first._target_=clock.FirstStep"]
    few = ["trainer.max_epochs=3", "hydra.run.dir=.", "trainer.profiler._target_=clock.LoaderClock"]
    started = time.time()
    environ = os.environ | {"PYTHONPATH": str(BENCHMARKS), "BENCH_STARTED_AT": str(started)}
    result = subprocess.run([*train, *clocks, *few], cwd=tmp_path, env=environ, capture_output=True, text=True)
    took = time.time() - started
    assert result.returncode == 0, result.stderr
    epochs, first, loader, metrics = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("clock", "first", "loader", "metrics")
    )
    assert len(epochs) == 3
    assert min(epochs) > 0
    assert metrics[tags.STARTUP_SEC] - 1 < first < took - sum(epochs[1:])
    assert 0 < loader < 0.5
