"""What the ranks of a job tell each other before Lightning makes their process group. Importing this imports torch."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.config import flatten
from lockstep.errors import ConfigError, RunError
from lockstep.launch.timeouts import STORE_POLL_SEC

# What all nodes must agree on, and the keys in it that may differ from node to node.
AGREED_SECTIONS = ("seed", "trainer", "strategy", "model", "data", "callbacks")
PER_NODE_KEYS = {"data.root", "callbacks.epoch_monitor.started_at"}


class JobStore:
    """The key-value store of a job, as one rank sees it.

    Args:
        store: The store that the process group will use too; None in a job of one process, and under launchers that
            leave the address to Lightning.
    """

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store

    @classmethod
    def connect(cls, timeout_sec: float) -> "JobStore":
        """Connect to the job's store, or raise RunError if the node of rank 0 cannot be reached in this time."""
        told = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if not told or os.environ["WORLD_SIZE"] == "1":
            return cls(None)
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_sec)))
        except dist.DistError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise RunError(
                f"the node of rank 0 could not be reached at {address} within launch.timeout_sec={timeout_sec};"
                " launch.local_addr says under which address a node is reached"
            ) from error
        return cls(store)

    def once_per_node(self, function: Callable[[], None]) -> None:
        """Call `function` in one process of each node; the others return after it, however long it takes.

        A barrier of the process group would mistake a slow download for a hung rank.
        """
        key = f"once_per_node/{os.environ.get('GROUP_RANK', 0)}"
        if self._store is None or int(os.environ["LOCAL_RANK"]) == 0:
            function()
            if self._store is not None:
                self._store.set(key, "done")
            return
        while not self._store.check([key]):  # if the other fails, the launcher ends this process
            time.sleep(STORE_POLL_SEC)

    def from_rank_zero(self, key: str, value: Any) -> Any:
        """Return rank 0's `value`, anything that JSON holds, on every rank. `key` tells this exchange from others."""
        if self._store is None:
            return value
        if os.environ["RANK"] == "0":
            self._store.set(key, json.dumps(value))
        return json.loads(self._store.get(key))

    def check_nodes_agree(self, config: dict[str, Any]) -> None:
        """Refuse nodes that were started with different commands: they would wait for each other in vain.

        Raises:
            ConfigError: On every rank, naming the first key that differs.
        """
        if self._store is None:
            return
        run_dir = json.dumps(config["run_dir"])[1:-1]
        sections = json.dumps({section: config[section] for section in AGREED_SECTIONS})
        own = flatten(json.loads(sections.replace(run_dir, "RUN_DIR")))
        theirs = self.from_rank_zero("config", own)
        keys = [key for key in own | theirs if key not in PER_NODE_KEYS]
        key = next((key for key in keys if own.get(key) != theirs.get(key)), None)
        verdict = f"{key}={theirs.get(key)} on node 0 and {key}={own.get(key)} on node {os.environ.get('GROUP_RANK')}"
        rank, ranks = os.environ["RANK"], range(int(os.environ["WORLD_SIZE"]))
        self._store.set(f"verdict/{rank}", "" if key is None else verdict)
        verdicts = [self._store.get(f"verdict/{each}").decode() for each in ranks]
        self._store.set(f"heard/{rank}", "")
        if any(verdicts):
            if rank == "0":  # the store ends with this process, which therefore leaves last
                self._store.wait([f"heard/{each}" for each in ranks])
            raise ConfigError(f"{next(filter(None, verdicts))}; allowed: the same on every node")
