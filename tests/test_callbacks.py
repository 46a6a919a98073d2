"""What the small callbacks do to a loss or an exception, and what importing them costs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks import FailureNote, FiniteLoss
from lockstep.errors import RunError


def trainer_at(batch: int, device: str = "cpu", function: str = TrainerFn.FITTING) -> SimpleNamespace:
    return SimpleNamespace(
        fit_loop=SimpleNamespace(batch_idx=batch),
        state=SimpleNamespace(fn=function),
        strategy=SimpleNamespace(root_device=torch.device(device)),
        **{"current_epoch": 1, "global_step": 7, "global_rank": 0},
    )


def test_on_the_cpu_every_loss_is_checked_before_its_backward_pass() -> None:
    callback = FiniteLoss()
    callback.on_before_backward(trainer_at(2), None, torch.tensor(1.0))
    with pytest.raises(RunError, match=r"^the loss is nan in epoch 1, batch 3, step 7, on rank 0$"):
        callback.on_before_backward(trainer_at(3), None, torch.tensor(float("nan")))


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_save_checkpoint"])
def test_elsewhere_losses_are_checked_together(hook: str) -> None:
    callback = FiniteLoss(every_n_batches=3)
    callback.on_before_backward(trainer_at(0, "cuda"), None, torch.tensor(float("inf")))
    callback.on_before_backward(trainer_at(1, "cuda"), None, torch.tensor(1.0))
    with pytest.raises(RunError, match="^the loss is inf in epoch 1, batch 0"):
        callback.on_before_backward(trainer_at(2, "cuda"), None, torch.tensor(1.0))
    callback.on_before_backward(trainer_at(4, "cuda"), None, torch.tensor(float("inf")))
    with pytest.raises(RunError, match="^the loss is inf in epoch 1, batch 4"):
        getattr(callback, hook)(trainer_at(4, "cuda"), None)


@pytest.mark.parametrize(
    ("error", "function", "notes"),
    [
        (OSError("broken"), "fit", ["in epoch 1, batch 4, step 7, on rank 0"]),
        (OSError("broken"), "test", []),
        (KeyboardInterrupt(), "fit", []),
    ],
)
def test_an_exception_is_reported_with_its_position(error: BaseException, function: str, notes: list[str]) -> None:
    reported: list[tuple[BaseException, list[str]]] = []
    worker = SimpleNamespace(report=lambda error: reported.append((error, getattr(error, "__notes__", []))))
    FailureNote(worker).on_exception(trainer_at(4, function=function), None, error)
    assert reported == [(error, notes)]


def test_a_refused_config_is_not_a_failure() -> None:
    FailureNote(None).on_exception(trainer_at(0), None, error := MisconfigurationException("refused"))
    assert not hasattr(error, "__notes__")


def test_importing_the_callbacks_draws_and_writes_nothing() -> None:
    # torchmetrics, which Lightning imports, imports matplotlib by itself
    code = (
        "import sys, lightning.pytorch; before = set(sys.modules); import lockstep.callbacks;"
        "print(*({name.partition('.')[0] for name in set(sys.modules) - before} & {'matplotlib', 'tensorboard'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
