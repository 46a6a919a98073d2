"""Comparisons of made runs, whose right answers are known."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lockstep import report, tags
from lockstep.callbacks.timeline import merge
from lockstep.errors import ConfigError
from lockstep.report import figures, tables
from lockstep.report.comparison import Comparison, find_runs, read_run

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(make_config: Callable[..., DictConfig], tmp_path: Path) -> MakeRun:
    """Writes the folder of a finished run: a 100 s first epoch, then `epoch_sec`, in steps of `batch_size` samples."""

    def make(
        name: str,
        strategy: str,
        epoch_sec: list[float],
        *overrides: str,
        seed: int = 0,
        phases: dict[str, float] | None = None,
        extra: dict[str, float] | None = None,
        **metrics: Any,
    ) -> Path:
        folder = tmp_path / "runs" / name
        (folder / ".hydra").mkdir(parents=True)
        cfg = make_config(f"strategy={strategy}", "trainer.devices=2", f"seed={seed}", *overrides)
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
        writer = SummaryWriter(str(folder / "events"))
        for epoch, seconds in enumerate([100.0, *epoch_sec]):
            values = {
                tags.EPOCH_SEC: seconds,
                tags.SAMPLES_PER_SEC: 2560 / seconds,  # ten steps of 256
                tags.TRAIN_LOSS: 1.0 / (epoch + 1),
                **{tags.PHASE_SEC.format(phase=phase): 0.01 for phase in tags.PHASES},
                **{tags.PHASE_SEC.format(phase=phase): value for phase, value in (phases or {}).items()},
                **(extra or {}),
            }
            for tag, value in values.items():
                writer.add_scalar(tag, value, epoch)
        writer.close()
        final = {
            tags.TRAIN_LOSS: 0.25,
            tags.TEST_ACC: 0.9,
            tags.STARTUP_SEC: 3.0,
            tags.THREADS: 1,
            tags.DEVICE: "cpu",
            tags.HARDWARE: "2 cores",
            tags.VERSIONS: "torch 2",
        }
        (folder / "metrics.json").write_text(json.dumps(final | metrics))
        return folder

    return make


def compare(tmp_path: Path) -> list[Comparison]:
    runs, _ = find_runs([tmp_path / "runs"])
    return report.compare(runs)


def test_speed_up_is_the_median_of_pairs_not_the_ratio_of_medians(make_run: MakeRun, tmp_path: Path) -> None:
    # the machine became slower between the repeats
    for seed, (single, dp) in enumerate([(2.0, 1.0), (4.0, 4.0), (9.0, 3.0)]):
        make_run(f"s{seed}", "single", [single, single], seed=seed)
        make_run(f"d{seed}", "dp", [dp, dp], seed=seed)
    (comparison,) = compare(tmp_path)
    dp, single = sorted(comparison.rows, key=lambda row: row.strategy)
    assert (dp.speed_up, dp.speed_up_min, dp.speed_up_max) == (2.0, 1.0, 3.0)
    assert single.speed_up is None
    assert (single.epoch_sec, single.epoch_sec_min, single.epoch_sec_max) == (4.0, 2.0, 9.0)
    assert single.first_epoch_sec == 100.0
    assert (dp.processes, dp.replicas, dp.threads, dp.seeds) == (1, 2, 1, [0, 1, 2])
    assert comparison.findings == ["dp 1 x 2 is 2.00 times as fast as single 1 x 1."]


def test_what_did_not_pay_is_said_with_the_phase_that_ate_the_time(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "single", [1.0])
    comm = {tags.ALL_REDUCE_SEC: 0.004, tags.OVERLAP_FRACTION: 0.25}
    make_run("b", "ddp", [1.25], phases={"backward": 0.035}, extra=comm)
    (comparison,) = compare(tmp_path)
    (finding,) = comparison.findings
    assert finding.startswith("ddp 2 x 1 did not pay: 0.80 times the speed of single 1 x 1.")
    assert "backward: +25.0 ms per step (all-reduce 4.0 ms)" in finding


def test_a_difference_that_changes_sign_is_none(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, dp in enumerate([0.8, 1.1, 1.25]):
        make_run(f"s{seed}", "single", [1.0], seed=seed)
        make_run(f"d{seed}", "dp", [dp], seed=seed)
    (comparison,) = compare(tmp_path)
    expected = "dp 1 x 2 is about as fast as single 1 x 1: 0.91 times, 0.80 to 1.25 in the repeats."
    assert comparison.findings == [expected]


@pytest.mark.parametrize(
    ("overrides", "metrics", "key"),
    [
        (["trainer.max_epochs=7"], {}, "trainer.max_epochs"),
        (["data.batch_size=128"], {}, "data.batch_size"),
        (["model.net.hidden=8"], {}, "model.net.hidden"),
        (["data=mnist"], {}, "data._target_"),
        (["ckpt_path=some.ckpt"], {}, "ckpt_path"),
        (["+callbacks.gil._target_=lockstep.callbacks.GilMonitor"], {}, "callbacks.gil._target_"),
        ([], {tags.VERSIONS: "torch 3"}, tags.VERSIONS),
        ([], {tags.HARDWARE: "64 cores"}, tags.HARDWARE),
        ([], {tags.DEVICE: "gpu"}, tags.DEVICE),
    ],
)
def test_runs_that_differ_in_more_than_the_strategy_are_not_mixed(
    make_run: MakeRun, tmp_path: Path, overrides: list[str], metrics: dict[str, Any], key: str
) -> None:
    make_run("a", "single", [1.0])
    make_run("b", "dp", [1.0])
    make_run("c", "dp", [0.5], *overrides, **metrics)
    comparisons = compare(tmp_path)
    assert sorted(len(comparison.runs) for comparison in comparisons) == [1, 2]
    assert all(key in comparison.settings for comparison in comparisons)
    page = tables.markdown(comparisons, {}, [])
    assert "differ in more than the strategy" in page
    assert key in page
    (lonely,) = (comparison for comparison in comparisons if len(comparison.runs) == 1)
    assert lonely.rows[0].speed_up is None
    assert "no speed-up" in lonely.findings[0]


def test_seeds_that_do_not_match_are_said_and_only_pairs_compared(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "single", [2.0], seed=0)
    make_run("b", "dp", [1.0], seed=0)
    make_run("c", "dp", [8.0], seed=1)
    make_run("d", "dp", [8.0], seed=0)  # its partner is taken
    (comparison,) = compare(tmp_path)
    dp = next(row for row in comparison.rows if row.strategy == "dp")
    assert (dp.speed_up, dp.speed_up_min, dp.speed_up_max) == (2.0, 2.0, 2.0)
    assert "dp 1 x 2 has seeds [0, 1, 0], single 1 x 1 has [0]: only pairs are compared." in comparison.findings


def test_variants_of_a_strategy_are_rows_of_their_own(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "single", [1.0])
    make_run("b", "single", [2.0], **{tags.THREADS: 2})
    make_run("c", "ddp", [1.0])
    make_run("d", "ddp", [1.0], "+strategy.plugin.static_graph=true")
    (comparison,) = compare(tmp_path)
    labels = ["single 1 x 1 threads=1", "single 1 x 1 threads=2", "ddp 2 x 1", "ddp 2 x 1 static_graph=True"]
    assert [row.label for row in comparison.rows] == labels
    assert comparison.rows[1].speed_up == 0.5
    assert all("single 1 x 1 threads=1" in finding for finding in comparison.findings)


@pytest.mark.parametrize("tag", [tags.TEST_ACC, tags.TRAIN_LOSS, tags.STARTUP_SEC])
def test_a_run_that_lacks_a_number_does_not_spoil_the_others(make_run: MakeRun, tmp_path: Path, tag: str) -> None:
    make_run("a", "single", [1.0])
    make_run("b", "dp", [1.0])
    folder = make_run("c", "ddp", [1.0])
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics[tag]
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (comparison,) = report.write_comparison([tmp_path / "runs"], tmp_path / "out")
    assert [row.strategy for row in comparison.rows] == ["single", "dp"]
    assert f"without {tag}: `{folder}`" in (tmp_path / "out" / "comparison.md").read_text()


def test_runs_are_found_in_order_and_unfinished_ones_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    for job in (10, 9, 2):
        make_run(str(job), "single", [1.0])
    unfinished = make_run("11", "single", [1.0])
    (unfinished / "metrics.json").unlink()
    runs, left_out = find_runs([tmp_path / "runs", tmp_path / "runs" / "2"])
    assert [run.folder.name for run in runs] == ["2", "9", "10"]
    assert left_out == {unfinished: "not finished"}
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_later_attempts_points_replace_an_earlier_ones(make_run: MakeRun) -> None:
    folder = make_run("a", "single", [1.0, 1.0])
    (first,) = folder.rglob("events.out.tfevents.*")
    first.rename(first.with_name("events.out.tfevents.1.first"))
    writer = SummaryWriter(str(first.parent))
    writer.add_scalar(tags.EPOCH_SEC, 3.0, 2)
    writer.close()
    assert read_run(folder).values(tags.EPOCH_SEC) == [100.0, 1.0, 3.0]


def test_page_json_and_pictures_are_written(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("a", "single", [1.0])
    make_run("b", "dp", [0.5], extra={tags.GIL_CONTENTION.format(rank=0): 0.25})
    folder = tmp_path / "out"
    report.write_comparison([tmp_path / "runs"], folder)
    pictures = ["epoch_seconds.png", "loss_curves.png", "step_parts.png"]
    assert sorted(path.name for path in folder.glob("*.png")) == pictures  # no timeline: nothing was recorded
    for picture in pictures:
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert (folder / picture).stat().st_size > 5000
    page = (folder / "comparison.md").read_text()
    assert "| dp | 1 x 2 | 1 | 256 | 0.50 (0.50 to 0.50) | 100.00 | 5,120 | 2.00 (2.00 to 2.00) |" in page
    assert "25%" in page
    assert all(f"]({picture})" in page for picture in pictures)
    (content,) = json.loads((folder / "comparison.json").read_text())
    assert [row["strategy"] for row in content["rows"]] == ["single", "dp"]
    assert content["rows"][1]["speed_up"] == 2.0
    printed = capsys.readouterr().out
    assert "GIL contention" in printed
    assert "dp 1 x 2 is 2.00 times as fast as single 1 x 1." in printed
    report.write_comparison([tmp_path / "runs"], folder)  # again: TensorBoard still has one of each
    (events,) = (folder / "comparison").iterdir()
    images = EventAccumulator(str(events)).Reload().Tags()["images"]
    assert sorted(images) == [f"comparison/{picture.removesuffix('.png')}" for picture in pictures]


@pytest.mark.parametrize("name", ["comparison.md", "comparison.json"])
def test_a_full_disk_leaves_the_earlier_file(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_run("a", "single", [1.0])
    make_run("b", "dp", [0.5])
    report.write_comparison([tmp_path / "runs"], tmp_path / "out")
    earlier = (tmp_path / "out" / name).read_text()

    def fill_the_disk(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fill_the_disk)
    make_run("c", "ddp", [0.5])
    with pytest.raises(OSError, match="disk full"):
        report.write_comparison([tmp_path / "runs"], tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == earlier


def test_fewer_than_two_runs_are_no_comparison(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "single", [1.0])
    assert report.write_comparison([tmp_path / "runs"], tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_a_steps_parts_add_up_to_the_step(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "single", [1.0])
    overhead = {tags.SCATTER_SEC: 0.001, tags.REPLICATE_SEC: 0.002, tags.GATHER_SEC: 0.003, tags.REDUCE_SEC: 0.004}
    make_run("b", "dp", [1.0], extra=overhead)
    make_run("c", "ddp", [1.0], extra={tags.ALL_REDUCE_SEC: 0.004, tags.OVERLAP_FRACTION: 0.25})
    (comparison,) = compare(tmp_path)
    for row in comparison.rows:  # ten steps in a second, 40 ms of each in phases
        assert sum(figures.parts(row).values()) == pytest.approx(0.1)
        assert figures.parts(row)["loop and waiting"] == pytest.approx(0.06)
    _, dp, ddp = (figures.parts(row) for row in comparison.rows)
    assert dp["forward"] == pytest.approx(0.004)
    assert dp["backward"] == pytest.approx(0.006)
    assert ddp["all-reduce, overlapped"] == pytest.approx(0.001)
    assert ddp["all-reduce"] == pytest.approx(0.003)
    assert ddp["backward"] == pytest.approx(0.006)


# ------------------------------------------------------------------------------------------------ timelines


def event(name: str, start: float, length: float, thread: int, process: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "tid": thread, "pid": process}


def test_ranks_traces_are_merged_on_one_clock() -> None:
    on_gpu = event("forward", 5, 1, 99) | {"cat": "gpu_user_annotation"}
    others = [{"ph": "M", "name": "x"}, on_gpu]
    first = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [event("forward", 5, 1, 70), *others]}
    second = {"baseTimeNanoseconds": 3_000_000, "traceEvents": [event("forward", 5, 1, 80)]}
    merged = merge([first, second])["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in merged if e["ph"] == "X"] == [(0, 0), (1, 2000)]
    assert [e["args"]["name"] for e in merged if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_lanes_are_processes_and_threads(tmp_path: Path) -> None:
    dp = [
        event("forward", 1000, 500, 70, 0),
        event("aten::conv2d", 1000, 500, 71, 0),
        event("replica forward", 1100, 100, 72, 0),
        event("replica forward", 1100, 100, 71, 0),
        event("gather", 1300, 100, 70, 0),
    ]
    (tmp_path / tags.TRACE_FILE).write_text(json.dumps({"traceEvents": dp}))
    bars = figures.timeline_bars(tmp_path)
    assert [(bar.lane, bar.part, bar.start, bar.whole) for bar in bars] == [
        ("the process", "forward", 0.0, True),
        ("the process", "gather", 0.3, False),
        ("replica 0", "forward", 0.1, False),
        ("replica 1", "forward", 0.1, False),
    ]
    ddp = [event("backward", 0, 9, 70 + rank, rank) for rank in (0, 1)]
    ddp += [event("gloo:all_reduce", 5, 3, 90 + rank, rank) for rank in (0, 1)]
    (tmp_path / tags.TRACE_FILE).write_text(json.dumps({"traceEvents": ddp}))
    lanes = [bar.lane for bar in figures.timeline_bars(tmp_path)]
    assert lanes == ["rank 0", "rank 0, network", "rank 1", "rank 1, network"]
    assert figures.timeline_bars(tmp_path / "nothing recorded") == []
    (tmp_path / tags.TRACE_FILE).write_text(json.dumps({"traceEvents": [event("aten::conv2d", 0, 1, 70)]}))
    assert figures.timeline_bars(tmp_path) == []


@pytest.mark.parametrize(("strategy", "lanes"), [("single", 1), ("dp", 3), ("ddp", 4)])
def test_recorded_steps_show_what_ran_where(
    run_job: Callable[..., Any], make_run: MakeRun, tmp_path: Path, strategy: str, lanes: int
) -> None:
    record = "+callbacks.timeline={_target_: lockstep.callbacks.StepTimeline, folder: '${run_dir}', first_batch: 3}"
    run_job(f"strategy={strategy}", "trainer.devices=2", record)
    bars = figures.timeline_bars(tmp_path / "run")
    assert len({bar.lane for bar in bars}) == lanes
    steps = [bar for bar in bars if bar.lane == bars[0].lane and bar.whole and bar.part == "backward"]
    assert len(steps) == 3
    expected = {"dp": {"scatter", "replicate", "gather", "summing gradients"}, "ddp": {"all-reduce"}, "single": set()}
    assert {bar.part for bar in bars} == set(tags.PHASES) | expected[strategy]
    made = make_run("a", strategy, [1.0])
    (tmp_path / "run" / tags.TRACE_FILE).rename(made / tags.TRACE_FILE)
    (comparison,) = compare(tmp_path)
    assert "step_timeline.png" in [path.name for path in figures.draw([comparison], tmp_path)]
