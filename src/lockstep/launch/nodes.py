"""How the agents of a job meet. Importing this imports torch."""

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from lockstep.errors import ConfigError
from lockstep.launch.addresses import LOOPBACK, NodeAddress
from lockstep.launch.timeouts import CONNECT_MARGIN_SEC

RUN_ID = "lockstep"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's switch: the workers do not share the agents' store


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single node: a fresh store for every attempt, which no other machine can reach.

    c10d's rendezvous listens on every interface, delays the first meeting by up to 0.3 s, and shares one store among
    the attempts of a restarted job, which then find the addresses of dead workers.
    """

    def __init__(self) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=RUN_ID, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # the store takes the listener over, and closes it
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))


class NodesRendezvous(DynamicRendezvousHandler):
    """c10d's rendezvous of several nodes, with rank 0 on the node where they meet.

    c10d sorts the nodes by the text of their addresses, so the run's folder would lie on any of them.
    """

    _node: NodeAddress

    @classmethod
    def meet(cls, node: NodeAddress, num_nodes: int, launch: dict[str, Any]) -> "NodesRendezvous":
        """Connect this node to the meeting point, and agree on the number of nodes, by the config group `launch`.

        Raises:
            RendezvousError: If the meeting point cannot be reached within `launch.timeout_sec`.
            ConfigError: If another node expects another number of nodes.
        """
        timeout, run_id = launch["timeout_sec"], launch["rdzv_id"] or RUN_ID
        size = (num_nodes, num_nodes)  # at least and at most
        options = {"read_timeout": timeout, "is_host": node.hosts}
        parameters = RendezvousParameters("c10d", launch["rdzv_endpoint"], run_id, *size, node.address, **options)
        backend, store = _connect(parameters, timeout)
        join = RendezvousTimeout(join=timedelta(seconds=timeout))
        self = cls.from_backend(run_id, store, backend, *size, node.address, join)
        self._node = node
        self._agree_on_size(dist.PrefixStore(f"lockstep/{run_id}", store), num_nodes)
        return self

    def _agree_on_size(self, sizes: dist.Store, num_nodes: int) -> None:
        self._sizes = sizes
        expected = sizes.compare_set("num_nodes", "", str(num_nodes)).decode()
        if expected != str(num_nodes):  # c10d would let the nodes wait for each other
            sizes.set("refusal", f"trainer.num_nodes={num_nodes} on one node and {expected} on another")
            self.set_closed()
            self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self._sizes.check(["refusal"]):
            raise ConfigError(f"{self._sizes.get('refusal').decode()}; allowed: the same on every node")

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        before = os.environ.get(OWN_STORE)
        os.environ[OWN_STORE] = "1"
        try:
            info = super().next_rendezvous()
        except RendezvousClosedError:
            self._raise_refusal()
            raise
        finally:
            os.environ.pop(OWN_STORE)
            os.environ |= {} if before is None else {OWN_STORE: before}
        if self._node.hosts:
            info.store.set("host", str(info.rank))
        rank = (info.rank - int(info.store.get("host"))) % info.world_size
        # The address of the store that the workers on rank 0's node make: a new one for each attempt, which does not
        # hold the addresses of dead workers.
        address = RendezvousStoreInfo.build(rank, dist.PrefixStore("workers", info.store), self._node.address)
        return RendezvousInfo(info.store, rank, info.world_size, address)


def _connect(parameters: RendezvousParameters, timeout_sec: float) -> tuple[RendezvousBackend, dist.Store]:
    """Return c10d's backend. A thread connects, since torch waits in C++, for ever if another program listens there."""
    results: list[tuple[RendezvousBackend, dist.Store] | Exception] = []

    def connect() -> None:
        try:
            results.append(create_backend(parameters))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_sec + CONNECT_MARGIN_SEC)
    (result,) = results or [RendezvousConnectionError(f"no answer within launch.timeout_sec={timeout_sec}")]
    if isinstance(result, Exception):
        raise result
    return result
