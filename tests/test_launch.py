"""Workers get the launcher's environment, failures are told well, and the process is afterwards what it was."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import launch, tags
from lockstep.config import ConfigError
from lockstep.launch import WorkerError

RunJob = Callable[..., Any]
DDP2 = ("strategy=ddp", "trainer.devices=2")


def test_rank_and_world_size_come_from_the_launcher(run_job: RunJob) -> None:
    environment = run_job(*DDP2, function="faults:environment")
    assert environment["RANK"] == environment["LOCAL_RANK"] == environment["GROUP_RANK"] == "0"
    assert environment["WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == "localhost"


def test_each_job_meets_at_a_free_port(run_job: RunJob) -> None:
    ports = [run_job(*DDP2, function="faults:environment")["MASTER_PORT"] for _ in range(2)]
    assert "29500" not in ports  # torch's fixed default, where two jobs of one machine would meet


def test_workers_are_fresh_and_have_their_share_of_the_cores(run_job: RunJob) -> None:
    cores = len(os.sched_getaffinity(0))
    jobs = [("strategy=single",), ("strategy=dp", "trainer.devices=2"), DDP2, ("strategy=single",)]
    seen = [run_job(*job, function="faults:process") for job in jobs]
    assert len({process["pid"] for process in seen}) == len(jobs)
    assert os.getpid() not in {process["pid"] for process in seen}
    assert [process["threads"] for process in seen] == [cores, max(1, cores // 2), max(1, cores // 2), cores]
    assert run_job("launch.threads_per_process=3", function="faults:process")["threads"] == 3


def test_spawned_workers_train_too(run_job: RunJob) -> None:
    metrics = run_job("launch.start_method=spawn", "trainer.limit_train_batches=2")
    assert 0 <= metrics[tags.TEST_ACC] <= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_rank_ends_the_job_with_its_traceback(run_job: RunJob, rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError) as failure:
        run_job(*DDP2, f"+callbacks.fail={{_target_: faults.FailAt, rank: {rank}, step: 5}}")
    assert time.monotonic() - start < 30
    message = str(failure.value)
    assert message.startswith(f"rank {rank} failed:\nTraceback")
    assert "faults.py" in message
    assert message.endswith("RuntimeError: broken on purpose")
    assert message.count("Traceback") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(run_job: RunJob, rank: int) -> None:
    with pytest.raises(WorkerError, match=f"rank {rank} was killed"):
        run_job(*DDP2, f"+callbacks.fail={{_target_: faults.FailAt, rank: {rank}, step: 5, how: kill}}")


def test_no_worker_outlives_a_failure(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        run_job(
            *DDP2,
            f"+callbacks.note={{_target_: faults.NotePid, folder: {tmp_path}}}",
            "+callbacks.fail={_target_: faults.FailAt, rank: 1, step: 5}",
        )
    pids = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_refused_config_is_one_line(run_job: RunJob) -> None:
    with pytest.raises(ConfigError, match=r"^data.batch_size=4600; allowed: up to the 4500 training images$"):
        run_job(*DDP2, "data.batch_size=4600")


def test_lightnings_refusals_are_one_line_too(run_job: RunJob) -> None:
    with pytest.raises(ConfigError, match="sync_batchnorm=True"):
        run_job("strategy=dp", "trainer.sync_batchnorm=true")


def test_more_gpus_than_there_are(run_job: RunJob) -> None:
    with pytest.raises(ConfigError, match=r"trainer.accelerator=gpu with strategy=ddp needs 32 GPUs and .* has \d+"):
        run_job("strategy=ddp", "trainer.devices=32", "trainer.accelerator=gpu", function="faults:accelerator")


def test_one_step_is_a_run(run_job: RunJob) -> None:
    for steps in range(1, 5):  # a schedule of few steps must not divide by zero
        assert 0 <= run_job(f"trainer.max_steps={steps}", run=str(steps))[tags.TEST_ACC] <= 1


def test_auto_takes_the_cpu_where_there_are_too_few_gpus(run_job: RunJob) -> None:
    assert (
        run_job("trainer.accelerator=auto", "strategy=dp", "trainer.devices=32", function="faults:accelerator") == "cpu"
    )


@pytest.mark.parametrize("content", ["tensor", "weights", "code", "torn"])
def test_a_file_that_is_no_checkpoint(run_job: RunJob, tmp_path: Path, content: str) -> None:
    import torch

    path = tmp_path / "some.ckpt"
    touched = tmp_path / "code was run"
    objects = {"tensor": torch.ones(2), "weights": {"weight": torch.ones(2)}, "code": Touch(str(touched)), "torn": {}}
    torch.save(objects[content], path)
    if content == "torn":
        whole = path.read_bytes()
        path.write_bytes(whole[:40] + whole[60:])
    with pytest.raises(ConfigError, match=f"ckpt_path={path} is not a checkpoint") as refusal:
        run_job(f"ckpt_path={path}")
    assert "\n" not in str(refusal.value)
    assert not touched.exists()


class Touch:
    """Pickles into something that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_environment_and_handlers_are_restored(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in launch.HANDLED_SIGNALS}
    run_job(*DDP2, function="faults:environment")
    assert dict(os.environ) == before
    assert {number: signal.getsignal(number) for number in launch.HANDLED_SIGNALS} == handlers


def test_no_temporary_file_is_left(run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    run_job(*DDP2, function="faults:environment")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),  # stray variables are not a launcher
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 2, 1)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),  # inside salloc, without srun
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun of one task: it starts its own workers
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, ("srun", 4, 3)),
    ],
)
def test_who_started_this_interpreter(environ: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    assert launch.external_launcher(environ) == expected


def test_torchruns_size_must_be_the_configs(make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun started 3 processes; strategy=ddp .*trainer.devices=2.* runs 2"):
        launch.run("faults:environment", make_config(*DDP2))
