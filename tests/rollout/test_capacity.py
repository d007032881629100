"""How much work an engine accepts at a time: the plan and vLLM itself agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.arithmetic import longest_sample_tokens
from mrl.config.hardware import hardware
from mrl.config.lora import LoraConfig
from mrl.config.resolved.load import load_config
from mrl.models.adapters import adapter_tensors
from mrl.models.families import read_spec
from mrl.plan.engine_memory import engine_memory
from mrl.plan.known_models import model_spec
from mrl.rollout.capacity import EngineCapacity, EngineDemand, engine_capacity, engine_share
from mrl.rollout.engine import EngineSettings, RolloutEngine
from mrl.rollout.scheduler import MAX_IN_FLIGHT
from tests.plan.planning import subject_of
from tests.rollout.conftest import MAX_TOKENS, VOCAB, Small

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop-grpo.yaml"
LIMITS = [f"rollout.max_prompt_tokens={MAX_TOKENS - 32}", "rollout.max_response_tokens=32"]
H100 = hardware("h100")


def planned(overrides: list[str], model: Path) -> tuple[int, int]:
    """Return the limits that `mrl plan` uses."""
    config = load_config(str(LAPTOP), LIMITS + overrides).config
    found = engine_memory(config, read_spec(model), H100)
    return found.max_sequences, found.max_tokens


def test_a_running_engine_works_on_as_much_as_is_planned(
    make_engine: Callable[..., RolloutEngine], small: Small
) -> None:
    engine: Any = make_engine("vllm", small("qwen3"), max_num_seqs=24, max_num_batched_tokens=480)
    scheduler = engine._engine.vllm_config.scheduler_config
    overrides = ["rollout.vllm.max_num_seqs=24", "rollout.vllm.max_num_batched_tokens=480"]
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == planned(overrides, small("qwen3")) == (24, 480)
    assert planned([], small("qwen3")) == (128, 2048), "small enough for a laptop"


@pytest.mark.parametrize("given", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 96}])
def test_an_engine_on_a_gpu_is_told_what_is_planned(
    small: Small, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    from vllm.usage.usage_lib import UsageContext

    from mrl.rollout import vllm_engine

    monkeypatch.setattr(
        type(vllm_engine.current_platform), "get_device_total_memory", lambda *_: H100.memory_bytes, raising=False
    )
    config = subject_of("grpo-qwen2.5-0.5b-1n1g").config
    config = replace(config, rollout=replace(config.rollout, vllm=given))
    longest = longest_sample_tokens(config.rollout)
    share, dtype = engine_share(config), config.actor.dtype
    settings = EngineSettings(
        small("qwen3"), dtype, "cuda", longest, VOCAB, Path("sockets"), "engine", share=share, vllm=given
    )
    arguments = vllm_engine.engine_arguments(settings)
    planned = engine_memory(config, read_spec(small("qwen3")), H100)
    found = arguments["max_num_seqs"], arguments["max_num_batched_tokens"]
    assert found == (planned.max_sequences, planned.max_tokens)
    graphs = 1024 if not given else None
    assert arguments.get("max_cudagraph_capture_size") == graphs, "without them up to 512 alone"
    names = ("model", "max_num_seqs", "max_num_batched_tokens")
    made = vllm_engine.EngineArgs(**{name: arguments[name] for name in names}, max_model_len=96)
    scheduler = made.create_engine_config(UsageContext.ENGINE_CONTEXT).scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == found, "as vLLM reads them"


def demand(model: str, share: int, tp: int = 1, **vllm: Any) -> EngineDemand:
    return EngineDemand(model_spec(model), tp, "bfloat16", "cuda", H100.memory_bytes, 8192, share, vllm)


def test_an_engine_works_on_its_share_where_its_cache_holds_it() -> None:
    assert engine_capacity(demand("Qwen2.5-7B", 256, 2)) == EngineCapacity(256, 16384)
    assert engine_capacity(demand("Qwen2.5-7B", 300, 2)) == EngineCapacity(320, 16384), "in steps"
    assert engine_capacity(demand("Qwen2.5-7B", 1, 2)) == EngineCapacity(128, 16384), "validation may ask for more"
    assert engine_capacity(replace(demand("Qwen2.5-0.5B", 5000), max_tokens=1024)) == EngineCapacity(1024, 16384)
    assert MAX_IN_FLIGHT == 1024, "what one replica is asked for at a time"


def test_a_stage_caches_its_layers_and_holds_its_weights() -> None:
    """Stages of Qwen2.5-7B: 28 layers. The last of three has norm and head, the first the embedding."""
    whole, half, third = (replace(demand("Qwen2.5-7B", 256), pp=pp) for pp in (1, 2, 3))
    assert (half.token_bytes, third.token_bytes) == (whole.token_bytes // 2, whole.token_bytes * 10 // 28)
    head = 152_064 * 3584 * 2
    layer = (whole.weight_bytes - 2 * head - 3584 * 2) // 28
    assert half.weight_bytes == head + 14 * layer + 3584 * 2
    assert third.weight_bytes == head + 9 * layer + 3584 * 2
    assert third.cache_bytes(0) > whole.cache_bytes(0)
    windows = replace(demand("gpt-oss-20b", 256), pp=2)
    assert windows.state_bytes * 2 == replace(windows, pp=1).state_bytes


def test_data_parallel_ranks_share_the_experts_and_the_samples() -> None:
    """Qwen3-30B-A3B on 8: 48 layers of 128 experts of 3 x 2048 x 768."""
    alone = demand("Qwen3-30B-A3B", 2048)
    ranks = replace(alone, dp=8)
    assert alone.weight_bytes - ranks.weight_bytes == 2 * 48 * 112 * 3 * 2048 * 768
    assert ranks.token_bytes == alone.token_bytes, "each caches whole attention, of its samples"
    assert engine_capacity(replace(ranks, max_tokens=1024)).max_num_seqs == 256


def test_a_slot_for_adapters_is_not_given_to_the_cache() -> None:
    """On one device the slot is as large as PEFT's file of the rank that vLLM pads to."""
    plain, adapted = demand("Qwen2.5-7B", 256), replace(demand("Qwen2.5-7B", 256), adapter_rank=20)
    tensors = adapter_tensors(plain.spec, LoraConfig(rank=32, alpha=64))
    assert adapted.adapter_bytes == 2 * sum(map(math.prod, tensors.values()))
    assert plain.cache_bytes(0) - adapted.cache_bytes(0) == adapted.adapter_bytes
    split = replace(adapted, tp=4)
    assert split.adapter_bytes < 0.6 * adapted.adapter_bytes, "each worker has a part of most factors"
    assert replace(adapted, pp=3).adapter_bytes == adapted.adapter_bytes * 10 / 28, "the second stage has ten layers"


def test_a_cache_that_is_the_limit_is_not_given_to_logits_and_prefills() -> None:
    large = demand("Qwen3-235B-A22B", 1024, 8, gpu_memory_utilization=0.88)
    assert engine_capacity(large) == EngineCapacity(128, 8192)
    middle = demand("Qwen2.5-7B", 1024, 1)
    found = engine_capacity(middle)
    held = middle.cache_bytes(middle.work_bytes(128, 8192)) // middle.token_bytes // 2048
    assert 128 < held < 1024
    assert found == EngineCapacity(-(-held // 64) * 64, 8192)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_seqs": 40}, (40, 16384)),
        ({"max_num_batched_tokens": 512}, (256, 512)),
        ({"max_num_batched_tokens": 96}, (96, 96)),
        ({"max_num_seqs": 20000}, (20000, 20000)),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 77}, (4, 77)),
    ],
)
def test_what_the_user_says_holds_and_the_other_number_fits_it(
    given: dict[str, int], expected: tuple[int, int]
) -> None:
    assert engine_capacity(demand("Qwen2.5-7B", 256, 2, **given)) == EngineCapacity(*expected)


def test_prompts_that_are_not_cut_fit_into_one_step() -> None:
    long = replace(demand("Qwen2.5-7B", 256, 2, enable_chunked_prefill=False), max_tokens=40000)
    assert engine_capacity(long).max_num_batched_tokens == 40000
    assert engine_capacity(replace(long, device="cpu")).max_num_batched_tokens == 40000


def test_steps_that_are_ahead_in_flight_are_part_of_the_share() -> None:
    apart = {"placement__pools": "{all: null, train: 4, engines: 4}"}
    apart["placement__roles"] = "{actor: train, rollout: engines}"
    alone = engine_share(subject_of("grpo-qwen2.5-7b-1n8g", **apart).config)
    given = subject_of("grpo-qwen2.5-7b-1n8g", **apart).config
    nine = replace(given.batch, prompts_per_step=3, samples_per_prompt=3)
    uneven = replace(given, batch=nine, rollout=replace(given.rollout, replicas=2))
    assert engine_share(uneven) == 5, "nine samples of two engines"
    ahead = {"asynchrony__ahead": 2, "algorithm__correction": "{level: token}"}
    assert engine_share(subject_of("grpo-qwen2.5-7b-1n8g", **apart, **ahead).config) == alone
    in_flight = subject_of("grpo-qwen2.5-7b-1n8g", **apart, **ahead, asynchrony__weights="in_flight")
    assert engine_share(in_flight.config) == 3 * alone
