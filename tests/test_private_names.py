"""The names of other packages that are not public and are used all the same: what for, and whether they are there.

An upgrade that takes one away fails here, with a sentence. `make test-versions` runs this file on the oldest and the
newest admitted versions.
"""

import ast
import inspect
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector
from torch.distributed.elastic.agent.server import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from lockstep import config

PACKAGE = config.PROJECT / "src" / "lockstep"


class Private(NamedTuple):
    """One private name.

    Attributes:
        name: As it stands in src/lockstep.
        purpose: What breaks without it.
        there: Returns True if the name is still there.
    """

    name: str
    purpose: str
    there: Callable[[], Any]


def methods(owner: type, *names: str) -> Callable[[], bool]:
    return lambda: all(callable(getattr(owner, name, None)) for name in names)


def in_source(owner: Any, text: str) -> Callable[[], bool]:
    return lambda: text in inspect.getsource(owner)


TABLE = [
    # ------------------------------------------------------------------------------------------------ CPython
    Private(
        "_forkserver",
        "launch/command.py ends the fork server at once where no job has begun: its imports would go on for seconds",
        lambda: isinstance(forkserver._forkserver, forkserver.ForkServer),
    ),
    Private(
        "_forkserver_pid",
        "launch/command.py: the process to end",
        lambda: hasattr(forkserver.ForkServer(), "_forkserver_pid"),
    ),
    # ------------------------------------------------------------------------------------------------ torch
    Private(
        "_start_workers, _stop_workers, _monitor_workers, _shutdown",
        "launch/agent.py gives torch's elastic agent its workers by these, its documented extension points",
        methods(SimpleElasticAgent, "_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"),
    ),
    Private(
        "_remaining_restarts",
        "launch/agent.py tells the workers how often they were restarted",
        in_source(SimpleElasticAgent.__init__, "self._remaining_restarts"),
    ),
    Private(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "launch/nodes.py: the workers of each attempt get a store of their own, without addresses of the dead",
        in_source(dynamic_rendezvous, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    ),
    Private(
        "_get_ddp_logging_data",
        "callbacks/phases.py reads comm/all_reduce_sec and comm/overlap_fraction",
        methods(DistributedDataParallel, "_get_ddp_logging_data"),
    ),
    Private(
        "_set_ddp_runtime_logging_sample_rate",
        "callbacks/phases.py has every tenth step measured",
        methods(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate"),
    ),
    Private("_C", "callbacks/timeline.py, for the next name", lambda: hasattr(torch, "_C")),
    Private(
        "_ExperimentalConfig",
        "callbacks/timeline.py records the threads of dp's replicas too",
        lambda: torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    ),
    Private(
        "_replicate_for_data_parallel",
        "strategies.py copies a module as torch.nn.DataParallel does",
        methods(torch.nn.Module, "_replicate_for_data_parallel"),
    ),
    Private(
        "_parameters, _buffers, _modules",
        "strategies.py gives a replica weights of its own",
        lambda: {"_parameters", "_buffers", "_modules"} <= vars(torch.nn.Module()).keys(),
    ),
    Private(
        "torch.utils._pytree",
        "strategies.py walks inputs and outputs; torch has no public one",
        lambda: _pytree.tree_unflatten(*_pytree.tree_flatten({"a": [1, 2]})) == {"a": [1, 2]},
    ),
    # ------------------------------------------------------------------------------------------------ Lightning
    Private(
        "_signal_connector",
        "callbacks/stopping.py, for the next name",
        in_source(Trainer.__init__, "self._signal_connector"),
    ),
    Private(
        "_sigterm_notifier_fn",
        "callbacks/stopping.py: else Lightning broadcasts inside the signal handler",
        methods(_SignalConnector, "_sigterm_notifier_fn"),
    ),
    Private(
        "_broadcast_sigterm_tensor",
        "callbacks/stopping.py: else Lightning broadcasts before every batch, and waits for it",
        methods(_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    ),
    Private(
        "signal_handlers",
        "launch/signals.py finds its own handler inside the one that Lightning wraps around it",
        lambda: _HandlersCompose([print]).signal_handlers == [print],
    ),
    Private(
        "_setup_model",
        "strategies.py puts the replicas in the way of `self(...)`",
        lambda: callable(ParallelStrategy._setup_model) and "_setup_model" in inspect.getsource(Strategy.setup),
    ),
    Private(
        "_layer_sync",
        "strategies.py refuses sync_batchnorm",
        in_source(ParallelStrategy.__init__, "self._layer_sync"),
    ),
]


@pytest.mark.parametrize("private", TABLE, ids=lambda private: private.name)
def test_a_private_name_is_still_there(private: Private) -> None:
    try:
        there = private.there()
    except (AttributeError, TypeError):
        there = False
    assert there, f"{private.name} is gone or has changed; {private.purpose}"


def test_the_table_is_complete() -> None:
    """Every underscored attribute that is not the project's own stands in the table."""
    listed = {name for private in TABLE for name in private.name.split(", ")}
    used, own = set(), {"_exit"}  # os._exit is public
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
                used.add(node.module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                used.add(node.attr)
    assert used - own <= listed, f"not in the table: {sorted(used - own - listed)}"
