"""Workers that die, raise, stop or hang: the call ends soon, names the failed ranks, and leaves no process.

Each test reads `events.jsonl` and the kernel's process table.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.mesh import Mesh
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, RunContext
from mrl.controller.call import RankFailure, root_causes
from mrl.controller.node_agent import read_process
from mrl.controller.nodes import start_agent
from mrl.errors import WorkerDied, WorkerError, WorkerRaised, WorkerSilent
from mrl.events import Event, RanksReleased, WorkerFault, WorkersStarted, read_events
from tests.conftest import MakeGroup, by_node, make_rank_workers

import ray  # isort: skip - after mrl.controller, which settles how Ray authenticates


def last(path: Path, kind: type[Event]) -> Event:
    return [recorded.event for recorded in read_events(path) if isinstance(recorded.event, kind)][-1]


def assert_ended(context: RunContext, group: RayWorkerGroup, error: WorkerError) -> None:
    """Check that no process of the group is left, and that later calls raise the same error (restarts depend on it)."""
    started = last(context.events.path, WorkersStarted)
    assert isinstance(started, WorkersStarted)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any((read_process(pid) or "Z")[0] not in "ZX" for pid in started.pids):
        time.sleep(0.05)
    assert [(read_process(pid) or "Z")[0] for pid in started.pids if (read_process(pid) or "Z")[0] not in "ZX"] == []
    with pytest.raises(WorkerError) as again:
        group.who()
    assert again.value is error


IN_NODES = pytest.mark.parametrize(
    "in_nodes", [pytest.param(False, marks=pytest.mark.slow), True], ids=["direct", "by node"]
)


def witness(context: RunContext) -> tuple[WorkerFault, RanksReleased]:
    fault, released = last(context.events.path, WorkerFault), last(context.events.path, RanksReleased)
    assert isinstance(fault, WorkerFault)
    assert isinstance(released, RanksReleased)
    return fault, released


@IN_NODES
def test_a_killed_worker_is_the_culprit_not_its_neighbours(
    in_nodes: bool, run_context: RunContext, doomed_workers: MakeGroup
) -> None:
    group = doomed_workers(in_nodes)
    group.join()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        group.die(2, after_s=0.3)
    assert time.monotonic() - began < 6
    message = str(caught.value)
    assert message.startswith("critic rank 2 (tp0 dp1) on node ")
    assert "died in die after" in message
    assert "| about to be killed" in message, "the tail of its log is shown"
    assert caught.value.ranks == (2,)
    assert caught.value.role == "critic"
    fault, released = witness(run_context)
    assert (fault.role, fault.rank, fault.phase, fault.fault) == ("critic", 2, "die", "died")
    assert set(released.ranks) <= {0, 1, 3}
    assert_ended(run_context, group, caught.value)


@IN_NODES
def test_one_that_raises_is_the_culprit_and_the_others_leave_the_collective(
    in_nodes: bool, run_context: RunContext, doomed_workers: MakeGroup
) -> None:
    group = doomed_workers(in_nodes)
    group.join()
    began = time.monotonic()
    with pytest.raises(WorkerRaised) as caught:
        group.raise_on(1)
    assert time.monotonic() - began < 6
    message = str(caught.value)
    assert "critic rank 1 (tp1 dp0) on node " in message
    assert "raised in raise_on after" in message
    assert "rank 1: row 7 is bad\n  fix: leave it out" in message
    assert "rank_workers.py" in message, "the traceback is shown"
    assert "the other ranks were ended: 0, 2, 3" in message
    fault, released = witness(run_context)
    assert (fault.rank, fault.phase, fault.fault) == (1, "raise_on", "raised")
    assert released.ranks == [0, 1, 2, 3]
    assert_ended(run_context, group, caught.value)


@IN_NODES
def test_a_stopped_worker_is_found_long_before_the_deadline(
    in_nodes: bool, run_context: RunContext, doomed_workers: MakeGroup
) -> None:
    group = doomed_workers(in_nodes)
    group.join()
    began = time.monotonic()
    with pytest.raises(WorkerSilent) as caught:
        group.stop_on(3)
    assert time.monotonic() - began < 8 < run_context.deadlines.call_s
    message = str(caught.value)
    assert "critic rank 3 (tp1 dp1) on node " in message
    assert "is stopped in stop_on" in message
    assert "in stop_on\n" in message, "its Python stack is shown"
    fault, released = witness(run_context)
    assert (fault.rank, fault.phase, fault.fault) == (3, "stop_on", "stopped")
    assert released.ranks == [0, 1, 2, 3]
    assert_ended(run_context, group, caught.value)


def test_a_rank_that_follows_ends_its_group_when_it_dies(run_context: RunContext) -> None:
    """Its own call never ends, and rank 0 alone is called."""
    slots = run_context.resources.device_slots("critic")
    two = replace(slots, devices=slots.devices[:2])
    worker = RayClassWithInitArgs("tests.rank_workers:FollowedWorker")
    group = RayWorkerGroup("critic", worker, Mesh(2, tp=2), run_context, two)
    assert group.who() == 0
    with pytest.raises(WorkerError, match="answers no call of `where`"):
        group.where()
    started = last(run_context.events.path, WorkersStarted)
    assert isinstance(started, WorkersStarted)
    answer = group.who.future(for_s=15)
    os.kill(started.pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        answer.get()
    assert time.monotonic() - began < 6
    assert str(caught.value).startswith("critic rank 1 (tp1) on node ")
    assert "died in who after" in str(caught.value)
    assert_ended(run_context, group, caught.value)


@pytest.mark.slow
def test_one_that_hangs_is_told_from_those_that_wait_for_it(run_context: RunContext) -> None:
    context = by_node(replace(run_context, deadlines=replace(run_context.deadlines, call_s=10)))
    group = make_rank_workers(context, "critic")
    group.join()
    began = time.monotonic()
    with pytest.raises(WorkerSilent) as caught:
        group.spin_on(2)
    took = time.monotonic() - began
    assert context.deadlines.call_s - 0.5 < took < context.deadlines.call_s + 5
    message = str(caught.value)
    assert "critic rank 2 (tp0 dp1) on node " in message
    assert "did not answer in spin_on" in message
    assert "in spin_for_ever" in message
    assert caught.value.ranks == (2,)
    fault, _ = witness(run_context)
    assert (fault.rank, fault.fault) == (2, "silent")
    assert_ended(run_context, group, caught.value)


@pytest.mark.parametrize("holds_gil", [True, False], ids=["with the GIL", "without it"])
def test_one_that_hangs_in_c_shows_where(holds_gil: bool, run_context: RunContext) -> None:
    context = replace(run_context, deadlines=replace(run_context.deadlines, call_s=2))
    slots = context.resources.device_slots("critic")
    worker = RayClassWithInitArgs("tests.rank_workers:RankWorker")
    group = RayWorkerGroup("critic", worker, Mesh(1), context, replace(slots, devices=slots.devices[:1]))
    with pytest.raises(WorkerSilent) as caught:
        group.hang_in_c(holds_gil)
    _, stacks, native, kernel, _ = re.split(
        r"Python stack:|native frames:|its threads in the kernel:|nothing in", str(caught.value)
    )
    assert "in hang_in_c\n" in stacks
    assert "hang_in_c" in native.partition("read (libc")[2] or "| py-spy: " in native, "it may be forbidden to look"
    assert re.match(r"\s+\| main thread \([^)]+\): sleeping in \w*pipe_read", kernel)
    assert_ended(context, group, caught.value)


def test_an_error_that_every_rank_raises_leaves_the_workers_alive(doomed_workers: MakeGroup) -> None:
    from tests.controller.test_worker_group import prompts

    group = doomed_workers(in_nodes=True)
    with pytest.raises(WorkerRaised, match="every rank says the same"):
        group.raise_everywhere()
    assert group.who() == 0
    with pytest.raises(WorkerRaised, match=r"declares \['values'\] but returned \['vaules'\]"):
        group.forget_a_column(prompts())


def test_where_one_raises_and_the_others_answer_the_group_ends(
    run_context: RunContext, doomed_workers: MakeGroup
) -> None:
    group = doomed_workers()
    with pytest.raises(WorkerRaised, match="row 9 is bad") as caught:
        group.raise_alone(1)
    assert caught.value.ranks == (1,)
    assert "the other ranks were ended: 0, 2, 3" in str(caught.value)
    _, released = witness(run_context)
    assert (released.role, released.ranks, released.reason) == ("critic", [0, 1, 2, 3], "rank 1 raised in raise_alone")
    assert_ended(run_context, group, caught.value)


@pytest.mark.slow
def test_an_agent_that_dies_takes_the_ranks_of_its_node_along(run_context: RunContext) -> None:
    resources = run_context.resources
    home = resources.nodes[0]
    agent = start_agent(home.node_id)
    node = replace(home, agent=agent)
    stand_in: Any = SimpleNamespace(node=lambda _: node, device_slots=resources.device_slots, numa_binding=False)
    group = make_rank_workers(by_node(replace(run_context, resources=stand_in)), "critic")
    group.join()
    answer = group.spin_on.future(2)
    began = time.monotonic()
    ray.kill(agent)
    with pytest.raises(WorkerDied) as caught:
        answer.get()
    assert time.monotonic() - began < 6
    assert {1, 2, 3} <= set(caught.value.ranks), "rank 0 is called directly"
    assert "its node does not answer: the whole node may be lost" in str(caught.value)
    assert_ended(run_context, group, caught.value)


def test_a_worker_that_cannot_start_says_why(run_context: RunContext, doomed_workers: MakeGroup) -> None:
    with pytest.raises(WorkerRaised) as caught:
        doomed_workers(fail_on_rank=2)
    assert "critic rank 2" in str(caught.value)
    assert "raised in start" in str(caught.value)
    assert "ValueError: this rank cannot start" in str(caught.value)
    fault, _ = witness(run_context)
    assert (fault.rank, fault.phase, fault.fault) == (2, "start", "raised")


def test_secrets_stay_out_of_worker_logs(
    run_context: RunContext, rank_workers: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_API_KEY", "canary-in-a-coal-mine")
    rank_workers.set_canary("canary-in-a-coal-mine")
    rank_workers.say_secret()
    texts = [path.read_text() for path in run_context.run_directory.rglob("*") if path.is_file()]
    assert any("the key is <redacted:CANARY_API_KEY>" in text for text in texts)
    assert not any("canary-in-a-coal-mine" in text for text in texts)


def fault(rank: int, kind: str, at: float = 0.0, trace: str = "") -> RankFailure:
    return RankFailure(rank, kind, "", at, trace)


@pytest.mark.parametrize(
    ("faults", "culprits"),
    [
        ([fault(0, "raised", 1.0), fault(1, "died"), fault(2, "silent")], [1]),
        ([fault(0, "raised", 2.0), fault(1, "raised", 1.0), fault(2, "silent")], [1]),
        ([fault(0, "silent", trace="torch/distributed/x.py"), fault(1, "stopped")], [1]),
        ([fault(0, "silent", trace="torch/distributed/x.py"), fault(1, "silent", trace="mine.py")], [1]),
        (
            [fault(0, "silent", trace="torch/distributed/x.py"), fault(1, "silent", trace="torch/distributed/x.py")],
            [0, 1],
        ),
        ([fault(0, "died"), fault(3, "died")], [0, 3]),
    ],
)
def test_blame_falls_on_what_explains_the_rest(faults: list[RankFailure], culprits: list[int]) -> None:
    assert [found.rank for found in root_causes(faults)] == culprits
