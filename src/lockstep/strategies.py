"""DataParallel for Lightning 2, which dropped its `dp` strategy. Needs torch and Lightning only; can be copied alone.

`DataParallelStrategy` uses `torch.nn.DataParallel` on CUDA, and `ThreadedDataParallel` on the CPU, where
`torch.nn.DataParallel` would silently call the module once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

T = TypeVar("T")


class ThreadedDataParallel(nn.Module):
    """`torch.nn.DataParallel` for the CPU: each replica has its own weights and its own thread.

    It scatters the inputs along dimension 0, runs forward **and backward** of each chunk in its replica's thread,
    gathers the outputs along dimension 0, and sums the replicas' gradients into the module's parameters, always in the
    same order. Replica 0 shares its buffers with the module, so its in-place changes (BatchNorm's running statistics)
    persist; those of other replicas are lost. Replicas run in the caller's grad mode, inference mode and autocast.

    As in `torch.nn.DataParallel`, tensors are cut as by `torch.chunk` (9 samples on 4 replicas give three chunks of 3,
    so three replicas run), containers are traversed, all other inputs go to every replica, and scalar outputs become a
    vector with one element per replica. All replicas draw from one random generator, so their dropout masks depend on
    the threads' timing. Second derivatives are not supported and raise an error.

    Args:
        module: The module to replicate; its own parameters and buffers stay in place.
        num_replicas: Number of replicas and threads.

    Raises:
        ValueError: From `forward`, if input tensors differ in the size of dimension 0, or one has no dimensions.
        TypeError: From `forward`, if outputs cannot be gathered.
    """

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        super().__init__()
        self.module = module
        # One thread per replica, not one pool: a fast thread must not run two replicas while another idles.
        self.threads = [ThreadPoolExecutor(1, thread_name_prefix=f"replica-{i}") for i in range(num_replicas)]
        self.seconds: Counter[str] = Counter()  # overhead beside the module's own work: scatter, replicate, ...

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
        """End the threads; the module cannot be called after that."""
        for thread in self.threads:
            thread.shutdown()


class _Call:
    """One forward pass through the replicas, kept for its backward pass."""

    output_spec: TreeSpec

    def __init__(self, parallel: ThreadedDataParallel, leaves: list[Any], spec: TreeSpec) -> None:
        self.module, self.threads, self.seconds = parallel.module, parallel.threads, parallel.seconds
        self.parameters = list(parallel.module.parameters())
        self.differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.chunks, self.spec = _scatter(leaves, len(parallel.threads)), spec

    def forward(self, track: bool = False) -> tuple[Any, ...]:
        """Run the replicas and return their flattened, gathered outputs; with `track`, record what `backward` needs."""
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
        self.seconds["replicate"] += max(each["replicate"] for each in seconds)  # replicas are made in parallel
        self.output_spec = specs[0]
        if any(spec != self.output_spec for spec in specs):
            raise TypeError(f"the replicas returned different structures: {', '.join(map(str, specs))}")
        with _timed("gather", self.seconds):
            return tuple(_gather(values) for values in zip(*self.outputs, strict=True))

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the parameters, then of the inputs, given those of the gathered outputs."""
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
    """Connects the replicas' autograd graphs, one per thread, to the caller's."""

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
    """Add the block's duration in seconds to `seconds[what]`, and show it to a profiler under that name."""
    start = time.perf_counter()
    with torch.profiler.record_function(what):
        yield
    seconds[what] += time.perf_counter() - start


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _in_threads(
    threads: Sequence[ThreadPoolExecutor], function: Callable[..., T], *arguments: Iterable[Any]
) -> list[T]:
    """Return `function` of each replica's arguments; if any fail, wait for all and raise the first replica's error."""
    calls = zip(*arguments, strict=True)
    futures = [thread.submit(function, *each) for thread, each in zip(threads, calls, strict=False)]
    wait(futures)
    return [future.result() for future in futures]


def _caller_context(grad: bool) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that enters the caller's modes in another thread, which would start with the defaults."""
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
    """Return one list of leaves per replica: tensors cut along dimension 0, everything else unchanged."""
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    if () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"tensors sent through the replicas must share dimension 0, the batch; got shapes {shapes}")
    cut = [list(leaf.detach().chunk(num_replicas)) if isinstance(leaf, Tensor) else None for leaf in leaves]
    num_chunks = next((len(pieces) for pieces in cut if pieces is not None), num_replicas if leaves else 1)
    return [
        # Detached again: the views that `chunk` returns do not allow in-place changes.
        [leaf if pieces is None else pieces[i].detach() for leaf, pieces in zip(leaves, cut, strict=True)]
        for i in range(num_chunks)
    ]


def _replicate(
    module: nn.Module, parameters: Sequence[nn.Parameter], share_buffers: bool
) -> tuple[nn.Module, list[Tensor]]:
    """Return a copy of the module tree with its own weights, and these weights in the order of `parameters`.

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
                # Not set in the dict: a module may also keep its weights elsewhere, as torch's RNNs do.
                setattr(replica, name, weight_of[id(parameter)])
        replica._buffers.update({name: buffer_of.get(id(value), value) for name, value in original._buffers.items()})
        replica._modules.update({name: replica_of.get(id(child)) for name, child in original._modules.items()})
    return replica_of[id(module)], weights


def _gather(values: Sequence[Any]) -> Any:
    """Return one output of all replicas, concatenated along dimension 0 and detached from their graphs."""
    if all(value is None for value in values):
        return None
    if not all(isinstance(value, Tensor) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise TypeError(f"replicas can return tensors, None and containers of them; got {', '.join(kinds)}")
    return torch.cat([value.detach().reshape(1) if value.ndim == 0 else value.detach() for value in values])


def _scatter_grad(grad: Tensor | None, outputs: Sequence[Any]) -> list[Tensor | None]:
    """Return each replica's share of the gradient of one gathered output."""
    if grad is None:
        return [None] * len(outputs)
    shares = grad.split([output.shape[0] if output.ndim else 1 for output in outputs])
    return [share.reshape(output.shape) for share, output in zip(shares, outputs, strict=True)]


def _replica_grads(outputs: list[Any], grads: Sequence[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    """Run one replica's backward pass and return the gradients of `leaves`, its weights and inputs."""
    pairs = zip(outputs, grads, strict=True)
    pairs = [(output, grad) for output, grad in pairs if grad is not None and _requires_grad(output)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    used, their_grads = zip(*pairs, strict=True)
    # The graph is kept as long as the call, since the caller may go backward through its own graph again.
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
    """Calls the `forward` of a LightningModule's class, not the one that `DataParallelStrategy` sets on the object."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


class DataParallelStrategy(ParallelStrategy):
    """Trains in one process, with one replica of the model per device.

    A call of `self(...)` in a LightningModule scatters the inputs, runs each replica in its own thread, and gathers the
    outputs on the first device, as `nn.DataParallel(model)(x)` does in plain torch. The rest of the step, loss and
    logging included, runs once. A LightningModule needs no change: its loss is the mean over the whole batch for any
    batch size, and checkpoints have the names of the unwrapped module. To Lightning this is one process, rank 0 of a
    world of 1, so it injects no sampler and reduces nothing. Arguments: as for `ParallelStrategy`, normally none.

        Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy())

    Raises:
        MisconfigurationException: For more than one node or process, an accelerator other than CPU or CUDA,
            `sync_batchnorm`, or a `training_step` that never calls `self(...)` and so would run on one device.
    """

    strategy_name = "dp"
    global_rank = local_rank = node_rank = 0
    world_size = 1
    reduce, all_gather = SingleDeviceStrategy.reduce, SingleDeviceStrategy.all_gather
    barrier, broadcast = SingleDeviceStrategy.barrier, SingleDeviceStrategy.broadcast

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
        model.forward = self._forward  # on the instance, not a submodule: names and state do not change
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
        """Return the replicas' overhead since the last call, in seconds by tag; empty on CUDA."""
        spent: Counter[str] = getattr(self._replicas, "seconds", Counter())
        taken = {f"dp/{what}_sec": seconds for what, seconds in spent.items()}
        spent.clear()
        return taken

    @override
    def teardown(self) -> None:
        if self._replicas is not None:
            assert self.lightning_module is not None
            del self.lightning_module.forward
            if isinstance(self._replicas, ThreadedDataParallel):
                self._replicas.shutdown()
            self._replicas = None
        super().teardown()
