"""Tables: one run's result and comparisons, on the terminal and as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from lockstep import tags
from lockstep.files import shortest_path
from lockstep.report.comparison import Comparison, Row


def print_result(metrics: Mapping[str, float], run_dir: Path) -> None:
    """Print a finished run's results, and where to find more."""
    table = Table(Column(style="bold"), Column(overflow="fold"), show_header=False)
    table.add_row("test accuracy", _format(metrics, tags.TEST_ACC, "{:.2%}"))
    table.add_row("training, seconds per epoch", _format(metrics, tags.EPOCH_SEC_MEDIAN, "{:.2f}"))
    table.add_row("samples per second", _format(metrics, tags.SAMPLES_PER_SEC_MEDIAN, "{:,.0f}"))
    table.add_row("run folder", shortest_path(run_dir))
    console = Console()
    console.print(table)
    # outside the table and unbroken, to be copied
    console.print(f"tensorboard --logdir {shortest_path(run_dir)}", soft_wrap=True, highlight=False)


def _format(metrics: Mapping[str, float], tag: str, pattern: str) -> str:
    return pattern.format(metrics[tag]) if tag in metrics else "not measured"


SPREAD = "{:.2f} ({:.2f} to {:.2f})"
COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda row: row.label.replace(f" {row.processes} x {row.replicas}", ""),
    "processes x replicas": lambda row: f"{row.processes} x {row.replicas}",
    "threads each": lambda row: str(row.threads),
    "global batch": lambda row: str(row.batch_size),
    "train s/epoch": lambda row: SPREAD.format(row.epoch_sec, row.epoch_sec_min, row.epoch_sec_max),
    "first epoch, s": lambda row: f"{row.first_epoch_sec:.2f}",
    "samples/s": lambda row: f"{row.samples_per_sec:,.0f}",
    "speed-up": lambda row: (
        "" if row.speed_up is None else SPREAD.format(row.speed_up, row.speed_up_min, row.speed_up_max)
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


def _columns(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """Return the columns of a table: GIL contention only if any run measured it."""
    return COLUMNS | (GIL_COLUMN if any(row.gil is not None for row in comparison.rows) else {})


def _heading(comparison: Comparison) -> str:
    if not comparison.settings:
        return "The same training under different strategies"
    return "Runs with " + ", ".join(f"{key}={value}" for key, value in comparison.settings.items())


def print_comparison(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Print the tables, the findings, and where `folder` has the page."""
    console = Console()
    for comparison in comparisons:
        # one column per strategy: a few of them fit into a terminal, a column per measure would not
        (first, cell), *measures = _columns(comparison).items()
        headers = (Column(cell(row), justify="right") for row in comparison.rows)
        table = Table(first, *headers, title=_heading(comparison))
        for name, cell in measures:
            table.add_row(name, *(cell(row) for row in comparison.rows))
        console.print(table)
        for finding in comparison.findings:
            console.print(finding, highlight=False)
    console.print(f"comparison: {shortest_path(folder / 'comparison.md')}", soft_wrap=True, highlight=False)


def markdown(comparisons: Sequence[Comparison], left_out: Mapping[Path, str], figures: Sequence[Path]) -> str:
    """Return the page: `left_out` holds reasons by folder, `figures` files beside the page."""
    lines = ["# Comparison", ""]
    if len(comparisons) > 1:
        keys = ", ".join(comparisons[0].settings)
        lines += [f"These runs differ in more than the strategy ({keys}); only like is compared with like.", ""]
    for comparison in comparisons:
        lines += _section(comparison)
    lines += [f"![{figure.stem.replace('_', ' ')}]({figure.name})\n" for figure in figures]
    lines += [f"- left out, {reason}: `{path}`" for path, reason in left_out.items()]
    return "\n".join(lines).rstrip() + "\n"


def _section(comparison: Comparison) -> list[str]:
    metrics, columns = comparison.runs[0].metrics, _columns(comparison)
    table = [list(columns), ["---" if name == "strategy" else "---:" for name in columns]]
    table += [[cell(row) for cell in columns.values()] for row in comparison.rows]
    return [
        f"## {_heading(comparison)}",
        "",
        "; ".join(str(metrics.get(tag)) for tag in (tags.HARDWARE, tags.VERSIONS, tags.DEVICE)) + ".",
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
        "",
        NOTE,
        "",
        *(f"- {finding}" for finding in comparison.findings),
        "",
    ]
