"""How fast Lockstep is, as ratios: against a hand-written loop, the usual Lightning project, and itself.

    python benchmarks/bench.py                    every row, 7 pairs each; prints a table, writes outputs/bench.json
    python benchmarks/bench.py --rows 1 3 --pairs 3

A row with a star says how far the row above it could come on this machine: there, processes that need nothing of each
other share the work.

Machines drift by a factor of two within minutes. So the two sides of a pair run one directly after the other, in turn
the one and the other first; what counts is the ratio of each pair, and of those the median, smallest and largest.
MNIST is fetched first if it is not there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from lockstep import config, host, tags
from lockstep.data import fetch
from lockstep.model import CNN

BENCHMARKS = Path(__file__).resolve().parent
TRAIN = str(config.PROJECT / "train.py")
NO_EVALUATION = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
NO_CHECKPOINTS = ("~callbacks.best", "~callbacks.last")
EPOCHS = 3  # of which the first is not counted
DDP = ("strategy=ddp", "trainer.devices=2")
DP = ("strategy=dp", "trainer.devices=2")
FEW = 60  # batches of cnn_wide, twelve times the arithmetic, in an epoch
WIDE = ("model=cnn_wide", f"trainer.limit_train_batches={FEW}")

# The loop at its best. glibc may or may not hand each step's buffers back to the system, as chance has it, and fetching
# them again takes up to half of an epoch. Our workers tell it to keep them (`host.keep_freed_memory`).
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


@dataclass
class Run:
    """One command.

    Attributes:
        seconds: Wall time, s.
        results: What it wrote.
    """

    seconds: float
    results: Any


def run(command: list[str], results: str | None = None) -> Run:
    """Run a command in a folder of its own; `{run}` in it stands for that folder.

    Args:
        command: With its arguments.
        results: A JSON file that it leaves there.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"PYTHONPATH": str(BENCHMARKS), "BENCH_STARTED_AT": str(time.time())}
        arguments = [argument.replace("{run}", folder) for argument in command]
        start = time.perf_counter()
        done = subprocess.run(arguments, check=False, capture_output=True, text=True, cwd=folder, env=environ)
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} ended with exit code {done.returncode}:\n{done.stderr}")
        return Run(seconds, json.loads(Path(folder, results).read_text()) if results else None)


@dataclass(frozen=True)
class Sides:
    """What is compared.

    Attributes:
        accelerator: Lightning's name of what all of them run on.
        data: The folder that holds MNIST/raw.
    """

    accelerator: str
    data: Path

    def ours(self, *overrides: str, results: str | None = "metrics.json", folder: str = "hydra.run.dir={run}") -> Run:
        options = (f"trainer.accelerator={self.accelerator}", f"data.root={self.data}", folder)
        return run([sys.executable, TRAIN, "trainer.enable_progress_bar=false", *options, *overrides], results)

    def usual(self, *overrides: str) -> Run:
        options = (f"accelerator={self.accelerator}", f"data_dir={self.data}", "hydra.run.dir={run}")
        return run([sys.executable, str(BENCHMARKS / "usual" / "train.py"), *options, *overrides], "seconds.json")

    def hand_written(self, *options: str, processes: int = 1) -> float:
        """Seconds of an epoch."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        fixed = (f"--epochs={EPOCHS}", f"--data={self.data}", f"--device={self.accelerator}")
        script = [str(BENCHMARKS / "hand_written.py"), *fixed, *options, "--json={run}/seconds.json"]
        memory = ["env", *(f"{name}={value}" for name, value in KEEP_MEMORY.items())]
        seconds = run([*memory, sys.executable, *(torchrun if processes > 1 else []), *script], "seconds.json").results
        return median(seconds[1:])

    def two_halves(self) -> float:
        """Seconds of an epoch of the wide net in two loops at the same time, each with half of every batch."""
        options = ("--model=cnn_wide", "--threads=1", "--batch=128", f"--batches={FEW}")
        with ThreadPoolExecutor(2) as pool:
            return max(pool.map(lambda _: self.hand_written(*options), range(2)))

    def epoch(self, *overrides: str) -> float:
        """Seconds of one of our epochs."""
        few = (f"trainer.max_epochs={EPOCHS}", *NO_EVALUATION)
        return self.ours(*few, *overrides).results[tags.EPOCH_SEC_MEDIAN]

    def clocked_epoch(self, *overrides: str) -> float:
        """Seconds of the least disturbed of five, by a clock that does not need our callback."""
        few = ("trainer.max_epochs=6", *NO_EVALUATION, *NO_CHECKPOINTS, "+callbacks.clock._target_=clock.Clock")
        return min(self.ours(*few, *overrides, results="clock.json").results[1:])

    def until_first_step(self, *overrides: str) -> float:
        few = ("trainer.max_steps=1", *NO_EVALUATION, *NO_CHECKPOINTS)
        return self.ours(*few, "+callbacks.first={_target_: clock.FirstStep}", *overrides, results="first.json").results

    def sweep(self) -> float:
        few = [f"trainer.limit_{stage}_batches=10" for stage in ("train", "val", "test")]
        jobs = ("strategy=single,dp,ddp", "trainer.devices=2", "trainer.max_epochs=1", *few, "--multirun")
        return self.ours(*jobs, folder="hydra.sweep.dir={run}", results=None).seconds

    def three_usual_runs(self) -> float:
        few = ("max_epochs=1", "limit_batches=10")  # Lightning 2 has no dp: a second single stands for it
        return sum(self.usual(*few, *more).seconds for more in ((), (), ("strategy=ddp", "devices=2")))

    def loader_share(self) -> float:
        """Of a training epoch: fetching a batch, bringing it to the device, scaling it."""
        few = (f"trainer.max_epochs={EPOCHS}", *NO_EVALUATION, "trainer.profiler._target_=clock.LoaderClock")
        return self.ours(*few, results="loader.json").results

    def closing_share(self) -> float:
        """Of the main command: what is neither start-up nor training."""
        main = self.ours(*DDP)
        training_sec = 5 * main.results[tags.EPOCH_SEC_MEDIAN]
        return (main.seconds - main.results[tags.STARTUP_SEC] - training_sec) / main.seconds


@dataclass(frozen=True)
class Row:
    """One line of the table: `numerator / denominator`, and what it should be.

    Attributes:
        denominator: None: the numerator is a share already.
        target: None: none, the row explains another.
        at_most: Whether `target` is an upper limit.
    """

    what: str
    target: float | None
    numerator: Callable[[Sides], float]
    denominator: Callable[[Sides], float] | None = None
    at_most: bool = True


ROWS = {
    "1": Row(
        "ddp, until its first optimizer step / the usual project",
        0.55,
        lambda sides: sides.until_first_step(*DDP),
        lambda sides: sides.usual("strategy=ddp", "devices=2", "max_epochs=1", "limit_batches=1").results["first_step"],
    ),
    "2": Row("sweep of single, dp, ddp / three runs of the usual project", 0.40, Sides.sweep, Sides.three_usual_runs),
    "3": Row("epoch of single / hand-written loop", 1.05, Sides.epoch, Sides.hand_written),
    "4": Row(
        "epoch of ddp, 2 processes / hand-written DDP",
        1.05,
        lambda sides: sides.epoch(*DDP),
        lambda sides: sides.hand_written("--threads=1", processes=2),
    ),
    "5": Row("loader share of an epoch", 0.02, Sides.loader_share),
    "6": Row(
        "the main command, 5 epochs / the usual project",
        0.25,
        lambda sides: sides.ours(*DDP).seconds,
        lambda sides: sides.usual("strategy=ddp", "devices=2").seconds,
    ),
    "7": Row(
        "epoch of dp, 2 replicas / single with 2 threads, cnn_wide",
        0.75,
        lambda sides: sides.epoch(*WIDE, *DP, "launch.threads_per_process=1"),
        lambda sides: sides.epoch(*WIDE, "launch.threads_per_process=2"),
    ),
    "7*": Row(
        "two loops with half a batch each / single with 2 threads",
        None,
        Sides.two_halves,
        lambda sides: sides.epoch(*WIDE, "launch.threads_per_process=2"),
    ),
    "8": Row(
        "epoch of single with 1 thread / ddp, 2 processes, cnn_wide",
        1.8,
        lambda sides: sides.epoch(*WIDE, "launch.threads_per_process=1"),
        lambda sides: sides.epoch(*WIDE, *DDP, "launch.threads_per_process=1"),
        at_most=False,
    ),
    "8*": Row(
        "single with 1 thread / two loops with half a batch each",
        None,
        lambda sides: sides.epoch(*WIDE, "launch.threads_per_process=1"),
        Sides.two_halves,
        at_most=False,
    ),
    "9": Row(
        "epoch with EpochMonitor / without",
        1.01,
        Sides.clocked_epoch,
        lambda sides: sides.clocked_epoch("~callbacks.epoch_monitor"),
    ),
    "10": Row("neither start-up nor training, share of the main command", 0.10, Sides.closing_share),
}


@dataclass
class Result:
    """What a row's pairs gave; absolute values are of this run alone."""

    row: str
    what: str
    target: str
    median: float
    smallest: float
    largest: float
    met: bool | None
    pairs: list[tuple[float, float]]

    @property
    def spread(self) -> str:
        return f"{self.smallest:.3f} to {self.largest:.3f}"

    def cells(self) -> tuple[str, ...]:
        """The table's columns after the number."""
        both = [f"{median(side):.2f} s" for side in zip(*self.pairs, strict=True)]
        absolute = " / ".join(both) if ROWS[self.row].denominator is not None else ""
        met = {True: "yes", False: "no", None: ""}[self.met]
        return self.what, self.target, f"{self.median:.3f}", self.spread, absolute, met


def measure(number: str, pairs: int, sides: Sides) -> Result:
    row, measured = ROWS[number], []
    whole = row.denominator or (lambda sides: 1.0)
    for pair in range(pairs):
        if pair % 2:
            second, first = whole(sides), row.numerator(sides)
        else:
            first, second = row.numerator(sides), whole(sides)
        measured.append((first, second))
    ratios = [first / second for first, second in measured]
    middle = median(ratios)
    met, target = None, ""
    if row.target is not None:
        met = middle <= row.target if row.at_most else middle >= row.target
        target = f"{'<=' if row.at_most else '>='} {row.target:.2f}"
    return Result(number, row.what, target, middle, min(ratios), max(ratios), met, measured)


def arithmetic_share(epoch_sec: float) -> dict[str, float]:
    """How much of an epoch of `single` its arithmetic would take at the rate of a large float32 matrix product."""
    size = 1024
    a, b = torch.rand(size, size), torch.rand(size, size)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    rate = 2 * size**3 / min(seconds)
    with FlopCounterMode(display=False) as counter:
        CNN()(torch.rand(256, 1, 28, 28)).sum().backward()
    flops = 55_000 // 256 * counter.get_total_flops()
    return {"gemm_gflops": rate / 1e9, "epoch_gflop": flops / 1e9, "share": flops / rate / epoch_sec}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--data", type=Path, default=config.PROJECT / "data", help="the folder that holds MNIST/raw")
    parser.add_argument("--json", type=Path, default=config.PROJECT / "outputs" / "bench.json")
    options = parser.parse_args()

    fetch(options.data)
    console = Console()
    sides = Sides(options.accelerator, options.data.resolve())
    device = "" if options.accelerator == "cpu" else f"{torch.cuda.get_device_name()}, "
    versions = f"torch {torch.__version__}, lightning {pl.__version__}"
    hardware = f"{device}{host.hardware()}, {versions}"
    table = Table(
        "#", "what", "target", "median", "min to max", "absolute", "met", title=hardware, title_justify="left"
    )
    report: dict[str, Any] = {"hardware": hardware, "rows": []}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for number in options.rows:
        result = measure(number, options.pairs, sides)
        report["rows"].append(asdict(result))
        console.print(f"{number}: {result.median:.3f} ({result.spread})", highlight=False)
        table.add_row(number, *result.cells())
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    console.print(table)
    singles = [first for result in report["rows"] if result["row"] == "3" for first, _ in result["pairs"]]
    if singles and options.accelerator == "cpu":
        share = report["arithmetic"] = arithmetic_share(median(singles))
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        console.print(
            f"an epoch of single is {share['epoch_gflop']:.0f} GFLOP; at the {share['gemm_gflops']:.0f} GFLOP/s of a"
            f" large matrix product that is {share['share']:.0%} of its time"
        )


if __name__ == "__main__":
    main()
