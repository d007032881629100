"""Each term of the model of time against its formula, written out from a preset's numbers."""

from __future__ import annotations

import math

import pytest

from mrl.config.arithmetic import role_mesh
from mrl.models.rollout_table import EngineSizes, engine_bytes
from mrl.plan.assumptions import ASSUMPTIONS, RESERVE
from mrl.plan.engine_memory import engine_memory
from mrl.plan.plan_input import PlanInput
from mrl.plan.reshard_traffic import ReshardTraffic
from mrl.plan.timing import Lengths, TimedPhase, decode_step, plan_time
from mrl.plan.weights import buffers, stage_weights
from mrl.weight_sync.intersections import ShardIntersections
from tests.plan.planning import subject_of

LENGTHS = Lengths(prompt=512, response=2048)
LAYOUT = {
    "actor__parallel__tp": 4,
    "actor__parallel__pp": 2,
    "actor__parallel__vpp": 1,
    "actor__parallel__cp": 2,
    "actor__parallel__sequence_parallel": "true",
    "actor__max_tokens_per_device": 4096,
    "actor__megatron__recompute_granularity": "null",
}
BATCH = {
    "batch__prompts_per_step": 64,
    "batch__samples_per_prompt": 8,
    "batch__samples_per_update": 128,
    "batch__epochs_per_step": 3,
}
SAMPLES, UPDATES, NODE = 512, 12, 8


def subject(**changes: object) -> PlanInput:
    """Qwen3-32B on 32 devices: dp 2."""
    return subject_of("grpo-qwen3-32b-4n8g", **LAYOUT | BATCH | changes)


def phase(of: PlanInput, name: str) -> TimedPhase:
    (found,) = (phase for phase in plan_time(of, LENGTHS).phases if phase.name == name)
    return found


def seconds_per_byte(of: PlanInput, span: int) -> float:
    outside = max(0, span - NODE) / span
    device = of.hardware
    return (
        outside / device.network_bytes_per_s + (1 - outside) / device.link_bytes_per_s
    ) / ASSUMPTIONS.link_efficiency


@pytest.mark.parametrize(("name", "passes", "epochs", "updates"), [("reference", 1, 1, 1), ("train actor", 3, 3, 12)])
def test_training_and_scoring(name: str, passes: int, epochs: int, updates: int) -> None:
    of = subject()
    spec, device, parts = of.specs["actor"], of.hardware, phase(of, name).parts
    tokens = SAMPLES * epochs * 2560
    micro_batches = math.ceil(tokens / updates / 2 / (4096 * 2))
    products = passes * SAMPLES * epochs * spec.sequence_flops(2560)
    launches = passes * micro_batches * updates * spec.num_layers * ASSUMPTIONS.train_layer_s / 2
    hidden, keys = 2 * spec.hidden, 2 * spec.num_kv_heads * spec.head_dim
    tensor = 4 * hidden * 3 / 4 * seconds_per_byte(of, 4)
    context = 2 * keys / 4 * 1 * seconds_per_byte(of, 8)
    stages = 2 * hidden / 4 * seconds_per_byte(of, 32)
    links = passes * tokens / 4 * (spec.num_layers * (tensor + context) + stages) / 2
    expected = {
        "matrix products": products / (32 * device.flops_per_s * ASSUMPTIONS.train_efficiency),
        "launches": launches,
        "links": links,
    }
    expected["pipeline bubble"] = sum(expected.values()) / micro_batches
    if name == "train actor":
        model = of.config.trained_roles()["actor"]
        owned = buffers(spec, model, role_mesh(of.config, "actor"), "lm", 0)
        moved = sum(buffer.num_padded * (1 - 1 / buffer.num_owners) * 6 for buffer in owned)
        expected["gradients and weights over the ranks"] = 12 * moved * seconds_per_byte(of, 16)
    assert parts == pytest.approx(expected)


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    """Of eight units of work per weight and token, with recomputation, two are the gradient of the weight."""
    full = {"actor__megatron__recompute_granularity": "full"}
    of = subject(**full)
    rate = 32 * of.hardware.flops_per_s * ASSUMPTIONS.train_efficiency
    before, after = (
        phase(each, "train actor").parts["matrix products"] * rate
        for each in (of, subject(**full, actor__lora="{rank: 32, alpha: 64, sync: merged}"))
    )
    hidden, queries, keys, ffn = 5120, 64 * 128, 8 * 128, 25600
    attention = 3 * hidden + queries + 2 * keys + queries + hidden
    adapters = 2 * 64 * 32 * (attention + 2 * (hidden + ffn) + ffn + hidden)
    assert before - after == pytest.approx(SAMPLES * 3 * 2560 * (of.specs["actor"].flops_per_token - 4 * adapters))
    assert after == pytest.approx(6 / 8 * before, rel=0.03)


def test_engines_that_stay_awake_get_the_adapters_only() -> None:
    """The study's arithmetic: rank 32 on all layers of a 70B model is 0.83 GB in bfloat16."""
    of = subject_of("grpo-llama3.3-70b-lora-1n8g", sync__offload="false")
    seconds_per_byte = 1 / of.hardware.network_bytes_per_s / ASSUMPTIONS.link_efficiency
    assert phase(of, "weights").parts == pytest.approx({"adapters": 0.83e9 * seconds_per_byte}, rel=0.01)
    assert "reshard" in phase(subject_of("grpo-llama3.3-70b-lora-1n8g"), "weights").parts


def test_experts_are_sent_and_launched_one_by_one() -> None:
    of = subject_of("grpo-qwen3-30b-a3b-2n8g")
    spec, mesh, model = of.specs["actor"], of.config.actor.parallel, of.config.actor
    assert spec.moe is not None
    forward = phase(of, "reference").parts
    samples = of.config.batch.prompts_per_step * of.config.batch.samples_per_prompt
    dp = 16 // (mesh.tp * mesh.pp * mesh.cp)
    tokens = samples * 2560
    micro_batches = math.ceil(tokens / dp / (model.max_tokens_per_device * mesh.cp))
    routed = sum(map(spec.has_experts, range(spec.num_layers)))
    each = ASSUMPTIONS.expert_layer_s
    if not model.megatron.get("moe_grouped_gemm"):
        each += spec.moe.num_experts / mesh.ep * ASSUMPTIONS.lone_expert_s
    launches = (spec.num_layers - routed) * ASSUMPTIONS.train_layer_s + routed * each
    assert forward["launches"] == pytest.approx(micro_batches * launches / mesh.pp)
    alone = subject_of("grpo-qwen3-30b-a3b-2n8g", actor__megatron__moe_grouped_gemm="false")
    more = phase(alone, "reference").parts["launches"]
    assert more == pytest.approx(
        micro_batches * routed * (ASSUMPTIONS.expert_layer_s + 128 / mesh.ep * ASSUMPTIONS.lone_expert_s) / mesh.pp
    )


def test_stages_share_cache_and_products_but_each_part_of_the_samples_reads_all_weights() -> None:
    of, alone = (subject(rollout__tp=4, rollout__pp=pp) for pp in (2, 1))
    engine, whole = (engine_memory(one.config, one.specs["actor"], one.hardware) for one in (of, alone))
    assert engine.token_bytes * 2 == whole.token_bytes
    staged, lone = decode_step(of, engine), decode_step(alone, whole)
    bytes_per_s = of.hardware.memory_bytes_per_s * ASSUMPTIONS.decode_bandwidth
    weights, of_whole = (next(size for name, size, _ in one.parts if name == "weights") for one in (engine, whole))
    more_s = (2 * weights - of_whole) / bytes_per_s + ASSUMPTIONS.decode_step_s
    sent_s = 2 * 2 * 5120 * seconds_per_byte(of, 8)
    assert staged(8, 0) == pytest.approx(lone(8, 0) + more_s + 8 * sent_s)
    cache_s = (staged(8, 1e5) - staged(8, 0)) / (lone(8, 1e5) - lone(8, 0))
    assert cache_s == pytest.approx(0.5)


@pytest.mark.parametrize("dp", [8, 16])
def test_data_parallel_ranks_read_the_experts_that_the_tokens_of_all_ranks_choose(dp: int) -> None:
    """Qwen3-30B-A3B: 48 layers, 8 of 128 experts per token, h 2048. Sixteen ranks are on two nodes."""
    vllm = "{enable_expert_parallel: true, enable_prefix_caching: true}"
    changes = {"rollout__vllm": vllm, "algorithm__router_replay": "none", "rollout__tp": 1, "rollout__dp": dp}
    of = subject_of("grpo-qwen3-30b-a3b-2n8g", **changes)
    spec, device = of.specs["actor"], of.hardware
    step_s = decode_step(of, engine := engine_memory(of.config, spec, device))
    weights = next(size for name, size, _ in engine.parts if name == "weights")
    experts = 48 * 128 * 3 * 2048 * 768 / spec.num_parameters * weights
    bytes_per_s = device.memory_bytes_per_s * ASSUMPTIONS.decode_bandwidth
    touched = (1 - 8 / 128) ** dp - (1 - 8 / 128) ** (2 * dp)
    sent_s = 48 * 2 * 2 * 2048 * (dp - 1) * seconds_per_byte(of, dp)
    assert step_s(2, 0) - step_s(1, 0) == pytest.approx(touched * experts / bytes_per_s + sent_s)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_generation_reads_weights_and_cache_for_each_token_and_ends_with_the_longest(tp: int) -> None:
    of = subject(rollout__tp=tp, rollout__vllm__gpu_memory_utilization=0.9, rollout__max_response_tokens=4096)
    spec, device = of.specs["actor"], of.hardware
    engine = engine_memory(of.config, spec, device)
    samples = SAMPLES / (32 // tp)
    fits = samples * 2560 <= engine.cache_tokens
    batch = max(1.0, min(samples, math.inf if fits else engine.cache_tokens / 1536, engine.max_sequences))
    weights = engine_bytes(spec, tp, "bfloat16")[0]

    def step_s(size: float) -> float:
        read = (weights + size * 1536 * engine.token_bytes) / (device.memory_bytes_per_s * ASSUMPTIONS.decode_bandwidth)
        flops = size * (spec.flops_per_token + spec.attention_flops_per_token_pair * 1536)
        compute = flops / (tp * device.flops_per_s * ASSUMPTIONS.prefill_efficiency)
        waits = 1 if tp == 1 else 2
        anyway_s = spec.num_layers * ASSUMPTIONS.decode_layer_s * waits + ASSUMPTIONS.decode_step_s
        return max(max(read, compute) + anyway_s, size * ASSUMPTIONS.decode_sample_s)

    prefill = spec.sequence_flops(512) * samples / (tp * device.flops_per_s * ASSUMPTIONS.prefill_efficiency)
    assert phase(of, "rollout").parts == pytest.approx(
        {
            "prefill": prefill / 8,
            "decoding": samples * 2048 / batch * step_s(batch),
            "the longest": 2048 * step_s(max(1.0, ASSUMPTIONS.tail_share * batch)),
        }
    )
    changes = {"rollout__vllm__enable_prefix_caching": "false", "rollout__max_response_tokens": 1024}
    uncached = subject(rollout__tp=tp, rollout__vllm__gpu_memory_utilization=0.9, **changes)
    assert phase(uncached, "rollout").parts["prefill"] == pytest.approx(prefill)
    assert phase(uncached, "rollout").parts["the longest"] == 0, "longer than the longest is not to be waited for"


def test_weights_go_to_the_engines_and_the_trainers_memory_to_the_host_and_back() -> None:
    of = subject(rollout__tp=2)
    spec, device, model = of.specs["actor"], of.hardware, of.config.actor
    mesh = role_mesh(of.config, "actor")
    traffic = ReshardTraffic(ShardIntersections(spec, model.parallel, EngineSizes(2)), mesh, NODE, "bfloat16").busiest()
    slowest = max(traffic.link / device.link_bytes_per_s, traffic.network / device.network_bytes_per_s)
    held = stage_weights(spec, model, mesh, "lm", 0)
    assert phase(of, "weights").parts == pytest.approx(
        {
            "reshard": slowest / ASSUMPTIONS.link_efficiency,
            "to the host and back": 2 * (held.parameters + held.optimizer) / device.host_bytes_per_s,
        }
    )
    assert set(phase(subject(rollout__tp=2, sync__offload="false"), "weights").parts) == {"reshard"}
    apart = {"placement__pools": "{all: null, train: 16, engines: 16}"}
    apart["placement__roles"] = "{actor: train, rollout: engines}"
    one = engine_bytes(spec, 2, "bfloat16")[0] / ASSUMPTIONS.link_efficiency / device.network_bytes_per_s
    assert phase(subject(rollout__tp=2, **apart), "weights").parts == pytest.approx({"reshard": one})
    apart["placement__pools"] = "{all: null, train: 16, engines: 32}"
    busy = subject(rollout__tp=2, cluster__nodes=6, **apart)
    assert phase(busy, "weights").parts == pytest.approx({"reshard": 2 * one}), "16 ranks send to 32 workers"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_has_weights_work_space_and_the_rest_as_its_cache(tp: int) -> None:
    """By hand for Qwen3-32B: h 5120, 64 heads and 8 of keys of 128, f 25600, 64 layers, 151936 tokens."""
    of = subject(rollout__tp=tp, rollout__vllm__gpu_memory_utilization=0.9)
    engine = engine_memory(of.config, of.specs["actor"], of.hardware)
    weights, _ = engine_bytes(of.specs["actor"], tp, "bfloat16")
    widest = 3 * 5120 + max((64 + 2 * 8) * 128 // tp, 3 * 25600 // tp)
    # A cache of 26,796 tokens is the limit at tp 1; at tp 2 it holds 147 samples of a quarter of 8,192.
    tokens, sequences = {1: 8192, 2: 16384, 4: 16384}[tp], 128
    work, reserve = tokens * widest * 2 + 3 * sequences * 151936 * 4, 2 << 30
    cache = int(0.9 * of.hardware.memory_bytes) - weights - work - reserve
    assert {what: size for what, size, _ in engine.parts} == {
        "weights": weights,
        "work space": work,
        RESERVE: reserve,
        "cache": max(0, cache),
    }
    assert engine.token_bytes == 2 * 64 * (8 // tp) * 128 * 2
    rollout = of.config.rollout
    assert engine.sample_bytes == engine.token_bytes * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    assert engine.cache_tokens == max(0, cache) // engine.token_bytes
    assert engine.full_samples == min(max(0, cache) // engine.sample_bytes, sequences)
    few = subject(rollout__tp=tp, rollout__vllm__max_num_seqs=3, rollout__vllm__kv_cache_memory_bytes=10**11)
    fixed = engine_memory(few.config, few.specs["actor"], few.hardware)
    assert (fixed.max_sequences, fixed.full_samples, fixed.cache_bytes) == (3, 3, 10**11)


def test_a_policy_that_teaches_itself_makes_one_more_pass() -> None:
    taught = {"algorithm__distillation__form": "top_k", "algorithm__distillation__context": "Answer {prompt}"}
    of = subject(**taught)
    assert phase(of, "teacher").parts == phase(of, "old log-probs").parts
    assert "teacher" not in {each.name for each in plan_time(subject(), LENGTHS).phases}


def test_a_teacher_that_reads_a_success_reads_another_response() -> None:
    own = {"form": "top_k", "context": "Answer {prompt} {success}", "success_at": 1.0, "context_tokens": 1000}
    of = subject(**{f"algorithm__distillation__{name}": value for name, value in own.items()})
    longer = Lengths(LENGTHS.whole, LENGTHS.response)
    (teacher,) = (phase for phase in plan_time(of, LENGTHS).phases if phase.name == "teacher")
    (scoring,) = (phase for phase in plan_time(of, longer).phases if phase.name == "old log-probs")
    assert teacher.parts == scoring.parts
    assert teacher.seconds > phase(of, "old log-probs").seconds
