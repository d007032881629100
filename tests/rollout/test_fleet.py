"""Replicas in real processes: the same samples however many they are, and whoever of them dies when."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mrl.config.mesh import Mesh
from mrl.config.schema import PlacementConfig
from mrl.errors import RolloutError
from mrl.events import ReplicaLost, WorkersStarted, read_events
from mrl.rollout.engine import EngineSettings, RolloutEngine
from mrl.rollout.requests import Generated, Sampling
from tests.rollout.conftest import MAX_TOKENS, VLLM, Small, requests, run
from tests.rollout.lethal_engine import POISON
from tests.rollout.small_models import VOCAB
from tests.rollout.trainer_side import InBackground, fused, send, update, whole

if TYPE_CHECKING:
    from mrl.controller import RayWorkerGroup, RunContext
    from mrl.rollout.fleet import RolloutFleet

SAMPLING = Sampling(stop_token_ids=(7, 8))
WANTED = requests(6, 4, 40)
NUMBERS = itertools.count()


class Fleet:
    """A fleet with its trainer's side: every version is another random model."""

    def __init__(self, context: RunContext, small: Small, num_replicas: int, engine: str, tp: int = 1) -> None:
        from mrl.rollout.fleet import RolloutFleet  # loads Ray

        self.context, self.small, self.engine, self.tp = context, small, engine, tp
        self.role = f"rollout{next(NUMBERS)}"
        self.sent: list[tuple[int, ...]] = []
        self.before_sending: Callable[[], None] = lambda: None
        self.fleet: RolloutFleet = RolloutFleet(num_replicas, self.start, self.send, self.settings(0), context.events)

    def settings(self, replica: int) -> EngineSettings:
        sockets = self.context.run_directory / "handover"
        sockets.mkdir(mode=0o700, exist_ok=True)
        name = f"{self.role}-{replica}"
        return EngineSettings(self.small("qwen3"), "float32", "cpu", MAX_TOKENS, VOCAB, sockets, name, self.tp, VLLM)

    def start(self, replica: int) -> RayWorkerGroup:
        """A replica on one device of the session's pool."""
        from mrl.controller import RayClassWithInitArgs, RayWorkerGroup

        pool = copy.copy(self.context.resources.pools["all"])
        pool.devices, pool.num_devices = [pool.devices[replica]], 1
        resources = copy.copy(self.context.resources)
        resources.pools = {"one": pool}
        role = f"{self.role}-{replica}"
        roles = dict.fromkeys((role, "actor", "critic"), "one")
        resources._placement = PlacementConfig(pools={"one": 1}, roles=roles)
        worker = RayClassWithInitArgs("mrl.rollout.replica:RolloutReplica", self.engine, self.settings(replica), 60.0)
        return RayWorkerGroup(role, worker, Mesh(1), dataclasses.replace(self.context, resources=resources))

    def send(self, replicas: Sequence[int], version: int) -> None:
        self.sent.append(tuple(replicas))
        self.before_sending()
        model = self.small("qwen3", version)
        sending = [
            InBackground(send, self.settings(replica), version, tensors, rank)
            for replica in replicas
            for rank in range(self.tp)
            for tensors in [fused(model, self.tp, rank) if self.engine == "vllm" else whole(model)]
        ]
        for each in sending:
            each.result()

    def pid(self, replica: int) -> int:
        started = [found.event for found in read_events(self.context.events.path)]
        ours = [e for e in started if isinstance(e, WorkersStarted) and e.role == f"{self.role}-{replica}"]
        return ours[-1].pids[0]

    def lost(self) -> list[ReplicaLost]:
        events = [found.event for found in read_events(self.context.events.path)]
        since = next(i for i, e in enumerate(events) if isinstance(e, WorkersStarted) and e.role.startswith(self.role))
        return [event for event in events[since:] if isinstance(event, ReplicaLost)]


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def make_fleet(run_context: RunContext, small: Small) -> Iterator[MakeFleet]:
    made: list[Fleet] = []

    def make(num_replicas: int, engine: str = "transformers", tp: int = 1) -> Fleet:
        made.append(Fleet(run_context, small, num_replicas, engine, tp))
        return made[-1]

    yield make
    for each in made:
        each.fleet.close()


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., RolloutEngine], small: Small) -> dict[str, Generated]:
    """What one engine in this process makes of the requests, at version 1."""
    engine = make_engine("transformers", small("qwen3"))
    update(engine, small("qwen3", 1), version=1)
    return run(engine, WANTED, SAMPLING)


def assert_are(samples: Sequence[Generated], expected: dict[str, Generated]) -> None:
    assert [sample.key for sample in samples] == [request.key for request in WANTED]
    for sample in samples:
        np.testing.assert_array_equal(sample.token_ids, expected[sample.key].token_ids)
        np.testing.assert_allclose(sample.log_probs, expected[sample.key].log_probs, rtol=0, atol=1e-5)
        assert (sample.finish, sample.weight_version) == (expected[sample.key].finish, 1)


def generate_and(fleet: Fleet, act: Callable[[], None], after: int) -> list[Generated]:
    """All samples in order; something happens once so many are finished."""
    samples: dict[str, Generated] = {}
    for sample in fleet.fleet.stream(WANTED, SAMPLING, version=1):
        samples[sample.key] = sample
        if len(samples) == after:
            act()
    return [samples[request.key] for request in WANTED]


def test_replicas_die_idle_while_receiving_while_generating_and_all_at_once(
    make_fleet: MakeFleet, alone: dict[str, Generated]
) -> None:
    fleet = make_fleet(2)
    assert "fuses nothing" in fleet.fleet.full_tensors_because

    def kill(*replicas: int) -> None:
        for replica in replicas:
            os.kill(fleet.pid(replica), signal.SIGKILL)

    fleet.before_sending = lambda: (setattr(fleet, "before_sending", lambda: None), kill(1))[0]
    fleet.fleet.update(1)  # one dies while it receives: the other gets its weights all the same
    assert fleet.sent == [(0, 1), (0,)] or fleet.sent == [(0, 1)]
    assert_are(fleet.fleet.generate(WANTED, SAMPLING, version=1), alone)
    kill(0)  # idle
    assert_are(fleet.fleet.generate(WANTED, SAMPLING, version=1), alone)
    assert_are(generate_and(fleet, lambda: kill(1), after=3), alone)
    assert_are(generate_and(fleet, lambda: kill(0, 1), after=6), alone)
    lost = fleet.lost()
    assert [each.replica for each in lost][:3] == [1, 0, 1]
    assert len(lost) == 5
    assert lost[2].num_unfinished > 0


def test_a_replica_that_is_stopped_is_replaced(make_fleet: MakeFleet, alone: dict[str, Generated]) -> None:
    fleet = make_fleet(2)
    fleet.fleet.update(1)
    samples = generate_and(fleet, lambda: os.kill(fleet.pid(0), signal.SIGSTOP), after=2)
    assert_are(samples, alone)
    assert [each.replica for each in fleet.lost()] == [0]
    assert "stopped" in fleet.lost()[0].reason


def test_a_late_replica_gets_its_weights_before_it_serves(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    samples = fleet.fleet.generate(WANTED[:3], SAMPLING, version=2)
    assert [sample.weight_version for sample in samples] == [2, 2, 2]
    assert fleet.sent == [(0,)]
    fleet.fleet.generate(WANTED[:3], SAMPLING, version=2)
    assert fleet.sent == [(0,)]
    fleet.fleet.sleep()
    fleet.fleet.wake("weights")
    fleet.fleet.update(3)
    fleet.fleet.wake("kv_cache")
    assert [sample.weight_version for sample in fleet.fleet.generate(WANTED[:1], SAMPLING, 3)] == [3]


def test_whoever_asks_for_no_more_leaves_idle_replicas(make_fleet: MakeFleet, alone: dict[str, Generated]) -> None:
    fleet = make_fleet(2)
    fleet.fleet.update(1)
    stream = fleet.fleet.stream(WANTED, SAMPLING, version=1)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_are(fleet.fleet.generate(WANTED, SAMPLING, version=1), alone)


def test_a_prompt_that_kills_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, "tests.rollout.lethal_engine:LethalEngine")
    fleet.fleet.update(1)
    poisoned = dataclasses.replace(WANTED[5], key=f"{POISON}/0", prompt=POISON)
    with pytest.raises(RolloutError, match=f"prompt {POISON}: .*being generated from when [23] replicas died"):
        fleet.fleet.generate([*WANTED, poisoned], SAMPLING, version=1)


def test_engines_that_keep_breaking_stop_the_run(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, "tests.rollout.lethal_engine:BrokenEngine")
    fleet.fleet.update(1)
    with pytest.raises(RolloutError, match="the device is lost"):
        fleet.fleet.generate(WANTED, SAMPLING, version=1)
    with pytest.raises(RolloutError, match="do not fit into"):
        fleet.fleet.generate([dataclasses.replace(WANTED[0], max_tokens=MAX_TOKENS)], SAMPLING, version=1)


@pytest.mark.slow
def test_vllm_replicas_in_processes_die_and_are_replaced(make_fleet: MakeFleet, alone: dict[str, Generated]) -> None:
    fleet = make_fleet(2, "vllm")
    fleet.fleet.update(1)
    assert not fleet.fleet.full_tensors_because
    assert_are(fleet.fleet.generate(WANTED, SAMPLING, version=1), alone)
    assert_are(generate_and(fleet, lambda: os.kill(fleet.pid(0), signal.SIGKILL), after=1), alone)
    assert_are(generate_and(fleet, lambda: os.kill(fleet.pid(1), signal.SIGSTOP), after=1), alone)
    assert [each.replica for each in fleet.lost()] == [0, 1]


@pytest.mark.slow
def test_a_replica_of_several_processes_dies_as_a_whole(make_fleet: MakeFleet, alone: dict[str, Generated]) -> None:
    fleet = make_fleet(1, "vllm", tp=2)
    fleet.fleet.update(1)
    before = workers_of(fleet.pid(0))
    assert len(before) >= 2
    assert_are(generate_and(fleet, lambda: os.kill(before[-1], signal.SIGKILL), after=1), alone)
    assert len(fleet.lost()) == 1
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]


def workers_of(pid: int) -> list[int]:
    """The children of a process."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
