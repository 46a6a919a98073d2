"""What a person reads: about one run as it starts and ends, and about several runs side by side.

python -m lockstep.report outputs/sweeps/TIME              compare a sweep again
python -m lockstep.report outputs/single/A outputs/ddp/B   or any runs
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from lockstep import config, tags
from lockstep.comparison import Comparison, Row, compare, find_runs
from lockstep.files import shortest

# ---------------------------------------------------------------------------------------------------- one run


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
        "run folder": shortest(run_dir),
    }
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    # outside the table, whole, to be copied
    console.print(f"tensorboard --logdir {shortest(run_dir)}", soft_wrap=True, highlight=False)


def _format(metrics: Mapping[str, float], tag: str, pattern: str) -> str:
    return pattern.format(metrics[tag]) if tag in metrics else "not measured"


# ---------------------------------------------------------------------------------------------------- several runs

COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda row: row.label.replace(f" {row.processes} x {row.replicas}", ""),
    "processes x replicas": lambda row: f"{row.processes} x {row.replicas}",
    "threads each": lambda row: str(row.threads),
    "global batch": lambda row: str(row.batch_size),
    "train s/epoch": lambda row: f"{row.epoch_sec:.2f} ({row.epoch_sec_min:.2f} to {row.epoch_sec_max:.2f})",
    "first epoch, s": lambda row: f"{row.first_epoch_sec:.2f}",
    "samples/s": lambda row: f"{row.samples_per_sec:,.0f}",
    "speed-up": lambda row: (
        "" if row.speed_up is None else f"{row.speed_up:.2f} ({row.speed_up_min:.2f} to {row.speed_up_max:.2f})"
    ),
    "train loss": lambda row: f"{row.train_loss:.4f}",
    "test accuracy": lambda row: f"{row.test_acc:.2%}",
    "start-up, s": lambda row: f"{row.startup_sec:.1f}",
}
GIL_COLUMN = {"GIL contention": lambda row: "" if row.gil is None else f"{row.gil:.0%}"}
NOTE = (
    "Times: median over the repeats' epochs without the first (smallest to largest). Speed-up: median of single's epoch"
    " time over this one's, paired by repeat (smallest to largest)."
)


def columns_of(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """The table's columns; the interpreter lock's only where it was measured."""
    return COLUMNS | (GIL_COLUMN if any(row.gil is not None for row in comparison.rows) else {})


def print_comparison(comparisons: Sequence[Comparison], folder: Path) -> None:
    """The table, on the terminal."""
    console = Console()
    for comparison in comparisons:
        # one column a strategy: three of them fit into a terminal, eleven measures would not
        (first, cell), *measures = columns_of(comparison).items()
        table = Table(
            first, *(Column(cell(row), justify="right") for row in comparison.rows), title=_heading(comparison)
        )
        for name, cell in measures:
            table.add_row(name, *(cell(row) for row in comparison.rows))
        console.print(table)
        for finding in comparison.findings:
            console.print(finding, highlight=False)
    console.print(f"comparison: {shortest(folder / 'comparison.md')}", soft_wrap=True, highlight=False)


def _heading(comparison: Comparison) -> str:
    if not comparison.settings:
        return "The same training under different strategies"
    return "Runs with " + ", ".join(f"{key}={value}" for key, value in comparison.settings.items())


def markdown(comparisons: Sequence[Comparison], left_out: Mapping[Path, str], figures: Sequence[Path]) -> str:
    """The comparison as a page."""
    lines = ["# Comparison", ""]
    if len(comparisons) > 1:
        keys = ", ".join(comparisons[0].settings)
        lines += [f"These runs differ in more than the strategy ({keys}); only like is compared with like.", ""]
    for comparison in comparisons:
        first, columns = comparison.runs[0], columns_of(comparison)
        lines += [
            f"## {_heading(comparison)}",
            "",
            "; ".join(str(first.metrics.get(tag)) for tag in (tags.HARDWARE, tags.VERSIONS, tags.DEVICE)) + ".",
            "",
            "| " + " | ".join(columns) + " |",
            "| " + " | ".join("---" if name == "strategy" else "---:" for name in columns) + " |",
            *("| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in comparison.rows),
            "",
            NOTE,
            "",
            *(f"- {finding}" for finding in comparison.findings),
            "",
        ]
    lines += [f"![{figure.stem.replace('_', ' ')}]({figure.name})\n" for figure in figures]
    lines += [f"- left out, {reason}: `{path}`" for path, reason in left_out.items()]
    return "\n".join(lines).rstrip() + "\n"


def write_comparison(paths: Sequence[Path], folder: Path) -> list[Comparison]:
    """Compare runs: comparison.md, comparison.json and figures into `folder`, the table on the terminal.

    Args:
        paths: Run folders, or folders that hold some.
        folder: Where the files go.

    Returns:
        The comparisons, none where fewer than two runs are finished.
    """
    runs, left_out = find_runs(paths)
    for path, reason in left_out.items():
        print(f"left out of the comparison, {reason}: {shortest(path)}")
    if len(runs) < 2:
        return []
    from lockstep import figures  # matplotlib, which a command that only trains should not wait for

    comparisons = compare(runs)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(comparisons, folder)
    _show_in_tensorboard(drawn, folder / "comparison")
    (folder / "comparison.md").write_text(markdown(comparisons, left_out, drawn))
    content = [
        {
            "settings": comparison.settings,
            "rows": [asdict(row) for row in comparison.rows],
            "findings": comparison.findings,
            "runs": [str(run.folder) for run in comparison.runs],
        }
        for comparison in comparisons
    ]
    (folder / "comparison.json").write_text(json.dumps(content, indent=2) + "\n")
    print_comparison(comparisons, folder)
    return comparisons


def _show_in_tensorboard(figures: Sequence[Path], folder: Path) -> None:
    """The figures as a run of their own on TensorBoard's image page; those of an earlier comparison are replaced."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer = EventFileWriter(str(folder))
    for path in figures:
        image = Summary.Image(encoded_image_string=path.read_bytes())
        value = Summary.Value(tag=f"comparison/{path.stem}", image=image)
        writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.report", description="Compare finished runs.")
    parser.add_argument("paths", nargs="+", type=Path, help="run folders, or folders that hold some")
    parser.add_argument("--output", type=Path, help="where the files go; default: the first path")
    arguments = parser.parse_args()
    try:
        comparisons = write_comparison(arguments.paths, arguments.output or arguments.paths[0])
    except config.ConfigError as error:
        sys.exit(f"error: {error}")
    if not comparisons:
        sys.exit("error: fewer than two finished runs there; a comparison needs two")


if __name__ == "__main__":
    main()
