"""DataParallel for Lightning 2.

Lightning 2.0 dropped its `dp` strategy. `DataParallelStrategy` brings it back: on CUDA through `torch.nn.DataParallel`,
on the CPU through `ThreadedDataParallel`, which has real replicas where `torch.nn.DataParallel` would silently call the
module once. This file needs torch and Lightning only, and can be imported or copied alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

T = TypeVar("T")


class ThreadedDataParallel(nn.Module):
    """`torch.nn.DataParallel` for the CPU: replicas with weights of their own, one thread each.

    The inputs are scattered along dimension 0, every replica runs forward **and backward** on its chunk in its own
    thread, the outputs are gathered along dimension 0, and the replicas' gradients are summed into the module's
    parameters, always in the same order. Buffers are replica 0's: it shares them with the module, so what it changes in
    place (BatchNorm's running statistics) is kept. Grad mode, inference mode and autocast are the caller's.

    As with `torch.nn.DataParallel`, tensors are cut as `torch.chunk` does it (9 samples on 4 replicas make three chunks
    of 3, and three replicas run), containers are walked, anything else goes to every replica as it is, and scalar
    outputs become a vector with one element per replica. Replicas that draw random numbers share one generator, so
    their dropout masks depend on the threads' timing. Second derivatives are refused.

    Args:
        module: The module to replicate; its own parameters and buffers stay where they are.
        num_replicas: Replicas, and threads.

    Raises:
        ValueError: From `forward`, if input tensors disagree in dimension 0 or have none.
        TypeError: From `forward`, if the replicas return what cannot be gathered.
    """

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        super().__init__()
        self.module = module
        # one thread each rather than one pool: a fast thread must not take two replicas while another idles
        self.threads = [ThreadPoolExecutor(1, thread_name_prefix=f"replica-{i}") for i in range(num_replicas)]
        self.seconds: Counter[str] = Counter()  # spent beside the module's own work, by what: scatter, replicate, ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        with _timed("scatter", self.seconds):
            call = _Call(self, leaves, spec)
        differentiable = [*call.parameters, *(leaves[i] for i in call.differentiable)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable):
            outputs = _Replicas.apply(call, *differentiable)
        else:
            outputs = call.forward()
        return tree_unflatten(list(outputs), call.output_spec)

    def shutdown(self) -> None:
        """End the threads; the module cannot be called any more."""
        for thread in self.threads:
            thread.shutdown()


class _Call:
    """One pass through the replicas: the forward half, and what the backward half needs of it."""

    output_spec: TreeSpec

    def __init__(self, parallel: ThreadedDataParallel, leaves: list[Any], spec: TreeSpec) -> None:
        self.module, self.threads, self.seconds = parallel.module, parallel.threads, parallel.seconds
        self.parameters = list(parallel.module.parameters())
        self.differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.chunks, self.spec = _scatter(leaves, len(parallel.threads)), spec

    def forward(self, track: bool = False) -> tuple[Any, ...]:
        """Run the replicas; their flattened outputs, gathered.

        Args:
            track: Whether the replicas record what `backward` needs.
        """
        enter_context = _caller_context(grad=track)

        def run(index: int, chunk: list[Any]) -> tuple[list[Tensor], list[Any], TreeSpec, Counter[str]]:
            seconds: Counter[str] = Counter()
            with enter_context():
                with _timed("replicate", seconds):
                    replica, weights = _replicate(self.module, self.parameters, share_buffers=index == 0)
                inputs = [chunk[i].requires_grad_(track) for i in self.differentiable]
                args, kwargs = tree_unflatten(chunk, self.spec)
                with torch.profiler.record_function("replica forward"):
                    outputs, spec = tree_flatten(replica(*args, **kwargs))
            return weights + inputs, outputs, spec, seconds

        results = _in_threads(self.threads, run, range(len(self.chunks)), self.chunks)
        self.leaves, self.outputs, specs, seconds = ([result[i] for result in results] for i in range(4))
        self.seconds["replicate"] += max(each["replicate"] for each in seconds)  # they replicate at the same time
        self.output_spec = specs[0]
        if any(spec != self.output_spec for spec in specs):
            raise TypeError(f"the replicas returned different structures: {', '.join(map(str, specs))}")
        with _timed("gather", self.seconds):
            return tuple(_gather(values) for values in zip(*self.outputs, strict=True))

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters, then of the inputs, from those of the gathered outputs."""
        by_output = zip(grads, zip(*self.outputs, strict=True), strict=True)
        with _timed("scatter", self.seconds):
            shares = list(zip(*(_scatter_grad(grad, values) for grad, values in by_output), strict=True))
        by_replica = _in_threads(self.threads, _replica_grads, self.outputs, shares, self.leaves)
        pairs = list(zip(zip(*by_replica, strict=True), zip(*self.leaves, strict=True), strict=True))
        num_parameters = len(self.parameters)
        with _timed("reduce", self.seconds):
            of_parameters = [_sum_grads(grads) for grads, _ in pairs[:num_parameters]]
        return of_parameters + [_join_grads(grads, chunks) for grads, chunks in pairs[num_parameters:]]


class _Replicas(torch.autograd.Function):
    """Joins the replicas' graphs, one per thread, to the caller's."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *differentiable: Tensor) -> tuple[Any, ...]:
        outputs = call.forward(track=True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        by_output = zip(outputs, zip(*call.outputs, strict=True), strict=True)
        constant = [output for output, values in by_output if not any(_requires_grad(value) for value in values)]
        ctx.mark_non_differentiable(*(output for output in constant if output is not None))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.backward(grads)


@contextmanager
def _timed(what: str, seconds: Counter[str]) -> Iterator[None]:
    """Add the time that the block takes, s, and show it to a profiler under this name."""
    start = time.perf_counter()
    with torch.profiler.record_function(what):
        yield
    seconds[what] += time.perf_counter() - start


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _in_threads(
    threads: Sequence[ThreadPoolExecutor], function: Callable[..., T], *arguments: Iterable[Any]
) -> list[T]:
    """`function` of each replica's arguments; the first replica's exception if any failed, once all have ended."""
    calls = zip(*arguments, strict=True)
    futures = [thread.submit(function, *each) for thread, each in zip(threads, calls, strict=False)]
    wait(futures)
    return [future.result() for future in futures]


def _caller_context(grad: bool) -> Callable[[], AbstractContextManager[None]]:
    """The calling thread's modes, to be entered in other threads, which start with the defaults."""
    inference = torch.is_inference_mode_enabled()
    autocast = {
        "dtype": torch.get_autocast_dtype("cpu"),
        "enabled": torch.is_autocast_enabled("cpu"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }

    @contextmanager
    def enter() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", **autocast):
            yield

    return enter


def _scatter(leaves: list[Any], num_replicas: int) -> list[list[Any]]:
    """One list of leaves per replica: tensors cut along dimension 0, everything else as it is."""
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves if isinstance(leaf, Tensor)}
    if None in lengths or len(lengths) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise ValueError(f"tensors sent through the replicas must share dimension 0, the batch; got shapes {shapes}")
    cut = [list(leaf.detach().chunk(num_replicas)) if isinstance(leaf, Tensor) else None for leaf in leaves]
    num_chunks = next((len(pieces) for pieces in cut if pieces is not None), num_replicas if leaves else 1)
    return [
        # detached once more: what `chunk` returns may not be changed in place
        [leaf if pieces is None else pieces[i].detach() for leaf, pieces in zip(leaves, cut, strict=True)]
        for i in range(num_chunks)
    ]


def _replicate(
    module: nn.Module, parameters: Sequence[nn.Parameter], share_buffers: bool
) -> tuple[nn.Module, list[Tensor]]:
    """A copy of the module tree with weights of its own, and those weights, in the order of `parameters`.

    Everything else (hooks, plain attributes) is shared, as in `torch.nn.parallel.replicate`.
    """
    weights = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    weight_of = {id(p): weight for p, weight in zip(parameters, weights, strict=True)}
    buffer_of = {} if share_buffers else {id(buffer): buffer.clone() for buffer in module.buffers()}
    replica_of = {id(original): original._replicate_for_data_parallel() for original in module.modules()}
    for original in module.modules():
        replica = replica_of[id(original)]
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                # not into the dict: a module may keep its weights elsewhere too, as torch's RNNs do
                setattr(replica, name, weight_of[id(parameter)])
        for name, buffer in original._buffers.items():
            replica._buffers[name] = buffer_of.get(id(buffer), buffer)
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else replica_of[id(child)]
    return replica_of[id(module)], weights


def _gather(values: Sequence[Any]) -> Any:
    """One output of all replicas, joined along dimension 0 and cut off from their graphs."""
    if all(value is None for value in values):
        return None
    if not all(isinstance(value, Tensor) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise TypeError(f"replicas can return tensors, None and containers of them; got {', '.join(kinds)}")
    return torch.cat([value.detach().reshape(1) if value.ndim == 0 else value.detach() for value in values])


def _scatter_grad(grad: Tensor | None, outputs: Sequence[Any]) -> list[Tensor | None]:
    """Each replica's share of one gathered output's gradient."""
    if grad is None:
        return [None] * len(outputs)
    shares = grad.split([output.shape[0] if output.ndim else 1 for output in outputs])
    return [share.reshape(output.shape) for share, output in zip(shares, outputs, strict=True)]


def _replica_grads(outputs: list[Any], grads: Sequence[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    """One replica's backward pass: the gradients of its weights and inputs."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and _requires_grad(output)
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    used, their_grads = zip(*pairs, strict=True)
    # The graph lives as long as the call, since the caller may keep its own and go backward through it again.
    with torch.profiler.record_function("replica backward"):
        found = iter(torch.autograd.grad(used, wanted, their_grads, retain_graph=True, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _sum_grads(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return sum(present[1:], start=present[0]) if present else None


def _join_grads(grads: Sequence[Tensor | None], chunks: Sequence[Tensor]) -> Tensor | None:
    if all(grad is None for grad in grads):
        return None
    filled = (torch.zeros_like(chunk) if grad is None else grad for grad, chunk in zip(grads, chunks, strict=True))
    return torch.cat(list(filled))


class _ClassForward(nn.Module):
    """Calls a LightningModule's own `forward`, past the one that `DataParallelStrategy` puts on the instance."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


class DataParallelStrategy(ParallelStrategy):
    """One process, one replica of the model per device.

    What a LightningModule sends through `self(...)` is replicated, scattered, run in one thread per replica, and
    gathered on the first device. The rest of the step, loss and logging included, runs once. That is what
    `model = nn.DataParallel(model); output = model(x)` does in plain torch, and it needs no change to a
    LightningModule: the loss is the mean over the whole batch for any batch size, and checkpoints have the names of the
    unwrapped module.

        Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy())

    To Lightning it is one process: rank 0 of a world of 1, so no sampler is injected and nothing is reduced.

    Args: as for `lightning.pytorch.strategies.ParallelStrategy`; normally none.

    Raises:
        MisconfigurationException: For more than one node or process, an accelerator other than CPU or CUDA,
            `sync_batchnorm`, or a `training_step` that never calls `self(...)` and so would run on one device.
    """

    strategy_name = "dp"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replicas: nn.Module | None = None
        self._shared_out = False

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(
                f"Trainer(num_nodes={num_nodes}): DataParallelStrategy is one process on one node; allowed: 1"
            )

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        if self.root_device.type not in ("cpu", "cuda"):
            raise MisconfigurationException(
                f"Trainer(accelerator={self.root_device.type!r}): DataParallelStrategy allows 'cpu' and 'cuda'"
            )
        if (processes := self.cluster_environment.world_size()) != 1:
            raise MisconfigurationException(f"DataParallelStrategy is one process; the launcher started {processes}")
        if self._layer_sync is not None:
            raise MisconfigurationException("Trainer(sync_batchnorm=True): DataParallelStrategy allows False only")
        super().setup_environment()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        assert self.parallel_devices is not None
        if self.root_device.type == "cuda":
            self._replicas = nn.DataParallel(_ClassForward(model), device_ids=self.parallel_devices)
        else:
            self._replicas = ThreadedDataParallel(_ClassForward(model), len(self.parallel_devices))
        model.forward = self._forward  # on the instance, and not as a submodule: names and state stay as they are
        return model

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._replicas is not None
        self._shared_out = True
        return self._replicas(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._shared_out = False
        output = super().training_step(*args, **kwargs)
        if not self._shared_out:
            raise MisconfigurationException(
                "DataParallelStrategy shares out what `training_step` sends through `self(...)`, and it sent nothing;"
                " call `self(batch)` there instead of a submodule"
            )
        return output

    def take_phase_seconds(self) -> dict[str, float]:
        """What replicas have cost beside the module's own work since the last call, s by tag; empty on CUDA."""
        spent: Counter[str] = getattr(self._replicas, "seconds", Counter())
        taken = {f"dp/{what}_sec": seconds for what, seconds in spent.items()}
        spent.clear()
        return taken

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    @override
    def teardown(self) -> None:
        if self._replicas is not None:
            assert self.lightning_module is not None
            del self.lightning_module.forward
            if isinstance(self._replicas, ThreadedDataParallel):
                self._replicas.shutdown()
            self._replicas = None
        super().teardown()
