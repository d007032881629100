"""The memory plan: what moves when a setting moves, what overflows and what is advised, and that presets fit."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.models.table import hf_tensors
from mrl.plan.activations import head_bytes, layer_bytes, stage_activations
from mrl.plan.assumptions import RESERVE, UNUSED
from mrl.plan.known_models import model_spec
from mrl.plan.memory import MemoryPlan, Phase, plan_memory, role_stages
from mrl.plan.plan_input import PlanInput
from mrl.plan.search import _recomputations, advise
from mrl.plan.timing import assumed_lengths, plan_time
from tests.plan.planning import PRESETS, REWARD_MODEL, subject_of

LLAMA_8B, QWEN_MOE = model_spec("Llama-3.1-8B"), model_spec("Qwen3-30B-A3B")


def phase(plan: MemoryPlan, name: str) -> Phase:
    (found,) = (phase for phase in plan.phases if phase.name == name)
    return found


def size(phase: Phase, role: str, what: str) -> int:
    return sum(item.num_bytes for item in phase.items if (item.role, item.what) == (role, what))


def trained(**settings: object) -> TrainedModelConfig:
    return TrainedModelConfig(max_tokens_per_device=1000, **settings)  # type: ignore[arg-type]


def test_a_rank_has_at_least_one_key_head() -> None:
    """Llama-3.1-8B has 8 of them: from 8 ranks on, more ranks share only what the 32 query heads keep."""
    by_tp = {tp: layer_bytes(LLAMA_8B, trained(parallel=ParallelConfig(tp=tp)), has_experts=False) for tp in (8, 16)}
    rope = 4 * LLAMA_8B.head_dim * 2
    of_queries = (2 * 2 * LLAMA_8B.num_heads * LLAMA_8B.head_dim + 4 * LLAMA_8B.num_heads) / 16
    of_one_key_head = 2 * 2 * LLAMA_8B.head_dim
    assert by_tp[16].attention == pytest.approx(of_queries + of_one_key_head + rope)
    assert by_tp[8].attention == pytest.approx(2 * of_queries + of_one_key_head + rope)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits(preset: str) -> None:
    plan = plan_memory(subject_of(preset))
    assert not plan.shortages
    assert plan.engine.full_samples >= 8


def test_an_h100_does_not_hold_a_405b_engine() -> None:
    subject = subject_of("grpo-llama3.1-405b-18n8g")
    h100 = dataclasses.replace(subject, hardware=subject_of("grpo-qwen3-32b-4n8g").hardware)
    assert {shortage.phase.name for shortage in plan_memory(h100).shortages} >= {"weights", "rollout"}


def test_there_is_no_advice_for_a_device_that_is_far_too_small() -> None:
    subject = subject_of("grpo-qwen2.5-7b-1n8g")
    small = dataclasses.replace(subject, hardware=dataclasses.replace(subject.hardware, memory_bytes=8 << 30))
    assert plan_memory(small).shortages
    assert advise(small) == []


def test_a_layer_keeps_what_its_tensors_hold() -> None:
    """By hand for Llama-3.1-8B: h 4096, q 4096, k and v 1024 each, f 14336, in bfloat16."""
    layer = layer_bytes(LLAMA_8B, trained(), has_experts=False)
    attention = 4096 + 2 * 1024 + 4096
    rotation = 2 * 4 * 128
    assert layer.total == 2 * (4 * 4096 + attention + 5 * 14336) + 4 * 32 + rotation
    halved = layer_bytes(LLAMA_8B, trained(parallel=ParallelConfig(tp=2, sequence_parallel=True)), has_experts=False)
    assert halved.total - rotation == (layer.total - rotation) / 2
    whole_norms = layer_bytes(LLAMA_8B, trained(parallel=ParallelConfig(tp=2)), has_experts=False)
    assert whole_norms.total - halved.total == 2 * 4 * 4096 / 2
    fused = layer_bytes(LLAMA_8B, trained(megatron={"bias_activation_fusion": True}), has_experts=False)
    assert layer.total - fused.total == 2 * 2 * 14336


FUSED = {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"}


def test_a_plan_counts_fused_kernels_unless_they_are_switched_off() -> None:
    dense, experts = subject_of("grpo-qwen2.5-7b-1n8g"), subject_of("grpo-qwen3-30b-a3b-2n8g")
    assert {name for name, value in dense.config.actor.megatron.items() if value is True} == FUSED
    assert experts.config.actor.megatron["moe_grouped_gemm"]
    assert experts.config.actor.megatron["moe_permute_fusion"]
    for name, elements in (("apply_rope_fusion", 4 * 128), ("bias_activation_fusion", 2 * 18944 / 2)):
        changed = {f"actor__megatron__{name}": "false", "actor__megatron__recompute_granularity": "null"}
        kept = [
            layer_bytes(subject.specs["actor"], subject.config.actor, has_experts=False).total
            for subject in (subject_of("grpo-qwen2.5-7b-1n8g", **changed), dense)
        ]
        assert kept[0] - kept[1] == 2 * elements


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_make_no_more_again_than_their_memory_asks_for(preset: str) -> None:
    """Lighter recomputation would leave less than 8 % of a device, which has not been measured yet."""
    subject = subject_of(preset)
    memory = subject.hardware.memory_bytes
    ways = {role: list(_recomputations(subject, role)) for role in subject.config.trained_roles()}
    chosen = max(
        next(cost for cost, way in enumerate(of_role) if way["recompute_granularity"] == at(subject, role))
        for role, of_role in ways.items()
    )
    for cost in range(chosen):
        lighter = {f"{role}.megatron.{k}": v for role, way in ways.items() for k, v in way[cost].items()}
        assert plan_memory(subject.with_changes_unchecked(lighter)).fullest.num_bytes > 0.92 * memory
    assert chosen == 2 or plan_memory(subject).fullest.num_bytes <= 0.92 * memory


def at(subject: PlanInput, role: str) -> str | None:
    granularity: str | None = subject.config.model_roles()[role].megatron.get("recompute_granularity")
    return granularity


def test_recomputation_and_pipelines_change_what_is_kept() -> None:
    def kept(stage: int = 0, num_micro_batches: int = 100, **settings: object) -> float:
        taken = stage_activations(LLAMA_8B, trained(**settings), stage, num_micro_batches, "cpu")
        return (taken.kept + taken.at_work) / 1000 - backward

    backward = 2 * (2 * 4096 + 3 * 14336)  # gradients of input, output and MLP, in bfloat16
    layer = layer_bytes(LLAMA_8B, trained(), has_experts=False)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert kept() == pytest.approx(32 * layer.total, rel=1e-6)
    assert kept(megatron=full) == pytest.approx(32 * 8192 + layer.total, rel=1e-6)
    four = full | {"recompute_num_layers": 4}
    assert kept(megatron=four) == pytest.approx(8 * 8192 + 4 * layer.total, rel=1e-6)
    some = full | {"recompute_method": "block", "recompute_num_layers": 8}
    assert kept(megatron=some) == pytest.approx(8 * 8192 + 25 * layer.total, rel=1e-6)
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert kept(megatron=selective) == pytest.approx(32 * layer.total - 31 * 2 * 5 * 14336, rel=1e-6)
    staged = ParallelConfig(pp=4)
    sent = 2 * 4096
    assert kept(parallel=staged) == kept() + 4 * sent, (
        "as many micro-batches as stages, each of a quarter of the layers"
    )
    assert kept(stage=3, parallel=staged) == pytest.approx(8 * layer.total, rel=1e-6)
    assert kept(num_micro_batches=2, parallel=staged) == pytest.approx(16 * layer.total + 2 * sent, rel=1e-6)
    interleaved = ParallelConfig(pp=4, vpp=2)
    assert kept(parallel=interleaved) == pytest.approx((2 * 3 + 4 + 1) * (4 * layer.total + sent), rel=1e-6)
    assert kept(stage=3, parallel=interleaved) == pytest.approx(5 * (4 * layer.total + sent / 2), rel=1e-6)


def test_recomputed_heads_of_latents_are_not_kept() -> None:
    spec = model_spec("Moonlight-16B-A3B")
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    kept, again = (
        stage_activations(spec, trained(megatron=megatron), 0, 1).kept / 1000 for megatron in ({}, selective)
    )
    assert kept - again == pytest.approx(27 * 2 * 2 * 16 * 192, rel=1e-6), "queries and keys, in bfloat16"


def test_backward_in_a_layer_takes_what_a_7b_takes_by_hand() -> None:
    """Qwen2.5-7B, tp 2 with sequence parallelism, fused kernels, the MLP recomputed: h 3584, q 3584, k 512, f 18944."""
    mlp = {"actor__megatron__recompute_granularity": "selective", "actor__megatron__recompute_modules": "[mlp]"}
    subject = subject_of("grpo-qwen2.5-7b-1n8g", actor__parallel__pp=1, actor__parallel__vpp=1, **mlp)
    taken = stage_activations(subject.specs["actor"], subject.config.actor, 0, 100)
    tokens, h = 16384, 2 * 3584
    attention = (2 * 2 * 3584 + 2 * 2 * 512 + 4 * 28) / 2
    # A layer's input, the output of attention's norm and the input of the MLP, of which each rank has half.
    assert taken.kept == pytest.approx(28 * tokens * (3 * h / 2 + attention), rel=1e-6)
    again, gradients, gathered = h / 2 + 3 * 18944, 2 * 18944, 3 * h
    assert taken.at_work == pytest.approx(tokens * (again + gradients + gathered), rel=1e-6)
    on_a_cpu = stage_activations(subject.specs["actor"], subject.config.actor, 0, 100, "cpu")
    assert on_a_cpu.kept - taken.kept == pytest.approx(28 * tokens * h / 2, rel=1e-6), "the MLP's norm is apart there"


def test_building_the_optimizer_takes_the_models_own_parameters_once_more() -> None:
    """Megatron makes its buffers while the parameters still lie elsewhere: 2 + 2 + 4 bytes each in bfloat16."""
    plan = plan_memory(subject_of("ppo-llama3.1-70b-8n8g"))
    actor, critic = phase(plan, "build actor"), phase(plan, "build critic")
    parameters = size(phase(plan, "train actor"), "actor", "parameters")
    assert actor.num_bytes - size(actor, "actor", RESERVE) == pytest.approx(4 * parameters, rel=0.03)
    assert size(critic, "actor", "optimizer") > 0, "the actor was built before, and is still there"


def test_phases_follow_the_hybrid_engine() -> None:
    plan = plan_memory(subject_of("ppo-llama3.1-70b-8n8g"))
    assert [each.name for each in plan.phases] == [
        *("build actor", "build critic", "weights", "rollout", "log-probs", "train actor", "values", "train critic")
    ]
    weights, rollout, train = (phase(plan, name) for name in ("weights", "rollout", "train actor"))
    assert size(weights, "actor", "parameters") > 0 == size(weights, "actor", "gradients")
    assert size(weights, "rollout", "cache") == 0 < size(rollout, "rollout", "cache")
    assert size(rollout, "actor", "parameters") == 0
    assert size(rollout, "critic", "optimizer") == 0 < size(train, "critic", "optimizer"), "a guest of the actor leaves"
    assert {item.what for item in train.items if item.role == "rollout"} == {RESERVE}, "the engine sleeps"
    assert size(train, "actor", "gradients") == 2 * size(train, "actor", "parameters")


def test_a_critic_on_the_actors_model_takes_no_second_copy() -> None:
    own, shared = (
        plan_memory(
            subject_of(
                "ppo-llama3.1-8b-1n8g",
                actor__lora="{rank: 32, alpha: 64}",
                critic__lora=f"{{rank: 32, alpha: 64, base: {base}}}",
            )
        )
        for base in ("own", "actor")
    )
    both = [phase(plan, "train actor") for plan in (own, shared)]
    parameters, adapters = (size(train, "critic", "parameters") for train in both)
    assert 0 < adapters < 0.03 * parameters
    assert size(both[1], "critic", RESERVE) == 0, "one process"
    assert size(both[1], "critic", "optimizer") == size(both[0], "critic", "optimizer")
    assert shared.host_bytes_per_node < own.host_bytes_per_node


def test_a_teacher_has_parameters_alone_and_a_divergence_from_it_takes_memory_of_the_actor() -> None:
    plans = {
        form: plan_memory(
            subject_of("distill-qwen2.5-7b-from-72b-2n8g", algorithm__distillation__form=form, actor__parallel__pp=1)
        )
        for form in ("advantage", "top_k", "full")
    }
    reading, rollout = phase(plans["top_k"], "teacher"), phase(plans["top_k"], "rollout")
    assert size(reading, "teacher", "parameters") > 2 * 72e9 / 16
    assert size(rollout, "teacher", "parameters") == 0
    assert not {item.what for item in reading.items if item.role == "teacher"} & {"gradients", "optimizer"}
    taken = {form: size(phase(plan, "train actor"), "actor", "divergence") for form, plan in plans.items()}
    assert taken["advantage"] == 0 < taken["top_k"]
    matrix, hidden = 152_064 // 2 * 8192 * 2, 16_384 * 8192 * 2
    assert taken["full"] - taken["top_k"] > matrix + hidden


def test_reference_on_its_own_devices_takes_no_memory_of_the_actors_machines() -> None:
    kept = plan_memory(subject_of("grpo-qwen2.5-72b-8n8g", algorithm__kl__where="loss"))
    apart = {"cluster__nodes": 10, "placement__pools": "{all: 64, frozen: 16}", "placement__roles__reference": "frozen"}
    subject = subject_of("grpo-qwen2.5-72b-8n8g", algorithm__kl__where="loss", **apart)
    plan = plan_memory(subject)
    reading = phase(plan, "reference")
    assert size(reading, "reference", "parameters") > 2 * 72e9 / 16
    assert {item.what for item in reading.items if item.role == "reference"} & {"gradients", "optimizer"} == set()
    assert {item.role for item in reading.items} == {"reference"}
    assert plan.host_bytes_per_node < kept.host_bytes_per_node, "the actor keeps no copy"
    times = {each.name for each in plan_time(subject, assumed_lengths(subject.config)).phases}
    assert {"reference", "train actor"} <= times
    assert "train reference" not in times


def test_a_reward_model_has_parameters_alone_and_leaves_for_the_rollout() -> None:
    plan = plan_memory(subject_of("ppo-llama3.1-8b-1n8g", **REWARD_MODEL))
    assert [each.name for each in plan.phases][-3:] == ["values", "train critic", "reward model"]
    scoring, rollout = phase(plan, "reward model"), phase(plan, "rollout")
    held = sum(math.prod(shape) for shape in hf_tensors(LLAMA_8B, "score").values()) * 2
    assert size(scoring, "reward_model", "parameters") == held
    assert size(rollout, "reward_model", "parameters") == 0
    assert not {item.what for item in scoring.items if item.role == "reward_model"} & {"gradients", "optimizer"}
    assert size(scoring, "actor", "parameters") == size(scoring, "critic", "parameters") == 0, "amid the rollout"
    assert {item.what for item in scoring.items if item.role == "rollout"} == {RESERVE}, "engines sleep meanwhile"
    without = plan_memory(subject_of("ppo-llama3.1-8b-1n8g"))
    assert plan.host_bytes_per_node - without.host_bytes_per_node == 8 * held


@pytest.mark.parametrize("preset", ["grpo-qwen2.5-7b-1n8g", "ppo-llama3.1-70b-8n8g"])
def test_the_reference_is_a_copy_of_the_actors_parameters_on_the_host(preset: str) -> None:
    none, *kept = (subject_of(preset, algorithm__kl__where=where) for where in ("none", "loss", "reward", "both"))
    per_rank = max(role.weights.parameters for role in role_stages(none, "actor"))
    assert per_rank > 0
    for subject in kept:
        more = plan_memory(subject).host_bytes_per_node - plan_memory(none).host_bytes_per_node
        assert more == per_rank * subject.config.cluster.devices_per_node


def test_the_host_holds_what_leaves_the_fullest_machine() -> None:
    subject = subject_of("ppo-llama3.1-8b-1n8g", algorithm__kl__where="none")
    roles = [role_stages(subject, name)[0].weights for name in ("actor", "critic")]
    whole = plan_memory(subject).host_bytes_per_node
    checkpoint = sum(weights.checkpoint for weights in roles)
    assert checkpoint == sum(weights.optimizer for weights in roles), "in bfloat16: float32 weights, and moments"
    assert whole == 8 * (sum(weights.parameters + weights.optimizer for weights in roles) + checkpoint)
    staying = subject_of("ppo-llama3.1-8b-1n8g", algorithm__kl__where="loss", sync__offload="false")
    assert plan_memory(staying).host_bytes_per_node == 8 * (roles[0].parameters + checkpoint), "and the reference"


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_the_head_counts_on_the_last_stage_alone_where_it_is_larger_than_a_layer(pp: int, vpp: int) -> None:
    changes = {
        f"{role}__parallel__{name}": size for role in ("actor", "critic") for name, size in (("pp", pp), ("vpp", vpp))
    }
    subject = subject_of("ppo-llama3.1-70b-8n8g", **changes)
    for name, head in (("actor", "lm"), ("critic", "score")):
        stages = role_stages(subject, name)
        assert [role.stage for role in stages] == list(range(pp))
        model = subject.config.model_roles()[name]
        for role in stages:
            is_last = role.stage == pp - 1
            for items, backward in ((role.train, True), (role.score, False)):
                of_head = head_bytes(subject.specs[name], model, head, backward=backward)
                works = [item for item in items if item.what != UNUSED]
                (largest,) = [item for item in works if item.what != "activations" or not backward]
                assert largest.num_bytes >= of_head * is_last
                assert (largest.what == "head") == (is_last and largest.num_bytes == of_head)


def test_the_head_keeps_hidden_states_their_gradient_and_three_tiles() -> None:
    """By hand for Llama-3.1-8B: h 4096 and 128256 columns, in bfloat16; a tile is 2^28 bytes, or 512 columns."""
    model, tiles = trained(), 3 * (1 << 28)
    assert head_bytes(LLAMA_8B, model, "lm", backward=False) == 1000 * 4096 * 2 + tiles
    assert head_bytes(LLAMA_8B, model, "lm", backward=True) == 1000 * 4096 * 8 + 128256 * 4096 * 2 + tiles
    halved = trained(parallel=ParallelConfig(tp=2))
    assert head_bytes(LLAMA_8B, halved, "lm", backward=True) == 1000 * 4096 * 8 + 64128 * 4096 * 2 + tiles
    assert head_bytes(LLAMA_8B, model, "score", backward=False) == 1000 * 4096 * 2
    assert head_bytes(LLAMA_8B, model, "score", backward=True) == 1000 * 4096 * 8
    many = TrainedModelConfig(max_tokens_per_device=1 << 18)
    assert head_bytes(LLAMA_8B, many, "lm", backward=False) == (1 << 18) * (4096 * 2 + 3 * 512 * 4)


def test_memory_that_does_not_take_turns_adds_up() -> None:
    together = plan_memory(subject_of("grpo-qwen2.5-7b-1n8g", sync__offload="false"))
    train = phase(together, "train actor")
    assert size(train, "rollout", "cache") > 0
    assert together.shortages
    assert together.host_bytes_per_node < plan_memory(subject_of("grpo-qwen2.5-7b-1n8g")).host_bytes_per_node


def test_engines_with_devices_of_their_own_stay_awake() -> None:
    apart = subject_of(
        "grpo-qwen3-32b-4n8g",
        placement__pools="{all: null, train: 16, engines: 16}",
        placement__roles="{actor: train, rollout: engines}",
    )
    plan = plan_memory(apart)
    assert {(each.pool, each.name) for each in plan.phases} == {
        ("train", "weights"),
        *(("train", name) for name in ("build actor", "log-probs", "train actor")),
        *(("engines", name) for name in ("weights", "rollout")),
    }
    assert not any(item.role == "rollout" for item in phase(plan, "train actor").items)


@pytest.mark.parametrize(
    ("changes", "overflows"),
    [
        ({"actor__megatron__recompute_granularity": "null", "actor__max_tokens_per_device": 65536}, "train actor"),
        ({"rollout__tp": 1, "rollout__vllm__gpu_memory_utilization": 0.8}, "rollout"),
        ({"rollout__vllm__gpu_memory_utilization": 0.99}, "rollout"),
    ],
)
def test_what_overflows_is_named_and_the_advice_fits(changes: dict[str, object], overflows: str) -> None:
    subject = subject_of("grpo-qwen3-32b-4n8g", **changes)
    assert plan_memory(subject).shortages[0].phase.name == overflows
    found = advise(subject)
    assert found
    for advised, _ in found:
        varied = subject.with_changes(advised)
        assert varied is not None, "the advice keeps to the rules"
        assert not plan_memory(varied).shortages
        assert subject.overrides(advised)


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (1, False)])
def test_a_cache_holds_at_least_one_sample_of_full_length(missing: int, fits: bool) -> None:
    plan = plan_memory(subject_of("grpo-qwen2.5-7b-1n8g"))
    cache = plan.engine.sample_bytes - missing
    short = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, cache_bytes=cache))
    assert (short.shortages == plan.shortages) == fits
