"""Runs side by side: read back from their folders, put together where they are alike, and compared."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import config, tags

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
    inner = {tag: [value for run in runs for value in run.later(tag)] for tag in tags.INNER}
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
