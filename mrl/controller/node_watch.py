"""Watch the nodes of a run, and the head of a joined cluster. A node that is silent for too long ends the run.

Calls that wait for an unreachable node would wait for a minute, until Ray gives it up, or forever.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from mrl.controller.processes import NodeView
from mrl.errors import WorkerDied
from mrl.events import EventLog, NodeSilent

PATIENCE = 6
"""Number of heartbeats of silence after which a node is lost; a busy node may need some of them."""
_HEAD_S = 30.0
_POLL_S = 1.0
Lose = Callable[[WorkerDied], None]
"""Ends the run. Its threads may all be waiting."""


class NodeWatch:
    """Asks every other node, twice per heartbeat, until it is stopped.

    After the same time without a call, a node ends its processes of the run: two attempts must never write together.
    """

    def __init__(self, nodes: Sequence[NodeView], heartbeat_s: float, events: EventLog, lose: Lose) -> None:
        own_node = ray.get_runtime_context().get_node_id()
        self._nodes = [node for node in nodes if node.node_id != own_node]
        self._heartbeat_s, self._limit_s = heartbeat_s, heartbeat_s * PATIENCE
        self._events, self._lose = events, lose
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop asking."""
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        beat_s = self._heartbeat_s / 2
        last_answers = {node.node_id: time.monotonic() for node in self._nodes}
        pending: dict[str, Any] = {}
        while self._nodes and not self._ends.wait(beat_s):
            for node in self._nodes:
                if node.node_id not in pending:
                    pending[node.node_id] = node.agent.hear.remote(self._limit_s)
            done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=beat_s / 2)
            for node in self._nodes:
                if pending[node.node_id] in done and _is_answer(pending.pop(node.node_id)):
                    last_answers[node.node_id] = time.monotonic()
                    node.is_silent.clear()
                self._judge(node, time.monotonic() - last_answers[node.node_id])

    def _judge(self, node: NodeView, silent_s: float) -> None:
        name = f"node {node.name} ({node.network.address})"
        if silent_s > self._heartbeat_s * 0.75 and not node.is_silent.is_set():
            node.is_silent.set()
            self._events.write(NodeSilent(node.name, node.network.address, silent_s))
        if silent_s > self._limit_s and not self._ends.is_set():
            self._lose(WorkerDied(f"{name} is lost: it has not answered for {silent_s:.0f} s"))


def _is_answer(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=0)
    except RayError:
        return False
    return True


@contextmanager
def watched_head(lose: Lose) -> Iterator[None]:
    """Check during the block that the cluster's head answers and that this node's raylet lives."""
    ends = threading.Event()
    thread = threading.Thread(target=_watch_head, args=(ends, lose), name="head-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()


def _watch_head(ends: threading.Event, lose: Lose) -> None:
    head, node = internal_kv_get_gcs_client(), ray._private.worker.global_worker.node
    address, raylet = ray.get_runtime_context().gcs_address, _raylet(node.raylet_socket_name)
    last_answer = time.monotonic()
    while not ends.is_set():
        if select.select([raylet], [], [], _POLL_S)[0] and not ends.is_set():
            lose(WorkerDied(f"the Ray of the cluster at {address} has ended on this node"))
        try:
            head.check_alive([], timeout=_POLL_S)
            last_answer = time.monotonic()
        except RayError:
            pass
        silent_s = time.monotonic() - last_answer
        if silent_s > _HEAD_S and not ends.is_set():
            lose(
                WorkerDied(
                    f"the head of the Ray cluster at {address} is lost: it has not answered for {silent_s:.0f} s"
                )
            )


def _raylet(path: str) -> int:
    """Return a descriptor that becomes readable when the raylet behind this socket ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return os.pidfd_open(struct.unpack("3i", credentials)[0])
