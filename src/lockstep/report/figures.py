"""Pictures of a comparison: seconds per epoch, loss curves, and where a step's time goes."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lockstep import tags
from lockstep.report.comparison import Comparison, Row

# Okabe and Ito's palette, which colour-blind people can tell apart ("Color universal design", 2008).
STRATEGY_COLORS = {"single": "#0072B2", "dp": "#E69F00", "ddp": "#009E73"}
OTHER_COLORS = ("#CC79A7", "#D55E00", "#56B4E9")
# The parts of a step, in order.
PART_COLORS = {
    "data": "#999999",
    "scatter": "#F0E442",
    "replicate": "#E69F00",
    "forward": "#56B4E9",
    "gather": "#D55E00",
    "backward": "#0072B2",
    "all-reduce, overlapped": "#66C2A5",
    "all-reduce": "#009E73",
    "summing gradients": "#8C4A00",
    "optimizer": "#CC79A7",
    "loop and waiting": "#DDDDDD",
}
# What is marked in a trace, and the part that it is. The phases contain the others.
MARKS = {part: part for part in (*tags.PHASES, "scatter", "replicate", "gather")} | {
    "replica forward": "forward",
    "replica backward": "backward",
    "reduce": "summing gradients",
    "gloo:all_reduce": "all-reduce",
    "nccl:all_reduce": "all-reduce",
}
# A white card with dark ink reads on light pages and on dark ones.
STYLE = {
    "figure.facecolor": "white",
    "figure.figsize": (6.5, 4),
    "figure.dpi": 120,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "grid.color": "#E0E0E0",
    "font.size": 11,
}


def draw(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Draw PNG files named after their painters, numbered from the second comparison on; return them in that order."""
    drawn = []
    for (number, comparison), painter in product(enumerate(comparisons), PAINTERS):
        with mpl.rc_context(STYLE):
            figure = Figure()
            painter(comparison, figure)
            if figure.axes:
                drawn.append(folder / f"{painter.__name__}{f'_{number}' if number else ''}.png")
                figure.savefig(drawn[-1], bbox_inches="tight")
    return drawn


def show_in_tensorboard(figures: Sequence[Path], folder: Path) -> None:
    """Put figures on TensorBoard's image page, as a run of their own; they replace those of an earlier comparison."""
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer = EventFileWriter(str(folder))
    for path in figures:
        image = Summary.Image(encoded_image_string=path.read_bytes())
        value = Summary.Value(tag=f"comparison/{path.stem}", image=image)
        writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
    writer.close()


def color(strategy: str, index: int) -> str:
    return STRATEGY_COLORS.get(strategy, OTHER_COLORS[index % len(OTHER_COLORS)])


def epoch_seconds(comparison: Comparison, figure: Figure) -> None:
    """Draw bars for the medians, and points for every epoch of each repeat but the first."""
    axes = figure.subplots()
    for index, row in enumerate(comparison.rows):
        axes.bar(index, row.epoch_sec, width=0.6, color=color(row.strategy, index), alpha=0.55)
        axes.text(index, 0.02 * row.epoch_sec, f"{row.epoch_sec:.2f} s", ha="center", va="bottom", weight="bold")
        for repeat, run in enumerate(row.runs):
            seconds = run.later(tags.EPOCH_SEC)
            offset = (repeat - (len(row.runs) - 1) / 2) * 0.4 / len(row.runs)
            axes.scatter([index + offset] * len(seconds), seconds, s=14, color="#222222", zorder=3)
    ticks = [f"{row.label}\n{row.threads} thread{'s' if row.threads > 1 else ''} each" for row in comparison.rows]
    axes.set_xticks(range(len(ticks)), ticks)
    title = "Seconds per epoch: median (bar), every epoch of each repeat (points)"
    axes.set(ylabel="training, seconds per epoch", title=title)
    axes.grid(axis="x", visible=False)


def loss_curves(comparison: Comparison, figure: Figure) -> None:
    """Draw the all-reduced training losses over each other: the strategy does not change what is learnt."""
    axes = figure.subplots()
    styles = ("-", "--", ":", "-.")
    for index, row in enumerate(comparison.rows):
        # the wide lines show beneath the narrow ones
        look = {"color": color(row.strategy, index), "alpha": 0.8, "linewidth": 5 - 1.4 * index if index < 3 else 1}
        for repeat, run in enumerate(row.runs):
            epochs, losses = zip(*run.curves[tags.TRAIN_LOSS], strict=True)
            label = row.label if repeat == 0 else None
            axes.plot([epoch + 1 for epoch in epochs], losses, styles[index % len(styles)], label=label, **look)
    title = "The strategies' losses lie on each other"
    axes.set(xlabel="epoch", ylabel="train/loss (all-reduced mean)", yscale="log", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def step_parts(comparison: Comparison, figure: Figure) -> None:
    """Draw stacked bars: where a step's time goes, ms."""
    figure.set_size_inches(8, 1.2 + 0.7 * len(comparison.rows))
    axes = figure.subplots()
    for index, row in enumerate(comparison.rows):
        left = 0.0
        for part, seconds in parts(row).items():
            axes.barh(index, 1000 * seconds, left=left, height=0.6, color=PART_COLORS[part])
            left += 1000 * seconds
        axes.text(left, index, f"  {left:.1f} ms", va="center")
    axes.set_yticks(range(len(comparison.rows)), [row.label for row in comparison.rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="ms per step", title="Where a step's time goes")
    _add_legend(axes, {part for row in comparison.rows for part in parts(row)})


def _add_legend(axes: Axes, used: Collection[str]) -> None:
    handles = [Patch(color=PART_COLORS[part], label=part) for part in PART_COLORS if part in used]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)


def parts(row: Row) -> dict[str, float]:
    """Return a step's time, s, cut into parts that do not overlap.

    What a strategy adds is taken out of the phase that contains it. Of the all-reduce, the overlapped share is hidden
    behind the backward pass.
    """
    found = row.step_sec | {"loop and waiting": row.step_sec["rest"]}
    for tag, (phase, part) in tags.STRATEGY_OVERHEAD.items():
        found[part] = min(row.overhead.get(tag, 0.0), found[phase])
        found[phase] -= found[part]
    found["all-reduce, overlapped"] = found["all-reduce"] * row.overhead.get(tags.OVERLAP_FRACTION, 0.0)
    found["all-reduce"] -= found["all-reduce, overlapped"]
    return {part: found[part] for part in PART_COLORS if found[part] > 0}


def step_timeline(comparison: Comparison, figure: Figure) -> None:
    """Draw what each process and thread did in a few recorded steps, one lane per thread; nothing without a record."""
    recorded = [(row, bars) for row in comparison.rows if (bars := timeline_bars(row.runs[0].folder))]
    if not recorded:
        return
    lanes = [len({bar.lane for bar in bars}) for _, bars in recorded]
    figure.set_size_inches(11, 1.3 + sum(0.5 + 0.42 * number for number in lanes))
    grid = {"height_ratios": [1 + number for number in lanes], "hspace": 0.35}
    column = figure.subplots(len(recorded), sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    for axes, (row, bars) in zip(column, recorded, strict=True):
        _draw_lanes(axes, row, bars)
    column[-1].set_xlabel("ms")
    _add_legend(column[0], {bar.part for _, bars in recorded for bar in bars})


@dataclass(frozen=True)
class Bar:
    """A marked stretch of a lane; times in ms."""

    lane: str
    part: str
    start: float
    length: float
    whole: bool  # a phase of the whole step, which may contain other bars


def _draw_lanes(axes: Axes, row: Row, bars: Sequence[Bar]) -> None:
    names = list(dict.fromkeys(bar.lane for bar in bars))
    for bar in bars:
        # a phase of the whole step is pale beneath the bars that it contains: under dp its thread mostly waits
        alpha = 0.4 if bar.whole and row.replicas > 1 else 1.0
        style = {"color": PART_COLORS[bar.part], "alpha": alpha, "linewidth": 0}
        axes.barh(names.index(bar.lane), bar.length, left=bar.start, **style)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_title(row.label, fontsize=10, loc="left")


def timeline_bars(folder: Path) -> list[Bar]:
    """Return a run's recorded steps, lane by lane; empty if none are recorded."""
    path = folder / tags.TRACE_FILE
    trace = json.loads(path.read_text()) if path.is_file() else {"traceEvents": []}
    events = [event for event in trace["traceEvents"] if event["name"] in MARKS]
    steps = [event for event in events if event["name"] in tags.PHASES]
    if not steps:
        return []
    start, end = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    main = {event["pid"]: event["tid"] for event in steps}  # each process's training thread
    replicas = sorted({event["tid"] for event in events if event["name"] == "replica forward"})
    bars = []
    for event in sorted(events, key=lambda e: (e["pid"], e["tid"] != main[e["pid"]], e["tid"], e["ts"])):
        if start <= event["ts"] <= end:
            name, at = event["name"], (event["ts"] - start) / 1000
            bars.append(Bar(_lane(event, main, replicas), MARKS[name], at, event["dur"] / 1000, name in tags.PHASES))
    return bars


def _lane(event: dict[str, Any], main: dict[int, int], replicas: list[int]) -> str:
    if event["tid"] == main[event["pid"]]:
        return f"rank {event['pid']}" if len(main) > 1 else "the process"
    if event["name"].endswith("all_reduce"):
        return f"rank {event['pid']}, network"  # gloo's threads take turns, so they share a lane
    return f"replica {replicas.index(event['tid'])}"


PAINTERS = (epoch_seconds, loss_curves, step_parts, step_timeline)
