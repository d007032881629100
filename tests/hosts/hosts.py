"""Simulated hosts: separate namespaces for network, host name, shared memory and /etc/hosts, on one bridge.

A first process, `init`, is the init process of a PID namespace and holds the bridge. All processes of all hosts run in
that namespace, so the kernel ends them with `init`, which ends when its standard input closes. Therefore even a killed
test leaves nothing behind. Nothing has a name outside, so two sessions cannot collide. The file system is shared.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mrl.launch.node import RayNode
from tests.apart import MAIN, ROOT

RAY_PORT = 6399
_START_S = 240.0
_SPACES = ("--net", "--mount", "--uts")
_AS_ROOT = () if os.getuid() == 0 else ("--map-root-user",)
_ENTER_AS_ROOT = () if os.getuid() == 0 else ("--user", "--preserve-credentials")
# Orphaned processes of the hosts become its children; with SIGCHLD ignored, they never become zombies.
_INIT = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
_HOLD = "import sys; print(flush=True); sys.stdin.read()"


@cache
def why_not() -> str:
    """Return why this machine cannot simulate hosts, or an empty string if it can."""
    if missing := [name for name in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(name) is None]:
        return f"hosts need {', '.join(missing)} (iproute2, util-linux, hostname)"
    make = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs none /dev/shm"
    command = ["unshare", *_AS_ROOT, *_SPACES, "--pid", "--fork", "--mount-proc", "sh", "-c", f"{make} && hostname a"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"hosts need root or user namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Host:
    """A simulated host."""

    name: str
    address: str
    interface: str
    port: str
    """Bridge end of its network link."""
    pid: int
    """Process id of the process that holds its namespaces."""
    names: Path
    """File that it sees as /etc/hosts."""
    files: Path
    """Directory for Ray, removed with the hosts."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables for commands on this host."""

    def prefix(self, directory: Path = ROOT) -> list[str]:
        """Return the command prefix that runs a command on this host, in a directory."""
        return ["nsenter", f"--target={self.pid}", *_ENTER_AS_ROOT, *_SPACES, "--pid", f"--wdns={directory}"]

    def run(self, *command: str, cwd: Path = ROOT, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and wait for it."""
        return subprocess.run(
            [*self.prefix(cwd), *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.all_environment(),
        )

    def all_environment(self) -> dict[str, str]:
        """Return the environment for commands: this process's without Ray and network variables, plus the host's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | self.environment

    def ip(self, *arguments: str) -> None:
        """Run `ip` on this host to change its network."""
        ran = self.run("ip", *arguments)
        assert ran.returncode == 0, ran.stderr

    def limit(self, mbit_per_s: int) -> None:
        """Limit the rate of its link in both directions, with a burst of 2 ms or two full segments."""
        burst = max(mbit_per_s * 250, 2 * 65536)
        shape = ["replace", "root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", str(burst), "latency", "50ms"]
        self._shape(shape, sends=True, receives=True)

    def drop(self, *, sends: bool = True, receives: bool = True) -> None:
        """Silently drop the packets that it sends, that it receives, or both."""
        self._shape(["replace", "root", "pfifo", "limit", "0"], sends=sends, receives=receives)

    def heal(self) -> None:
        """Remove the limits and drops of its link."""
        self._shape(["del", "root"], sends=True, receives=True, missing="Cannot delete qdisc with handle of zero")

    def _shape(self, shape: Sequence[str], *, sends: bool, receives: bool, missing: str | None = None) -> None:
        ends: list[tuple[list[str], str]] = [([], self.interface)] * sends + [
            (["nsenter", "--target=1", "--net"], self.port)
        ] * receives
        for enter, end in ends:  # 1 is `init`
            ran = self.run(*enter, "tc", "qdisc", shape[0], "dev", end, *shape[1:])
            assert ran.returncode == 0 or (missing and missing in ran.stderr), ran.stderr

    def processes(self, title: str = "") -> list[int]:
        """Return the process ids on this host, or those with `title` in the command line."""
        space, pids = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(process / "ns" / "net") == space and int(process.name) != self.pid:
                    pids += [int(process.name)] * (title in (process / "cmdline").read_text())
        return pids

    def kill_all(self) -> None:
        """Kill all processes on this host, like a loss of power."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (self.files / "ray_current_cluster").unlink(missing_ok=True)

    def mrl(self, *arguments: str, cwd: Path, code: int = 0) -> str:
        """Run `mrl` on this host and return its output."""
        ran = self.run(sys.executable, "-c", MAIN, *arguments, cwd=cwd)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr


@contextmanager
def hosts(interfaces: Sequence[str]) -> Iterator[list[Host]]:
    """Start a host for each interface name, called node1, node2, ...

    As on Debian, a host resolves its own name to 127.0.1.1, and the names of the other hosts to their addresses.
    """
    with ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrl-hosts-")))
        init = _hold(stack, ["unshare", *_AS_ROOT, *_SPACES, "--pid", "--fork", "--mount-proc", "--kill-child"], _INIT)
        switch = [
            "nsenter",
            f"--target={init}",
            *_ENTER_AS_ROOT,
            "--net",
        ]  # enters no PID namespace, so process ids are those outside
        _run(*switch, "sh", "-ec", "ip link add br0 type bridge; ip link set br0 up")
        made = []
        for number, interface in enumerate(interfaces, 1):
            enter = ["nsenter", f"--target={init}", *_ENTER_AS_ROOT, *_SPACES, "--pid", "unshare", *_SPACES]
            pid, port = _hold(stack, enter, _HOLD), f"v{number}"
            names, own = files / f"names{number}", files / f"{number}"
            made.append(Host(f"node{number}", f"10.77.0.{number}", interface, port, pid, names, own))
            peer = f"type veth peer name {interface} netns {pid}"
            _run(*switch, "sh", "-ec", f"ip link add {port} {peer}; ip link set {port} master br0 up")
        for host in made:
            known = {other.name: other.address for other in made} | {host.name: "127.0.1.1"}
            host.names.write_text("127.0.0.1 localhost\n" + "".join(f"{known[name]} {name}\n" for name in known))
            steps = f"ip addr add {host.address}/24 dev {host.interface}; ip link set {host.interface} up; "
            steps += f"ip link set lo up; hostname {host.name}; mount --bind {host.names} /etc/hosts; "
            ran = host.run("sh", "-ec", steps + "mount -t tmpfs tmpfs /dev/shm")
            assert ran.returncode == 0, ran.stderr
        yield made


@contextmanager
def ray_on(some: Sequence[Host], directory: Path, *options: str, dashboard: bool = False) -> Iterator[str]:
    """Start Ray on these hosts with token authentication, the first as head. Yield the address for joining.

    Ray's processes end with the hosts.
    """
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    head, address = some[0], f"{some[0].address}:{RAY_PORT}"
    joins = {host.name: [f"--address={address}"] for host in some}
    joins[head.name] = ["--head", f"--port={RAY_PORT}", f"--include-dashboard={dashboard}"]
    with ExitStack() as stack:
        started = []
        for host in some:
            host.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
            started.append(stack.enter_context(ray_of(host, *joins[host.name], *options)))
            if host is head:
                started[0].await_start(_START_S)
        for node in started:
            node.await_start(_START_S)
        yield address


@contextmanager
def ray_of(host: Host, *options: str) -> Iterator[RayNode]:
    """Start the Ray node of a host without waiting until it is ready."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={host.address}", f"--node-name={host.name}", f"--temp-dir={host.files}"]
    process = subprocess.Popen(
        [*host.prefix(), *command, "--object-store-memory=200000000", *options],
        env=host.all_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield RayNode(process, host.files)
    finally:
        _end(process)


def _hold(stack: ExitStack, enter: Sequence[str], program: str) -> int:
    """Start a program that holds namespaces until the block ends. Return its process id outside of them."""
    process = subprocess.Popen(
        [*enter, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    stack.callback(_end, process)
    assert process.stdout is not None, "it is a pipe"
    assert process.stdout.read(1) == b"\n", f"{enter[0]} did not start"
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
