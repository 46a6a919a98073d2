"""How fast Lockstep is, as ratios: against a hand-written loop, the usual Lightning project, and itself.

    python benchmarks/bench.py                    every row, 7 pairs each; prints a table, writes outputs/bench.json
    python benchmarks/bench.py --rows 1 3 --pairs 3

Machines drift by a factor of two within minutes. So the two sides of a pair run one directly after the other, in turn
the one and the other first; what counts is the ratio of each pair, and of those the median, smallest and largest.
MNIST must lie in data/ already: any run of `python train.py` fetches it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lockstep import config, tags, training

BENCHMARKS = Path(__file__).resolve().parent
QUIET = ("trainer.enable_progress_bar=false", "trainer.accelerator=cpu")
NO_EVALUATION = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
DDP = ("strategy=ddp", "trainer.devices=2")
WIDE = ("model=cnn_wide", "trainer.max_epochs=2", "trainer.limit_train_batches=40", *NO_EVALUATION)
DATA = config.PROJECT / "data"
MULTIPLY_ADDS = 28 * 28 * 8 * 25 + 10 * 10 * 16 * 8 * 25 + 400 * 128 + 128 * 10  # of the default net, per image

# The loop at its best. glibc may or may not hand each step's buffers back to the system, as chance has it, and fetching
# them again takes up to half of an epoch. Our workers have loaded so much before that it keeps them.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


@dataclass
class Run:
    """One command.

    Attributes:
        seconds: Wall time, s.
        results: What it wrote.
    """

    seconds: float
    results: dict[str, Any] = field(default_factory=dict)


def run(command: list[str], results: str | None = None) -> Run:
    """Run a command in a folder of its own; `{run}` in it stands for that folder.

    Args:
        command: With its arguments.
        results: A JSON file that it leaves there.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"PYTHONPATH": str(BENCHMARKS), "BENCH_STARTED_AT": str(time.time())}
        start = time.perf_counter()
        arguments = [argument.replace("{run}", folder) for argument in command]
        subprocess.run(arguments, check=True, capture_output=True, cwd=folder, env=environ)
        seconds = time.perf_counter() - start
        return Run(seconds, json.loads(Path(folder, results).read_text()) if results else {})


def ours(*overrides: str, results: str = "metrics.json") -> Run:
    train = str(config.PROJECT / "train.py")
    return run([sys.executable, train, *QUIET, "hydra.run.dir={run}", *overrides], results)


def usual(*overrides: str) -> Run:
    train = str(BENCHMARKS / "usual" / "train.py")
    return run([sys.executable, train, f"data_dir={DATA}", "hydra.run.dir={run}", *overrides], "seconds.json")


def hand_written(processes: int, *arguments: str) -> float:
    """Seconds of its last epoch."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = [str(BENCHMARKS / "hand_written.py"), *arguments]
    command = [sys.executable, *(torchrun if processes > 1 else []), *script]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | KEEP_MEMORY)
    return json.loads(result.stdout)[-1]


def first_step(run: Run) -> float:
    work = sum(run.results[tags.PHASE_SEC.format(phase=phase)] for phase in tags.PHASES[1:])
    return run.results[tags.STARTUP_SEC] + work


def epoch(*overrides: str) -> float:
    """Seconds of our last epoch of two."""
    return ours(*overrides, "trainer.max_epochs=2", *NO_EVALUATION).results[tags.EPOCH_SEC]


def sweep() -> float:
    few = [f"trainer.limit_{stage}_batches=10" for stage in ("train", "val", "test")]
    train = [sys.executable, str(config.PROJECT / "train.py"), "-m", *QUIET, "hydra.sweep.dir={run}", *few]
    return run([*train, "strategy=single,dp,ddp", "trainer.devices=2", "trainer.max_epochs=1"]).seconds


def three_usual_runs() -> float:
    few = ("max_epochs=1", "limit_batches=10")  # Lightning 2 has no dp: a second single stands for it
    return sum(usual(*few, *more).seconds for more in ((), (), ("strategy=ddp", "devices=2")))


def clocked(*overrides: str) -> float:
    without = ("~callbacks.best", "~callbacks.last", "+callbacks.clock={_target_: clock.Clock}")
    return ours("trainer.max_epochs=3", *NO_EVALUATION, *without, *overrides, results="clock.json").results[-1]


@dataclass(frozen=True)
class Row:
    """One line of the table: `numerator() / denominator()`, and what it should be.

    Attributes:
        at_most: Whether `target` is an upper limit.
    """

    what: str
    target: float
    numerator: Callable[[], float]
    denominator: Callable[[], float] = lambda: 1.0
    at_most: bool = True


def loader_share() -> float:
    metrics = ours("trainer.max_epochs=2", *NO_EVALUATION).results
    phases = [metrics[tags.PHASE_SEC.format(phase=phase)] for phase in tags.PHASES]
    return phases[0] / sum(phases)


def overhead_share() -> float:
    """Of the main command: what is neither start-up nor training."""
    main = ours(*DDP)
    training_sec = 5 * main.results[tags.EPOCH_SEC_MEDIAN]
    return (main.seconds - main.results[tags.STARTUP_SEC] - training_sec) / main.seconds


ROWS = {
    1: Row(
        "ddp, until its first optimizer step / the usual project",
        0.55,
        lambda: first_step(ours(*DDP, "trainer.max_steps=1", *NO_EVALUATION)),
        lambda: usual("strategy=ddp", "devices=2", "max_epochs=1", "limit_batches=1").results["first_step"],
    ),
    2: Row("sweep of single, dp, ddp / three runs of the usual project", 0.40, sweep, three_usual_runs),
    3: Row("epoch of single / hand-written loop", 1.05, epoch, lambda: hand_written(1)),
    4: Row("epoch of ddp / hand-written DDP", 1.05, lambda: epoch(*DDP), lambda: hand_written(2, "--threads", "1")),
    5: Row("loader share of an epoch", 0.02, loader_share),
    6: Row(
        "the main command, 5 epochs / the usual project",
        0.25,
        lambda: ours(*DDP).seconds,
        lambda: usual("strategy=ddp", "devices=2").seconds,
    ),
    7: Row(
        "epoch of dp with 2 replicas / single with 2 threads, cnn_wide",
        0.75,
        lambda: epoch(*WIDE, "strategy=dp", "trainer.devices=2"),
        lambda: epoch(*WIDE),
    ),
    8: Row(
        "epoch of single with 1 thread / ddp with 2 processes, cnn_wide",
        1.8,
        lambda: epoch(*WIDE, "launch.threads_per_process=1"),
        lambda: epoch(*WIDE, *DDP),
        at_most=False,
    ),
    9: Row("epoch with EpochMonitor / without", 1.01, clocked, lambda: clocked("~callbacks.epoch_monitor")),
    10: Row("neither start-up nor training, share of the main command", 0.10, overhead_share),
}


@dataclass
class Result:
    """What a row's pairs gave; absolute values are of this run alone."""

    row: int
    what: str
    target: str
    median: float
    smallest: float
    largest: float
    met: bool
    pairs: list[tuple[float, float]]


def measure(number: int, pairs: int) -> Result:
    row, measured = ROWS[number], []
    for pair in range(pairs):
        sides = [row.numerator, row.denominator]
        if pair % 2:
            second, first = sides[1](), sides[0]()
        else:
            first, second = sides[0](), sides[1]()
        measured.append((first, second))
    ratios = [first / second for first, second in measured]
    middle = median(ratios)
    met = middle <= row.target if row.at_most else middle >= row.target
    target = f"{'<=' if row.at_most else '>='} {row.target:.2f}"
    return Result(number, row.what, target, middle, min(ratios), max(ratios), met, measured)


def arithmetic_share(epoch_sec: float) -> dict[str, float]:
    """How near an epoch comes to what these cores can do at best: a large float32 matrix product's rate."""
    size = 1024
    a, b = torch.rand(size, size), torch.rand(size, size)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    rate = 2 * size**3 / min(seconds)
    flops = 215 * 256 * 3 * 2 * MULTIPLY_ADDS  # forward, and twice as much backward
    return {"gemm_gflops": rate / 1e9, "epoch_gflop": flops / 1e9, "share": flops / rate / epoch_sec}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, default=config.PROJECT / "outputs" / "bench.json")
    options = parser.parse_args()

    console, results = Console(), []
    hardware = f"{training.num_cores()} cores of {training.cpu_name()}, torch {torch.__version__}"
    table = Table("#", "what", "target", "median", "smallest to largest", "met", title=hardware, title_justify="left")
    for number in options.rows:
        result = measure(number, options.pairs)
        results.append(asdict(result))
        spread = f"{result.smallest:.3f} to {result.largest:.3f}"
        cells = (result.what, result.target, f"{result.median:.3f}", spread, "yes" if result.met else "no")
        table.add_row(str(number), *cells)
        console.print(f"{number}: {result.median:.3f} ({spread})", highlight=False)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"hardware": hardware, "rows": results}, indent=2) + "\n")
    console.print(table)
    singles = [first for result in results if result["row"] == 3 for first, _ in result["pairs"]]
    if singles:
        share = arithmetic_share(median(singles))
        console.print(
            f"an epoch of single is {share['epoch_gflop']:.0f} GFLOP; at the {share['gemm_gflops']:.0f} GFLOP/s of a"
            f" large matrix product that is {share['share']:.0%} of its time"
        )


if __name__ == "__main__":
    main()
