"""How the workers of a job find each other: where the store is, and what goes through it before training.

Imports torch; `launch` imports this module when a job is launched.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from lockstep.addresses import LOOPBACK
from lockstep.config import ConfigError
from lockstep.worker import RunError

# What all nodes must agree on, less what may well differ from node to node.
AGREED_SECTIONS = ("seed", "trainer", "strategy", "model", "data", "callbacks")
PER_NODE_KEYS = {"data.root", "callbacks.epoch_monitor.started_at"}


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one node with itself: a fresh store for every attempt, which no other machine can reach.

    The c10d rendezvous listens on every interface, delays each first meeting by up to 0.3 s, and lets the attempts of a
    restarted job share a store, where they find the addresses of the dead.

    Args:
        run_id: Of the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # the store takes the listener over, and closes it
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def shutdown(self) -> bool:
        return True


class NodesRendezvous(RendezvousHandler):
    """The meeting of several nodes: c10d's, with rank 0 on the node where they meet.

    c10d sorts the nodes by the text of their addresses. So the run's folder would lie on any of them.

    Args:
        inner: c10d's own.
        store: Where the nodes tell each other their sizes.
        hosts: Whether the meeting point is on this node.
        address: What the other nodes connect to.
    """

    def __init__(self, inner: RendezvousHandler, store: dist.Store, hosts: bool, address: str) -> None:
        self._inner, self._store, self._hosts, self._address = inner, store, hosts, address

    def agree_on_size(self, num_nodes: int) -> None:
        """c10d lets nodes that expect different numbers wait for each other.

        Raises:
            ConfigError: If another node expects another number; it will hear of it too.
        """
        expected = self._store.compare_set("num_nodes", "", str(num_nodes)).decode()
        if expected != str(num_nodes):
            self._store.set("refusal", f"trainer.num_nodes={num_nodes} on one node and {expected} on another")
            self._inner.set_closed()
            self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self._store.check(["refusal"]):
            raise ConfigError(f"{self._store.get('refusal').decode()}; allowed: the same on every node")

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            info = self._inner.next_rendezvous()
        except RendezvousClosedError:
            self._raise_refusal()
            raise
        if self._hosts:
            info.store.set("host", str(info.rank))
        rank = (info.rank - int(info.store.get("host"))) % info.world_size
        # the address of the store that the workers of rank 0's node will make, a new one in each attempt
        address = RendezvousStoreInfo.build(rank, dist.PrefixStore("workers", info.store), self._address)
        return RendezvousInfo(info.store, rank, info.world_size, address)

    def get_backend(self) -> str:
        return "nodes"

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def _loopback(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(parameters.run_id)


def _nodes(parameters: RendezvousParameters) -> NodesRendezvous:
    backend, store = _connected(parameters)
    handler = create_handler(store, backend, parameters)
    sizes = dist.PrefixStore(f"lockstep/{parameters.run_id}", store)
    nodes = NodesRendezvous(handler, sizes, parameters.get_as_bool("is_host"), parameters.local_addr)
    nodes.agree_on_size(parameters.min_nodes)
    return nodes


def _connected(parameters: RendezvousParameters) -> tuple[RendezvousBackend, dist.Store]:
    """c10d's backend. Connecting waits in C++, for ever if something else listens there; so it is done in a thread."""
    results: list[tuple[RendezvousBackend, dist.Store] | Exception] = []

    def connect_to_host() -> None:
        try:
            results.append(create_backend(parameters))
        except Exception as error:
            results.append(error)

    timeout_sec = parameters.get_as_int("read_timeout")
    thread = threading.Thread(target=connect_to_host, daemon=True)
    thread.start()
    thread.join(timeout_sec + 5)  # what it takes to give up by itself, and a little more
    (result,) = results or [RendezvousConnectionError(f"no answer within launch.timeout_sec={timeout_sec}")]
    if isinstance(result, Exception):
        raise result
    return result


rendezvous_handler_registry.register("loopback", _loopback)
rendezvous_handler_registry.register("nodes", _nodes)


_store: dist.Store | None = None  # of this worker's job, once it is connected


def connect(timeout_sec: float) -> None:
    """Connect this worker to its job's store, from which Lightning will make the process group later.

    In a job of one process there is nothing to connect to; under launchers that tell no address, only Lightning does.

    Args:
        timeout_sec: How long to wait for the other ranks.

    Raises:
        RunError: If the node of rank 0 cannot be reached.
    """
    global _store
    told = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not told or os.environ["WORLD_SIZE"] == "1":
        return
    try:
        _store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_sec)))
    except dist.DistError as error:
        raise RunError(
            f"the node of rank 0 could not be reached at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within"
            f" launch.timeout_sec={timeout_sec}; launch.local_addr says under which address a node is reached"
        ) from error


def once_per_node(function: Callable[[], None]) -> None:
    """Call `function` in one process of each node; the others return when it has, however long that takes.

    A barrier of the process group would take a slow download for a stuck rank.
    """
    store = _store
    key = f"once_per_node/{os.environ.get('GROUP_RANK', 0)}"
    if store is None or int(os.environ["LOCAL_RANK"]) == 0:
        function()
        if store is not None:
            store.set(key, "done")
        return
    while not store.check([key]):  # the launcher ends this process if the other fails
        time.sleep(0.02)


def from_rank_zero(key: str, value: Any) -> Any:
    """What rank 0 passed for `value`, in every process.

    Args:
        key: Tells this exchange from others.
        value: Anything JSON holds; counts on rank 0 alone.
    """
    store = _store
    if store is None:
        return value
    if os.environ["RANK"] == "0":
        store.set(key, json.dumps(value))
    return json.loads(store.get(key))


def check_nodes_agree(config: dict[str, Any]) -> None:
    """Refuse nodes that were started with different commands: they would wait for each other in vain.

    Raises:
        ConfigError: On every rank, naming the first key that differs.
    """
    if _store is None:
        return
    run_dir = json.dumps(config["run_dir"])[1:-1]
    sections = json.dumps({section: config[section] for section in AGREED_SECTIONS})
    own = _flat(json.loads(sections.replace(run_dir, "RUN_DIR")))
    theirs = from_rank_zero("config", own)
    keys = [key for key in own | theirs if key not in PER_NODE_KEYS]
    key = next((key for key in keys if own.get(key) != theirs.get(key)), None)
    verdict = f"{key}={theirs.get(key)} on node 0 and {key}={own.get(key)} on node {os.environ.get('GROUP_RANK')}"
    _store.set(f"verdict/{os.environ['RANK']}", "" if key is None else verdict)
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if verdict := _store.get(f"verdict/{rank}").decode():
            raise ConfigError(f"{verdict}; allowed: the same on every node")


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as typed on the command line."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
