"""Ray on this node, as a process of ours: started with what it offers said outright, and ended with all of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema import ClusterConfig
from mrl.errors import SetupError

_LOOPBACK = "127.0.0.1"
_STARTED = "ray_current_cluster"  # Ray writes it into its directory once the node is up and known to the others
_ENDS_S = 20.0
_POLL_S = 0.2
_SIOCGIFADDR = 0x8915
_PORTS = range(20000, 32768)


@dataclass(frozen=True)
class RayNode:
    """A `ray start --block` that runs."""

    process: subprocess.Popen[bytes]
    directory: Path

    def await_start(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not (self.directory / _STARTED).exists():
            self.check()
            if time.monotonic() > deadline:
                raise SetupError(f"Ray did not start on this node within {limit_s:g} s")
            time.sleep(_POLL_S)

    def check(self) -> None:
        if (status := self.process.poll()) is not None:
            logs = self.directory / "session_latest" / "logs"
            raise SetupError(f"Ray ended on this node, with status {status}{_last_words(logs)}")


@contextmanager
def ray_node(host: str, name: str, options: Sequence[str]) -> Iterator[RayNode]:
    """Run Ray for the length of the block, its sockets and logs in a private directory."""
    directory = Path(tempfile.mkdtemp(prefix="mrl-"))  # 0700; Ray would leave them open to all
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={host}", f"--node-name={name}", f"--temp-dir={directory}", *options]
    # Its default is one port for all: a head that finds it taken lives on without this agent, and refuses every job.
    command += [f"--dashboard-agent-listen-port={free_port()}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=default_signals)
    try:
        yield RayNode(process, directory)
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, and left
        shutil.rmtree(directory, ignore_errors=True)


def head_options(port: int) -> list[str]:
    """What makes a node the first. Its dashboard listens on this node alone: `ssh -L` is the way to it."""
    # A fixed port would be another user's on a shared node, and Ray ends when it cannot have it.
    options = ["--head", f"--port={port}", f"--ray-client-server-port={free_port()}"]
    return [*options, f"--dashboard-host={_LOOPBACK}", f"--dashboard-port={free_port()}"]


def device_options(cluster: ClusterConfig, num_cpus: int) -> list[str]:
    """What a node offers: what Ray counts by itself is the machine's, not the job's."""
    if cluster.device == "cpu":
        return [f"--num-cpus={cluster.devices_per_node}"]
    return [f"--num-gpus={cluster.devices_per_node}", f"--num-cpus={num_cpus}"]


def own_address(interface: str | None, name: str) -> str:
    """The address of this node that others reach: an interface's, or what the node's name stands for."""
    if interface is None:
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            what = f"{name} stands for {address} here, which no other node reaches"
            raise SetupError(what, fix="name network_interface in the cluster file")
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            present = ", ".join(name for _, name in socket.if_nameindex())
            fix = f"network_interface of the cluster file: this node has {present}"
            raise SetupError(f'the interface "{interface}" has no address: {error.strerror}', fix=fix) from error
    return socket.inet_ntoa(answer[20:24])


def free_port() -> int:
    """Return a port that is free now on every address. None of those that the kernel hands out unasked, which may be
    another's before Ray takes it, and none of those that Ray gives to its workers."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
    raise SetupError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on this node")


def default_signals() -> None:
    """Reset SIGTERM in a new process: a signal that its parent ignores would stay ignored in it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _last_words(logs: Path) -> str:
    """Return what Ray says of the process that took it along."""
    said = logs / "ray_process_exit.log"
    return f": {' '.join(said.read_text(errors='replace').split())}" if said.is_file() else ""
