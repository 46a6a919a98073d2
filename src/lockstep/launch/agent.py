"""The agent of a job: starts its workers on this node, watches them, and starts them again where that is allowed.

The engine is torch's elastic agent. It does the rendezvous, assigns the ranks and counts the restarts. This module
gives it workers that are forked from the fork server and report one outcome each. Importing it imports torch.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

import psutil
from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousError

from lockstep.errors import Stopped, WorkerError, first_line
from lockstep.launch.addresses import NodeAddress, loopback, node_address
from lockstep.launch.nodes import LoopbackRendezvous, NodesRendezvous
from lockstep.launch.outcomes import Outcome, cause, how_it_stopped, of_exit_code
from lockstep.launch.signals import stop_signals_deferred
from lockstep.launch.timeouts import MONITOR_INTERVAL_SEC, SETTLE_POLL_SEC, SETTLE_SEC, SHUTDOWN_SEC, STOP_SEC
from lockstep.launch.worker import Call, work

log = logging.getLogger(__name__)


class WorkerProcess:
    """One worker, as its agent sees it."""

    def __init__(self, context: BaseContext, rank: int, call: Call, environ: dict[str, str]) -> None:
        self.rank = rank
        self.outcome: Outcome | None = None  # None while it works
        self._reports, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(call, environ, theirs))
        self.process.start()
        theirs.close()

    def look(self) -> Outcome | None:
        """Return how the worker ended, None while it works."""
        if self.outcome is None:
            gone = self.process.exitcode is not None  # asked first: whatever it reported is in the pipe by then
            with suppress(EOFError, OSError):
                if self._reports.poll():
                    self.outcome = pickle.loads(self._reports.recv_bytes())
            if self.outcome is None and gone:
                self.outcome = of_exit_code(self.process.exitcode, self.rank)
        return self.outcome

    def is_suspended(self) -> bool:
        """Return True if the process is stopped, as SIGSTOP does it."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def signal(self, number: int) -> None:
        """Send a signal, unless the process ended: its id may be another's by now."""
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self) -> Outcome:
        """Kill the process if it still runs, let go of it, and return how it ended."""
        self.signal(signal.SIGKILL)
        self.process.join()
        outcome = self.look()
        self.process.close()
        self._reports.close()
        return outcome


class Agent(SimpleElasticAgent):
    """Runs one job's workers on this node.

    Args:
        spec: How many workers, how they meet, and how often they may be restarted.
        call: What they call.
        environ: Variables that they get beside those that tell them their place.

    Attributes:
        outcomes: How the workers of the last attempt ended.
        failure: The outcome that ended the present attempt, None while it is healthy.
    """

    def __init__(self, spec: WorkerSpec, call: Call, environ: dict[str, str]) -> None:
        super().__init__(spec)
        self._call, self._environ = call, environ
        self._context = multiprocessing.get_context(call.config["launch"]["start_method"])
        self._workers: list[WorkerProcess] = []
        self.outcomes: list[Outcome] = []
        self.failure: Outcome | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        shared = self._environ | {
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        self.failure = None
        for worker in worker_group.workers:
            place = {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
            }
            # a signal between the two would leave the fork server with half a request, or a worker that nobody knows
            with stop_signals_deferred():
                self._workers.append(WorkerProcess(self._context, worker.global_rank, self._call, shared | place))
        return {local_rank: each.process.pid for local_rank, each in enumerate(self._workers)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        outcomes = [worker.look() for worker in self._workers]
        if any(outcome is not None and outcome.kind != "succeeded" for outcome in outcomes):
            self.failure = self._settled()
            if self.failure.is_final:
                raise self.failure.as_exception()
            if self._remaining_restarts:
                log.warning(self.failure.as_exception())
            return RunResult(WorkerState.FAILED)
        if None in outcomes:
            return RunResult(WorkerState.HEALTHY)
        self._wait(SHUTDOWN_SEC)  # what they do after their report is not waited for any longer
        return RunResult(WorkerState.SUCCEEDED, {outcome.rank: outcome.value for outcome in outcomes})

    def _settled(self) -> Outcome:
        """Return the cause of a failure, once all workers ended or had the time to.

        A killed worker disappears a little later than its connections, and losing those makes its peers fail.
        """
        self._wait(SETTLE_SEC)
        failure = cause(worker.outcome for worker in self._workers if worker.outcome is not None)
        return self._with_missing_ranks(failure) if failure.kind == "timed out" else failure

    def _with_missing_ranks(self, failure: Outcome) -> Outcome:
        """Return the time-out of a collective with the names of the ranks that did not reach it."""
        silent = [worker for worker in self._workers if worker.outcome is None]
        suspended = [worker for worker in silent if worker.is_suspended()]
        for worker in suspended:
            worker.signal(signal.SIGCONT)  # so that it can act on the SIGTERM that follows
        names = [f"rank {worker.rank}, which is stopped (process state T)" for worker in suspended]
        elsewhere = "another rank" if self.get_worker_group().group_world_size == 1 else "a rank of another node"
        names = names or [f"rank {worker.rank}" for worker in silent] or [elsewhere]
        waited = f"waited launch.timeout_sec={self._call.config['launch']['timeout_sec']} s for {', '.join(names)}"
        return replace(failure, kind="explained", message=f"{waited} in {failure.place}")

    def _wait(self, seconds: float) -> None:
        """Wait until all workers ended, and no longer than this."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(worker.look() is not None and not worker.process.is_alive() for worker in self._workers):
                return
            time.sleep(SETTLE_POLL_SEC)

    # torch's versions pass different options to the next two

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, **_: Any) -> None:
        if not self._workers:
            return
        self.outcomes = []
        try:
            for worker in self._workers:
                if worker.look() is None:  # the others are ending already, and may have something to save
                    worker.signal(death_sig)
            self._wait(STOP_SEC if self.failure is None else SHUTDOWN_SEC)
        finally:
            while self._workers:
                self.outcomes.append(self._workers.pop().end())


def run_in_workers(call: Call) -> Any:
    """Call a function in every worker process of a job, and return rank 0's value; None on other nodes.

    Raises:
        ConfigError: If a worker refused the config.
        WorkerError: If a worker failed; no worker is left then.
        Stopped: If a signal ended the job.
    """
    _silence("torch.distributed.elastic")
    launch, num_nodes = call.config["launch"], call.config["trainer"]["num_nodes"]
    node = loopback() if num_nodes == 1 else node_address(launch["rdzv_endpoint"], launch["local_addr"])
    try:
        rendezvous = LoopbackRendezvous() if num_nodes == 1 else NodesRendezvous.meet(node, num_nodes, launch)
        agent = Agent(_spec(rendezvous, launch), call, _network(node))
        try:
            result = agent.run()
        except Stopped as stop:  # a rank's says where it stopped; of the command's own, the ranks' outcomes do
            raise Stopped(stop.signum, stop.where or how_it_stopped(agent.outcomes)) from None
        finally:
            rendezvous.shutdown()
    except RendezvousError as error:
        late = f"not all came within launch.timeout_sec={launch['timeout_sec']}"
        reason = first_line(error.__cause__ or error) if str(error.__cause__ or error) else late
        where = f"{num_nodes} nodes did not meet at launch.rdzv_endpoint={launch['rdzv_endpoint']}"
        raise WorkerError(f"{where}: {reason}") from None
    if result is None:  # torch lets a node too many wait until the others have ended
        raise WorkerError(
            f"the job at launch.rdzv_endpoint={launch['rdzv_endpoint']} had its {num_nodes} nodes already"
        )
    if result.is_failed():
        raise agent.failure.as_exception()
    return result.return_values.get(0)


def _spec(rendezvous: LoopbackRendezvous | NodesRendezvous, launch: dict[str, Any]) -> WorkerSpec:
    return WorkerSpec(
        role="lockstep",
        local_world_size=launch["nproc_per_node"],
        rdzv_handler=rendezvous,
        entrypoint=work,
        max_restarts=launch["max_restarts"],
        monitor_interval=MONITOR_INTERVAL_SEC,
    )


def _network(node: NodeAddress) -> dict[str, str]:
    """Return the variables that keep Gloo to the node's address; by itself it takes the one of the host name."""
    if node.interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    return {"GLOO_SOCKET_IFNAME": node.interface}


def _silence(package: str) -> None:
    """Silence a package's log: this one says once what matters. Torch gives each of its loggers a level of its own."""
    for name in [*logging.root.manager.loggerDict, package]:
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)
