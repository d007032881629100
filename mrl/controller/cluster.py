"""Start Ray with a token, or join a running Ray cluster."""

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
    """Return one token for all Ray clusters that this process starts: Ray reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def ray_cluster(config: ClusterConfig) -> Iterator[None]:
    """Provide Ray for the length of a run. If it is started here, it ends with the block and leaves nothing behind.

    Inside the block of a Ray cluster that was started here, a nested call does nothing.
    """
    listener = signal.getsignal(signal.SIGTERM)
    if _soon:
        _soon[-1].result()
    if config.ray_address is not None:
        cluster = _joined(config.ray_address, config.allow_insecure_ray)
    else:
        cluster = _started_here(config)
    with cluster:
        # Ray replaces the SIGTERM handler, even in the process itself. Without this, a run could not save on SIGTERM.
        if callable(listener) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, listener)
        yield


_soon: list[Future[None]] = []
"""The Ray cluster that a thread is starting, if any."""


@contextmanager
def ray_cluster_soon(config: ClusterConfig) -> Iterator[None]:
    """Start Ray on this machine in a thread while the block runs. `ray_cluster` in the block waits for it.

    Most of Ray's start is waiting for its processes, and a run has much to load in this time.
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
            f"the Ray cluster at {address} does not use token authentication: "
            "anyone who can reach its ports can run code on it",
            fix="start it with RAY_AUTH_MODE=token and set the same here, or set cluster.allow_insecure_ray=true",
        )
    host, _, port = address.rpartition(":")  # or "auto"
    try:
        # Ray tries for minutes, and then ends the process.
        if port.isdecimal() and (reason := failures([Endpoint(host.strip("[]"), int(port), "")], _CONNECT_S)[0]):
            raise ConnectionError(reason)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address}: {error}",
            fix="check that it runs, that the address is right, and that RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) is "
            "its token. For clusters without tokens: RAY_AUTH_MODE=disabled and cluster.allow_insecure_ray=true",
        ) from error
    with watched_head(lose_ray):
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _started_here(config: ClusterConfig) -> Iterator[None]:
    """Start Ray on this machine, with sockets and logs in a private directory: Ray would leave them open to all."""
    if config.nodes != 1:
        raise PlacementError(
            f"cluster.nodes is {config.nodes}, but without cluster.ray_address Ray starts on this machine only",
            fix="start Ray on all nodes and set cluster.ray_address=auto, or set cluster.nodes=1",
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise PlacementError(
            "Ray would be started without token authentication",
            fix="unset RAY_AUTH_MODE, and import mrl.controller before ray",
        )
    if ray.is_initialized():
        yield
        return
    directory = Path(tempfile.mkdtemp(prefix="mrl-"))  # mode 0700; sockets need a short path
    before = {name: os.environ.pop(name, None) for name in _TOKEN_VARIABLES}
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(directory / "token")
    try:
        with _kept(config, directory) as address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            yield
    finally:
        for name in _TOKEN_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        shutil.rmtree(directory, ignore_errors=True)


class _RayDied(SetupError):
    """A process of Ray ended while Ray was starting."""


@contextmanager
def _kept(config: ClusterConfig, directory: Path) -> Iterator[str]:
    """Run Ray's processes below a keeper process, which ends them when this process ends or leaves the block."""
    try:
        keeper, address = _start_keeper(config, directory)
    except _RayDied as error:  # on a busy machine, a raylet that waits too long for its agents ends
        sys.stderr.write(f"{error}. Ray is started once more.\n")
        keeper, address = _start_keeper(config, directory)
    is_over = threading.Event()
    with keeper:
        try:
            threading.Thread(target=_await_loss, args=(keeper, is_over), name="ray-loss", daemon=True).start()
            yield address
        finally:
            ray.shutdown()
            is_over.set()
            _end(keeper)


def _start_keeper(config: ClusterConfig, directory: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a keeper process, which removes the directory at its end. Return it with the address of its Ray."""
    directory.mkdir(mode=0o700, exist_ok=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    # A CPU device is a slot, not a core: a laptop may run more ranks than it has cores.
    slots = [str(config.devices_per_node)] if config.device == "cpu" else []
    command = [sys.executable, "-m", "mrl.controller.keeper", str(directory), *slots]
    pipe = subprocess.PIPE
    environment = dict(os.environ)  # a copy: libraries in other threads may change os.environ
    with (directory / "keeper.log").open("w+") as log:
        keeper = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True, env=environment
        )
        assert keeper.stdout is not None, "it is a pipe"
        if address := keeper.stdout.readline().strip():
            return keeper, address
        with keeper:
            _end(keeper)
            reason = keeper.stdout.read().strip()
        log.seek(0)
        last_lines = log.read().strip().splitlines()[-1:] or ["it printed nothing"]
    if reason:
        raise _RayDied(f"Ray did not start on this machine: {reason}")
    fix = f"use a shorter TMPDIR: Ray's sockets are in {directory}" if "AF_UNIX" in last_lines[0] else ""
    raise SetupError(f"Ray did not start on this machine: {last_lines[0]}", fix=fix)


def _end(keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):
        # Send a line, as a forked process may hold the pipe open. Bypass the buffer, which close would write again.
        os.write(keeper.stdin.fileno(), b"\n")
    try:
        keeper.wait(_KEEPER_ENDS_S)
    except subprocess.TimeoutExpired:
        keeper.kill()


def _await_loss(keeper: subprocess.Popen[str], is_over: threading.Event) -> None:
    """End this process with a message when its Ray is lost: calls that wait for Ray would wait forever."""
    assert keeper.stdout is not None, "it is a pipe"
    keeper.stdout.readline()
    if not is_over.is_set():  # otherwise its end was requested, and the pipe may be closed
        reason = keeper.stdout.readline().strip() or f"its keeper process (pid {keeper.pid}) has ended"
        lose_ray(WorkerDied(f"the Ray that was started for this run is lost: {reason}"))


def lose_ray(error: WorkerDied) -> None:
    """End this process with an error. Its threads cannot raise it, because each may be waiting for Ray."""
    os._exit(_when_lost[-1](error))


def _report_loss(error: WorkerDied) -> int:
    sys.stderr.write(f"{error}\n")
    return error.exit_code


_when_lost: list[Callable[[WorkerDied], int]] = [_report_loss]


@contextmanager
def when_ray_is_lost(tell: Callable[[WorkerDied], int]) -> Iterator[None]:
    """If this process loses its Ray or a node of it during the block, end with the exit code that `tell` returns."""
    _when_lost.append(tell)
    try:
        yield
    finally:
        _when_lost.remove(tell)
