"""Pictures of a comparison: seconds per epoch, loss curves, and where a step's time goes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws into files; no screen is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lockstep import tags
from lockstep.comparison import Comparison, Row, Run

# Okabe and Ito's palette, which colour-blind people can tell apart ("Color universal design", 2008).
STRATEGY_COLORS = {"single": "#0072B2", "dp": "#E69F00", "ddp": "#009E73"}
OTHER_COLORS = ("#CC79A7", "#D55E00", "#56B4E9")
PART_COLORS = {
    "data": "#999999",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#CC79A7",
    "scatter": "#F0E442",
    "replicate": "#E69F00",
    "gather": "#D55E00",
    "summing gradients": "#8C4A00",
    "all-reduce, overlapped": "#66C2A5",
    "all-reduce": "#009E73",
    "loop and waiting": "#DDDDDD",
}
# A white card with dark ink reads on light pages and on dark ones.
STYLE = {
    "figure.facecolor": "white",
    "figure.dpi": 120,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E0E0E0",
    "font.size": 11,
}


def draw(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Draw every figure of the first comparison as PNG; the others' get a number.

    Returns:
        The files, in the order in which they are read.
    """
    drawn = []
    for number, comparison in enumerate(comparisons):
        suffix = f"_{number}" if number else ""
        for name, painter in FIGURES.items():
            path = folder / f"{name}{suffix}.png"
            with plt.rc_context(STYLE):
                figure = painter(comparison)
                if figure is None:
                    continue
                figure.savefig(path, bbox_inches="tight")
                plt.close(figure)
            drawn.append(path)
    return drawn


def color(strategy: str, index: int = 0) -> str:
    return STRATEGY_COLORS.get(strategy, OTHER_COLORS[index % len(OTHER_COLORS)])


def epoch_seconds(comparison: Comparison) -> Figure:
    """Bars: the median; points: every epoch but the first of each repeat."""
    figure, axes = plt.subplots(figsize=(6.5, 4))
    groups = _by_row(comparison)
    for position, (row, runs) in enumerate(groups):
        axes.bar(position, row.epoch_sec, width=0.6, color=color(row.strategy, position), alpha=0.55)
        axes.text(position, 0.02 * row.epoch_sec, f"{row.epoch_sec:.2f} s", ha="center", va="bottom", weight="bold")
        for repeat, run in enumerate(runs):
            seconds = run.later(tags.EPOCH_SEC)
            offset = (repeat - (len(runs) - 1) / 2) * 0.4 / max(len(runs), 1)
            axes.scatter([position + offset] * len(seconds), seconds, s=14, color="#222222", zorder=3)
    axes.set_xticks(range(len(groups)), [_tick(row) for row, _ in groups])
    axes.set_ylabel("training, seconds per epoch")
    axes.set_title("Seconds per epoch: median (bar), every epoch of each repeat (points)", fontsize=11)
    axes.grid(axis="x", visible=False)
    return figure


def loss_curves(comparison: Comparison) -> Figure:
    """The epochs' all-reduced training losses on each other: the strategy does not change what is learnt."""
    figure, axes = plt.subplots(figsize=(6.5, 4))
    styles = ("-", "--", ":", "-.")
    for position, (row, runs) in enumerate(_by_row(comparison)):
        for repeat, run in enumerate(runs):
            epochs, losses = zip(*run.curves[tags.TRAIN_LOSS], strict=True)
            axes.plot(
                [epoch + 1 for epoch in epochs],
                losses,
                styles[position % len(styles)],
                color=color(row.strategy, position),
                linewidth=5 - 1.4 * position if position < 3 else 1,  # the wide ones show beneath the narrow ones
                alpha=0.8,
                label=row.label if repeat == 0 else None,
            )
    axes.set_xlabel("epoch")
    axes.set_ylabel("train/loss (all-reduced mean)")
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("The strategies' losses lie on each other", fontsize=11)
    axes.legend()
    return figure


def step_parts(comparison: Comparison) -> Figure:
    """Stacked bars: where a step's time goes, ms."""
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.7 * len(comparison.rows)))
    seen = set()
    for position, row in enumerate(comparison.rows):
        left = 0.0
        for part, seconds in parts(row).items():
            width = 1000 * seconds
            axes.barh(
                position, width, left=left, height=0.6, color=PART_COLORS[part], label=None if part in seen else part
            )
            seen.add(part)
            left += width
        axes.text(left, position, f"  {left:.1f} ms", va="center")
    axes.set_yticks(range(len(comparison.rows)), [row.label for row in comparison.rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.set_title("Where a step's time goes", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    return figure


def parts(row: Row) -> dict[str, float]:
    """A step's time, s, cut into parts that do not overlap.

    What a strategy adds lies inside Lightning's phases: replicating and gathering inside forward, summing gradients and
    the all-reduce inside backward. Of the all-reduce the overlapped share is hidden behind the backward pass.
    """
    found = {phase: row.step_sec[phase] for phase in tags.PHASES}
    inner = {tag: row.inner.get(tag, 0.0) for tag in tags.INNER_PHASES}
    all_reduce = min(inner[tags.ALL_REDUCE_SEC], found["backward"])
    hidden = all_reduce * row.inner.get(tags.OVERLAP_FRACTION, 0.0)
    found["backward"] -= all_reduce + inner[tags.REDUCE_SEC]
    found["forward"] -= inner[tags.SCATTER_SEC] + inner[tags.REPLICATE_SEC] + inner[tags.GATHER_SEC]
    ordered = {
        "data": found["data"],
        "scatter": inner[tags.SCATTER_SEC],
        "replicate": inner[tags.REPLICATE_SEC],
        "forward": found["forward"],
        "gather": inner[tags.GATHER_SEC],
        "backward": found["backward"],
        "all-reduce, overlapped": hidden,
        "all-reduce": all_reduce - hidden,
        "summing gradients": inner[tags.REDUCE_SEC],
        "optimizer": found["optimizer"],
        "loop and waiting": row.step_sec["rest"],
    }
    return {part: seconds for part, seconds in ordered.items() if seconds > 0}


@dataclass(frozen=True)
class Bar:
    """One marked stretch of a lane, ms."""

    lane: str
    part: str
    start: float
    length: float
    whole: bool  # a phase of the step as a whole, in which others may be marked


def step_timeline(comparison: Comparison) -> Figure | None:
    """One lane a thread: what every process and thread did in a few recorded steps. None where none were recorded."""
    recorded = [(row, bars) for row, runs in _by_row(comparison) if (bars := timeline_bars(runs[0].folder))]
    if not recorded:
        return None
    lanes = [list(dict.fromkeys(bar.lane for bar in bars)) for _, bars in recorded]
    figure, rows = plt.subplots(
        len(recorded),
        sharex=True,
        squeeze=False,
        figsize=(11, 1.3 + sum(0.5 + 0.42 * len(names) for names in lanes)),
        gridspec_kw={"height_ratios": [1 + len(names) for names in lanes], "hspace": 0.35},
    )
    for axes, (row, bars), names in zip(rows[:, 0], recorded, lanes, strict=True):
        for bar in bars:
            # beneath what is marked inside it, a phase of the whole step is pale: under dp its thread mostly waits
            alpha = 0.4 if bar.whole and row.replicas > 1 else 1.0
            lane = names.index(bar.lane)
            axes.barh(lane, bar.length, 0.8, bar.start, color=PART_COLORS[bar.part], alpha=alpha, linewidth=0)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title(row.label, fontsize=10, loc="left")
    rows[-1, 0].set_xlabel("ms")
    used = [part for part in PART_COLORS if any(bar.part == part for _, bars in recorded for bar in bars)]
    handles = [Patch(color=PART_COLORS[part], label=part) for part in used]
    rows[0, 0].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    return figure


# What is marked in a trace, and the part that it is; phases of the step as a whole first.
PHASE_MARKS = {phase: phase for phase in tags.PHASES}
INNER_MARKS = {
    "scatter": "scatter",
    "replicate": "replicate",
    "replica forward": "forward",
    "gather": "gather",
    "replica backward": "backward",
    "reduce": "summing gradients",
    "gloo:all_reduce": "all-reduce",
    "nccl:all_reduce": "all-reduce",
}


def timeline_bars(folder: Path) -> list[Bar]:
    """A run's recorded steps, lane by lane; empty where none were recorded."""
    path = folder / tags.TRACE_FILE
    if not path.is_file():
        return []
    marks = PHASE_MARKS | INNER_MARKS
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] in marks]
    steps = [event for event in events if event["name"] in PHASE_MARKS]
    if not steps:
        return []
    start, end = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    main = {event["pid"]: event["tid"] for event in steps}  # the thread of each process that trains
    replicas = sorted({event["tid"] for event in events if event["name"] == "replica forward"})
    several = len(main) > 1
    bars = []
    for event in sorted(events, key=lambda e: (e["pid"], e["tid"] != main[e["pid"]], e["tid"], e["ts"])):
        if not start <= event["ts"] <= end:
            continue
        process, whole = f"rank {event['pid']}", event["name"] in PHASE_MARKS
        if event["tid"] == main[event["pid"]]:
            lane = process if several else "the process"
        elif event["name"].endswith("all_reduce"):
            lane = f"{process}, network"  # gloo takes turns between threads; they are one lane here
        else:
            lane = f"replica {replicas.index(event['tid'])}"
        bars.append(Bar(lane, marks[event["name"]], (event["ts"] - start) / 1000, event["dur"] / 1000, whole))
    return bars


FIGURES: dict[str, Callable[[Comparison], Figure | None]] = {
    "epoch_seconds": epoch_seconds,
    "loss_curves": loss_curves,
    "step_parts": step_parts,
    "step_timeline": step_timeline,
}


def _by_row(comparison: Comparison) -> list[tuple[Row, list[Run]]]:
    return list(zip(comparison.rows, comparison.repeats, strict=True))


def _tick(row: Row) -> str:
    return f"{row.label}\n{row.threads} thread{'s' if row.threads > 1 else ''} each"
