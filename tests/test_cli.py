"""train.py as a person types it."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_SEC, TRAIN, environment, processes_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import tags

SMALL = [
    *("data=mnist_sample", "trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.log_every_n_steps=5"),
    "launch.threads_per_process=1",
]
DDP2 = ["strategy=ddp", "trainer.devices=2"]

EVERY_STRATEGY = {
    tags.TRAIN_LOSS,
    tags.TRAIN_LOSS_RANK.format(rank=0),
    tags.TRAIN_LOSS_STEP,
    tags.LR,
    tags.VAL_LOSS,
    tags.VAL_ACC,
    tags.TEST_LOSS,
    tags.TEST_ACC,
    tags.EPOCH_SEC,
    tags.EPOCH_SEC_FASTEST_RANK,
    tags.EPOCH_SEC_MEDIAN,
    tags.VAL_SEC,
    tags.STARTUP_SEC,
    tags.SAMPLES_PER_SEC,
    tags.SAMPLES_PER_SEC_MEDIAN,
    *(tags.PHASE_SEC.format(phase=phase) for phase in tags.PHASES),
}
DDP_ONLY = {tags.TRAIN_LOSS_RANK.format(rank=1), tags.ALL_REDUCE_SEC, tags.OVERLAP_FRACTION}
DP_ONLY = {tags.SCATTER_SEC, tags.REPLICATE_SEC, tags.GATHER_SEC, tags.REDUCE_SEC}
PER_STEP = {tags.TRAIN_LOSS_STEP, tags.LR}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Starts the command's rank 0 after its rank 1; torchrun ends all others at the first exit.
LATE_RANK_0 = ["--no-python", "bash", "-c", 'if [ "$RANK" = 0 ]; then sleep 1; fi; exec "$@"', "late"]


def run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = environment(COLUMNS="100", **environ)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SEC, env=env, check=False)


def train(cwd: Path, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run([*TRAIN, *SMALL, f"hydra.run.dir={cwd / 'run'}", *overrides], cwd, **environ)


def scalars(folder: Path) -> dict[str, list[int]]:
    """Each tag's steps, from the run's one event file."""
    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    return {tag: [event.step for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("overrides", "opening", "only_here"),
    [
        (["strategy=single"], "single: 1 process x 1 replica", set()),
        (["strategy=dp", "trainer.devices=2"], "dp: 1 process x 2 replicas", DP_ONLY),
        (DDP2, "ddp: 2 processes x 1 replica", DDP_ONLY),
    ],
)
def test_a_run_says_what_it_does_and_leaves_what_the_readme_says(
    tmp_path: Path, overrides: list[str], opening: str, only_here: set[str]
) -> None:
    result = train(tmp_path, *overrides, "trainer.enable_progress_bar=false")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(opening)
    assert "| batch 256 = " in lines[0]
    assert lines[0].endswith("| cpu | MNIST from bundled sample")
    assert "test accuracy" in result.stdout
    assert lines[-1] == "tensorboard --logdir run"
    assert len(lines) == 8, result.stdout  # the opening line, the table of six, the command: nothing else

    folder = tmp_path / "run"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    strategy = overrides[0].partition("=")[2]
    (events,) = (name for name in files if name.startswith(f"{strategy}-seed0/events.out.tfevents."))
    assert files - {events} == {
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "metrics.json",
        "train.log",
    }
    found = scalars(folder)
    assert set(found) == EVERY_STRATEGY | only_here
    assert all(steps == sorted(set(steps)) for steps in found.values())
    once = {tags.STARTUP_SEC, tags.EPOCH_SEC_MEDIAN, tags.SAMPLES_PER_SEC_MEDIAN, tags.TEST_ACC, tags.TEST_LOSS}
    for tag in set(found) - once - PER_STEP:
        assert found[tag] == [0, 1], tag
    for tag in PER_STEP:
        assert found[tag] == [5, 10, 15, 20, 25, 30]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics.pop(tags.SOURCE) == "bundled sample"
    assert metrics.pop(tags.DEVICE) == "cpu"
    assert "cores of" in metrics.pop(tags.HARDWARE)
    assert metrics.pop(tags.VERSIONS).startswith("torch 2")
    assert metrics.pop(tags.THREADS) >= 1
    assert set(metrics) == (EVERY_STRATEGY | only_here) - PER_STEP
    assert all(isinstance(value, float) for value in metrics.values())
    assert 0.5 < metrics[tags.TEST_ACC] < 1
    assert opening in (folder / "train.log").read_text()


def test_progress_bar_is_rank_zeros_alone(tmp_path: Path) -> None:
    result = train(tmp_path, *DDP2)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert len(re.findall(r"Epoch 1/1", result.stdout)) == 1
    assert "v_num" not in result.stdout


def cpu_seconds_of_commands() -> float:
    """What the commands that ended so far have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "returncode", "expected"),
    [
        (["--cfg", "job", "strategy=dp"], 0, "DataParallelStrategy"),
        (["strategy=ddpp"], 1, "Could not find 'strategy/ddpp'"),
    ],
)
def test_looking_and_mistyping_are_answered_at_once(
    tmp_path: Path, arguments: list[str], returncode: int, expected: str
) -> None:
    before = cpu_seconds_of_commands()
    result = run([*TRAIN, *arguments], tmp_path)
    between = cpu_seconds_of_commands()
    run([sys.executable, "-c", "import lightning.pytorch"], tmp_path)
    after = cpu_seconds_of_commands()
    assert result.returncode == returncode
    assert expected in result.stdout + result.stderr
    assert not processes_in(tmp_path)
    assert between - before < (after - between) / 2  # whatever this machine does besides
    if returncode:
        assert all(option in result.stderr for option in ("single", "dp", "ddp"))


def test_looking_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['train.py', '--cfg', 'job']\n"
        f"runpy.run_path({TRAIN[1]!r}, run_name='__main__')\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    result = run([sys.executable, "-c", code], tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_mistake_is_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    result = train(tmp_path, *DDP2, "trainer.devices=0")
    assert result.returncode == 1
    assert result.stderr == "error: trainer.devices=0; allowed: a whole number >= 1\n"
    assert result.stdout == ""
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {".hydra", "train.log"}  # Hydra's: what was asked for


def test_a_failing_rank_ends_the_command_with_its_traceback(tmp_path: Path) -> None:
    fail = "+callbacks.fail={_target_: faults.FailAt, rank: 1, step: 5}"
    result = train(tmp_path, *DDP2, fail, "trainer.enable_progress_bar=false")
    assert result.returncode == 1
    assert result.stderr.startswith("error: rank 1 failed:\nTraceback")
    assert result.stderr.endswith("RuntimeError: broken on purpose\nin epoch 0, batch 5, step 5, on rank 1\n")
    assert result.stderr.count("Traceback") == 1
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert not processes_in(tmp_path)


LEFTOVERS = {
    **{"RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "elsewhere"},
    **{"MASTER_PORT": "1", "OMP_NUM_THREADS": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "9"},
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["strategy=single"], marks=pytest.mark.slow),
        pytest.param(["strategy=dp", "trainer.devices=2"], marks=pytest.mark.slow),
        DDP2,
    ],
)
def test_leftovers_in_the_environment_are_named_and_ignored(tmp_path: Path, overrides: list[str]) -> None:
    options = ("trainer.enable_progress_bar=false", "launch.threads_per_process=null")
    result = train(tmp_path, *overrides, *options, **LEFTOVERS)
    assert result.returncode == 0, result.stderr
    warning = result.stderr.removesuffix("\n")
    assert warning.startswith("warning: ignored in the environment: ")
    assert "\n" not in warning
    for name, value in LEFTOVERS.items():
        assert name.startswith("SLURM_") or f"{name}={value}" in warning
    assert "3 SLURM_* variables" in warning
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    cores = len(os.sched_getaffinity(0))
    assert metrics[tags.THREADS] == (cores if overrides == ["strategy=single"] else max(1, cores // 2))


@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        (["strategy=ddp", "trainer.devices=3"], 3),
        (["strategy=single"], 1),
        pytest.param(["strategy=dp", "trainer.devices=2"], 1, marks=pytest.mark.slow),
        (["strategy=ddp", "trainer.devices=3", "data.batch_size=100"], 3),  # which has another mistake
    ],
)
def test_torchruns_size_must_be_the_configs(tmp_path: Path, overrides: list[str], runs: int) -> None:
    result = run([*TORCHRUN, *LATE_RANK_0, *TRAIN, *SMALL, f"hydra.run.dir={tmp_path / 'run'}", *overrides], tmp_path)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith(f"error: torchrun started 2 processes; {overrides[0]} with trainer.devices=")
    assert errors[0].endswith(f" runs {runs}")


def test_a_refused_config_under_torchrun_is_told_once(tmp_path: Path) -> None:
    job = [TRAIN[1], *SMALL, *DDP2, f"hydra.run.dir={tmp_path / 'run'}", "data.batch_size=4600"]
    result = run([*TORCHRUN, *job], tmp_path)
    assert result.returncode == 1
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1, result.stderr


def test_a_signal_to_a_rank_of_torchrun_stops_both(tmp_path: Path) -> None:
    fail = "+callbacks.fail={_target_: faults.FailAt, rank: 1, step: 5, how: terminate}"
    job = [TRAIN[1], *SMALL, *DDP2, f"hydra.run.dir={tmp_path / 'run'}", fail, "trainer.enable_progress_bar=false"]
    result = run([*TORCHRUN, *job], tmp_path)
    assert result.returncode != 0
    stopped = [line for line in result.stderr.splitlines() if line.startswith("stopped by")]
    assert stopped == ["stopped by SIGTERM after step 15, in epoch 0; resume with ckpt_path=run/checkpoints/last.ckpt"]
    assert "exitcode  : 143" in result.stderr


def test_torchrun_starts_the_workers_and_only_rank_zero_writes(tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    command = [torchrun, "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", TRAIN[1]]
    overrides = [*SMALL, *DDP2, f"hydra.run.dir={tmp_path}/run/${{now:%f}}", "trainer.enable_progress_bar=false"]
    result = run([*command, *overrides], tmp_path, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ddp: 2 processes x 1 replica, 1 thread each") == 1
    assert result.stdout.count("test accuracy") == 1
    (folder,) = (tmp_path / "run").iterdir()
    assert set(scalars(folder)) == EVERY_STRATEGY | DDP_ONLY
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def sweep(tmp_path: Path, *strategies: str) -> tuple[list[dict[str, object]], subprocess.CompletedProcess[str]]:
    """Run a sweep; each job's metrics but the times."""
    command = [*TRAIN, "-m", f"strategy={','.join(strategies)}", "trainer.devices=2", *SMALL]
    folder = tmp_path / "-".join(strategies)
    options = ["trainer.limit_train_batches=3", "trainer.enable_progress_bar=false", f"hydra.sweep.dir={folder}"]
    result = run([*command, *options], tmp_path)
    assert result.returncode == 0, result.stderr
    timing = ("time/", "throughput/", "phase/", "comm/", "dp/")
    jobs = [json.loads((folder / str(job) / "metrics.json").read_text()) for job in range(len(strategies))]
    return [{tag: value for tag, value in job.items() if not tag.startswith(timing)} for job in jobs], result


def test_a_sweep_trains_each_job_once_and_compares_them(tmp_path: Path) -> None:
    strategies = ("single", "dp", "ddp")
    _, result = sweep(tmp_path, *strategies)
    folder = tmp_path / "single-dp-ddp"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "2", "comparison"]
    for job, strategy in enumerate(strategies):
        assert len(list((folder / str(job)).rglob("events.out.tfevents.*"))) == 1
        assert len(re.findall(f"^{strategy}: ", result.stdout, re.MULTILINE)) == 1
    assert "The same training under different strategies" in result.stdout
    (content,) = json.loads((folder / "comparison.json").read_text())
    assert [row["strategy"] for row in content["rows"]] == list(strategies)
    assert all(row["speed_up"] for row in content["rows"][1:])
    again = run([sys.executable, "-m", "lockstep.report", str(folder), "--output", str(tmp_path / "again")], tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "comparison.md").read_text() == (folder / "comparison.md").read_text()


@pytest.mark.slow
def test_a_job_is_the_same_whatever_ran_before_it(tmp_path: Path) -> None:
    (first, second, single, dp), _ = sweep(tmp_path, "ddp", "ddp", "single", "dp")
    assert first == second
    (same_single, same_ddp), _ = sweep(tmp_path, "single", "ddp")
    assert same_single == single
    assert same_ddp == first
    assert dp["run/threads"] == first["run/threads"]


def test_reporting_on_nothing_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep.report", str(tmp_path)]
    assert run(command, tmp_path).stderr == "error: fewer than two finished runs there; a comparison needs two\n"
    nowhere = run([*command, "nowhere"], tmp_path)
    assert nowhere.stderr.startswith("error: nowhere is not a folder")


def test_every_failing_job_of_a_sweep_says_so_and_the_others_run(tmp_path: Path) -> None:
    command = [*TRAIN, "-m", "data.batch_size=9999,256,8888", *SMALL, "trainer.limit_train_batches=2"]
    result = run([*command, f"hydra.sweep.dir={tmp_path / 'sweep'}", "trainer.enable_progress_bar=false"], tmp_path)
    assert result.returncode == 1
    for job, batch_size in ((0, 9999), (2, 8888)):
        message = f"data.batch_size={batch_size}; allowed: up to the 4500 training images"
        assert f"error: {message}\n" in result.stderr
        assert message in (tmp_path / "sweep" / str(job) / "train.log").read_text()
    assert (tmp_path / "sweep" / "1" / "metrics.json").exists()


def test_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    result = run([*TORCHRUN, *LATE_RANK_0, *TRAIN, "-m", "strategy=single,dp"], tmp_path)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: torchrun starts one job; allowed: the sweep without torchrun"]
    assert list(tmp_path.iterdir()) == []
