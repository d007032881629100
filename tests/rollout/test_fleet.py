"""Replicas in real processes: the samples do not depend on the number of replicas, or on which ones die, and when."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mrl.config.mesh import Mesh
from mrl.errors import RolloutError
from mrl.events import ReplicaLost, WorkersStarted, read_events
from mrl.models.rollout_table import EngineSizes
from mrl.rollout.engine import EngineSettings, RolloutEngine
from mrl.rollout.requests import Generated, Sampling
from tests.rollout.conftest import MAX_TOKENS, VLLM, Small, requests, run
from tests.rollout.lethal_engine import BREAKING, DEADLY
from tests.rollout.small_models import VOCAB
from tests.rollout.stub_replicas import generate
from tests.rollout.trainer_side import InBackground, fused, send, update, whole

if TYPE_CHECKING:
    from mrl.controller import RayWorkerGroup, RunContext
    from mrl.rollout.fleet import RolloutFleet

SAMPLING = Sampling(stop_token_ids=(7, 8))
WANTED = requests(6, 4, 40)
NUMBERS = itertools.count()
LETHAL = "tests.rollout.lethal_engine:LethalEngine"
WHOLE_EXPERTS = "tests.rollout.expert_parallel_engine:ExpertParallelEngine"


class Fleet:
    """A fleet and its trainer side. Each version has the weights of another random model."""

    def __init__(
        self,
        context: RunContext,
        small: Callable[[int], Path],
        num_replicas: int,
        engine: str,
        tp: int = 1,
        ep: int = 1,
    ) -> None:
        from mrl.rollout.fleet import RolloutFleet  # loads Ray

        # vLLM's start and first step take long where others compute as well.
        patient = dataclasses.replace(context.deadlines, start_s=300, call_s=120)
        self.context = dataclasses.replace(context, deadlines=patient)
        self.small, self.engine, self.tp, self.ep = small, engine, tp, ep
        self.unsent = ""
        """A tensor that the trainer forgets."""
        self.role = f"rollout{next(NUMBERS)}"
        self.sent: list[tuple[int, ...]] = []
        self.before_sending: Callable[[], None] = lambda: None
        self.fleet: RolloutFleet = RolloutFleet(num_replicas, self.start, self.send, self.settings(0), context.events)

    def settings(self, replica: int) -> EngineSettings:
        sockets = self.context.run_directory / "handover"
        sockets.mkdir(mode=0o700, exist_ok=True)
        name = f"{self.role}-{replica}"
        vllm = {**VLLM, "enable_expert_parallel": self.ep > 1}
        return EngineSettings(self.small(0), "float32", "cpu", MAX_TOKENS, VOCAB, sockets, name, self.tp, vllm)

    def start(self, replica: int) -> RayWorkerGroup:
        """A replica on one device of the session's pool."""
        from mrl.controller import DeviceSlots, RayClassWithInitArgs, RayWorkerGroup

        all_slots = self.context.resources.device_slots("actor")
        slot = DeviceSlots(all_slots.devices[replica : replica + 1], all_slots.fraction, all_slots.description)
        worker = RayClassWithInitArgs("mrl.rollout.replica:RolloutReplica", self.engine, self.settings(replica), 60.0)
        return RayWorkerGroup(f"{self.role}-{replica}", worker, Mesh(1), self.context, slot)

    def send(self, replicas: Sequence[int], version: int) -> None:
        self.sent.append(tuple(replicas))
        self.before_sending()
        model = self.small(version)
        sending = []
        for replica, rank in itertools.product(replicas, range(self.tp)):
            tensors = fused(model, EngineSizes(self.tp, self.ep), rank) if self.engine != LETHAL else whole(model)
            sent = [entry for entry in tensors if entry[0] != self.unsent]
            sending.append(InBackground(send, self.settings(replica), version, sent, rank))
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


@pytest.fixture(scope="module")
def fleet(run_context: RunContext, small: Small) -> Iterator[Fleet]:
    """Two replicas for all tests. If a test kills one, the next test starts its replacement."""
    made = Fleet(run_context, partial(small, "qwen3"), 2, LETHAL)
    yield made
    made.fleet.close()


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., RolloutEngine], small: Small) -> dict[str, Generated]:
    """Return the samples that one engine in this process makes for the requests, at version 1."""
    return samples_of(make_engine("transformers", small("qwen3")), small("qwen3", 1))


def samples_of(engine: RolloutEngine, model: Path) -> dict[str, Generated]:
    update(engine, model, version=1)
    return run(engine, WANTED, SAMPLING)


def assert_are(samples: Sequence[Generated], expected: dict[str, Generated]) -> None:
    assert [sample.key for sample in samples] == [request.key for request in WANTED]
    for sample in samples:
        np.testing.assert_array_equal(sample.token_ids, expected[sample.key].token_ids)
        np.testing.assert_allclose(sample.log_probs, expected[sample.key].log_probs, rtol=0, atol=1e-5)
        assert (sample.finish, sample.weight_version) == (expected[sample.key].finish, 1)


def generate_and(fleet: Fleet, act: Callable[[], None], after: int) -> list[Generated]:
    """Return all samples in order. Call `act` when this many are finished."""
    samples: dict[str, Generated] = {}
    for sample in fleet.fleet.stream(WANTED, SAMPLING, version=1):
        samples[sample.key] = sample
        if len(samples) == after:
            act()
    return [samples[request.key] for request in WANTED]


def kill(fleet: Fleet, *replicas: int) -> None:
    for replica in replicas:
        os.kill(fleet.pid(replica), signal.SIGKILL)


def test_samples_are_those_of_one_engine(fleet: Fleet, alone: dict[str, Generated]) -> None:
    assert "has no fused tensors" in fleet.fleet.full_tensor_reason
    fleet.fleet.update(1)
    assert_are(generate(fleet.fleet, WANTED, SAMPLING, version=1), alone)


def test_a_replica_killed_in_the_middle_loses_no_sample(fleet: Fleet, alone: dict[str, Generated]) -> None:
    assert_are(generate_and(fleet, lambda: kill(fleet, 1), after=3), alone)
    (lost,) = fleet.lost()
    assert (lost.replica, lost.num_unfinished > 0) == (1, True)


@pytest.mark.slow
@pytest.mark.on_demand
def test_replicas_killed_while_they_receive_idle_and_all_at_once(fleet: Fleet, alone: dict[str, Generated]) -> None:
    fleet.fleet.update(2)
    before = len(fleet.lost())

    def kill_once() -> None:
        fleet.before_sending = lambda: None
        kill(fleet, 1)

    fleet.before_sending = kill_once
    fleet.fleet.update(1)  # the other gets its weights all the same
    assert_are(generate(fleet.fleet, WANTED, SAMPLING, version=1), alone)
    fleet.fleet.update(1)
    kill(fleet, 0)
    assert_are(generate(fleet.fleet, WANTED, SAMPLING, version=1), alone)
    fleet.fleet.update(1)
    assert_are(generate_and(fleet, lambda: kill(fleet, 0, 1), after=6), alone)
    assert [each.replica for each in fleet.lost()[before:]][:2] == [1, 0]
    assert len(fleet.lost()) == before + 4


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_replica_that_is_stopped_is_replaced(fleet: Fleet, alone: dict[str, Generated]) -> None:
    fleet.fleet.update(1)
    assert_are(generate_and(fleet, lambda: os.kill(fleet.pid(0), signal.SIGSTOP), after=2), alone)
    assert fleet.lost()[-1].replica == 0
    assert "stopped" in fleet.lost()[-1].reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "how"),
    [(DEADLY, "died"), pytest.param(BREAKING, "raised .*: the device is lost", marks=pytest.mark.on_demand)],
)
def test_a_prompt_that_two_replicas_do_not_survive_is_named(fleet: Fleet, prompt: str, how: str) -> None:
    wrong = dataclasses.replace(WANTED[5], key=f"{prompt}/0", prompt=prompt)
    with pytest.raises(RolloutError, match=rf"prompt {prompt}: [23] replicas died while .* the last error: .*{how}"):
        generate(fleet.fleet, [*WANTED, wrong], SAMPLING, version=1)


@pytest.fixture
def vllm_fleet(run_context: RunContext, small: Small, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    family, num_replicas, *sizes = request.param
    engine = "vllm" if len(sizes) == 1 else WHOLE_EXPERTS
    made = Fleet(run_context, partial(small, family), num_replicas, engine, *sizes)
    yield made
    made.fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("vllm_fleet", [("qwen3", 2, 1)], indirect=True)
def test_vllm_replicas_are_killed_and_stopped_and_replaced(vllm_fleet: Fleet, alone: dict[str, Generated]) -> None:
    vllm_fleet.fleet.update(1)
    assert not vllm_fleet.fleet.full_tensor_reason
    assert_are(generate(vllm_fleet.fleet, WANTED, SAMPLING, version=1), alone)
    assert_are(generate_and(vllm_fleet, lambda: kill(vllm_fleet, 0), after=1), alone)
    vllm_fleet.fleet.update(1)
    assert_are(generate_and(vllm_fleet, lambda: os.kill(vllm_fleet.pid(1), signal.SIGSTOP), after=1), alone)
    assert [each.replica for each in vllm_fleet.lost()] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("vllm_fleet", [("qwen3", 1, 2)], indirect=True)
@pytest.mark.on_demand
def test_a_replica_of_several_processes_dies_as_a_whole(vllm_fleet: Fleet, alone: dict[str, Generated]) -> None:
    vllm_fleet.fleet.update(1)

    def kill_one_of(pids: list[int]) -> list[Generated]:
        return generate_and(vllm_fleet, lambda: os.kill(pids[-1], signal.SIGKILL), after=1)

    for num_lost in (1, 2):
        workers = workers_of(vllm_fleet.pid(0))
        assert len(workers) >= 2
        assert_are(kill_one_of(workers if num_lost == 1 else [vllm_fleet.pid(0)]), alone)
        assert not [pid for pid in workers if is_running(pid)]
        assert len(vllm_fleet.lost()) == num_lost, "\n".join(each.reason for each in vllm_fleet.lost())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vllm_fleet", "family"),
    [
        pytest.param(("qwen3_moe", 1, 2), "qwen3_moe", marks=pytest.mark.on_demand),
        pytest.param(("glm4_moe", 1, 2, 2), "glm4_moe", marks=pytest.mark.on_demand),
        (("deepseek_v3", 1, 2), "deepseek_v3"),
        pytest.param(("gpt_oss", 1, 2), "gpt_oss", marks=pytest.mark.on_demand),
    ],
    indirect=["vllm_fleet"],
    ids=["parts of all experts", "whole experts and parts of the shared one", "some heads of latents", "biases once"],
)
def test_every_rank_of_an_engine_takes_its_own_shard(
    vllm_fleet: Fleet, family: str, make_engine: Callable[..., RolloutEngine], small: Small
) -> None:
    expected = samples_of(make_engine("transformers", small(family)), small(family, 1))
    vllm_fleet.fleet.update(2)
    vllm_fleet.fleet.update(1)
    assert_are(generate(vllm_fleet.fleet, WANTED, SAMPLING, version=1), expected)
    vllm_fleet.unsent = "model.norm.weight"
    with pytest.raises(RolloutError, match=r"1 of the model's parameters were not sent: model\.norm\.weight"):
        vllm_fleet.fleet.update(2)
    vllm_fleet.unsent = ""
    assert_are(generate(vllm_fleet.fleet, WANTED, SAMPLING, version=1), expected)
    assert not vllm_fleet.lost()


def workers_of(pid: int) -> list[int]:
    """Return the children of a process, in the order of their start."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
