"""A rank that dies is named; with restarts the run goes on as if nothing had happened."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import tags
from lockstep.errors import WorkerError
from lockstep.launch.command import run

slow = pytest.mark.slow

RunJob = Callable[..., Any]
DDP2 = ("strategy=ddp", "trainer.devices=2")
EPOCHS3 = ("trainer.max_epochs=3", "trainer.log_every_n_steps=1")  # 17 steps each
STRATEGIES = {"single": ("strategy=single",), "dp2": ("strategy=dp", "trainer.devices=2"), "ddp2": DDP2}
# A process group's setup, training, validation, test: where a rank may die.
MOMENTS = ["setup", "on_fit_start", "on_train_start", "on_before_backward", "on_validation_end", "on_test_start"]


def callback(name: str, **arguments: Any) -> str:
    listed = ", ".join(f"{key}: {value}" for key, value in {"_target_": f"faults.{name}", **arguments}.items())
    return f"+callbacks.{name.lower()}={{{listed}}}"


def weights(tmp_path: Path, run: str) -> dict[str, torch.Tensor]:
    return torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def curves(tmp_path: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """Every tag's steps and values over all event files of a run, as they lie in the files."""
    found: dict[str, list[tuple[int, float]]] = {}
    for events in sorted((tmp_path / run).rglob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(events), purge_orphaned_data=False).Reload()
        for tag in accumulator.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in accumulator.Scalars(tag))
    return found


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("[0-9]*")]


@pytest.mark.parametrize("moment", [pytest.param(moment, marks=slow) for moment in MOMENTS[:-2]] + MOMENTS[-2:])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(run_job: RunJob, tmp_path: Path, rank: int, moment: str) -> None:
    notes = callback("NotePid", folder=tmp_path)
    with pytest.raises(WorkerError, match=f"^rank {rank} was killed by SIGKILL; it left no traceback$"):
        run_job(*DDP2, notes, callback("KillIn", rank=rank, hook=moment))
    assert time.time() - (tmp_path / "run" / "struck").stat().st_mtime < 30
    for pid in pids(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_of_three_is_named(run_job: RunJob, rank: int) -> None:
    with pytest.raises(WorkerError, match=f"^rank {rank} was killed by SIGKILL"):
        run_job(
            "strategy=ddp",
            "trainer.devices=3",
            "data.batch_size=252",
            callback("FailAt", rank=rank, step=5, how="kill"),
        )


def test_a_rank_killed_after_its_work_does_not_hang_the_command(run_job: RunJob) -> None:
    """What it was to do is done and reported, so the job is."""
    assert run_job(*DDP2, function="faults:die_after_the_work") == 0


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param("single", callback("FailAt", rank=0, step=36, how="kill"), marks=slow),
        pytest.param("dp2", callback("FailAt", rank=0, step=36, how="kill"), marks=slow),
        ("ddp2", callback("FailAt", rank=0, step=36, how="kill")),
        pytest.param("ddp2", callback("FailAt", rank=1, step=36), marks=slow),
        ("ddp2", callback("FailAt", rank=1, step=8, how="kill")),  # before the first checkpoint
        pytest.param("ddp2", callback("KillIn", rank=0, hook="on_validation_end"), marks=slow),
        pytest.param("ddp2", callback("KillIn", rank=1, hook="on_test_start"), marks=slow),
        # each epoch writes two: killed in the third epoch's last.ckpt
        ("ddp2", "trainer.plugins=[{_target_: faults.KilledWhileSaving, number: 6}]"),
    ],
)
def test_a_restart_changes_nothing(
    run_job: RunJob, tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: str, fault: str
) -> None:
    job = (*STRATEGIES[strategy], *EPOCHS3)
    whole = run_job(*job, run="whole")
    restarted = run_job(*job, fault, "launch.max_restarts=1", run="restarted")
    assert "restart 1 of 1, from" in (tmp_path / "restarted" / "train.log").read_text()
    torch.testing.assert_close(weights(tmp_path, "restarted"), weights(tmp_path, "whole"), rtol=0, atol=0)
    for tag in (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TEST_ACC, tags.TEST_LOSS):
        assert restarted[tag] == whole[tag]
    expected, found = curves(tmp_path, "whole"), curves(tmp_path, "restarted")
    for tag in (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TRAIN_LOSS_STEP, tags.LR, tags.TEST_ACC):
        assert found[tag] == expected[tag], tag
    assert [step for step, _ in found[tags.EPOCH_SEC]] == [0, 1, 2]


def test_killed_while_saving_the_previous_checkpoint_still_loads(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 0 was killed"):
        run_job(*DDP2, *EPOCHS3, "trainer.plugins=[{_target_: faults.KilledWhileSaving, number: 4}]")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["epoch"] == 0
    metrics = run_job(*DDP2, *EPOCHS3, f"ckpt_path={path}", run="resumed")
    assert metrics[tags.TEST_ACC] > 0.5


def test_a_failure_outside_training_is_tried_again(run_job: RunJob) -> None:
    """The launcher ends rank 1 with SIGTERM, which must not count as being told to stop."""
    assert run_job(*DDP2, "launch.max_restarts=1", function="faults:fail_in_the_first_attempt") == 1
    with pytest.raises(WorkerError, match=r"^rank 0 failed:[\s\S]*OSError: broken on purpose$"):
        run_job(*DDP2, function="faults:fail_in_the_first_attempt")


def test_restarts_come_to_an_end(run_job: RunJob, tmp_path: Path) -> None:
    function = "faults:note_attempt_and_fail"
    with pytest.raises(WorkerError, match=r"^rank 0 failed:\n[\s\S]*broken on purpose, attempt 2$"):
        run_job("launch.max_restarts=2", function=function)
    assert (tmp_path / "run" / "attempts").read_text() == "012"


def test_a_refused_config_is_not_tried_again(run_job: RunJob, tmp_path: Path) -> None:
    overrides = ("data._target_=faults.NotedData", "data.batch_size=4600", "launch.max_restarts=50")
    with pytest.raises(ValueError, match=r"^data.batch_size=4600; allowed"):
        run_job(*overrides)
    assert (tmp_path / "run" / "attempts").read_text() == "0"


def test_another_runs_checkpoint_in_the_folder_is_not_taken(run_job: RunJob, tmp_path: Path) -> None:
    run_job("trainer.max_steps=3", "seed=7")
    old = tmp_path / "run" / "checkpoints" / "last.ckpt"
    os.utime(old, (time.time() - 60, time.time() - 60))
    run_job(*EPOCHS3, callback("FailAt", rank=0, step=8, how="kill"), "launch.max_restarts=1")
    run_job(*EPOCHS3, run="whole")
    torch.testing.assert_close(weights(tmp_path, "run"), weights(tmp_path, "whole"), rtol=0, atol=0)


def test_a_checkpoint_that_does_not_fit_is_one_line(
    make_config: Callable[..., DictConfig], make_disk: Callable[[str], Path]
) -> None:
    folder = make_disk("1m")  # there is room for best.ckpt, and not for last.ckpt too
    with pytest.raises(WorkerError) as failure:
        run("lockstep.training:train", make_config(*DDP2, f"run_dir={folder}/run"))
    message = str(failure.value)
    assert message.startswith(f"rank 0: the checkpoint {folder}/run/checkpoints/last.ckpt could not be written (")
    assert "No space left on device" in message
    assert "\n" not in message
    assert {path.name for path in (folder / "run" / "checkpoints").iterdir()} == {"best.ckpt"}
    assert torch.load(folder / "run" / "checkpoints" / "best.ckpt", weights_only=True)["global_step"] == 17
