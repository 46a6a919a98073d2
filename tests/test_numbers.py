"""The numbers that must hold: strategies, device counts, resuming and restarting change nothing but rounding."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import tags
from lockstep.data import MNISTSampleDataModule
from lockstep.model import CNN, LitClassifier

RunJob = Callable[..., dict[str, float]]

# 252 divides by 1, 2, 3; the sample's 500 validation and 1,000 test images do not divide by 3.
EXACT = (
    *("trainer.precision=64-true", "data.batch_size=252", "trainer.max_epochs=3"),
    *("model.net.channels=[4,8]", "model.net.hidden=32"),
)
STRATEGIES = {
    "single": ("strategy=single",),
    "dp2": ("strategy=dp", "trainer.devices=2"),
    "dp3": ("strategy=dp", "trainer.devices=3"),
    "ddp1": ("strategy=ddp", "trainer.devices=1"),
    "ddp2": ("strategy=ddp", "trainer.devices=2"),
    "ddp3": ("strategy=ddp", "trainer.devices=3"),
}
BATCH_NORM = ("model.net._target_=faults.BatchNormNet", "~model.net.channels", "~model.net.hidden")
DROPOUT = ("model.net._target_=faults.DropoutNet", "~model.net.channels", "~model.net.hidden")


def curve(tmp_path: Path, run: str, tag: str) -> list[float]:
    """A tag's values over the epochs, as TensorBoard holds them (float32)."""
    (events,) = (tmp_path / run).rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    return [event.value for event in accumulator.Scalars(tag)]


def weights(tmp_path: Path, run: str, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(tmp_path / run / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


def test_losses_and_weights_of_all_strategies_agree_in_float64(run_job: RunJob, tmp_path: Path) -> None:
    # Every epoch's loss in full: a run of k epochs of the same schedule ends with epoch k's.
    losses: dict[str, list[float]] = {}
    for name, strategy in STRATEGIES.items():
        metrics = run_job(*EXACT, *strategy, "+callbacks.history={_target_: faults.LossHistory}", run=name)
        losses[name] = json.loads((tmp_path / name / "losses.json").read_text())
        assert losses[name][-1] == metrics[tags.TRAIN_LOSS]
        assert len(losses[name]) == 3
        assert losses[name][0] > losses[name][-1]
    for name in STRATEGIES:
        torch.testing.assert_close(losses[name], losses["single"], rtol=0, atol=1e-9, msg=name)
        torch.testing.assert_close(weights(tmp_path, name), weights(tmp_path, "single"), rtol=0, atol=1e-9)


def test_only_rounding_separates_the_strategies_in_float32(run_job: RunJob) -> None:
    losses = {}
    for name in ("single", "dp2", "ddp2"):
        losses[name] = run_job(*STRATEGIES[name], run=name)[tags.TRAIN_LOSS]
    for name, loss in losses.items():
        assert abs(loss - losses["single"]) <= 1e-4, name


@pytest.mark.parametrize("model", [(), BATCH_NORM], ids=["cnn", "batch_norm"])
def test_one_checkpoint_tests_the_same_everywhere(run_job: RunJob, tmp_path: Path, model: tuple[str, ...]) -> None:
    run_job(*model, run="source")
    checkpoint = f"ckpt_path={tmp_path / 'source' / 'checkpoints' / 'last.ckpt'}"
    results = {}
    for name, strategy in STRATEGIES.items():
        # nothing is left to train, so this only tests; an odd number of samples per step, some of one sample
        metrics = run_job(
            *model,
            *strategy,
            checkpoint,
            "data.batch_size=252",
            "data.eval_batch_size=37",
            "+data.test_size=101",
            "data._target_=faults.FewTestImages",
            run=name,
        )
        results[name] = metrics[tags.TEST_ACC], metrics[tags.TEST_LOSS]
    accuracy, loss = results["single"]
    assert 0.2 < accuracy < 1
    assert (accuracy * 101) == pytest.approx(round(accuracy * 101), abs=1e-9)
    for name, (other_accuracy, other_loss) in results.items():
        assert other_accuracy == accuracy, name
        assert abs(other_loss - loss) <= 1e-6, name


@pytest.mark.parametrize("strategy", ["single", "dp2", "ddp2"])
def test_the_same_command_twice_gives_the_same_bits(run_job: RunJob, tmp_path: Path, strategy: str) -> None:
    first, second = (run_job(*STRATEGIES[strategy], run=run) for run in ("first", "second"))
    timing = ("time/", "throughput/", "phase/", "comm/", "dp/")
    for metrics in (first, second):
        for tag in [tag for tag in metrics if tag.startswith(timing)]:
            del metrics[tag]
    assert first == second
    torch.testing.assert_close(weights(tmp_path, "first"), weights(tmp_path, "second"), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [(), DROPOUT, pytest.param(("trainer.precision=64-true",), marks=pytest.mark.slow)],
    ids=["cnn", "dropout", "float64"],
)
@pytest.mark.parametrize("strategy", ["single", "ddp2"])
def test_resumed_at_an_epochs_end_gives_the_same_bits(
    run_job: RunJob, tmp_path: Path, strategy: str, options: tuple[str, ...]
) -> None:
    job = (*STRATEGIES[strategy], *options, "trainer.max_epochs=3")
    whole = run_job(*job, run="whole")
    with pytest.raises(Exception, match="broken on purpose"):
        # 17 steps an epoch: broken in the third
        run_job(*job, "+callbacks.fail={_target_: faults.FailAt, rank: 0, step: 36}", run="broken")
    resumed = run_job(*job, f"ckpt_path={tmp_path / 'broken' / 'checkpoints' / 'last.ckpt'}", run="resumed")
    torch.testing.assert_close(weights(tmp_path, "whole"), weights(tmp_path, "resumed"), rtol=0, atol=0)
    for tag in (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TEST_ACC):
        assert resumed[tag] == whole[tag]
    assert len(curve(tmp_path, "resumed", tags.TRAIN_LOSS)) == 1


@pytest.mark.slow
def test_nine_of_nine_resume_under_any_strategy(run_job: RunJob, tmp_path: Path) -> None:
    names = ("single", "dp2", "ddp2")
    expected = run_job(*EXACT, *STRATEGIES["single"], run="whole")[tags.TRAIN_LOSS]
    for source in names:
        # the schedule is the whole run's; only the run ends early
        run_job(*EXACT, *STRATEGIES[source], "+callbacks.stop={_target_: faults.StopAfter, epochs: 2}", run=source)
    for source in names:
        checkpoint = f"ckpt_path={tmp_path / source / 'checkpoints' / 'last.ckpt'}"
        for target in names:
            metrics = run_job(*EXACT, *STRATEGIES[target], checkpoint, run=f"{source}-{target}")
            assert abs(metrics[tags.TRAIN_LOSS] - expected) <= 1e-9, (source, target)
            assert math.isfinite(metrics[tags.TEST_LOSS])


def test_resuming_for_longer_stretches_the_schedule(run_job: RunJob, tmp_path: Path) -> None:
    run_job(run="short")
    checkpoint = f"ckpt_path={tmp_path / 'short' / 'checkpoints' / 'last.ckpt'}"
    run_job(checkpoint, "trainer.max_epochs=3", "trainer.log_every_n_steps=1", run="long")
    rates = curve(tmp_path, "long", tags.LR)
    assert len(rates) == 2 * 17
    # Past the top of a cycle over 51 steps, and down to its end. The first step still has the old cycle's last rate.
    assert rates[1] == max(rates[1:])
    assert rates[-1] < 1e-4


@pytest.mark.parametrize(
    "options",
    [("trainer.val_check_interval=0.5",), ("trainer.check_val_every_n_epoch=2",), ("trainer.max_steps=40",)],
    ids=lambda options: options[0],
)
def test_checkpoints_of_unusual_rhythms_resume(run_job: RunJob, tmp_path: Path, options: tuple[str, ...]) -> None:
    run_job(*options, "trainer.max_epochs=3", run="source")
    for name in ("best", "last"):
        checkpoint = tmp_path / "source" / "checkpoints" / f"{name}.ckpt"
        metrics = run_job(*options, "trainer.max_epochs=4", "trainer.max_steps=60", f"ckpt_path={checkpoint}", run=name)
        assert 0.3 < metrics[tags.TEST_ACC] <= 1
        assert (tmp_path / name / "checkpoints" / "last.ckpt").exists()


def test_a_checkpoint_with_nothing_left_to_train_is_tested_itself(run_job: RunJob, tmp_path: Path) -> None:
    run_job(run="source")
    (tmp_path / "source").rename(tmp_path / "moved")
    (tmp_path / "moved" / "checkpoints" / "best.ckpt").unlink()
    path = tmp_path / "moved" / "checkpoints" / "last.ckpt"
    model = LitClassifier.load_from_checkpoint(path, net=CNN(), optimizer=torch.optim.SGD)
    _, test = MNISTSampleDataModule().load()
    datamodule = MNISTSampleDataModule()
    datamodule.trainer = SimpleNamespace(lightning_module=model)
    outputs = model.eval().validation_step(datamodule.on_after_batch_transfer(test[:], 0), 0)
    assert run_job(f"ckpt_path={path}")[tags.TEST_ACC] == outputs["acc"].double().mean().item()


def test_a_checkpoint_holds_the_config_and_opens_weights_only(run_job: RunJob, tmp_path: Path) -> None:
    run_job("strategy=ddp", "trainer.devices=2", "model.net.channels=[2, 3]", run="run")
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt"]
    for name in ("best", "last"):
        checkpoint: dict[str, Any] = torch.load(folder / f"{name}.ckpt", weights_only=True)
        assert checkpoint["hyper_parameters"]["strategy"]["name"] == "ddp"
        assert checkpoint["hyper_parameters"]["model"]["net"]["channels"] == [2, 3]
        assert all(key.startswith("net.") for key in checkpoint["state_dict"])
