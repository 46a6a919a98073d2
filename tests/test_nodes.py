"""Two hosts, made of network namespaces: each a process of its own, with its own network and its own disk."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE_SEC, TRAIN, remove_what_the_killed_leave, start, wait_until

from lockstep import tags
from lockstep.errors import ConfigError
from lockstep.launch import addresses

slow = pytest.mark.slow

ENDPOINT = "10.77.0.1:29400"
TIMEOUT = 60
JOB = [
    *("strategy=ddp", "trainer.num_nodes=2", "trainer.devices=1", "data=mnist_sample", "trainer.accelerator=cpu"),
    *("trainer.enable_progress_bar=false", "trainer.precision=64-true", "data.batch_size=252", "trainer.max_epochs=2"),
    *(f"launch.timeout_sec={TIMEOUT}", "launch.threads_per_process=1"),
]
SCRIPT = Path(__file__).parent / "two_hosts.sh"


class Hosts:
    """Two hosts, and what runs on them.

    Args:
        name: Of their namespaces.
        folder: Where host 0 and host 1 keep their runs; neither sees the other's.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, *overrides: str, endpoint: str = ENDPOINT) -> subprocess.Popen[str]:
        """The command on one host; `overrides` come after those that all tests share."""
        own, other = self.folder / str(host), self.folder / str(1 - host)
        for path in (own, other):
            path.mkdir(exist_ok=True)
        train = [*TRAIN, *JOB, f"launch.rdzv_endpoint={endpoint}", f"hydra.run.dir={own}/run", *overrides]
        hide = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(other)]
        process = start(["ip", "netns", "exec", f"{self.name}-{host}", *hide, *train], own)
        self.processes.append(process)
        return process

    def kill(self, host: int) -> None:
        """Everything that runs on a host, at once, but for Python's resource trackers.

        They remove the semaphores of the others from /dev/shm, which a real host would lose.
        """
        namespace = ["ip", "netns", "pids", f"{self.name}-{host}"]
        for pid in subprocess.run(namespace, capture_output=True, text=True, check=True).stdout.split():
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)

    def unplug(self) -> None:
        """The cable; what is sent from now on is lost without a word."""
        subprocess.run(["ip", "-n", f"{self.name}-1", "link", "set", "eth0", "down"], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    name = f"lockstep{os.getpid()}"
    made = subprocess.run([str(SCRIPT), "up", name], capture_output=True, text=True, check=False)
    if made.returncode:
        subprocess.run([str(SCRIPT), "down", name], check=True)
        pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
    hosts = Hosts(name, tmp_path)
    yield hosts
    for host in (0, 1):
        hosts.kill(host)
    for process in hosts.processes:
        process.communicate(timeout=10)
    subprocess.run([str(SCRIPT), "down", name], check=True)
    remove_what_the_killed_leave()


def ended(process: subprocess.Popen[str], seconds: float = PATIENCE_SEC) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=seconds)
    return process.returncode, stderr.strip()


def slow_steps(hosts: Hosts) -> str:
    return f"+callbacks.slow={{_target_: faults.SlowSteps, seconds: 0.1, started: {hosts.folder / 'started'}}}"


def metrics(hosts: Hosts) -> dict[str, Any]:
    return json.loads((hosts.folder / "0" / "run" / "metrics.json").read_text())


def one_host(run_job: Callable[..., Any], **kwargs: Any) -> dict[str, float]:
    alone = [override for override in JOB if not override.startswith(("trainer.num_nodes", "trainer.devices"))]
    return run_job(*alone, "trainer.devices=2", run="one_host")


@slow
def test_two_hosts_train_as_one_with_two_devices(hosts: Hosts, run_job: Callable[..., Any]) -> None:
    both = [hosts.start(host) for host in (1, 0)]
    assert [ended(process) for process in both] == [(0, ""), (0, "")]
    expected, found = one_host(run_job), metrics(hosts)
    for tag in (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TEST_LOSS, tags.TEST_ACC):
        assert abs(found[tag] - expected[tag]) <= 1e-9, tag
    assert not (hosts.folder / "1" / "run" / "checkpoints").exists()


@slow
def test_a_late_node_is_waited_for(hosts: Hosts) -> None:
    first = hosts.start(1)
    wait_until((hosts.folder / "1" / "run" / ".hydra").exists, "the first node's start")
    time.sleep(10)  # by now it waits, or will soon
    assert [ended(process) for process in (hosts.start(0), first)] == [(0, ""), (0, "")]


@pytest.mark.parametrize("how", ["killed", pytest.param("unplugged", marks=slow)])
def test_a_dead_host_is_reported_on_the_other(hosts: Hosts, how: str) -> None:
    timeout = {"killed": TIMEOUT, "unplugged": 20}[how]
    job = (slow_steps(hosts), f"launch.timeout_sec={timeout}", "trainer.max_epochs=1000000")
    first, _ = (hosts.start(host, *job) for host in (0, 1))
    wait_until((hosts.folder / "started").exists, "the first steps")
    begin = time.monotonic()
    if how == "killed":
        hosts.kill(1)
        expected = "error: rank 0: lost the connection to another rank in "
    else:
        hosts.unplug()
        expected = f"error: rank 0: waited launch.timeout_sec={timeout} s for a rank of another node in "
    code, stderr = ended(first)
    assert code == 1
    assert stderr.startswith(expected)
    assert "in epoch " in stderr
    assert time.monotonic() - begin < timeout + 20


@slow
def test_a_host_that_comes_back_resumes_with_the_other(hosts: Hosts, run_job: Callable[..., Any]) -> None:
    job = ("launch.max_restarts=1",)
    first, _ = (hosts.start(host, *job, slow_steps(hosts)) for host in (0, 1))
    wait_until((hosts.folder / "0" / "run" / "checkpoints" / "last.ckpt").exists, "the first checkpoint")
    hosts.kill(1)
    second = hosts.start(1, *job, slow_steps(hosts))
    assert [ended(process) for process in (first, second)] == [(0, ""), (0, "")]
    assert "restart 1 of 1, from" in (hosts.folder / "0" / "run" / "train.log").read_text()
    expected, found = one_host(run_job), metrics(hosts)
    for tag in (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.TEST_LOSS, tags.TEST_ACC):
        assert abs(found[tag] - expected[tag]) <= 1e-9, tag


@slow
def test_a_signal_on_one_host_stops_both_and_leaves_a_checkpoint(hosts: Hosts) -> None:
    first, second = (hosts.start(host, slow_steps(hosts), "trainer.max_epochs=1000000") for host in (0, 1))
    wait_until((hosts.folder / "started").exists, "the first steps")
    os.kill(second.pid, signal.SIGTERM)
    codes = [ended(process, seconds=40) for process in (first, second)]
    assert [code for code, _ in codes] == [143, 143], codes
    assert all(stderr.startswith("stopped by SIGTERM after step ") for _, stderr in codes)
    path = hosts.folder / "0" / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] >= 3


@pytest.mark.parametrize(
    ("key", "values"),
    [
        pytest.param("trainer.num_nodes", (2, 3), marks=slow),
        pytest.param("trainer.max_epochs", (2, 3), marks=slow),
        pytest.param("trainer.devices", (1, 2), marks=slow),
        ("seed", (0, 1)),
    ],
)
def test_commands_that_disagree_are_refused_on_both(hosts: Hosts, key: str, values: tuple[int, int]) -> None:
    both = [hosts.start(host, f"{key}={value}", "data.batch_size=240") for host, value in enumerate(values)]
    for process in both:
        code, stderr = ended(process)
        assert code == 1
        assert stderr.startswith("error: ")
        assert f"{key}=" in stderr, stderr


def test_a_port_in_use_is_named(hosts: Hosts) -> None:
    squat = (
        "import socket, time; server = socket.create_server(('10.77.0.1', 29400)); print(flush=True); time.sleep(90)"
    )
    enter = ["ip", "netns", "exec", f"{hosts.name}-0", sys.executable, "-c", squat]
    with subprocess.Popen(enter, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        code, stderr = ended(hosts.start(0, "launch.timeout_sec=5"))
        other.kill()
    assert code == 1
    assert stderr.startswith(f"error: 2 nodes did not meet at launch.rdzv_endpoint={ENDPOINT}: ")


# ---------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("endpoint", ["no.such.host.invalid:29400", "10.77.0.1", "10.77.0.1:", "10.77.0.1:99999", ":1"])
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"^launch.rdzv_endpoint={endpoint}"):
        addresses.node_address(endpoint, None)


def test_an_address_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^launch.local_addr=no.such.host.invalid: this machine does not know"):
        addresses.node_address("127.0.0.1:29400", "no.such.host.invalid")


def test_a_nodes_address_is_the_one_it_reaches_the_endpoint_from(monkeypatch: pytest.MonkeyPatch) -> None:
    own = addresses.node_address("127.0.0.1:29400", None)
    assert (own.address, own.hosts) == ("127.0.0.1", True)
    assert addresses.node_address("127.0.0.1:29400", "127.0.0.2").hosts is False
    assert own.interface == next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    # a machine whose own name means a loopback address to itself is known to the others by that name
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.0.1", 0))])
    assert addresses.node_address("node-0:29400", None).address == "node-0"
