"""Network of this process's node: its addresses and interfaces, and reachability tests."""

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
    """Address on which a node's processes listen, and the settings that make gloo and NCCL use the same network."""

    address: str
    interface: str | None
    """Interface of the address; None if no interface of this node has it."""
    of_site: dict[str, str]
    """Interface variables that the site has set; they stay unchanged."""

    def environment(self) -> dict[str, str]:
        """Return the variables to set. The equals sign makes NCCL match the full name instead of a prefix."""
        chosen = {GLOO: self.interface, NCCL: f"={self.interface}"} if self.interface is not None else {}
        return {name: value for name, value in chosen.items() if name not in self.of_site}


@dataclass(frozen=True)
class Endpoint:
    """A listening socket of a node."""

    address: str
    port: int
    interface: str


def network(address: str) -> Network:
    """Return how this node uses the network of one of its addresses."""
    of_site = {name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)}
    return Network(address, interfaces().get(address), of_site)


def interfaces() -> dict[str, str]:
    """Return the interface of each address of this node."""
    room = array("B", bytes(_ENTRY_BYTES * _MAX_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        reply = fcntl.ioctl(query, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    entries = room.tobytes()[: struct.unpack("iL", reply)[0]]
    names = {}
    for offset in range(0, len(entries), _ENTRY_BYTES):
        names[socket.inet_ntoa(entries[offset + 20 : offset + 24])] = (
            entries[offset : offset + 16].partition(b"\0")[0].decode()
        )
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else ():
        digits, *_, name = line.split()
        names[str(IPv6Address(int(digits, 16)))] = name
    return names


def listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def listen_everywhere(address: str) -> list[tuple[socket.socket, Endpoint]]:
    """Open a socket on the address, and on each other interface that the site has named for gloo or NCCL.

    Return none if no interface of this node has the address.
    """
    names_by_address, site_names = interfaces(), {name.removeprefix("=") for name in network(address).of_site.values()}
    if address not in names_by_address:
        return []
    address_of = {names_by_address[address]: address}
    for other_address, name in names_by_address.items():
        if name in site_names:
            address_of.setdefault(name, other_address)
    sockets = [(listen(other_address), name) for name, other_address in address_of.items()]
    return [(listener, Endpoint(address_of[name], listener.getsockname()[1], name)) for listener, name in sockets]


def failures(endpoints: Sequence[Endpoint], limit_s: float) -> list[str]:
    """Return the reason why each endpoint is unreachable from this node, empty if reachable. All are tested at once."""
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
