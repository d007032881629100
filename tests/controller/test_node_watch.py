"""A run whose cluster loses its head, or its part on the run's own node, ends soon with a reason."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from mrl.children import children_of
from mrl.config.schema import ClusterConfig
from mrl.controller import RunContext
from mrl.controller.cluster import ray_cluster
from mrl.controller.diagnosis import NodeMemory
from mrl.controller.network import Network
from mrl.controller.node_watch import NodeWatch
from mrl.controller.processes import NodeView
from mrl.errors import PlacementError, WorkerDied
from mrl.events import NodeSilent, read_events
from mrl.launch.node import RayNode, free_port, head_options, ray_node
from tests.apart import ROOT


@contextmanager
def cluster(tmp_path: Path) -> Iterator[tuple[RayNode, int]]:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    os.environ.pop("RAY_AUTH_TOKEN", None)
    port = free_port()
    options = [*head_options(port), "--include-dashboard=False", "--num-cpus=1", "--object-store-memory=100000000"]
    try:
        with ray_node("127.0.0.1", "alone", options) as node:
            node.await_start(120)
            yield node, port
    finally:
        os.environ.clear()
        os.environ |= before


def process_of(node: RayNode, name: str) -> int:
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children_of(node.process.pid)}
    (pid,) = [pid for pid, its in names.items() if its == name]
    return pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "said", "limit_s"),
    [
        ("gcs_server", signal.SIGSTOP, r"the head of the Ray cluster at {} is lost: it has not answered for \d s", 15),
        ("raylet", signal.SIGKILL, "the Ray of the cluster at {} has ended on this node", 5),
    ],
)
def test_the_end_of_a_joined_cluster_is_the_end_of_a_run(
    name: str, number: signal.Signals, said: str, limit_s: float, tmp_path: Path
) -> None:
    with cluster(tmp_path) as (node, port):
        program = [sys.executable, "-m", "tests.controller.joined", f"127.0.0.1:{port}"]
        with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            assert run.stdout.readline() == "joined\n"
            pid = process_of(node, name)
            os.kill(pid, number)
            began = time.monotonic()
            try:
                heard, code = run.stdout.read().splitlines(), run.wait(60)  # Ray may print lines, too
            finally:
                run.kill()
                with suppress(ProcessLookupError):  # its parent may have collected it by now
                    os.kill(pid, signal.SIGKILL)
            assert [line for line in heard if re.fullmatch(said.format(rf"\S+:{port}"), line.strip())], heard
            assert code == 76
            assert time.monotonic() - began < limit_s


class Wavering:
    """An agent of another node. It is slow once, fails several times in a row, and then answers every time."""

    def __init__(self) -> None:
        self._num_heard = 0
        self._answered_at: list[float] = []

    def hear(self, limit_s: float) -> None:
        self._num_heard += 1
        if self._num_heard == 3:
            time.sleep(1.0)
        if 6 <= self._num_heard < 10:
            raise ConnectionError("out of reach")
        self._answered_at.append(time.time())

    def num_heard(self) -> int:
        return self._num_heard

    def answered_at(self) -> list[float]:
        return self._answered_at


def test_a_node_that_was_silent_is_asked_on_and_counts_again_when_it_answers(run_context: RunContext) -> None:
    import ray  # mrl.controller comes first: it has Ray ask its callers for a token

    agent = ray.remote(Wavering).options(num_cpus=0).remote()
    ray.get(agent.num_heard.remote())
    node = NodeView("another", "n1", agent, NodeMemory(0, 1, 1), Network("10.0.0.1", None, {}))
    lost: list[WorkerDied] = []
    watch = NodeWatch([node], 0.4, run_context.events, lost.append)
    try:
        deadline = time.monotonic() + 20
        while ray.get(agent.num_heard.remote()) < 14 and not lost:
            assert time.monotonic() < deadline, "it is not asked any more"
            time.sleep(0.05)
        while node.is_silent.is_set():  # a busy machine may be late with an answer
            assert time.monotonic() < deadline, "it does not count again"
            time.sleep(0.05)
        answered_at = ray.get(agent.answered_at.remote())
    finally:
        watch.stop()
        ray.kill(agent)
    assert lost == []
    silences = [each for each in read_events(run_context.events.path) if isinstance(each.event, NodeSilent)]
    reported_at = [each.time for each in silences if each.event.node == "n1"]
    assert len(reported_at) >= 2, "a busy machine adds some"
    on_its_way_s = 0.2  # an answer that was given, but had not arrived
    for first, second in pairwise(reported_at):
        assert any(first - on_its_way_s < at < second for at in answered_at), "each silence is reported once"


def test_a_head_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray alone would retry for minutes, so a restart could not use a deadline."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    config = ClusterConfig(nodes=1, devices_per_node=1, device="cpu", ray_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(PlacementError, match=r"no Ray cluster answers at .*Connection refused"), ray_cluster(config):
        pass
