"""Which side has the devices: every call to both sides, in order, on groups without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mrl.config.mesh import Mesh
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from mrl.controller import DeviceSlots, RayClassWithInitArgs, RunContext
from mrl.errors import DeviceFull, RolloutError, WorkerDied
from mrl.events import EventLog
from mrl.models.families import read_spec
from mrl.models.rollout_table import EngineSizes
from mrl.rollout import hybrid_engine
from mrl.rollout.engine import FreeMemory, RoleMemory
from mrl.rollout.hybrid_engine import PARTS, HybridEngine
from mrl.rollout.requests import GenerationRequest, Sampling
from tests.models.conftest import Tiny
from tests.rollout.stub_groups import NODES, Stage, StubGroup, finished, report

PRESET = Path(__file__).parents[2] / "configs" / "laptop-ppo.yaml"
ALL = ", ".join(PARTS)
GIB = 1 << 30
TOGETHER = {"laptop": 4}, {"actor": "laptop", "critic": "laptop"}
APART = {"laptop": 4, "engines": 2}, {"actor": "laptop", "critic": "laptop", "rollout": "engines"}
OFFLOAD, ONLOAD, EVERYTHING = "offload", "onload", ("parameters", "gradients", "optimizer")
TO_ENGINES = [
    ("actor", OFFLOAD, "gradients", "optimizer"),
    ("critic", OFFLOAD, *EVERYTHING),
    ("replicas", "wake", "weights"),
]
GENERATING = [("actor", OFFLOAD, "parameters"), ("replicas", "wake", "kv_cache")]
WAY_BACK = [("replicas", "sleep"), ("actor", ONLOAD, *EVERYTHING), ("critic", ONLOAD, *EVERYTHING)]
Made = tuple[HybridEngine, Stage]


def sent(version: int, workers: str) -> list[tuple[str, ...]]:
    return [("replicas", "receive_weights", str(version)), ("actor", "send_weights", str(version), workers)]


def requests(*keys: str) -> list[GenerationRequest]:
    return [GenerationRequest(key, key, np.ones(3, np.int32), 0, 10) for key in keys]


class StubDevice(str):
    @property
    def node_id(self) -> str:
        return self


@pytest.fixture
def make(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    """Return a function that makes engines whose groups are stubs; everything else is real."""
    made: list[HybridEngine] = []

    def start(
        placement: tuple[dict[str, int], dict[str, str]] = TOGETHER,
        family: str = "qwen3",
        *,
        tp: int = 2,
        model: str = "",
        **sync: Any,
    ) -> Made:
        config, stage = config_of(str(tiny(family)), placement, tp, sync, model), Stage()
        monkeypatch.setattr(hybrid_engine, "RayWorkerGroup", partial(StubGroup, stage))
        stage.answers["actor", "where"] = lambda: [(node, 0) for node in NODES["actor"]]
        stage.answers["receiver", "where"] = lambda: [(node, 0) for node in NODES["receiver"]]
        stage.answers["receiver", "rendezvous"] = lambda: "the first receiver's socket"
        for role in ("actor", "receiver"):
            stage.answers[role, "visible_gpus"] = lambda role=role: [f"{role}-gpu{n}" for n in range(4)]
        groups: dict[str, Future[Any]] = {}
        for role in config.model_roles():
            groups[role] = Future()
            groups[role].set_result(StubGroup(stage, role, RayClassWithInitArgs(""), Mesh(4), None))
        resources: Any = SimpleNamespace(
            device_slots=lambda role: DeviceSlots([StubDevice(f"{role}{n}") for n in range(4)], 0.5, role),  # type: ignore[misc]
            node=lambda node_id: SimpleNamespace(network=SimpleNamespace(address=f"address of {node_id}")),
        )
        events = EventLog(tmp_path / "events.jsonl")
        made.append(HybridEngine(config, groups, RunContext(tmp_path, events, config.deadlines, resources)))
        return made[-1], stage

    yield start
    for each in made:
        each.close()


def config_of(
    model: str, placement: tuple[dict[str, int], dict[str, str]], tp: int, sync: dict[str, Any], scorer: str = ""
) -> Config:
    """Return the preset with these changes, and with a reward model of that role."""
    pools, roles = ("{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}" for each in placement)
    device, here = sync.pop("device", "cpu"), sync.pop("devices_per_node", 8)
    vllm, pp = sync.pop("vllm", "{enable_prefix_caching: true}"), sync.pop("pp", 1)
    overrides = [f"placement.pools={pools}", f"placement.roles={roles}", f"model.path={model}", f"rollout.tp={tp}"]
    overrides.append(f"rollout.pp={pp}")
    if limit_s := sync.pop("engine_start_s", None):
        overrides.append(f"deadlines.engine_start_s={limit_s}")
    if scorer:
        overrides.append(f"{scorer}={{path: {model}, max_tokens_per_device: 1024}}")
    overrides += [f"sync.{name}={str(value).lower()}" for name, value in sync.items()]
    overrides += [f"cluster.device={device}", f"rollout.vllm={vllm}", f"cluster.devices_per_node={here}"]
    overrides += [f"cluster.nodes={-(-sum(placement[0].values()) // here)}", "cluster.ray_address=auto"]
    overrides += [f"{role}.parallel.sequence_parallel=true" for role in ("actor", "critic")]
    return load_config(str(PRESET), overrides).config


def test_an_engine_has_the_longer_to_start_the_larger_its_model(make: Callable[..., Made], tiny: Tiny) -> None:
    _, stage = make()
    deadlines = stage.started["rollout-1"].context.deadlines
    assert deadlines.start_s == 300 + read_spec(tiny("qwen3")).num_parameters / 5e8 > 300
    assert deadlines.call_s == 1800
    _, stage = make(engine_start_s=7)
    assert stage.started["rollout-1"].context.deadlines.start_s == 7


def test_engines_have_the_newest_weights_when_all_that_serve_have_them(make: Callable[..., Made]) -> None:
    engine, _ = make()
    engine.weights_changed()
    for held, has in (({0: 1, 1: 1}, False), ({0: 2, 1: 1}, False), ({0: None, 1: None}, False), ({0: 2, 1: 2}, True)):
        engine.fleet.versions = dict(held)
        assert engine.has_newest() == has, held
    engine.weights_changed()
    engine.fleet.versions = {0: None, 1: 3}
    assert engine.has_newest(), "a replica that restarts gets them before it serves"


def test_weights_are_to_be_had_while_the_trainer_leaves_the_actor_alone(make: Callable[..., Made]) -> None:
    """They are never available while the trainer has it, for any caller."""
    engine, _ = make()
    with engine._newest_weights() as version:
        assert version == 1
        assert engine.actor_lock.locked(), "the trainer waits until they are sent"
    engine.weights_changed()
    with engine.actor_lock, engine._newest_weights() as version:
        assert version is None
    with engine._newest_weights() as version:
        assert version == 2


# --- the two modes ----------------------------------------------------------------------------------------------------


def test_a_whole_turn_is_these_calls_in_this_order(make: Callable[..., Made]) -> None:
    engine, stage = make()
    assert stage.take() == [("replicas", "sleep")]
    engine.connect()
    stage.take()
    with engine.rollout_mode():
        assert stage.take() == [*TO_ENGINES, *sent(1, "[0, 1, 2, 3]"), *GENERATING]
        assert {sample.key for sample in engine.generate(requests("a", "b", "c"), Sampling())} == {"a", "b", "c"}
        assert {line[:2] for line in stage.take()} == {("replicas", "submit_and_poll")}
    assert stage.take() == WAY_BACK


def test_engines_that_slept_get_their_weights_again_and_a_new_version_after_an_update(
    make: Callable[..., Made],
) -> None:
    engine, stage = make()
    engine.connect()
    stage.take()
    for num_updates, version in ((0, 1), (0, 1), (1, 2), (2, 4)):
        for _ in range(num_updates):
            engine.weights_changed()
        with engine.rollout_mode():
            assert stage.take() == [*TO_ENGINES, *sent(version, "[0, 1, 2, 3]"), *GENERATING]
            list(engine.generate(requests("a"), Sampling(temperature=0.7)))
            _, sampling, asked, _ = next(
                args for (role, method), args in stage.arguments.items() if method == "submit_and_poll"
            )
            assert (sampling.temperature, asked) == (0.7, version)
        stage.arguments.clear()
        stage.take()


def test_a_reward_model_has_the_devices_between_two_rounds(make: Callable[..., Made]) -> None:
    """It is loaded only for its scores. The engines get the devices back on the next request, and not before."""
    pools, roles = TOGETHER
    engine, stage = make((pools, roles | {"reward_models.safe": "laptop"}), model="reward_models.safe")
    engine.connect()
    model = "reward_models.safe"
    stage.take()
    with engine.rollout_mode():
        list(engine.generate(requests("a"), Sampling()))
        stage.take()
        engine.pause()
        engine.pause()
        assert stage.take() == [("replicas", "sleep"), (model, ONLOAD, *EVERYTHING)]
        list(engine.generate(requests("b"), Sampling()))
        again = [line for line in stage.take() if line[1] != "submit_and_poll"]
        receives, sends = sent(1, "[0, 1, 2, 3]")
        assert again == [
            *[(model, OFFLOAD, *EVERYTHING), ("replicas", "wake", "weights"), receives],
            *[("actor", ONLOAD, "parameters"), sends, *GENERATING],
        ]
        assert engine.probe(requests("p")[0], Sampling(), everyone=False), "which all are"
        engine.pause()
        stage.take()
        assert not engine.probe(requests("p")[0], Sampling(), everyone=False)
        assert not stage.take(), "no group is woken without need"
    way_back = [(role, ONLOAD, *EVERYTHING) for role in ("actor", "critic", model)]
    assert stage.take() == way_back, "the engines sleep already"
    with engine.rollout_mode():
        stage.take()
    assert stage.take() == [("replicas", "sleep"), *way_back]


def test_a_reward_model_elsewhere_scores_while_the_engines_stay_awake(make: Callable[..., Made]) -> None:
    pools, roles = TOGETHER
    placement = (pools | {"other": 4}, roles | {"reward_models.safe": "other"})
    engine, stage = make(placement, model="reward_models.safe")
    engine.connect()
    with engine.rollout_mode():
        stage.take()
        engine.pause()
        assert stage.take() == []


def test_without_offload_nobody_moves_and_only_new_weights_travel(make: Callable[..., Made]) -> None:
    engine, stage = make(offload=False)
    engine.connect()
    assert "sleep" not in {method for _, method, *_ in stage.take()}
    with engine.rollout_mode():
        assert stage.take() == sent(1, "[0, 1, 2, 3]")
    with engine.rollout_mode():
        assert stage.take() == []
    engine.weights_changed()
    with engine.rollout_mode():
        assert stage.take() == sent(2, "[0, 1, 2, 3]")
    assert stage.take() == []


def test_the_modes_do_not_overlap(make: Callable[..., Made]) -> None:
    engine, stage = make()
    engine.connect()
    with pytest.raises(RolloutError, match="the trainer has the devices: call generate within rollout_mode"):
        engine.generate(requests("a"), Sampling())
    with engine.rollout_mode():
        stage.take()
        with pytest.raises(RolloutError, match="entered twice"), engine.rollout_mode():
            pass
        assert stage.take() == []
    with pytest.raises(RolloutError, match="the trainer has the devices"):
        engine.generate(requests("a"), Sampling())
    with engine.rollout_mode():
        pass


def test_only_what_goes_on_in_flight_meets_newer_weights(make: Callable[..., Made]) -> None:
    """Validation and batches that are generated whole use one version, even if the run sends weights in flight."""
    engine, _ = make()
    engine.connect()
    engine._cache = "keep"
    asked: list[Any] = []

    def stream(*given: Any) -> Iterator[Any]:
        asked.append(given[-1])
        return iter(())

    engine.fleet.stream = stream  # type: ignore[method-assign]
    with engine.rollout_mode():
        engine.generate(requests("a"), Sampling())
        engine.generate((), Sampling(), in_flight=True)
    assert asked == [None, "keep"]


def test_a_failure_while_generating_wakes_nobody_for_training(make: Callable[..., Made]) -> None:
    engine, stage = make()
    engine.connect()

    def fail() -> None:
        with engine.rollout_mode():
            stage.take()
            raise RolloutError("the prompt is bad")

    with pytest.raises(RolloutError, match="the prompt is bad"):
        fail()
    assert stage.take() == []


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_replica_that_starts_late_has_the_parameters_come_back_for_it_alone(make: Callable[..., Made]) -> None:
    engine, stage = make()
    engine.connect()
    with engine.rollout_mode():
        stage.take()

        def die(*args: Any) -> Any:
            stage.answers["rollout-1", "submit_and_poll"] = finished
            raise WorkerDied("its process ended\nwith more to read")

        stage.answers["rollout-1", "submit_and_poll"] = die
        keys = [f"{number}" for number in range(6)]
        assert {sample.key for sample in engine.generate(requests(*keys), Sampling())} == {*keys}
        lines = stage.take()
        if ("actor", ONLOAD, "parameters") not in lines:  # the other was quicker than the successor's start
            list(engine.generate(requests("again"), Sampling()))
            lines += stage.take()
        start = lines.index(("actor", ONLOAD, "parameters"))
        moved = [line for line in lines[start:] if line[0] == "actor"]
        assert moved == [
            ("actor", ONLOAD, "parameters"),
            ("actor", "send_weights", "1", "[2, 3]"),
            ("actor", OFFLOAD, "parameters"),
        ]


def test_what_was_moved_is_added_up_over_all_ranks(make: Callable[..., Made]) -> None:
    engine, _ = make()
    engine.connect()
    assert engine.metrics() == {}
    with engine.rollout_mode():
        pass
    metrics = engine.metrics()
    assert metrics.keys() == {"sync/seconds", "sync/bytes_between_ranks", "sync/least_bytes"}
    assert (metrics["sync/bytes_between_ranks"], metrics["sync/least_bytes"]) == (15, 13)
    assert 0 <= metrics["sync/seconds"] < 60
    metrics.clear()
    assert engine.metrics()


def test_a_worker_that_took_no_weights_stops_the_run(make: Callable[..., Made]) -> None:
    for placement, sender in ((TOGETHER, "actor"), (APART, "receiver")):
        engine, stage = make(placement, tp=1)
        engine.connect()
        stage.answers[sender, "send_weights"] = lambda *_: [report(1, 1), report(0, 0, "worker 1 is gone")]
        with pytest.raises(RolloutError, match="weights 1 did not arrive: worker 1 is gone"), engine.rollout_mode():
            pass
        assert engine.metrics() == {}


def test_lost_share_of_an_update_is_that_of_all_ranks(make: Callable[..., Made]) -> None:
    engine, stage = make()
    engine.connect()
    stage.answers["actor", "send_weights"] = lambda *_: [
        report(1, 1, moved=3.0, lost=1.0),
        report(1, 1, moved=1.0, lost=0.5),
    ]
    with engine.rollout_mode():
        pass
    assert engine.metrics()["sync/lost_update"] == 1.5 / 4


# --- engines in their own pool ----------------------------------------------------------------------------------------


def test_engines_with_their_own_pool_stay_awake_and_porters_take_their_weights(make: Callable[..., Made]) -> None:
    engine, stage = make(APART, tp=1)
    engine.connect()
    stage.take()
    stage.answers["receiver", "send_weights"] = lambda *_: [report(100, 90), report(100, 90)]
    with engine.rollout_mode():
        weights = [line for line in stage.take() if line[1] == "send_weights"]
        assert weights == [("receiver", "send_weights", "1", "[0, 1]"), ("actor", "send_weights", "1", "[0, 1]")]
    assert stage.take() == []
    assert engine.metrics()["sync/bytes_between_ranks"] == 215
    assert engine.metrics()["sync/least_bytes"] == 193
    with engine.rollout_mode():
        assert stage.take() == []


def test_porters_prepare_while_the_trainer_does(make: Callable[..., Made], tiny: Tiny) -> None:
    engine, stage = make(APART, tp=1)
    engine.connect()
    calls = [line[:3] for line in stage.asked if "prepare" in " ".join(line)]
    assert calls == [
        ("receiver", "prepare_receiving"),
        ("actor", "prepare_sending"),
        ("actor", "get", "prepare_sending"),
        ("receiver", "get", "prepare_receiving"),
    ]
    model, parallel, num_trainers, route = stage.arguments["receiver", "prepare_receiving"]
    assert (model, parallel.tp, num_trainers) == (str(tiny("qwen3")), 2, 4)
    assert stage.arguments["actor", "prepare_sending"] == (route,)
    assert route.layout.hosts == (4, 5)
    assert route.layout.nodes == (0, 0, 1, 1, 2, 1)
    assert route.rendezvous == "the first receiver's socket"
    receivers = stage.started["receiver"]
    assert receivers.worker.worker_class == "mrl.rollout.replica:WeightReceiver"
    assert receivers.mesh == Mesh(2)
    assert receivers.slots is not None
    assert receivers.slots.description == "rollout"


# --- settings of engines ----------------------------------------------------------------------------------------------


def test_the_route_says_which_engine_is_on_whose_device(make: Callable[..., Made], tmp_path: Path) -> None:
    engine, stage = make(bucket_bytes=12345)
    engine.connect()
    (route,) = stage.arguments["actor", "prepare_sending"]
    assert route.layout.sizes == EngineSizes(2)
    assert route.layout.hosts == (0, 1, 2, 3)
    assert route.layout.nodes == (0, 0, 1, 1)
    names = ("rollout-0-0", "rollout-0-1", "rollout-1-0", "rollout-1-1")
    assert route.sockets == tuple(tmp_path / "handover" / f"{name}.sock" for name in names)
    assert (route.bucket_bytes, route.rendezvous) == (12345, None)
    assert (route.dtype, route.trained_dtype, route.timeout_s) == ("bfloat16", "bfloat16", 1800.0)


@pytest.mark.parametrize(("tp", "slots"), [(1, ["actor0", "actor1", "actor2", "actor3"]), (2, ["actor0", "actor2"])])
def test_an_engine_sits_on_its_first_device_and_engines_share_none(
    make: Callable[..., Made], tp: int, slots: list[str]
) -> None:
    # tiny llama_tied has four key-value heads
    _, stage = make(TOGETHER, "llama_tied", tp=tp)
    found = {role: group.slots for role, group in stage.started.items() if role.startswith("rollout")}
    assert sorted(found) == [f"rollout-{index}" for index in range(4 // tp)]
    for index, name in enumerate(sorted(found)):
        slot = found[name]
        assert slot is not None
        devices: list[Any] = list(slot.devices)
        assert devices == [slots[index]]
        assert (slot.fraction, slot.description, slot.visible_gpus) == (0.5, "actor", [])
        assert stage.started[name].mesh == Mesh(1)


@pytest.mark.parametrize(("placement", "owner"), [(TOGETHER, "actor"), (APART, "receiver")])
def test_an_engine_sees_the_gpus_of_all_its_ranks(
    make: Callable[..., Made], placement: tuple[dict[str, int], dict[str, str]], owner: str
) -> None:
    engine, stage = make(placement, device="gpu")
    engine.connect()
    slot = stage.started["rollout-0"].slots
    assert slot is not None
    assert slot.visible_gpus == [f"{owner}-gpu0,{owner}-gpu1"]
    assert stage.started["rollout-0"].worker.args[1].device == "cuda"
    if owner == "actor":
        other = stage.started["rollout-1"].slots
        assert other is not None
        assert other.visible_gpus == [f"{owner}-gpu2,{owner}-gpu3"]
    else:
        assert slot.description == "rollout"


def test_an_engine_over_two_nodes_has_a_process_on_each_with_the_gpus_there(make: Callable[..., Made]) -> None:
    engine, stage = make(TOGETHER, "llama_tied", tp=4, device="gpu", devices_per_node=2)
    engine.connect()
    group = stage.started["rollout-0"]
    assert group.slots is not None
    assert [*group.slots.devices] == ["actor0", "actor2"]
    assert group.slots.visible_gpus == ["actor-gpu0,actor-gpu1", "actor-gpu2,actor-gpu3"]
    assert group.mesh == Mesh(2, tp=2)
    assert group.worker.args[1].nodes == ("address of actor0", "address of actor2")
    secrets = {group.worker.args[1].secret}
    assert stage.arguments["actor", "prepare_sending"][0].layout.hosts == (0, 1, 2, 3), "one worker for each device"
    engine, stage = make(TOGETHER, "llama_tied", tp=2, pp=2, device="gpu", devices_per_node=2)
    engine.connect()
    assert stage.started["rollout-0"].worker.args[1].pp == 2
    assert stage.started["rollout-0"].worker.args[1].nodes == ("address of actor0", "address of actor2")
    secrets.add(stage.started["rollout-0"].worker.args[1].secret)
    assert [len(secret) for secret in secrets] == [64, 64], "each engine has its own"
    route = stage.arguments["actor", "prepare_sending"][0]
    assert route.layout.sizes == EngineSizes(2, pp=2)
    assert [path.stem for path in route.sockets] == [f"rollout-0-{worker}" for worker in range(4)]
    stage.take()
    with engine.rollout_mode():
        assert ("actor", "send_weights", "1", "[0, 1, 2, 3]") in stage.take()
    _, stage = make(TOGETHER, "llama_tied", tp=2, devices_per_node=2)
    assert {stage.started[f"rollout-{index}"].worker.args[1].nodes for index in range(2)} == {()}


def test_a_gpu_without_room_for_an_engine_ends_the_run_with_who_holds_it(make: Callable[..., Made]) -> None:
    engine, stage = make(device="gpu")
    engine.connect()
    for role in ("actor", "critic"):
        stage.answers[role, "device_memory"] = lambda: [RoleMemory(number * GIB, number) for number in range(4)]
    with engine.rollout_mode():
        pass
    rooms = [FreeMemory(9 * GIB, 80 * GIB, 9 * GIB), FreeMemory(9 * GIB, 80 * GIB, 10 * GIB)]
    stage.answers["rollout-1", "wake"] = lambda part: rooms if part == "kv_cache" else []
    stage.take()
    with (
        pytest.raises(DeviceFull, match=r"Reserved by actor 3\.0 GiB .*, critic 3\.0 GiB") as raised,
        engine.rollout_mode(),
    ):
        pass
    assert raised.value.where == "device actor-gpu3 of n1"
    assert ("replicas", "submit_and_poll") not in [line[:2] for line in stage.take()]


def test_each_engine_is_made_from_the_runs_settings(make: Callable[..., Made], tiny: Tiny, tmp_path: Path) -> None:
    _, stage = make(vllm="{dtype: float32, enforce_eager: true}")
    for index in (0, 1):
        group = stage.started[f"rollout-{index}"]
        engine, settings, limit_s = group.worker.args
        assert (group.worker.worker_class, engine, limit_s) == ("mrl.rollout.replica:RolloutReplica", "vllm", 1800.0)
        assert settings.model == tiny("qwen3")
        assert (settings.dtype, settings.device, settings.tp) == ("float32", "cpu", 2)
        assert (settings.max_tokens, settings.vocab) == (512, 131)
        assert (settings.replica, settings.sockets) == (f"rollout-{index}", tmp_path / "handover")
        assert settings.vllm == {"enforce_eager": True, "kv_cache_memory_bytes": 1_000_000_000}  # the preset's


@pytest.mark.parametrize(
    ("family", "vllm", "because", "sizes"),
    [
        ("qwen3_moe", "{enable_expert_parallel: true}", "", EngineSizes(2, 2)),
        ("qwen3_moe", "{enable_expert_parallel: false}", "", EngineSizes(2, 1)),
        ("qwen3", "{enable_expert_parallel: true}", "", EngineSizes(2, 1)),
        ("qwen3", "{}", "it is quantized", EngineSizes(2, 1, whole=True)),
    ],
)
def test_engines_say_how_they_are_split(
    make: Callable[..., Made], family: str, vllm: str, because: str, sizes: EngineSizes
) -> None:
    engine, stage = make(TOGETHER, family, vllm=vllm, device="gpu")
    stage.answers["rollout-0", "full_tensor_reason"] = lambda: because
    engine.connect()
    assert stage.arguments["actor", "prepare_sending"][0].layout.sizes == sizes
    assert engine.fleet.full_tensor_reason == because


def test_sockets_are_private_and_nothing_of_an_earlier_run_is_among_them(
    make: Callable[..., Made], tmp_path: Path
) -> None:
    (tmp_path / "handover").mkdir()
    (tmp_path / "handover" / "rollout-0-0.sock").write_text("of a run that crashed")
    engine, stage = make(APART, tp=1)
    assert list((tmp_path / "handover").iterdir()) == []
    assert (tmp_path / "handover").stat().st_mode & 0o777 == 0o700
    stage.take()
    engine.close()
    assert not (tmp_path / "handover").exists()
    ended = {role for role, method, *_ in stage.asked if method == "shutdown"}
    assert ended == {"rollout-0", "rollout-1", "receiver"}
