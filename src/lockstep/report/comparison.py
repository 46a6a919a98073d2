"""Read finished runs back, group those with the same settings, and compare the strategies in each group."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import config, tags
from lockstep.errors import ConfigError

# Settings that compared runs need not share: how a strategy is carried out, and what no number depends on.
FREE_KEYS = {"trainer.devices", "trainer.num_nodes", "trainer.enable_progress_bar", "data.root"}
FREE_GROUP = "callbacks.progress_bar."
# A run without these cannot be compared.
NEEDED_METRICS = (tags.TRAIN_LOSS, tags.TEST_ACC, tags.STARTUP_SEC, tags.THREADS)
NEEDED_CURVES = (tags.EPOCH_SEC, tags.SAMPLES_PER_SEC, tags.TRAIN_LOSS)


@dataclass(frozen=True)
class Run:
    """A finished run, read back from its folder."""

    folder: Path
    cfg: DictConfig  # interpolations unresolved
    metrics: dict[str, Any]  # the content of metrics.json
    curves: dict[str, list[tuple[int, float]]]  # points (x, value) by tag, ordered by x

    @cached_property
    def shape(self) -> tuple[str, int, int, int]:
        """Return the strategy, the processes over all nodes, the replicas in each, and the threads of each replica."""
        cfg, threads = self.cfg, int(self.metrics[tags.THREADS])
        return cfg.strategy.name, config.world_size(cfg), config.replicas(cfg), threads

    @cached_property
    def details(self) -> dict[str, Any]:
        """Return what may tell runs of one strategy apart: threads, nodes and the strategy's options."""
        strategy = config.flatten(OmegaConf.to_container(self.cfg.strategy))
        options = {key: value for key, value in strategy.items() if key.startswith("plugin")}
        return {"threads": self.shape[3], "nodes": self.cfg.trainer.num_nodes, **options}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return, by key, everything that must be the same for a fair comparison."""
        shared = OmegaConf.masked_copy(self.cfg, ["trainer", "model", "data", "callbacks", "ckpt_path"])
        flat = config.flatten(OmegaConf.to_container(shared))
        kept = {key: flat[key] for key in flat if key not in FREE_KEYS and not key.startswith(FREE_GROUP)}
        return kept | {tag: self.metrics.get(tag) for tag in (tags.DEVICE, tags.HARDWARE, tags.VERSIONS)}

    def values(self, tag: str) -> list[float]:
        """Return a curve without its x."""
        return [value for _, value in self.curves.get(tag, [])]

    def later(self, tag: str) -> list[float]:
        """Return a curve's values without the first epoch, which warms up caches, allocators and DDP's buckets."""
        values = self.values(tag)
        return values[1:] or values

    def lacks(self) -> list[str]:
        """Return what a comparison needs and this run does not have."""
        metrics = [tag for tag in NEEDED_METRICS if tag not in self.metrics]
        return metrics + [f"the curve of {tag}" for tag in NEEDED_CURVES if tag not in self.curves]


class Row:
    """The repeats of one strategy, summarised. Times are in seconds and leave out each run's first epoch."""

    def __init__(self, runs: list[Run]) -> None:
        first, epochs = runs[0], _pool(runs, tags.EPOCH_SEC)
        self.runs = runs
        self.strategy, self.processes, self.replicas, self.threads = first.shape
        self.details = first.details
        # strategy, processes x replicas, and what tells it from similar rows
        self.label = f"{self.strategy} {self.processes} x {self.replicas}"
        self.batch_size: int = first.cfg.data.batch_size
        self.seeds: list[int] = [run.cfg.seed for run in runs]
        self.epoch_sec, self.epoch_sec_min, self.epoch_sec_max = median(epochs), min(epochs), max(epochs)
        self.first_epoch_sec = median(run.values(tags.EPOCH_SEC)[0] for run in runs)
        self.samples_per_sec = median(_pool(runs, tags.SAMPLES_PER_SEC))
        self.train_loss = median(run.metrics[tags.TRAIN_LOSS] for run in runs)
        self.test_acc = median(run.metrics[tags.TEST_ACC] for run in runs)
        self.startup_sec = median(run.metrics[tags.STARTUP_SEC] for run in runs)
        self.step_sec = _step_sec(runs)
        # means by tag: what the strategy adds inside the phases
        self.overhead = {tag: fmean(values) for tag in tags.PER_STRATEGY if (values := _pool(runs, tag))}
        contention = _pool(runs, *(tags.GIL_CONTENTION.format(rank=rank) for rank in range(self.processes)))
        self.gil = fmean(contention) if contention else None  # contention of the interpreter lock, 0 to 1, if measured
        self.speed_up: float | None = None  # median of the ratios to single, paired by repeat
        self.speed_up_min: float | None = None
        self.speed_up_max: float | None = None


def _pool(runs: list[Run], *names: str) -> list[float]:
    """Return the values of all runs' curves, first epochs left out."""
    return [value for run in runs for tag in names for value in run.later(tag)]


def _step_sec(runs: list[Run]) -> dict[str, float]:
    """Return the mean seconds of a step by phase; `rest` is Lightning's loop, and waiting for the other ranks."""
    phases = {phase: fmean(_pool(runs, tags.PHASE_SEC.format(phase=phase)) or [0.0]) for phase in tags.PHASES}
    step = fmean(runs[0].cfg.data.batch_size / rate for rate in _pool(runs, tags.SAMPLES_PER_SEC))
    return phases | {"rest": max(0.0, step - sum(phases.values()))}


@dataclass
class Comparison:
    """Runs with the same settings, one row per strategy."""

    settings: dict[str, Any]  # what these runs share and the runs of other comparisons do not
    rows: list[Row]
    findings: list[str]

    @property
    def runs(self) -> list[Run]:
        """Return the runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    def content(self) -> dict[str, Any]:
        """Return what comparison.json holds."""
        rows = [{name: value for name, value in vars(row).items() if name != "runs"} for row in self.rows]
        folders = [str(run.folder) for run in self.runs]
        return {"settings": self.settings, "rows": rows, "findings": self.findings, "runs": folders}


def find_runs(paths: Iterable[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs at or below some folders, ordered by name, and why others are left out, by folder.

    Raises:
        ConfigError: If a path does not exist.
    """
    runs, left_out = [], {}
    for folder in dict.fromkeys(_run_folders(paths)):
        if not (folder / "metrics.json").is_file():
            left_out[folder] = "not finished"
        elif lacks := (run := read_run(folder)).lacks():
            left_out[folder] = f"without {', '.join(lacks)}"
        else:
            runs.append(run)
    return runs, left_out


def _run_folders(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder; allowed: run folders, or folders that hold some")
        yield from (hydra.parent for hydra in sorted(path.rglob(".hydra"), key=_by_number))


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts job 10 after job 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]


def read_run(folder: Path) -> Run:
    """Read a run back from its config, its metrics.json and its event files."""
    # imports NumPy and more, which a command that only trains should not wait for
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
    """Return one comparison for each set of runs with the same settings."""
    keys = sorted({key for run in runs for key in run.settings})
    differing = [key for key in keys if len({json.dumps(run.settings.get(key)) for run in runs}) > 1]
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        alike[json.dumps({key: run.settings.get(key) for key in differing})].append(run)
    return [_compare(json.loads(settings), group) for settings, group in sorted(alike.items())]


def _compare(settings: dict[str, Any], runs: list[Run]) -> Comparison:
    repeats: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        repeats[json.dumps([run.shape, run.details])].append(run)
    rows = [Row(group) for group in repeats.values()]
    _tell_apart(rows)
    single = next((row for row in rows if row.strategy == "single"), None)
    if single is None:
        return Comparison(settings, rows, ["There is no run with strategy=single, so there is no speed-up to tell."])
    findings = [finding for row in rows if row is not single for finding in _add_speed_up(row, single)]
    return Comparison(settings, rows, findings)


def _tell_apart(rows: list[Row]) -> None:
    """Make equal labels differ: add the details in which their rows differ."""
    for label in {row.label for row in rows}:
        similar = [row for row in rows if row.label == label]
        keys = dict.fromkeys(key for row in similar for key in row.details)
        differing = [key for key in keys if len({str(row.details.get(key)) for row in similar}) > 1]
        for row, key in [(row, key) for key in differing for row in similar if key in row.details]:
            row.label += f" {key.removeprefix('plugin.')}={row.details[key]}"


def _paired_ratios(row: Row, single: Row) -> list[float]:
    """Return single's epoch time over this row's, by repeat: machines drift, but less between runs close in time."""
    ratios, partners = [], list(single.runs)
    for run in row.runs:
        if same_seed := [other for other in partners if other.cfg.seed == run.cfg.seed]:
            partners.remove(same_seed[0])
            ratios.append(median(same_seed[0].later(tags.EPOCH_SEC)) / median(run.later(tags.EPOCH_SEC)))
    return ratios


def _add_speed_up(row: Row, single: Row) -> list[str]:
    """Set the row's speed-up, and return the findings: whether it paid, and whether repeats have no partner."""
    ratios = _paired_ratios(row, single)
    findings = []
    if len(ratios) < len(row.runs):
        seeds = f"{row.label} has seeds {row.seeds}, {single.label} has {single.seeds}"
        findings.append(f"{seeds}: only pairs are compared.")
    if ratios:
        row.speed_up, row.speed_up_min, row.speed_up_max = median(ratios), min(ratios), max(ratios)
        findings.append(_verdict(row, single))
    return findings


def _verdict(row: Row, single: Row) -> str:
    if row.speed_up_min < 1 < row.speed_up_max:
        spread = f"{row.speed_up_min:.2f} to {row.speed_up_max:.2f}"
        return f"{row.label} is about as fast as {single.label}: {row.speed_up:.2f} times, {spread} in the repeats."
    if row.speed_up >= 1:
        return f"{row.label} is {row.speed_up:.2f} times as fast as {single.label}."
    return f"{row.label} did not pay: {row.speed_up:.2f} times the speed of {single.label}. {_lost_time(row, single)}"


def _lost_time(row: Row, single: Row) -> str:
    """Return in words which phase grew most, and what the strategy adds in it."""
    grown = {phase: 1000 * (row.step_sec[phase] - single.step_sec[phase]) for phase in row.step_sec}
    phase = max(grown, key=grown.__getitem__)
    name = "the rest of the loop, which includes waiting for the other ranks" if phase == "rest" else phase
    added = ", ".join(
        f"{part} {1000 * row.overhead[tag]:.1f} ms"
        for tag, (where, part) in tags.STRATEGY_OVERHEAD.items()
        if where == phase and tag in row.overhead
    )
    return f"Most of the time went into {name}: {grown[phase]:+.1f} ms per step{f' ({added})' if added else ''}."
