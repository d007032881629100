"""Engines without a trainer: they use the weights from their files, and never receive any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.arithmetic import num_engines
from mrl.config.libraries.vllm_fields import OWNED
from mrl.config.reward import JudgeConfig
from mrl.config.schema import PlacementConfig, RewardModelConfig
from mrl.controller import DeviceSlots, RunContext
from mrl.events import EventLog
from mrl.rollout import hybrid_engine
from mrl.rollout.capacity import MAX_SEQUENCES
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import Sampling
from mrl.rollout.vllm_engine import engine_arguments
from mrl.trainer.evaluation import engines_alone
from tests.models.conftest import Tiny
from tests.rollout.counting_engine import SETTINGS, CountingEngine, request
from tests.rollout.stub_groups import Stage, StubGroup
from tests.rollout.test_hybrid_engine import APART, TOGETHER, config_of, requests


@pytest.mark.parametrize(
    ("placement", "pool", "num_devices"), [(TOGETHER, "laptop", 4), (APART, "engines", 2)], ids=["together", "apart"]
)
def test_there_are_as_many_engines_and_nobody_else(
    placement: Any, pool: str, num_devices: int, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engines_alone(config_of(str(tiny("qwen3")), placement, 2, {}))
    config = replace(config, rollout=replace(config.rollout, stop=["</answer>"]))
    assert config.placement.pools == {pool: num_devices}
    assert list(config.model_roles()) == ["actor"]
    judged = PlacementConfig(pools=placement[0] | {"j": 3}, roles=placement[1] | {"judge": "j"})
    given = replace(config_of(str(tiny("qwen3")), placement, 2, {}), judge=JudgeConfig(path="some/judge"))
    assert engines_alone(replace(given, placement=judged)).placement.pools == {pool: num_devices, "judge": 3}
    stage = Stage()
    monkeypatch.setattr(hybrid_engine, "RayWorkerGroup", partial(StubGroup, stage))
    resources: Any = SimpleNamespace(device_slots=lambda role: DeviceSlots([f"{role}{n}" for n in range(4)], 0.5, role))
    context = RunContext(tmp_path, EventLog(tmp_path / "events.jsonl"), config.deadlines, resources)
    engines = HybridEngine(config, {}, context, loads_files=True)
    for _ in range(2):
        with engines.rollout_mode():
            assert {sample.key for sample in engines.generate(requests("a", "b"), Sampling())} == {"a", "b"}
    asked = stage.take()
    assert {role for role, *_ in asked} == {"replicas"}, "there is no trainer to be asked"
    assert [line for line in asked if line[1] != "submit_and_poll"] == [("replicas", "receive_weights", "1")]
    engines.close()
    assert stage.started.keys() == {"receiver", *(f"rollout-{n}" for n in range(num_devices // 2))}
    for index in range(num_devices // 2):
        settings = stage.started[f"rollout-{index}"].worker.args[1]
        assert (settings.loads_files, settings.reads_text) == (True, True)
        assert settings.share == MAX_SEQUENCES, "all prompts are under way at once"


def test_reward_models_keep_their_pools_and_may_have_that_of_the_engines(tiny: Tiny) -> None:
    given = config_of(str(tiny("qwen3")), TOGETHER, 2, {})
    models = {"near": RewardModelConfig(path="a", max_tokens_per_device=64)}
    models["far"] = replace(models["near"], path="b")
    roles = TOGETHER[1] | {"reward_models.near": "laptop", "reward_models.far": "other"}
    placement = PlacementConfig(pools=TOGETHER[0] | {"other": 3}, roles=roles)
    rollout = replace(given.rollout, replicas=1)
    config = engines_alone(replace(given, placement=placement, reward_models=models, rollout=rollout))
    assert config.placement.pools == {"laptop": 4, "other": 3}, "a model's layout needs all devices of its pool"
    assert config.placement.roles == {
        "actor": "nobody",
        "rollout": "laptop",
        "reward_models.near": "laptop",
        "reward_models.far": "other",
    }
    assert num_engines(config) == 1


def test_an_engine_that_has_loaded_its_weights_takes_none() -> None:
    engine = CountingEngine(replace(SETTINGS, loads_files=True))
    engine.receive_weights(1)
    engine.start([request("a")], Sampling())
    assert engine.notes == ["start"]
    assert engine.weight_version == 1


def test_vllm_reads_weights_and_tokenizer_where_it_is_to(tiny: Tiny) -> None:
    settings = replace(SETTINGS, model=tiny("qwen3"))
    plain = engine_arguments(settings)
    own = engine_arguments(replace(settings, loads_files=True, reads_text=True))
    assert (plain["load_format"], plain["skip_tokenizer_init"]) == ("dummy", True)
    assert (own["load_format"], own["skip_tokenizer_init"]) == ("auto", False)


def test_the_engine_sets_what_check_refuses(tiny: Tiny) -> None:
    settings = replace(SETTINGS, model=tiny("qwen3"), takes_weights_in_flight=True)
    in_flight = [replace(settings, device=device) for device in ("cpu", "cuda")]
    names = {name for settings in in_flight for name in engine_arguments(settings)}
    left_to_vllm = {"data_parallel_size", "seed"}  # to its own defaults
    of_user = {"dtype", "hf_overrides", "max_num_seqs", "max_num_batched_tokens", "max_cudagraph_capture_size"}
    assert names - of_user == OWNED.keys() - left_to_vllm
