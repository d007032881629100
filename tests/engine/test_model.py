"""Megatron's configuration of a model in a layout, and each rank's coordinates. No process is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.config.mesh import Mesh
from mrl.config.schema import MegatronModelConfig, ParallelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.layer_spec import RmsNorm, _has_experts
from mrl.engine.model import ModelRequest, TokenModel, _ScoreHead, transformer_config
from mrl.engine.packed_rows import SequenceSharding
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.errors import EngineError
from mrl.models.families import read_spec
from mrl.models.spec import ModelSpec
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import make_tiny

LARGE = ParallelConfig(tp=2, cp=2, pp=2, vpp=2, ep=2, etp=1, sequence_parallel=True)


def groups_of(parallel: ParallelConfig, rank: int = 0, world_size: int = 8) -> ParallelGroups:
    """A rank's coordinates, without process groups."""
    mesh = Mesh(world_size, parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp)
    nobody: Any = None
    return ParallelGroups(parallel, mesh.coordinates(rank), mesh, torch.device("cpu"), *[nobody] * 5)


def config_of(spec: ModelSpec, parallel: ParallelConfig, dtype: str = "float32", **megatron: Any) -> TransformerConfig:
    return transformer_config(ModelRequest(spec, "lm", dtype, megatron), groups_of(parallel))


@pytest.fixture(scope="module")
def moe(tiny_spec: dict[str, ModelSpec]) -> ModelSpec:
    return tiny_spec["qwen3_moe"]


@pytest.fixture(scope="module")
def tiny_spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    directory = tmp_path_factory.mktemp("specs")
    return {family: read_spec(make_tiny(family, directory / family)) for family in ("llama", "qwen3_moe", "mistral")}


def test_a_layout_reaches_megatron_size_by_size(moe: ModelSpec) -> None:
    config = config_of(moe, LARGE)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert config.virtual_pipeline_model_parallel_size == 2
    assert (config.context_parallel_size, config.expert_model_parallel_size) == (2, 2)
    assert config.expert_tensor_parallel_size == 1
    assert config.sequence_parallel
    assert config.overlap_p2p_comm
    one = config_of(moe, ParallelConfig())
    assert one.virtual_pipeline_model_parallel_size is None
    assert not one.sequence_parallel
    assert not one.overlap_p2p_comm


def test_uneven_stages_reach_megatron_at_the_right_ends(tiny_spec: dict[str, ModelSpec]) -> None:
    config = config_of(tiny_spec["llama"], ParallelConfig(pp=2, first_stage_layers=1, last_stage_layers=3))
    assert (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) == (1, 3)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_dtype_is_that_of_parameters_and_messages(moe: ModelSpec, dtype: str, expected: torch.dtype) -> None:
    config = config_of(moe, ParallelConfig(), dtype)
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (expected, expected, dtype == "bfloat16")


def test_what_must_hold_whatever_the_layout(moe: ModelSpec) -> None:
    for parallel in (ParallelConfig(), LARGE):
        config = config_of(moe, parallel)
        assert config.calculate_per_token_loss
        assert config.variable_seq_lengths
        assert not config.batch_p2p_comm
        assert not config.perform_initialization
        assert config.moe_token_dispatcher_type == "alltoall"
        assert config.hidden_dropout == config.attention_dropout == 0


def test_the_users_settings_stand_beside_what_the_model_and_the_layout_say(moe: ModelSpec) -> None:
    assert config_of(moe, LARGE, recompute_granularity="selective").recompute_granularity == "selective"
    assert config_of(moe, LARGE, hidden_dropout=0.0).hidden_dropout == 0, "nothing else is asked for"


@pytest.mark.parametrize(
    ("name", "value"), [("layernorm_epsilon", 0.01), ("moe_router_topk", 1), ("batch_p2p_comm", True)]
)
def test_no_setting_replaces_what_the_model_or_the_layout_says(name: str, value: Any, moe: ModelSpec) -> None:
    with pytest.raises(EngineError, match=rf"megatron\.{name}={value} contradicts .*the model's config\.json"):
        config_of(moe, LARGE, **{name: value})


DENSE_KERNELS = {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"}
EXPERT_KERNELS = {"moe_grouped_gemm", "moe_permute_fusion"}


def fused(config: TransformerConfig) -> set[str]:
    return {name for name in DENSE_KERNELS | EXPERT_KERNELS if getattr(config, name)}


def test_kernels_are_fused_where_transformer_engine_is_and_each_can_be_switched_off(
    tiny_spec: dict[str, ModelSpec], moe: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = replace(LARGE, ep=1)
    assert not fused(config_of(tiny_spec["llama"], dense)), "on a machine without it"
    assert not fused(config_of(moe, LARGE))
    monkeypatch.setattr("mrl.engine.model.has_transformer_engine", lambda: True)
    monkeypatch.setattr(TransformerConfig, "__post_init__", lambda config: None)  # it looks for the kernels themselves
    assert fused(config_of(tiny_spec["llama"], dense)) == DENSE_KERNELS
    assert fused(config_of(moe, LARGE)) == DENSE_KERNELS | EXPERT_KERNELS
    for name in DENSE_KERNELS | EXPERT_KERNELS:
        assert fused(config_of(moe, LARGE, **{name: False})) == (DENSE_KERNELS | EXPERT_KERNELS) - {name}


def test_transformer_engine_is_not_asked_for_a_window_over_context_ranks(
    tiny_spec: dict[str, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_two = ParallelConfig(cp=2)
    assert config_of(tiny_spec["mistral"], over_two).window_size, "our own attention computes it"
    monkeypatch.setattr("mrl.engine.model.has_transformer_engine", lambda: True)
    with pytest.raises(EngineError, match=r"sliding window of \d+ tokens with cp=2\s+fix: set parallel.cp=1"):
        config_of(tiny_spec["mistral"], over_two)


def test_sinks_on_a_gpu_need_transformer_engine(tmp_path: Path) -> None:
    request = ModelRequest(read_spec(make_tiny("gpt_oss", tmp_path)), "lm", "float32", {})
    groups = groups_of(ParallelConfig())
    assert transformer_config(request, groups).softmax_type == "learnable"
    with pytest.raises(EngineError, match=r"gpt_oss has sinks in its softmax.*\n.*install Transformer Engine"):
        transformer_config(request, replace(groups, device=torch.device("cuda")))


def fused_linear_layers(path: str, wanted: bool, groups: ParallelGroups) -> tuple[bool, set[bool]]:
    """Return the configured value and those of the layers, which are like Transformer Engine's."""
    megatron = dict.fromkeys(DENSE_KERNELS, False) | {"gradient_accumulation_fusion": wanted}
    settings = MegatronModelConfig(dtype="float32", max_tokens_per_device=64, megatron=megatron)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mrl.engine.model.has_transformer_engine", lambda: True)
        for linear in (ColumnParallelLinear, RowParallelLinear):
            patched.setattr(linear, "fuse_wgrad_accumulation", not wanted, raising=False)
        engine = MegatronEngine(EngineRequest(read_spec(path), "lm", settings), groups)
        layers = [each for each in engine.models[0].decoder.modules() if hasattr(each, "fuse_wgrad_accumulation")]
        return engine.config.gradient_accumulation_fusion, {layer.fuse_wgrad_accumulation for layer in layers}


def devices_of_a_model(path: str, groups: ParallelGroups) -> set[str]:
    """Build the model for a device other than the CPU that every machine has."""
    elsewhere = replace(groups, device=torch.device("meta"))
    request = ModelRequest(read_spec(path), "lm", "float32", {})
    model = TokenModel(request, transformer_config(request, groups), elsewhere, 0)
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def on_a_rank(dense: str, mixture: str) -> dict[str, Any]:
    with model_parallel(ParallelConfig(), seed=1) as groups:
        fused = [fused_linear_layers(dense, wanted, groups) for wanted in (True, False)]
        return {"fused": fused, "devices": devices_of_a_model(mixture, groups)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one rank says of models that it builds."""
    directory = tmp_path_factory.mktemp("models")
    models = [str(make_tiny(family, directory / family)) for family in ("llama", "qwen3_moe")]
    return dict(run_distributed(1, on_a_rank, *models, timeout_s=120.0)[0])


def test_linear_layers_add_to_gradients_themselves_if_this_is_configured(built: dict[str, Any]) -> None:
    assert built["fused"] == [(True, {True}), (False, {False})]


def test_every_tensor_of_a_mixture_is_on_the_device_of_its_rank(built: dict[str, Any]) -> None:
    assert built["devices"] == {"meta"}


def test_experts_stand_in_the_layers_that_the_model_says(moe: ModelSpec, tiny_spec: dict[str, ModelSpec]) -> None:
    routed = config_of(moe, ParallelConfig())
    assert [_has_experts(routed, layer) for layer in range(4)] == [True, False, True, True]
    dense = config_of(tiny_spec["llama"], ParallelConfig())
    assert [_has_experts(dense, layer) for layer in range(4)] == [False] * 4
    routed.moe_layer_freq = 2
    assert [_has_experts(routed, layer) for layer in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_transformers_to_the_bit(moe: ModelSpec, dtype: torch.dtype) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    config = config_of(moe, LARGE, "bfloat16" if dtype is torch.bfloat16 else "float32")
    ours, theirs = RmsNorm(config, 32, eps=1e-3), Qwen3RMSNorm(32, eps=1e-3).to(dtype)
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(32, generator=noise).to(dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    x = (0.01 * torch.randn(5, 3, 32, generator=noise)).to(dtype)
    assert ours.weight.dtype == dtype
    assert torch.equal(ours(x), theirs(x))
    assert ours.weight.sequence_parallel  # type: ignore[attr-defined]
    assert not RmsNorm(config_of(moe, ParallelConfig()), 32).weight.sequence_parallel  # type: ignore[attr-defined]


# --- places -----------------------------------------------------------------------------------------------------------


def test_each_rank_knows_its_stage_and_its_cut() -> None:
    for rank in range(8):
        groups = groups_of(LARGE, rank)
        assert (groups.is_first_stage, groups.is_last_stage) == (rank < 4, rank >= 4)
        assert groups.sequence_sharding == SequenceSharding(2, rank // 2 % 2, 2)
    plain = groups_of(ParallelConfig(tp=4, pp=2), 5)
    assert plain.sequence_sharding == SequenceSharding(1, 0, 1)  # tensor ranks split the sequence only if set
    alone = groups_of(ParallelConfig(), 3)
    assert (alone.is_first_stage, alone.is_last_stage) == (True, True)


@pytest.mark.parametrize(
    ("parallel", "multiples"),
    [
        (ParallelConfig(), (1, 1, 1, 1)),
        (ParallelConfig(tp=4, sequence_parallel=True, cp=2), (4, 8, 1, 2)),
        (ParallelConfig(tp=2, pp=2), (1, 1, 1, 1)),
        (ParallelConfig(pp=2, vpp=2), (1, 1, 2, 1)),
        (LARGE, (4, 4, 2, 2)),
    ],
    ids=str,
)
def test_micro_batches_keep_to_what_the_layout_needs(
    tiny_spec: dict[str, ModelSpec], parallel: ParallelConfig, multiples: tuple[int, int, int, int]
) -> None:
    spec = tiny_spec["llama"]
    engine = object.__new__(MegatronEngine)  # a real one of this layout needs eight processes
    engine.request = EngineRequest(spec, "lm", MegatronModelConfig(parallel=parallel, max_tokens_per_device=64))
    engine.groups = groups_of(parallel)
    rules = engine.packing
    assert (rules.row_multiple, rules.pack_multiple, rules.count_multiple, rules.context_size) == multiples
    pairs = spec.attention_flops_per_token_pair
    for num_tokens in (1, 10, 1000):
        expected = num_tokens * spec.flops_per_token + num_tokens * (num_tokens + 1) // 2 * pairs
        assert rules.cost.of(np.array([num_tokens])) == pytest.approx([expected])


def test_scores_are_not_rounded_to_what_weights_are_kept_in() -> None:
    chance = torch.Generator().manual_seed(1)
    hidden_SH = torch.randn(500, 64, generator=chance).bfloat16()
    head = _ScoreHead(64, 1, bias=False, dtype=torch.bfloat16)
    scores = head(hidden_SH)
    exact = hidden_SH.double() @ head.weight.detach().double()[0]
    assert scores.dtype == torch.float32
    assert float((scores.double() - exact).abs().max()) < 1e-5
    assert len(scores.unique()) == 500, "rounded to bfloat16 many of them would be equal"
