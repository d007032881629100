"""What every task of the Slurm step runs: Ray on its node, and on the first node the run.

Tasks meet in the directory of the attempt: the first one writes `address` there when its Ray can be joined, and
`exit_code` when the run has ended, at which the others leave. The batch script writes `stop` when time runs out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mrl import files
from mrl.config.load import load_any_config
from mrl.config.schema import Config
from mrl.errors import EXIT_STOPPED, MrlError, SetupError, TooFewDevices
from mrl.launch.ray_node import default_signals, device_options, free_port, head_options, own_address, ray_node
from mrl.plan.search import fits_on

_POLL_S = 0.5
_CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
_AWAIT = "await-nodes"  # the first argument of the process that waits for the other nodes


class RendezvousDirectory:
    """The directory in which the tasks of an attempt meet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, name: str) -> str:
        """Return what somebody wrote; nothing where nobody has."""
        try:
            return (self.directory / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str) -> None:
        """Write a file that others see whole or not at all."""
        files.write_text(self.directory / name, text)

    def has(self, name: str) -> bool:
        """Return whether the file is there. Opening asks the file server, where looking may be answered from memory."""
        try:
            os.close(os.open(self.directory / name, os.O_RDONLY))
        except FileNotFoundError:
            return False
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part; return its exit code."""
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
    # `scancel` signals every task. The run's own end ends the others, so that it can still save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = _first if os.environ["SLURM_PROCID"] == "0" else _other
    try:
        with writable_caches():
            return part(RendezvousDirectory(arguments.attempt), arguments)
    except MrlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


@contextmanager
def writable_caches() -> Iterator[None]:
    """For the time of the block libraries can keep what they compile: below the home directory, or where that cannot
    be written, as in a container without one, in a directory of this node, unless the site names others."""
    if os.access(Path.home(), os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mrl-caches-", ignore_cleanup_errors=True) as directory:
        for name in _CACHES:
            os.environ.setdefault(name, f"{directory}/{name.lower()}")
        yield


def _first(attempt: RendezvousDirectory, arguments: argparse.Namespace) -> int:
    name, limit_s, code = os.environ["SLURMD_NODENAME"], arguments.join_limit_s, 1
    try:
        host = own_address(arguments.interface, name)
        port = free_port()
        address = f"{host}:{port}"
        cluster = load_any_config(arguments.config, [f"cluster.ray_address={address}"]).config.cluster
        options = [*head_options(port), *device_options(cluster, arguments.cpus)]
        with ray_node(host, name, options) as node:
            node.await_start(limit_s)
            attempt.write("address", address)
            common = [arguments.config, f"cluster.ray_address={address}"]
            waiting = ["-m", "mrl.launch.node", _AWAIT, *common, f"{limit_s}", *attempt.read("nodes").split()]
            # A process of its own, like the run: Ray ends whoever is joined to a cluster that is gone.
            code = supervise([sys.executable, *waiting], attempt)
            if code == 0:
                code = supervise([sys.executable, "-m", "mrl.cli.main", arguments.verb, *common], attempt)
    finally:
        attempt.write("exit_code", f"{code}")
    return code


def _other(attempt: RendezvousDirectory, arguments: argparse.Namespace) -> int:
    name, limit_s = os.environ["SLURMD_NODENAME"], arguments.join_limit_s
    host, deadline = own_address(arguments.interface, name), time.monotonic() + limit_s
    while not (address := attempt.read("address")):
        if attempt.has("exit_code"):
            return 1
        if time.monotonic() > deadline:
            raise SetupError(f"the first node has started no Ray within {limit_s:g} s")
        time.sleep(_POLL_S)
    cluster = load_any_config(arguments.config, [f"cluster.ray_address={address}"]).config.cluster
    with ray_node(host, name, [f"--address={address}", *device_options(cluster, arguments.cpus)]) as node:
        while not attempt.has("exit_code"):
            node.check()
            time.sleep(_POLL_S)
    return 0


def _await_nodes(argv: Sequence[str]) -> int:
    """Return 0 when every node is up, or 1 after the limit, with those that are not and what would fit without them."""
    # With Ray, which only this process joins.
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


def supervise(command: Sequence[str], attempt: RendezvousDirectory) -> int:
    """Run a command to its end; SIGUSR1 tells it when the batch script wants it to stop. Its words go to a log."""
    with (attempt.directory / "train.log").open("ab") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=default_signals
        )
        signal.signal(signal.SIGTERM, lambda number, frame: run.send_signal(number))
        is_told = False
        while run.poll() is None:
            if not is_told and attempt.has("stop"):
                run.send_signal(signal.SIGUSR1)
                is_told = True
            time.sleep(_POLL_S)
    if run.returncode == -signal.SIGUSR1:
        return EXIT_STOPPED  # it was told before it could listen: nothing has been done that would be lost
    return run.returncode if run.returncode >= 0 else 128 - run.returncode


if __name__ == "__main__":
    sys.exit(main())
