"""What a person reads: about one run as it starts and ends, and about several runs side by side.

python -m lockstep.report outputs/sweeps/TIME              compare a sweep again
python -m lockstep.report outputs/single/A outputs/ddp/B   or any runs
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table

from lockstep import config, tags

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


# ---------------------------------------------------------------------------------------------------- several runs

# What may differ between the runs of a comparison: the strategy and how it is carried out, the repeat, and what is
# only looks. Anything else that differs is said.
FREE_KEYS = {"trainer.devices", "trainer.num_nodes", "trainer.enable_progress_bar", "data.root"}
FREE_GROUPS = ("callbacks.progress_bar.",)
# Without these there is nothing to compare.
NEEDED_METRICS = (tags.TRAIN_LOSS, tags.TEST_ACC, tags.STARTUP_SEC, tags.THREADS)
NEEDED_CURVES = (tags.EPOCH_SEC, tags.SAMPLES_PER_SEC, tags.TRAIN_LOSS)


@dataclass(frozen=True)
class Run:
    """A finished run, read back from its folder.

    Attributes:
        folder: Where it lies.
        cfg: What it was made with, interpolations unresolved.
        metrics: The content of its metrics.json.
        curves: By tag, (x, value) in the order of x.
    """

    folder: Path
    cfg: DictConfig
    metrics: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]

    @property
    def how(self) -> tuple[str, int, int, int]:
        """Strategy, processes over all nodes, replicas in each, threads of each replica."""
        return (
            self.cfg.strategy.name,
            config.world_size(self.cfg),
            config.replicas(self.cfg),
            int(self.metrics[tags.THREADS]),
        )

    @property
    def details(self) -> dict[str, Any]:
        """What tells runs of one strategy apart: its threads, nodes and options."""
        strategy = OmegaConf.to_container(self.cfg.strategy)
        options = {key: value for key, value in _flatten(strategy) if key.startswith("plugin")}
        return {"threads": self.how[3], "nodes": self.cfg.trainer.num_nodes, **options}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that must be the same for a fair comparison, by key."""
        names = [name for name in ("trainer", "model", "data", "callbacks") if name in self.cfg]
        groups = {name: OmegaConf.to_container(self.cfg[name]) for name in names} | {"ckpt_path": self.cfg.ckpt_path}
        flat = {
            key: value for key, value in _flatten(groups) if key not in FREE_KEYS and not key.startswith(FREE_GROUPS)
        }
        return flat | {tag: self.metrics.get(tag) for tag in (tags.DEVICE, tags.HARDWARE, tags.VERSIONS)}

    def values(self, tag: str) -> list[float]:
        """A curve without its x."""
        return [value for _, value in self.curves.get(tag, [])]

    def later(self, tag: str) -> list[float]:
        """A curve's values without the first epoch, which warms up caches, allocators and DDP's buckets."""
        values = self.values(tag)
        return values[1:] or values


@dataclass
class Row:
    """One strategy's repeats, summed up; times in seconds, over the epochs but the first of each run."""

    strategy: str
    processes: int
    replicas: int
    threads: int
    details: dict[str, Any]
    label: str  # strategy, processes x replicas, and what else tells this row from its like
    batch_size: int
    seeds: list[int]
    epoch_sec: float
    epoch_sec_min: float
    epoch_sec_max: float
    first_epoch_sec: float
    samples_per_sec: float
    train_loss: float
    test_acc: float
    startup_sec: float
    step_sec: dict[str, float]  # means, by phase, and `rest`: what the epoch took beside its phases
    inner: dict[str, float]  # by tag: what the strategy adds inside the phases
    gil: float | None = None  # contention of the interpreter lock, 0 to 1, where it was measured
    speed_up: float | None = None  # median of the ratios to single, paired by repeat
    speed_up_min: float | None = None
    speed_up_max: float | None = None


@dataclass
class Comparison:
    """Runs with the same settings, by strategy.

    Attributes:
        settings: What this comparison's runs have in common and other comparisons' runs have not.
    """

    settings: dict[str, Any]
    rows: list[Row]
    repeats: list[list[Run]] = field(repr=False)  # each row's runs
    findings: list[str]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.repeats for run in runs]


def find_runs(paths: Iterable[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs at or below some folders, in the order of their names, and why others are left out.

    Raises:
        ConfigError: If a path does not exist.
    """
    folders = []
    for path in paths:
        if not path.is_dir():
            raise config.ConfigError(f"{path} is not a folder; allowed: run folders, or folders that hold some")
        folders += [hydra.parent for hydra in sorted(path.rglob(".hydra"), key=_by_number)]
    runs, left_out = [], {}
    for folder in dict.fromkeys(folders):
        if not (folder / "metrics.json").is_file():
            left_out[folder] = "not finished"
            continue
        run = read_run(folder)
        missing = [tag for tag in NEEDED_METRICS if tag not in run.metrics]
        missing += [f"the curve of {tag}" for tag in NEEDED_CURVES if tag not in run.curves]
        if missing:
            left_out[folder] = f"without {', '.join(missing)}"
        else:
            runs.append(run)
    return runs, left_out


def _by_number(path: Path) -> tuple[tuple[int, str], ...]:
    """Job 10 comes after job 9."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.parts)


def read_run(folder: Path) -> Run:
    """Read a run back from what it left."""
    # a plotting tool's worth of imports, which a command that only trains should not wait for
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = OmegaConf.load(folder / ".hydra" / "config.yaml")
    metrics = json.loads((folder / "metrics.json").read_text())
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for events in sorted(folder.rglob("events.out.tfevents.*")):  # a later attempt's points replace an earlier one's
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
        for tag in accumulator.Tags()["scalars"]:
            curves[tag] |= {event.step: event.value for event in accumulator.Scalars(tag)}
    return Run(folder, cfg, metrics, {tag: sorted(points.items()) for tag, points in curves.items()})


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """One comparison for each set of runs with the same settings; what differs is in their `settings`."""
    keys = {key for run in runs for key in run.settings}
    differing = sorted(key for key in keys if len({json.dumps(run.settings.get(key)) for run in runs}) > 1)

    def settings_of(run: Run) -> str:
        return json.dumps({key: run.settings.get(key) for key in differing})

    ordered = sorted(runs, key=settings_of)  # stable: repeats stay in order
    return [_compare(json.loads(settings), list(group)) for settings, group in groupby(ordered, key=settings_of)]


def _compare(settings: dict[str, Any], runs: list[Run]) -> Comparison:
    by_how: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_how[json.dumps([run.how, run.details])].append(run)
    repeats = list(by_how.values())
    rows = [_row(group) for group in repeats]
    _tell_apart(rows)
    baseline = next((number for number, row in enumerate(rows) if row.strategy == "single"), None)
    findings = []
    if baseline is None:
        findings.append("There is no run with strategy=single, so there is no speed-up to tell.")
    for number, row in enumerate(rows):
        if baseline is not None and number != baseline:
            findings += _add_speed_up(row, repeats[number], rows[baseline], repeats[baseline])
    return Comparison(settings, rows, repeats, findings)


def _tell_apart(rows: list[Row]) -> None:
    """Put into the labels of rows that would be called the same what tells them apart."""
    for label in {row.label for row in rows}:
        like = [row for row in rows if row.label == label]
        keys = dict.fromkeys(key for row in like for key in row.details)
        differing = [key for key in keys if len({str(row.details.get(key)) for row in like}) > 1]
        for row in like:
            present = [key for key in differing if key in row.details]
            row.label = " ".join([label, *(f"{key.removeprefix('plugin.')}={row.details[key]}" for key in present)])


def _row(runs: list[Run]) -> Row:
    first, how = runs[0], runs[0].how
    epochs = [seconds for run in runs for seconds in run.later(tags.EPOCH_SEC)]
    rates = [rate for run in runs for rate in run.later(tags.SAMPLES_PER_SEC)]
    phases = {
        phase: _mean([value for run in runs for value in run.later(tags.PHASE_SEC.format(phase=phase))])
        for phase in tags.PHASES
    }
    # of the time per batch, what no phase accounts for: Lightning's loop, and waiting for the other ranks
    step_sec = _mean([first.cfg.data.batch_size / rate for rate in rates])
    gil_tags = [tags.GIL_CONTENTION.format(rank=rank) for rank in range(how[1])]
    contention = [value for run in runs for tag in gil_tags for value in run.later(tag)]
    inner_tags = (*tags.INNER_PHASES, tags.OVERLAP_FRACTION)
    inner = {tag: [value for run in runs for value in run.later(tag)] for tag in inner_tags}
    return Row(
        *how,
        details=first.details,
        label=f"{how[0]} {how[1]} x {how[2]}",
        batch_size=first.cfg.data.batch_size,
        seeds=[run.cfg.seed for run in runs],
        epoch_sec=median(epochs),
        epoch_sec_min=min(epochs),
        epoch_sec_max=max(epochs),
        first_epoch_sec=median(run.values(tags.EPOCH_SEC)[0] for run in runs),
        samples_per_sec=median(rates),
        train_loss=median(run.metrics[tags.TRAIN_LOSS] for run in runs),
        test_acc=median(run.metrics[tags.TEST_ACC] for run in runs),
        startup_sec=median(run.metrics[tags.STARTUP_SEC] for run in runs),
        step_sec=phases | {"rest": max(0.0, step_sec - sum(phases.values()))},
        inner={tag: _mean(values) for tag, values in inner.items() if values},
        gil=_mean(contention) if contention else None,
    )


def _paired_ratios(baseline: list[Run], group: list[Run]) -> list[float]:
    """single's epoch time over this strategy's, repeat by repeat: machines drift, neighbours in time less."""
    by_seed: dict[int, list[Run]] = defaultdict(list)
    for run in baseline:
        by_seed[run.cfg.seed].append(run)
    ratios = []
    for run in group:
        if by_seed[run.cfg.seed]:
            partner = by_seed[run.cfg.seed].pop(0)
            ratios.append(median(partner.later(tags.EPOCH_SEC)) / median(run.later(tags.EPOCH_SEC)))
    return ratios


def _add_speed_up(row: Row, runs: list[Run], baseline_row: Row, baseline: list[Run]) -> list[str]:
    """Put the speed-up into the row, and say in words what paid, what did not, and which repeats do not match."""
    ratios = _paired_ratios(baseline, runs)
    findings = []
    if len(ratios) < len(runs):
        seeds = f"{row.label} has seeds {row.seeds}, {baseline_row.label} has {baseline_row.seeds}"
        findings.append(f"{seeds}: only pairs are compared.")
    if ratios:
        row.speed_up, row.speed_up_min, row.speed_up_max = median(ratios), min(ratios), max(ratios)
        findings.append(_verdict(row, baseline_row))
    return findings


def _verdict(row: Row, single: Row) -> str:
    if row.speed_up_min < 1 < row.speed_up_max:
        spread = f"{row.speed_up_min:.2f} to {row.speed_up_max:.2f}"
        return f"{row.label} is about as fast as {single.label}: {row.speed_up:.2f} times, {spread} in the repeats."
    if row.speed_up >= 1:
        return f"{row.label} is {row.speed_up:.2f} times as fast as {single.label}."
    grown = {phase: 1000 * (row.step_sec[phase] - single.step_sec[phase]) for phase in row.step_sec}
    phase = max(grown, key=grown.__getitem__)
    names = {"rest": "the rest of the loop, which includes waiting for the other ranks"}
    verdict = (
        f"{row.label} did not pay: {row.speed_up:.2f} times the speed of {single.label}."
        f" Most of the time went into {names.get(phase, phase)}: {grown[phase]:+.1f} ms per step"
    )
    inner = ", ".join(
        f"{word} {1000 * row.inner[tag]:.1f} ms"
        for tag, (where, word) in tags.INNER_PHASES.items()
        if where == phase and tag in row.inner
    )
    return f"{verdict} ({inner})." if inner else f"{verdict}."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------------------------------------- the table

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
    console.print(f"comparison: {_relative(folder / 'comparison.md')}", soft_wrap=True, highlight=False)


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
        print(f"left out of the comparison, {reason}: {_relative(path)}")
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
