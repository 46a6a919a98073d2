"""What a person reads about a run."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep import tags


def opening_line(
    *, strategy: str, processes: int, replicas: int, threads: int, batch_size: int, device: str, source: str
) -> str:
    """What is about to run, in one line."""
    return (
        f"{strategy}: {_count(processes, 'process')} x {_count(replicas, 'replica')}, {_count(threads, 'thread')} each"
        f" | batch {batch_size} = {processes} x {batch_size // processes} | {device} | MNIST from {source}"
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def print_result(metrics: Mapping[str, float], run_dir: Path) -> None:
    """The closing table: what came out, and where to look."""
    rows = {
        "test accuracy": _format(metrics, tags.TEST_ACC, "{:.2%}"),
        "training, seconds per epoch": _format(metrics, tags.EPOCH_SEC_MEDIAN, "{:.2f}"),
        "samples per second": _format(metrics, tags.SAMPLES_PER_SEC_MEDIAN, "{:,.0f}"),
        "run folder": _relative(run_dir),
    }
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    # outside the table, whole, to be copied
    console.print(f"tensorboard --logdir {_relative(run_dir)}", soft_wrap=True, highlight=False)


def _format(metrics: Mapping[str, float], tag: str, pattern: str) -> str:
    return pattern.format(metrics[tag]) if tag in metrics else "not measured"


def _relative(path: Path) -> str:
    """As short as it can be typed from where the command was typed."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
