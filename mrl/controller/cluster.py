"""Ray itself: started here behind a token, or joined where it runs."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import ray
from ray.exceptions import RayError

from mrl.config.schema import ClusterConfig
from mrl.controller.network import Endpoint, failures
from mrl.controller.node_watch import watched_head
from mrl.errors import PlacementError, SetupError, WorkerDied

_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
_KEEPER_ENDS_S = 6.0
_CONNECT_S = 5.0


@cache
def _token() -> str:
    """One token for every Ray that this process starts: Ray reads it once and never looks again."""
    return secrets.token_hex(32)


@contextmanager
def ray_cluster(config: ClusterConfig) -> Iterator[None]:
    """Ray for the length of a run. One that is started here ends with it and leaves nothing behind.

    Within the block of a Ray that was started here another one starts nothing and ends nothing.
    """
    listener = signal.getsignal(signal.SIGTERM)
    if _soon:
        _soon[-1].result()
    if config.ray_address is not None:
        cluster = _joined(config.ray_address, config.allow_insecure_ray)
    else:
        cluster = _started_here(config)
    with cluster:
        # Ray makes SIGTERM its own, from the process too: whoever saves a run at it would never hear of it.
        if callable(listener) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, listener)
        yield


_soon: list[Future[None]] = []
"""The Ray that a thread is starting, where there is one."""


@contextmanager
def ray_cluster_soon(config: ClusterConfig) -> Iterator[None]:
    """Start Ray on this machine for the length of the block, which goes on meanwhile; `ray_cluster` in it waits.

    Ray waits for its own processes for most of the time that it takes to start, and a run has much to load.
    """
    with ExitStack() as cluster, ThreadPoolExecutor(1, "ray") as thread:
        _soon.append(thread.submit(cluster.enter_context, _started_here(config)))
        try:
            yield
        finally:
            _soon.pop()


@contextmanager
def _joined(address: str, allow_insecure: bool) -> Iterator[None]:
    if os.environ.get("RAY_AUTH_MODE") != "token" and not allow_insecure:
        raise PlacementError(
            f"the Ray cluster at {address} would be joined without token authentication: "
            "whoever reaches its ports can run code on it",
            fix="start it with RAY_AUTH_MODE=token and set the same here, or set cluster.allow_insecure_ray=true",
        )
    host, _, port = address.rpartition(":")  # or "auto"
    try:
        # Ray itself tries for minutes, and ends the process then.
        if port.isdecimal() and (why := failures([Endpoint(host.strip("[]"), int(port), "")], _CONNECT_S)[0]):
            raise ConnectionError(why)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address}: {error}",
            fix="is it running, does the address hold, and is RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) the token "
            "that it was started with? Without tokens: RAY_AUTH_MODE=disabled and cluster.allow_insecure_ray=true",
        ) from error
    with watched_head(lose_ray):
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _started_here(config: ClusterConfig) -> Iterator[None]:
    """A Ray of this machine alone, its sockets and logs in a private directory: Ray would leave them open to all."""
    if config.nodes != 1:
        raise PlacementError(
            f"cluster.nodes is {config.nodes}, but without cluster.ray_address Ray is started on this machine only",
            fix="start Ray on all nodes and set cluster.ray_address=auto, or set cluster.nodes=1",
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise PlacementError(
            "Ray would be started without token authentication",
            fix="unset RAY_AUTH_MODE, and let nothing import ray before mrl.controller",
        )
    if ray.is_initialized():
        yield
        return
    directory = Path(tempfile.mkdtemp(prefix="mrl-"))  # mkdtemp makes it 0700; sockets need a short path
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    before = {name: os.environ.pop(name, None) for name in _TOKEN_VARIABLES}
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    try:
        with _kept(config, directory) as address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            yield
    finally:
        for name in _TOKEN_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _kept(config: ClusterConfig, directory: Path) -> Iterator[str]:
    """Ray's processes, below one that ends them all when this one ends or leaves the block: the address of that Ray."""
    # A CPU device is a slot, not a core: a laptop may run more ranks than it has cores.
    slots = [str(config.devices_per_node)] if config.device == "cpu" else []
    command = [sys.executable, "-m", "mrl.controller.keeper", str(directory), *slots]
    pipe = subprocess.PIPE
    environment = dict(os.environ)  # a copy: libraries that load meanwhile change their own, which moves in memory
    with (
        (directory / "keeper.log").open("w+") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True, env=environment
        ) as keeper,
    ):
        assert keeper.stdout is not None, "it was asked for as a pipe"
        ends = threading.Event()
        try:
            if address := keeper.stdout.readline().strip():
                threading.Thread(target=_await_loss, args=(keeper, ends), name="ray-loss", daemon=True).start()
                yield address
        finally:
            ray.shutdown()
            ends.set()
            _end(keeper)
        if not address:
            log.seek(0)
            words = log.read().strip().splitlines()[-1:] or ["it said nothing"]
            fix = f"a TMPDIR whose name is shorter: Ray's sockets lie in {directory}" if "AF_UNIX" in words[0] else ""
            raise SetupError(f"Ray did not start on this machine: {words[0]}", fix=fix)


def _end(keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdin is not None, "it was asked for as a pipe"
    with suppress(BrokenPipeError):
        # A word, as a process forked here may hold the pipe open; past the buffer, which closing would write again.
        os.write(keeper.stdin.fileno(), b"\n")
    try:
        keeper.wait(_KEEPER_ENDS_S)
    except subprocess.TimeoutExpired:
        keeper.kill()


def _await_loss(keeper: subprocess.Popen[str], ends: threading.Event) -> None:
    """End this process when its Ray is lost, with what there is to say: whatever waits for Ray waits for ever."""
    assert keeper.stdout is not None, "it was asked for as a pipe"
    keeper.stdout.readline()
    if not ends.is_set():  # else it was told to, and its pipe may be closed by now
        why = keeper.stdout.readline().strip() or f"the process that keeps it (pid {keeper.pid}) has ended"
        lose_ray(WorkerDied(f"the Ray that was started for this run is lost: {why}"))


def lose_ray(error: WorkerDied) -> None:
    """End this process for an error that its threads would not hear of: each of them may wait for Ray."""
    os._exit(_when_lost[-1](error))


def _say_so(error: WorkerDied) -> int:
    sys.stderr.write(f"{error}\n")
    return error.exit_code


_when_lost: list[Callable[[WorkerDied], int]] = [_say_so]


@contextmanager
def when_ray_is_lost(tell: Callable[[WorkerDied], int]) -> Iterator[None]:
    """Where the Ray of this process is lost, or a node of it, this ends with the exit code that `tell` returns."""
    _when_lost.append(tell)
    try:
        yield
    finally:
        _when_lost.remove(tell)
