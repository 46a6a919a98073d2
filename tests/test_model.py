"""The network's shapes and the steps' outputs."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lockstep.model import CNN, LitClassifier


@pytest.fixture
def module() -> LitClassifier:
    torch.manual_seed(0)
    return LitClassifier(CNN(channels=(2, 3), hidden=4), partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("batch_size", [0, 1, 5])  # 0: a shard of an evaluation batch smaller than the world
def test_network_maps_images_to_logits(module: LitClassifier, batch_size: int) -> None:
    images = torch.randn(batch_size, 1, 28, 28)
    assert module(images).shape == (batch_size, 10)
    outputs = module.validation_step((images, torch.zeros(batch_size, dtype=torch.int64)), 0)
    assert outputs["loss"].shape == outputs["acc"].shape == (batch_size,)


def test_network_pools_channels_last(module: LitClassifier) -> None:
    feature_map = module.net.conv1(torch.randn(2, 1, 28, 28))
    assert feature_map.is_contiguous(memory_format=torch.channels_last)


def test_evaluation_says_what_training_minimises_and_what_is_right(module: LitClassifier) -> None:
    images, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    outputs = module.validation_step((images, labels), 0)
    torch.testing.assert_close(outputs["loss"].mean(), module.training_step((images, labels), 0))
    assert outputs["acc"].tolist() == (module(images).argmax(1) == labels).tolist()
    torch.testing.assert_close(outputs["loss"], F.cross_entropy(module(images), labels, reduction="none"))


def test_without_a_schedule_the_rate_is_the_optimizers(module: LitClassifier) -> None:
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_other_schedules_are_restored_as_they_are(module: LitClassifier) -> None:
    checkpoint = {"lr_schedulers": [{"last_epoch": 3, "T_max": 10}]}
    module.on_load_checkpoint(checkpoint)
    assert checkpoint == {"lr_schedulers": [{"last_epoch": 3, "T_max": 10}]}
    module.on_load_checkpoint({})  # weights only
