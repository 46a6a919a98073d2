"""ThreadedDataParallel computes what the unwrapped module computes; DataParallelStrategy fits into Lightning."""

import subprocess
import sys
import threading
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lockstep.model import CNN
from lockstep.strategies import DataParallelStrategy, ThreadedDataParallel

Parallel = Callable[..., ThreadedDataParallel]
Point = namedtuple("Point", ["x", "y"])


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    """Make ThreadedDataParallel modules, and end their threads after the test."""
    made = []

    def make(module: nn.Module, num_replicas: int = 2) -> ThreadedDataParallel:
        made.append(ThreadedDataParallel(module, num_replicas))
        return made[-1]

    yield make
    for module in made:
        module.shutdown()


class Call(nn.Module):
    """A module with one weight, whose forward is the given function of weight and inputs."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0, dtype=dtype))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("num_replicas", range(1, 6))
def test_outputs_and_gradients_are_the_modules(
    parallel: Parallel, num_replicas: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    net = CNN(channels=(2, 3)).to(dtype)
    replicas = parallel(net, num_replicas)
    for batch_size in range(1, 18):
        images = torch.randn(batch_size, 1, 28, 28, dtype=dtype, requires_grad=True)
        labels = torch.randint(10, (batch_size,))
        results = []
        for module in (net, replicas):
            logits = module(images)
            F.cross_entropy(logits, labels).backward()
            results.append([logits.detach(), images.grad.clone(), *gradients(net)])
            images.grad = None
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "chunks"), [(9, 4, [3, 3, 3]), (8, 4, [2, 2, 2, 2]), (1, 3, [1])]
)
def test_each_chunk_has_its_thread(parallel: Parallel, batch_size: int, num_replicas: int, chunks: list[int]) -> None:
    seen = []
    together = threading.Barrier(len(chunks), timeout=20)

    def record(weight: Tensor, x: Tensor) -> Tensor:
        together.wait()  # passes only if all replicas run at the same time
        seen.append((len(x), threading.get_ident()))
        return x * weight

    parallel(Call(record), num_replicas)(torch.ones(batch_size, 3, dtype=torch.float64))
    assert sorted(size for size, _ in seen) == sorted(chunks)
    assert len({thread for _, thread in seen}) == len(chunks)
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_backward_runs_in_the_replicas_threads(parallel: Parallel) -> None:
    threads = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            threads.append(threading.current_thread().name)
            return grad

    module = parallel(Call(lambda weight, x: Spy.apply(x * weight)), 3)
    module(torch.ones(6, 3, dtype=torch.float64)).sum().backward()
    assert len(threads) == len(set(threads)) == 3
    assert all(name.startswith("replica") for name in threads)


def test_replicas_have_weights_of_their_own(parallel: Parallel) -> None:
    pointers = []

    def record(weight: Tensor, x: Tensor) -> Tensor:
        pointers.append(weight.data_ptr())
        return x * weight

    module = Call(record)
    parallel(module, 2)(torch.ones(4, 3, dtype=torch.float64))
    assert len({*pointers, module.weight.data_ptr()}) == 3


def test_containers_keywords_and_constants_follow_torchs_rules(parallel: Parallel) -> None:
    def forward(weight: Tensor, pair: Any, *, scale: int, table: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(pair, Point)
        return {
            "point": Point(pair.x * weight * scale, [table["z"][0] + weight]),
            "class": (pair.x.sum(1) > 0).long(),
            "nothing": None,
            "mean": pair.y.mean() * weight.sum(),
        }

    x, y, z = (torch.randn(5, 3, dtype=torch.float64) for _ in range(3))
    module = Call(forward)
    found = parallel(module, 2)(Point(x, y), scale=2, table={"z": (z, "text")})
    expected = module(Point(x, y), scale=2, table={"z": (z, "text")})
    assert isinstance(found["point"], Point)
    torch.testing.assert_close(found["point"], expected["point"])
    torch.testing.assert_close(found["class"], expected["class"])
    assert not found["class"].requires_grad
    assert found["nothing"] is None
    weight = module.weight.sum()
    torch.testing.assert_close(found["mean"], torch.stack([y[:3].mean() * weight, y[3:].mean() * weight]))


def test_gradient_reaches_every_kind_of_output_and_only_the_inputs_that_want_it(parallel: Parallel) -> None:
    def forward(weight: Tensor, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * weight).sum(1), x.mean() * weight.sum(), y * 2

    module = Call(forward)
    x, y, z = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    z.requires_grad_()
    rows, mean, constant = parallel(module, 2)(x, y, z)
    assert not constant.requires_grad
    (rows.sum() + mean.sum()).backward()
    found = [module.weight.grad.clone(), x.grad.clone()]
    assert y.grad is None
    assert z.grad is None
    module.weight.grad = x.grad = None
    rows, mean, _ = module(x, y, z)
    # the scalar output of two replicas is a vector of their means
    (rows.sum() + 2 * mean).backward()
    torch.testing.assert_close(found, [module.weight.grad, x.grad])


def test_gradients_add_up_over_backward_passes(parallel: Parallel) -> None:
    module = Call(lambda weight, x: x * weight)
    loss = parallel(module, 2)(torch.ones(4, 3, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(module.weight.grad, torch.full((3,), 8.0, dtype=torch.float64))


def test_frozen_and_unused_parameters_get_no_gradient(parallel: Parallel) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (
                nn.Linear(3, 2),
                nn.Linear(2, 2).requires_grad_(False),
                nn.Linear(3, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    net = Net()
    parallel(net, 2)(torch.ones(4, 3)).sum().backward()
    assert net.used.weight.grad is not None
    assert net.frozen.weight.grad is None
    assert net.unused.weight.grad is None


def test_shared_weights_and_recurrent_layers(parallel: Parallel) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 3, batch_first=True)
            self.head = nn.Linear(3, 3, bias=False)
            self.head.weight = self.rnn.weight_hh_l0  # (12, 3): one tensor under two names

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    net(x).square().sum().backward()
    expected = gradients(net)
    parallel(net, 3)(x).square().sum().backward()
    torch.testing.assert_close(gradients(net), expected)


def test_a_module_that_keeps_its_weights_in_a_list_too(parallel: Parallel) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [None]
            self.weight = nn.Parameter(torch.ones(3))

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "weight":
                self.weights[0] = value
            super().__setattr__(name, value)

        def _replicate_for_data_parallel(self) -> nn.Module:
            replica = super()._replicate_for_data_parallel()
            replica.weights = list(self.weights)
            return replica

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weights[0]

    module = Listed()
    parallel(module, 2)(torch.ones(4, 3)).sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((3,), 4.0))


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_an_exception_comes_out_once_with_its_traceback(parallel: Parallel, how: str) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("broken backward")

    def broken_layer(weight: Tensor, x: Tensor) -> Tensor:
        if how == "forward" and x[0, 0] == 3:  # the second replica only
            raise KeyError("broken forward")
        return Broken.apply(x * weight)

    module = parallel(Call(broken_layer), 2)
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    with pytest.raises(KeyError, match=f"broken {how}") as error:
        module(x).sum().backward()
    frames = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert ("broken_layer" if how == "forward" else "backward") in frames
    if how == "forward":
        assert frames.count("broken_layer") == 1
        module(torch.zeros(2, 3, dtype=torch.float64))  # and the module still works


def test_grad_inference_and_autocast_modes_are_the_callers(parallel: Parallel) -> None:
    seen = []

    def record(weight: Tensor, x: Tensor) -> Tensor:
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        seen.append((*modes, (x @ x.T).dtype))
        return x * weight

    module = parallel(Call(record, torch.float32), 2)
    x = torch.ones(4, 3)
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert module(x).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).requires_grad
    assert module(x).requires_grad
    assert seen[0] == seen[1] == (False, False, False, torch.float32)
    assert seen[2] == seen[3] == (False, True, False, torch.float32)
    assert seen[4] == seen[5] == (True, False, True, torch.bfloat16)
    assert seen[6] == seen[7] == (True, False, False, torch.float32)


def test_autocast_gradients_are_the_modules(parallel: Parallel) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    results = []
    for module in (net, parallel(net, 2)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(x)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        results.append(gradients(net))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)  # bfloat16 has 8 bits


def test_buffers_are_replica_zeros(parallel: Parallel) -> None:
    torch.manual_seed(0)
    batch_norm, alone = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    parallel(batch_norm, 2)(x)
    alone(x[:4])
    torch.testing.assert_close(dict(batch_norm.named_buffers()), dict(alone.named_buffers()))
    assert batch_norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [((torch.ones(4, 3), torch.ones(5, 3)), r"\(4, 3\), \(5, 3\)"), ((torch.ones(4, 3), torch.tensor(1.0)), r"\(\)")],
)
def test_tensors_must_share_the_batch_dimension(parallel: Parallel, inputs: tuple[Tensor, ...], shapes: str) -> None:
    with pytest.raises(ValueError, match=shapes):
        parallel(Call(lambda weight, *x: x[0]), 2)(*inputs)


def test_outputs_that_cannot_be_gathered_are_named(parallel: Parallel) -> None:
    with pytest.raises(TypeError, match="got str"):
        parallel(Call(lambda weight, x: "text"), 2)(torch.ones(4, 3))
    with pytest.raises(TypeError, match="different structures"):
        parallel(Call(lambda weight, x: [x] * len(x)), 2)(torch.ones(3, 3))


def test_second_derivatives_are_refused(parallel: Parallel) -> None:
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    output = parallel(Call(lambda weight, x: x * weight), 2)(x).square().sum()
    (grad,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_tensors_at_all(parallel: Parallel) -> None:
    module = Call(lambda weight: weight * 2)
    torch.testing.assert_close(parallel(module, 2)(), module())
    ones = Call(lambda weight, size: weight.new_ones(size))
    assert len(parallel(ones, 2)(3)) == 6  # as in torch.nn.DataParallel, every replica gets the constant


# -------------------------------------------------------------------------------------------- the Lightning strategy


class Model(BoringModel):
    """A BoringModel that calls `self(...)` on its batch and records the threads that ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return super().forward(x)


def make_trainer(tmp_path: Path, **kwargs: Any) -> pl.Trainer:
    options = {
        "strategy": DataParallelStrategy(),
        "accelerator": "cpu",
        "devices": 3,
        "default_root_dir": tmp_path,
        "max_steps": 2,
        "limit_val_batches": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(**options | kwargs)


class Batches(BoringModel):
    """Loaders of batches of 6, so that there is something to scatter."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(super().train_dataloader().dataset, batch_size=6)

    val_dataloader = train_dataloader


class BatchModel(Model, Batches):
    pass


def test_a_lightning_module_needs_no_change(tmp_path: Path) -> None:
    model = BatchModel()
    names = list(model.state_dict())
    trainer = make_trainer(tmp_path)
    trainer.fit(model)
    assert len(model.threads) == 3
    assert all(name.startswith("replica") for name in model.threads)
    assert trainer.world_size == 1
    assert trainer.global_rank == 0
    assert not trainer._accelerator_connector.is_distributed  # or Lightning injects a sampler that drops half the data
    assert list(model.state_dict()) == names
    assert "forward" not in vars(model)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("replica")]
    trainer.save_checkpoint(tmp_path / "dp.ckpt")
    assert list(torch.load(tmp_path / "dp.ckpt", weights_only=True)["state_dict"]) == names


def test_fit_equals_the_single_device(tmp_path: Path) -> None:
    weights = []
    for strategy, devices in ((DataParallelStrategy(), 3), ("auto", 1)):
        pl.seed_everything(0, verbose=False)
        model = BatchModel()
        trainer = make_trainer(tmp_path, strategy=strategy, devices=devices, precision="64-true", max_steps=10)
        trainer.fit(model)
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


def test_predict_test_and_validate_share_out_too(tmp_path: Path) -> None:
    for run in (pl.Trainer.validate, pl.Trainer.test, pl.Trainer.predict):
        model = BatchModel()
        run(make_trainer(tmp_path), model, model.train_dataloader())
        assert len(model.threads) == 3


def test_a_step_that_sends_nothing_through_self_is_refused(tmp_path: Path) -> None:
    class Bypass(BatchModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).sum()

    with pytest.raises(MisconfigurationException, match=r"call `self\(batch\)`"):
        make_trainer(tmp_path).fit(Bypass())


def test_what_dp_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match="num_nodes=2"):
        make_trainer(tmp_path, num_nodes=2)
    with pytest.raises(MisconfigurationException, match="sync_batchnorm=True"):
        make_trainer(tmp_path, sync_batchnorm=True).fit(BatchModel())
    strategy = DataParallelStrategy(parallel_devices=[torch.device("meta")] * 2)
    strategy.cluster_environment = make_trainer(tmp_path)._accelerator_connector.cluster_environment
    with pytest.raises(MisconfigurationException, match="'meta'.*'cpu' and 'cuda'"):
        strategy.setup_environment()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(MisconfigurationException, match="launcher started 2"):
        make_trainer(tmp_path).fit(BatchModel())


def test_the_module_is_whole_again_after_a_failure(tmp_path: Path) -> None:
    class Fails(BatchModel):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("broken on purpose")

    model = Fails()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        make_trainer(tmp_path).fit(model)
    assert "forward" not in vars(model)


def test_imports_nothing_else_of_the_project() -> None:
    code = "import sys, lockstep.strategies; print(sorted(name for name in sys.modules if name.startswith('lockstep')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['lockstep', 'lockstep.strategies']"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_cuda_replicas_give_the_modules_gradients(tmp_path: Path, batch_size: int) -> None:
    torch.manual_seed(0)
    net = CNN(channels=(2, 3)).double().cuda()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images)

    module = Module()
    strategy = DataParallelStrategy(parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    images = torch.randn(batch_size, 1, 28, 28, dtype=torch.float64, device="cuda")
    module(images).square().sum().backward()
    expected = gradients(net)
    strategy._setup_model(module)
    module(images).square().sum().backward()
    torch.testing.assert_close(gradients(net), expected, rtol=0, atol=1e-12)
