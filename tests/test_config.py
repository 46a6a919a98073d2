"""The config composes, says what the design says, and refuses what cannot run."""

import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

from lockstep import config
from lockstep.errors import ConfigError
from lockstep.strategies import DataParallelStrategy

MakeConfig = Callable[..., DictConfig]


@pytest.mark.parametrize(
    ("strategy", "devices", "processes", "plugin"),
    [("single", 1, 1, str), ("dp", 3, 1, DataParallelStrategy), ("ddp", 3, 3, DDPStrategy)],
)
def test_strategy_decides_how_devices_are_used(
    make_config: MakeConfig, strategy: str, devices: int, processes: int, plugin: type
) -> None:
    cfg = make_config(f"strategy={strategy}", "trainer.devices=3", "data.batch_size=255")
    config.check(cfg)
    assert cfg.strategy.devices == devices
    assert cfg.launch.nproc_per_node == processes
    assert config.world_size(cfg) * config.replicas(cfg) == devices
    assert type(instantiate(cfg.strategy).plugin) is plugin


def test_trainer_keys_are_exactly_lightnings(make_config: MakeConfig) -> None:
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert set(make_config().trainer) == arguments - {"strategy", "logger", "callbacks"}


def test_every_strategy_file_is_short() -> None:
    for path in (config.PROJECT / "conf" / "strategy").glob("*.yaml"):
        assert 4 <= len(path.read_text().splitlines()) <= 9, path


@pytest.mark.parametrize("data", ["mnist", "mnist_sample"])
@pytest.mark.parametrize("model", ["cnn", "cnn_wide"])
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_every_combination_composes(make_config: MakeConfig, data: str, model: str, strategy: str) -> None:
    cfg = make_config(f"data={data}", f"model={model}", f"strategy={strategy}")
    config.check(cfg)
    assert not OmegaConf.missing_keys(cfg)
    OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.devices=0"], ["trainer.devices=0", "whole number >= 1"]),
        (["trainer.devices=-1"], ["trainer.devices=-1", "whole number >= 1"]),
        (["trainer.devices=auto"], ["trainer.devices=auto", "whole number >= 1"]),
        (["trainer.devices=true"], ["trainer.devices=True", "whole number >= 1"]),
        (["trainer.devices=2.5"], ["trainer.devices=2.5", "whole number >= 1"]),
        (["trainer.num_nodes=0"], ["trainer.num_nodes=0", "whole number >= 1"]),
        (["data.batch_size=0"], ["data.batch_size=0", "whole number >= 1"]),
        (["seed=-1"], ["seed=-1", "whole number >= 0"]),
        (["seed=4294967296"], ["seed=4294967296", "up to 4294967295"]),
        (["data.val_size=0.5"], ["data.val_size=0.5", "whole number >= 1"]),
        (["launch.max_restarts=-1"], ["launch.max_restarts=-1", "whole number >= 0"]),
        (["launch.threads_per_process=0"], ["launch.threads_per_process=0", "whole number >= 1"]),
        (["launch.start_method=fork"], ["launch.start_method=fork", "forkserver, spawn"]),
        (["optimized_metric=val/f1"], ["optimized_metric=val/f1", "val/acc"]),
        (
            ["strategy=ddp", "trainer.devices=3", "data.batch_size=100"],
            ["data.batch_size=100", "3 processes", "multiple of 3", "99"],
        ),
        (["strategy=ddp", "trainer.devices=3", "data.batch_size=2"], ["data.batch_size=2", "such as 3"]),
        (["strategy=dp", "trainer.num_nodes=2"], ["trainer.num_nodes=2", "strategy=dp", "strategy=ddp"]),
        (["strategy=single", "trainer.num_nodes=2"], ["trainer.num_nodes=2", "strategy=single", "strategy=ddp"]),
        (["strategy=ddp", "trainer.num_nodes=2"], ["launch.rdzv_endpoint=null", "HOST:PORT"]),
        (["launch.nproc_per_node=2"], ["launch.nproc_per_node=2", "allowed: 1"]),
        (["ckpt_path=/nonexistent/last.ckpt"], ["ckpt_path=/nonexistent/last.ckpt", "does not exist"]),
    ],
)
def test_refusals_name_the_key_the_value_and_what_is_allowed(
    make_config: MakeConfig, overrides: list[str], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        config.check(make_config(*overrides))
    message = str(refusal.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(("world_size", "share"), [(1, 256), (2, 128), (4, 64), (256, 1)])
def test_global_batch_is_shared_out(world_size: int, share: int) -> None:
    assert config.per_process_batch_size("data.batch_size", 256, world_size) == share


def test_folders_are_the_projects_whatever_the_working_directory(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_config("data=mnist").data.root == str(config.PROJECT / "data")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_withdrawn_releases_of_lightning_are_not_admitted(version: str) -> None:
    lines = (config.PROJECT / "requirements.txt").read_text().splitlines()
    (lightning,) = (Requirement(line.partition("#")[0]) for line in lines if line.startswith("lightning"))
    assert version not in lightning.specifier
    assert importlib.metadata.version("lightning") in lightning.specifier


@pytest.mark.parametrize("key", ["launch.rdzv_endpoint", "launch.local_addr"])
def test_one_node_needs_no_meeting_point(make_config: MakeConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=10.0.0.1 with trainer.num_nodes=1; allowed: null"):
        config.check(make_config(f"{key}=10.0.0.1"))
