"""This machine's addresses, as seen from the machine where the nodes of a job meet."""

import socket
from dataclasses import dataclass

import psutil

from lockstep.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeAddress:
    """How one node is reached.

    Attributes:
        address: What the other nodes connect to.
        hosts: Whether the meeting point is on this node.
        interface: The network interface that has the address; None where it cannot be told.
    """

    address: str
    hosts: bool
    interface: str | None


def loopback() -> NodeAddress:
    """Return the address of a single node, which nobody else needs to reach."""
    return NodeAddress(LOOPBACK, True, _interface(LOOPBACK))


def node_address(rdzv_endpoint: str, local_addr: str | None) -> NodeAddress:
    """Return this node's address: `launch.local_addr`, or the one from which it reaches `launch.rdzv_endpoint`.

    The host name is no help: on many machines it means 127.0.1.1 to themselves and nothing to others.

    Raises:
        ConfigError: If the endpoint is not HOST:PORT or one of the names is not known here.
    """
    host, port = _split(rdzv_endpoint)
    endpoint = _resolve("launch.rdzv_endpoint", rdzv_endpoint, host)
    if local_addr is not None:
        own = _resolve("launch.local_addr", local_addr, local_addr)
    else:
        with socket.socket(socket.AF_INET6 if ":" in endpoint else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((endpoint, port))  # sends nothing: it only looks up the way
            except OSError as error:
                raise ConfigError(
                    f"launch.rdzv_endpoint={rdzv_endpoint} cannot be reached from here ({error})"
                ) from error
            own = probe.getsockname()[0]
    hosts = own == endpoint
    # where the name of the endpoint means a loopback address on its own machine, the others know it by that name
    return NodeAddress(local_addr or (host if hosts else own), hosts, _interface(own))


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"launch.rdzv_endpoint={endpoint}; allowed: HOST:PORT of node 0, the same on every node")
    return host.strip("[]"), int(port)


def _resolve(key: str, value: str, host: str) -> str:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(
            f"{key}={value}: this machine does not know {host} ({error}); allowed: an address, or a name that it knows"
        ) from error


def _interface(address: str) -> str | None:
    """Return the network interface that has an address, None if there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(each.address == address for each in addresses)), None)
