"""The program of every task of the Slurm step: runs Ray on its node and, on the first node, the run.

Tasks communicate through the directory of the attempt. The first task writes `address` when its Ray accepts nodes, and
`exit_code` when the run has ended, so that the other tasks exit. The batch script writes `stop` when time runs out.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl import files
from mrl.config.resolved.load import load_any_config
from mrl.config.schema import ClusterConfig, Config
from mrl.errors import EXIT_STOPPED, MrlError, SetupError, TooFewDevices
from mrl.plan.search import fits_on

_MAX_OPENS_PER_S = 250
"""Files that all nodes together open per second, while they wait for the first one, on the shared file system."""
_CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
_AWAIT = "await-nodes"  # first argument of the process that waits for the other nodes


def read(file: Path) -> str:
    """Return the contents of a file, or an empty string if it does not exist."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def is_there(file: Path) -> bool:
    """Return whether a file exists. Opening it asks the file server, while a stat may be answered from a cache."""
    try:
        os.close(os.open(file, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part. Return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [_AWAIT]:
        return _await_nodes(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--verb", default="train")
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--join-limit-s", type=float, required=True)
    parser.add_argument("--interface")
    arguments = parser.parse_args(argv)
    # `scancel` signals every task. The other tasks end when the run ends, so that it can still save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = _first if os.environ["SLURM_PROCID"] == "0" else _other
    try:
        with writable_caches():
            return part(arguments.attempt, arguments)
    except MrlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


@contextmanager
def writable_caches() -> Iterator[None]:
    """For the length of the block, let libraries cache compiled code: below the home directory or, if it is not
    writable, as in a container without one, in a directory of this node, unless the site sets other places."""
    if os.access(Path.home(), os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mrl-caches-", ignore_cleanup_errors=True) as directory:
        for name in _CACHES:
            os.environ.setdefault(name, f"{directory}/{name.lower()}")
        yield


def _first(attempt: Path, arguments: argparse.Namespace) -> int:
    name, limit_s, code = os.environ["SLURMD_NODENAME"], arguments.join_limit_s, 1
    try:
        host = own_address(arguments.interface, name)
        port = free_port()
        address = f"{host}:{port}"
        cluster = load_any_config(arguments.config, [f"cluster.ray_address={address}"]).config.cluster
        options = [*head_options(port), *device_options(cluster, arguments.cpus)]
        with started_ray(host, name, options, limit_s):
            files.write_text(attempt / "address", address)
            common = [arguments.config, f"cluster.ray_address={address}"]
            waiting = ["-m", "mrl.launch.node", _AWAIT, *common, f"{limit_s}", *read(attempt / "nodes").split()]
            # A separate process, like the run: Ray ends every process that has joined a cluster that is gone.
            code = supervise([sys.executable, *waiting], attempt)
            if code == 0:
                code = supervise([sys.executable, "-m", "mrl.cli.main", arguments.verb, *common], attempt)
    finally:
        files.write_text(attempt / "exit_code", f"{code}")
    return code


def _other(attempt: Path, arguments: argparse.Namespace) -> int:
    name, limit_s = os.environ["SLURMD_NODENAME"], arguments.join_limit_s
    host, deadline = own_address(arguments.interface, name), time.monotonic() + limit_s
    wait_s = poll_interval(len(read(attempt / "nodes").split()))
    while not (address := read(attempt / "address")):
        if is_there(attempt / "exit_code"):
            return 1
        if time.monotonic() > deadline:
            raise SetupError(f"Ray did not start on the first node within {limit_s:g} s")
        time.sleep(wait_s)
    cluster = load_any_config(arguments.config, [f"cluster.ray_address={address}"]).config.cluster
    options = [f"--address={address}", *device_options(cluster, arguments.cpus)]
    try:
        with started_ray(host, name, options, limit_s) as node:
            while not is_there(attempt / "exit_code"):
                node.check()
                time.sleep(wait_s)
    except RayEnded:
        if not is_there(attempt / "exit_code"):  # otherwise the first node's Ray has ended with the run
            raise
    return 0


def poll_interval(num_nodes: int) -> float:
    """Return the seconds between two looks of a node at the directory of the attempt."""
    return max(_POLL_S, num_nodes / _MAX_OPENS_PER_S)


def _await_nodes(argv: Sequence[str]) -> int:
    """Return 0 when every node is up. After the limit, return 1 with the missing nodes and what would fit without
    them."""
    # These load Ray, so only this process joins.
    from mrl.controller import ray_cluster
    from mrl.controller.nodes import wait_for_nodes

    path, override, limit_s, *names = argv
    resolved = load_any_config(path, [override])
    cluster = resolved.config.cluster
    try:
        with ray_cluster(cluster):
            wait_for_nodes(names, cluster.device, cluster.devices_per_node, float(limit_s))
    except MrlError as error:
        if isinstance(error, TooFewDevices) and isinstance(resolved.config, Config):
            error.fix = "\n".join([error.fix, *fits_on(resolved, error.num_nodes)])
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def supervise(command: Sequence[str], attempt: Path) -> int:
    """Run a command to its end, with its output in a log. SIGUSR1 means that the batch script wants it to stop."""
    with (attempt / "train.log").open("ab") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=default_signals
        )
        signal.signal(signal.SIGTERM, lambda number, frame: run.send_signal(number))
        is_notified = False
        while run.poll() is None:
            if not is_notified and is_there(attempt / "stop"):
                run.send_signal(signal.SIGUSR1)
                is_notified = True
            time.sleep(_POLL_S)
    if run.returncode == -signal.SIGUSR1:
        return EXIT_STOPPED  # it was signaled before its handler was installed, when nothing could be lost
    return run.returncode if run.returncode >= 0 else 128 - run.returncode


_LOOPBACK = "127.0.0.1"
_STARTED = "ray_current_cluster"  # Ray writes this file once the node is up and known to the others
_ENDS_S = 20.0
_POLL_S = 0.2
_SIOCGIFADDR = 0x8915
_PORTS = range(20000, 32768)


class RayEnded(SetupError):
    """Ray has ended on this node."""


@dataclass(frozen=True)
class RayNode:
    """A running `ray start --block`."""

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
            raise RayEnded(f"Ray ended on this node with status {status}{_last_words(logs)}")


@contextmanager
def started_ray(host: str, name: str, options: Sequence[str], limit_s: float) -> Iterator[RayNode]:
    """Run Ray for the length of the block, which begins when Ray is up. A Ray that ends before is started once more.

    Its raylet gives its agents 15 seconds. Reading their code from a shared file system may take longer the first time.
    """
    with ExitStack() as stack:
        try:
            node = stack.enter_context(ray_node(host, name, options))
            node.await_start(limit_s)
        except RayEnded as error:
            sys.stderr.write(f"{error}. Ray is started once more.\n")
            stack.close()
            node = stack.enter_context(ray_node(host, name, options))
            node.await_start(limit_s)
        yield node


@contextmanager
def ray_node(host: str, name: str, options: Sequence[str]) -> Iterator[RayNode]:
    """Run Ray for the length of the block, with its sockets and logs in a private directory."""
    directory = Path(tempfile.mkdtemp(prefix="mrl-"))  # mode 0700; Ray would leave them readable by all users
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={host}", f"--node-name={name}", f"--temp-dir={directory}", *options]
    # The default is one port for all. A head that finds it taken continues without this agent, and rejects every job.
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
            os.killpg(process.pid, signal.SIGKILL)  # remaining processes that Ray started
        shutil.rmtree(directory, ignore_errors=True)


def head_options(port: int) -> list[str]:
    """Return the options of the first node. Its dashboard listens only on this node: use `ssh -L` to reach it."""
    # A fixed port could be another user's on a shared node, and Ray exits if it cannot get it.
    options = ["--head", f"--port={port}", f"--ray-client-server-port={free_port()}"]
    return [*options, f"--dashboard-host={_LOOPBACK}", f"--dashboard-port={free_port()}"]


def device_options(cluster: ClusterConfig, num_cpus: int) -> list[str]:
    """Return the devices that a node offers. Ray's own count would be the machine's, not the job's."""
    if cluster.device == "cpu":
        return [f"--num-cpus={cluster.devices_per_node}"]
    return [f"--num-gpus={cluster.devices_per_node}", f"--num-cpus={num_cpus}"]


def own_address(interface: str | None, name: str) -> str:
    """Return the address at which other nodes reach this one: the interface's, or the address that the node's name
    resolves to."""
    if interface is None:
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            what = f"{name} resolves to {address} here, which other nodes cannot reach"
            raise SetupError(what, fix="set network_interface in the cluster file")
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            present = ", ".join(name for _, name in socket.if_nameindex())
            fix = f"set network_interface in the cluster file; this node has {present}"
            raise SetupError(f'the interface "{interface}" has no address: {error.strerror}', fix=fix) from error
    return socket.inet_ntoa(answer[20:24])


def free_port() -> int:
    """Return a port that is free now on every address. Exclude ports that the kernel assigns automatically, which may
    be taken before Ray uses them, and ports that Ray gives to its workers."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise SetupError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on this node")


def default_signals() -> None:
    """Reset SIGTERM in a new process. A signal that the parent ignores would stay ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _last_words(logs: Path) -> str:
    """Return what Ray reports about the process whose end stopped it."""
    report = logs / "ray_process_exit.log"
    return f": {' '.join(report.read_text(errors='replace').split())}" if report.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
