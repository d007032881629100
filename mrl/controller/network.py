"""The network of the node that this process runs on: its addresses, who carries them, and who answers over it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES, _MAX_ENTRIES = 40, 1024  # of `struct ifreq`: a name, then a family, a port and an address
_IPV6 = Path("/proc/net/if_inet6")
_MAX_THREADS = 256


@dataclass(frozen=True)
class Network:
    """Where a node's processes listen, and how gloo and NCCL are told to use the same network."""

    address: str
    interface: str | None
    """The one that carries the address; None where none of this node does."""
    of_site: dict[str, str]
    """Variables that name an interface already: they stay as they are."""

    def environment(self) -> dict[str, str]:
        """What is left to set. An equals sign has NCCL take this very name, where it would take all that begin so."""
        chosen = {GLOO: self.interface, NCCL: f"={self.interface}"} if self.interface is not None else {}
        return {name: value for name, value in chosen.items() if name not in self.of_site}


@dataclass(frozen=True)
class Endpoint:
    """A socket of a node that waits to be reached."""

    address: str
    port: int
    interface: str


def network(address: str) -> Network:
    """Return how this node uses the network of an address of its own."""
    of_site = {name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)}
    return Network(address, interfaces().get(address), of_site)


def interfaces() -> dict[str, str]:
    """Return the interface of every address of this node."""
    room = array("B", bytes(_ENTRY_BYTES * _MAX_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    entries = room.tobytes()[: struct.unpack("iL", answer)[0]]
    found = {}
    for at in range(0, len(entries), _ENTRY_BYTES):
        found[socket.inet_ntoa(entries[at + 20 : at + 24])] = entries[at : at + 16].partition(b"\0")[0].decode()
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else ():
        digits, *_, name = line.split()
        found[str(IPv6Address(int(digits, 16)))] = name
    return found


def listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def listen_everywhere(address: str) -> list[tuple[socket.socket, Endpoint]]:
    """Open a socket on the address, and one on each other interface whose name the site has set for gloo or NCCL.

    None at all where no interface of this node carries the address.
    """
    own, named = interfaces(), {name.removeprefix("=") for name in network(address).of_site.values()}
    if address not in own:
        return []
    wanted = {own[address]: address}
    for carried, name in own.items():
        if name in named:
            wanted.setdefault(name, carried)
    sockets = [(listen(carried), name) for name, carried in wanted.items()]
    return [(each, Endpoint(wanted[name], each.getsockname()[1], name)) for each, name in sockets]


def failures(endpoints: Sequence[Endpoint], limit_s: float) -> list[str]:
    """Why each of these endpoints cannot be reached from this node, empty where it can; all are tried at once."""
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        return list(threads.map(lambda endpoint: _failure(endpoint, limit_s), endpoints))


def _failure(endpoint: Endpoint, limit_s: float) -> str:
    try:
        socket.create_connection((endpoint.address, endpoint.port), limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return f"{error.strerror}"
    return ""
