"""Workers get the launcher's environment, failures are told well, and the process is afterwards what it was."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lockstep import launch, tags
from lockstep.errors import ConfigError, WorkerError
from lockstep.launch.command import run
from lockstep.launch.signals import stop_signals_deferred

RunJob = Callable[..., Any]
DDP2 = ("strategy=ddp", "trainer.devices=2")


def test_rank_and_world_size_come_from_the_launcher(run_job: RunJob) -> None:
    environment = run_job(*DDP2, function="faults:environment")
    assert environment["RANK"] == environment["LOCAL_RANK"] == environment["GROUP_RANK"] == "0"
    assert environment["WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_each_job_meets_at_a_free_port(run_job: RunJob) -> None:
    ports = [run_job(*DDP2, function="faults:environment")["MASTER_PORT"] for _ in range(2)]
    assert "29500" not in ports  # torch's fixed default, where two jobs of one machine would meet


def test_workers_are_fresh_and_have_their_share_of_the_cores(run_job: RunJob) -> None:
    cores = len(os.sched_getaffinity(0))
    jobs = [("strategy=single",), ("strategy=dp", "trainer.devices=2"), DDP2, ("strategy=single",)]
    even_share = "launch.threads_per_process=null"
    seen = [run_job(*job, even_share, function="faults:process") for job in jobs]
    assert len({process["pid"] for process in seen}) == len(jobs)
    assert os.getpid() not in {process["pid"] for process in seen}
    assert [process["threads"] for process in seen] == [cores, max(1, cores // 2), max(1, cores // 2), cores]
    assert run_job("launch.threads_per_process=3", function="faults:process")["threads"] == 3


def test_workers_spend_no_time_on_what_is_not_training(run_job: RunJob) -> None:
    process = run_job(function="faults:process")
    assert process["gpus"] == ""  # trainer.accelerator=cpu: the optimizer does not look for GPUs in every step
    assert process["collects_garbage"]
    assert process["frozen_objects"] > 100_000  # what the fork server has imported
    one_step = 4 * 6_000_000 * 4 // 4096  # pages of its buffers
    assert process["page_faults"] < 5 * one_step  # of the nineteen steps that follow the first


@pytest.mark.slow
def test_spawned_workers_train_too(run_job: RunJob) -> None:
    metrics = run_job("launch.start_method=spawn", "trainer.limit_train_batches=2")
    assert 0 <= metrics[tags.TEST_ACC] <= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_rank_ends_the_job_with_its_traceback(run_job: RunJob, rank: int) -> None:
    with pytest.raises(WorkerError) as failure:
        run_job(*DDP2, f"+callbacks.fail={{_target_: faults.FailAt, rank: {rank}, step: 5}}")
    message = str(failure.value)
    assert message.startswith(f"rank {rank} failed:\nTraceback")
    assert "faults.py" in message
    assert message.endswith(f"RuntimeError: broken on purpose\nin epoch 0, batch 5, step 5, on rank {rank}")
    assert message.count("Traceback") == 1


def test_a_rank_that_was_done_is_not_blamed(run_job: RunJob) -> None:
    with pytest.raises(WorkerError, match=r"^rank 0 failed:\nTraceback[\s\S]*OSError: broken on purpose$"):
        run_job(*DDP2, function="faults:rank_one_first")


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=dp", "trainer.sync_batchnorm=true"], "sync_batchnorm=True"),
        (["trainer.precision=foo"], "trainer: Precision 'foo' is invalid"),
        (["trainer.accelerator=foo"], "trainer: .*accelerator='foo'"),
        (["trainer.barebones=true"], "trainer: .*barebones=True"),
        (["+trainer.epochs=3"], "trainer: .*unexpected keyword argument 'epochs'"),
        (["trainer.limit_train_batches=0"], "model.scheduler needs .*trainer.limit_train_batches above 0"),
        (["trainer.max_epochs=-1", "trainer.max_time=00:00:01:00"], "set trainer.max_epochs or trainer.max_steps"),
    ],
)
def test_lightnings_refusals_are_one_line_too(run_job: RunJob, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        run_job(*overrides)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.enable_checkpointing=false"],
        ["trainer.log_every_n_steps=0"],
        ["trainer.accumulate_grad_batches=2", *DDP2],
        ["trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=1", "strategy=dp", "trainer.devices=2"],
        ["trainer.fast_dev_run=true"],
        ["trainer.limit_val_batches=0"],
        ["trainer.precision=bf16-mixed", *DDP2],
        ["trainer.overfit_batches=2"],
        ["~logger"],
        ["~callbacks.epoch_monitor", "~callbacks.best"],
        ["model.scheduler=null"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_lightnings_options_work(run_job: RunJob, overrides: list[str]) -> None:
    metrics = run_job(*overrides)
    assert "~callbacks.epoch_monitor" in overrides or 0 <= metrics[tags.TEST_ACC] <= 1


def test_nodes_that_do_not_meet_are_told(run_job: RunJob, free_port: int) -> None:
    nodes = ("trainer.num_nodes=2", "strategy=ddp", "trainer.devices=1", "launch.local_addr=127.0.0.1")
    endpoint = f"launch.rdzv_endpoint=127.0.0.1:{free_port}"
    with pytest.raises(
        WorkerError, match=f"2 nodes did not meet at launch.rdzv_endpoint=127.0.0.1:{free_port}: not all"
    ):
        run_job(*nodes, endpoint, "launch.timeout_sec=3", function="faults:environment")


@pytest.mark.slow
def test_nodes_meet_without_resolving_a_name(make_config: Callable[..., Any], free_port: int) -> None:
    """Two nodes on one machine, the second as a process of its own; the endpoint is node 0's address."""
    nodes = ("trainer.num_nodes=2", "strategy=ddp", "trainer.devices=1", f"launch.rdzv_endpoint=127.0.0.1:{free_port}")
    host = make_config(*nodes, "launch.local_addr=127.0.0.1")
    guest = make_config(*nodes, "launch.local_addr=127.0.0.2")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        other = pool.submit(run, "faults:environment", guest)
        results = [run("faults:environment", host), other.result(timeout=60)]
    (environment,) = (result for result in results if result is not None)  # from the node with rank 0
    assert environment["WORLD_SIZE"] == "2"


def test_a_checkpoint_of_another_model_is_refused(run_job: RunJob, tmp_path: Path) -> None:
    run_job("trainer.max_steps=1", run="source")
    path = tmp_path / "source" / "checkpoints" / "last.ckpt"
    with pytest.raises(ConfigError, match=r"is of another model: .* has shape \(8.*\) there and \(4.*\) here"):
        run_job(f"ckpt_path={path}", "model.net.channels=[4, 16]")


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


@pytest.mark.parametrize("content", ["tensor", "weights", "code", "torn", "text"])
def test_a_file_that_is_no_checkpoint(run_job: RunJob, tmp_path: Path, content: str) -> None:
    import torch

    path = tmp_path / "some.ckpt"
    touched = tmp_path / "code was run"
    objects = {"tensor": torch.ones(2), "weights": {"weight": torch.ones(2)}, "code": Touch(str(touched))}
    torch.save(objects.get(content, {}), path)
    if content == "torn":
        whole = path.read_bytes()
        path.write_bytes(whole[:40] + whole[60:])
    if content == "text":
        path.write_text("hello")
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
    handlers = {number: signal.getsignal(number) for number in launch.STOP_SIGNALS}
    run_job(*DDP2, function="faults:environment")
    assert dict(os.environ) == before
    assert {number: signal.getsignal(number) for number in launch.STOP_SIGNALS} == handlers


def test_a_deferred_stop_signal_waits_for_the_block_whichever_thread_takes_it() -> None:
    seen: list[str] = []
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append("handled"))
    try:
        with stop_signals_deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            seen.append("block is done")
        assert seen == ["block is done", "handled"]
    finally:
        signal.signal(signal.SIGTERM, before)
        done.set()
        other.join()


@pytest.mark.parametrize("fails", [False, True])
def test_no_temporary_file_is_left(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Of the agent's; those of whole commands are looked for after every test."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with pytest.raises(WorkerError) if fails else nullcontext():
        run_job(*DDP2, function="faults:rank_one_first" if fails else "faults:environment")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),  # stray variables are not a launcher
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 2, 1, 0)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),  # inside salloc, without srun
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun of one task: it starts its own workers
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, ("srun", 4, 3, 0)),
    ],
)
def test_who_started_this_interpreter(environ: dict[str, str], expected: tuple[str, int, int, int] | None) -> None:
    assert launch.external_launcher(environ) == expected


def test_our_own_workers_have_no_external_launcher(run_job: RunJob) -> None:
    """Though torch's elastic agent, and so torchrun's environment, is behind both."""
    assert run_job(*DDP2, function="faults:who_am_i") == {"launcher": "lockstep", "rank": 0, "external": None}


def test_leftovers_are_taken_out_and_named() -> None:
    environ = {
        "RANK": "1",
        "SLURM_JOB_ID": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    line = launch.remove_leftovers(environ)
    assert environ == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert line.startswith("ignored in the environment: RANK=1, TORCHELASTIC_RUN_ID=x, 1 SLURM_* variables; ")
    assert launch.remove_leftovers(environ) is None


def test_the_store_and_gloo_listen_on_loopback_only(run_job: RunJob) -> None:
    found = run_job(*DDP2, f"+launch.agent_pid={os.getpid()}", function="faults:listeners")
    assert found  # at least the store
    assert set(found) == {"127.0.0.1"}
