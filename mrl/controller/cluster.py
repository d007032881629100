"""Ray itself: started here behind a token, or joined where it runs."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import ray
from ray.exceptions import RayError

from mrl.config.schema import ClusterConfig
from mrl.errors import PlacementError

_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


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
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address}: {error}",
            fix="is it running, does the address hold, and is RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) the token "
            "that it was started with? Without tokens: RAY_AUTH_MODE=disabled and cluster.allow_insecure_ray=true",
        ) from error
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
    # A CPU device is a slot, not a core: a laptop may run more ranks than it has cores.
    slots = {"num_cpus": config.devices_per_node} if config.device == "cpu" else {}
    try:
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(directory / "ray"),
            **slots,
        )
        yield
    finally:
        ray.shutdown()
        for name in _TOKEN_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        shutil.rmtree(directory, ignore_errors=True)
