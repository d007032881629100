"""Rules between a layout and the model: layers per stage, heads per tensor rank, experts per expert rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mrl import files
from mrl.config.arithmetic import longest_sample_tokens, longest_teacher_tokens, teaches_itself
from mrl.config.rules import gpt_oss
from mrl.config.rules.fsdp import check_fsdp_family
from mrl.config.rules.lora import check_lora_targets
from mrl.config.rules.problems import near_divisors, nearest, problem
from mrl.config.rules.sglang import check_sglang_family
from mrl.config.schema import Config, MegatronModelConfig
from mrl.config.sft import AnyConfig, RmConfig
from mrl.errors import Problem
from mrl.hub import HubName, local_files, neither

_NAMES = {
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "positions": ("max_position_embeddings",),
    "latent": ("kv_lora_rank",),
    "delta_heads": ("linear_num_key_heads",),
    "expert_ffn": ("moe_intermediate_size",),
}

_BLOCK = 128
_WITHOUT_SCORES = {
    "glm4_moe": "Glm4MoeForSequenceClassification",
    "glm4_moe_lite": "Glm4MoeLiteForSequenceClassification",
    "qwen3_5_moe_text": "Qwen3_5MoeForSequenceClassification",
}
"""Family without a class for scores in transformers -> name of the class."""
ROUTERS_WITH_BIAS = ("glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
"""Families whose routers choose experts by score plus a bias."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. A size is None if `config.json` does not give it."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None
    positions: int | None = None
    window: int | None = None
    """Largest number of tokens that attention sees. None if every layer sees all tokens."""
    family: str | None = None
    latent: int | None = None
    """Size of the latent of keys and values, with multi-latent attention."""
    delta_heads: int | None = None
    """Key heads of linear attention, in a model with the gated delta rule."""
    expert_ffn: int | None = None
    """Inner size of an expert."""


def read_model_shape(key: str, path: str) -> ModelShape | Problem | None:
    """Return the shape of a model whose config.json is on this machine, None for a model on the hub, or a problem of
    `key`."""
    directory = local_files(path)
    if directory is None and HubName.parse(path) is None:
        return problem(key, neither(path))
    if directory is None:
        return None
    file = directory / "config.json"
    try:
        sizes = json.loads(files.read_text(file))
    except OSError as error:
        return problem(key, f'"{file}" cannot be read: {error.strerror}', "is it a Hugging Face model directory?")
    except (ValueError, RecursionError):
        return problem(key, f'"{file}" is not JSON')
    if not isinstance(sizes, dict):
        return problem(key, f'"{file}" is not a JSON object')
    if isinstance(text := sizes.get("text_config"), dict):  # a model with vision
        sizes = text
    shape = {field: next((sizes[name] for name in names if name in sizes), None) for field, names in _NAMES.items()}
    if sizes.get("rope_scaling") or (sizes.get("rope_parameters") or {}).get("factor"):
        shape["positions"] = None  # scaling adds positions, and the number depends on its kind
    shape["window"] = sizes.get("sliding_window") if _has_windows(sizes) else None
    shape = {field: size if isinstance(size, int) and size > 0 else None for field, size in shape.items()}
    family = sizes.get("model_type")
    return ModelShape(**shape, family=family if isinstance(family, str) else None)


def _has_windows(sizes: dict[str, Any]) -> bool:
    """Return whether any layer uses the window. Files of Qwen give a window even if it is switched off."""
    is_qwen = str(sizes.get("model_type")).startswith("qwen")
    if not sizes.get("use_sliding_window", not is_qwen):
        return False
    if isinstance(kinds := sizes.get("layer_types"), list):
        return "sliding_attention" in kinds
    first, layers = sizes.get("max_window_layers", 0), sizes.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def check_model_rules(config: AnyConfig, roles: Sequence[str], shape: ModelShape) -> Iterator[Problem]:
    for role in roles:
        model = config.model_roles()[role]
        yield from _score_head(config, role, shape)
        yield from _layers(role, model, shape)
        yield from _heads(f"{role}.parallel.tp", model.parallel.tp, shape)
        yield from _experts(role, model, shape)
        kind = "gpt-oss" if shape.family == gpt_oss.FAMILY else "linear attention" if shape.delta_heads else None
        yield from check_lora_targets(config, role, shape.experts, kind)
        yield from _router_bias(config, role, shape)
        yield from check_fsdp_family(role, model, shape.family)
        if isinstance(config, Config) and role == "actor":
            yield from check_sglang_family(config, shape.family)
        yield from _latent(role, model, shape)
        yield from _linear_attention(role, model, shape)
        if config.cluster.device == "gpu" and model.strategy == "megatron":
            yield from _window(f"{role}.parallel.cp", model.parallel.cp, shape)
        if shape.family == gpt_oss.FAMILY:
            yield from gpt_oss.check_gpt_oss(role, model, shape.kv_heads)
    if isinstance(config, Config) and "actor" in roles:
        if config.algorithm.router_replay != "none" and shape.experts is None:
            what = "the model has no experts, so there is nothing to replay"
            yield problem("algorithm.router_replay", what, "algorithm.router_replay=none")
        yield from _heads("rollout.tp", config.rollout.tp, shape)
        if shape.family == gpt_oss.FAMILY:
            yield from gpt_oss.check_key_heads("rollout.tp", config.rollout.tp, shape.kv_heads)
        if config.rollout.dp > 1 and shape.experts is None:
            what = f"{config.rollout.dp}, but the model has no experts that data-parallel ranks could share"
            yield problem("rollout.dp", what, "rollout.dp=1: more engines do the same")
        yield from _states(config, shape)
        yield from _positions(config, shape)
        yield from _padded_experts(config, shape)


def _padded_experts(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Refuse experts that vLLM would pad to whole blocks: each of its workers would take the whole model instead."""
    tp, options = config.rollout.tp, config.rollout.vllm
    is_split = options.get("quantization") == "fp8_per_block" and not options.get("enable_expert_parallel")
    if not is_split or not shape.experts or not shape.expert_ffn or not shape.expert_ffn / tp % _BLOCK:
        return
    what = f"{tp} leaves {shape.expert_ffn / tp:g} of the {shape.expert_ffn} rows of an expert to each device of an "
    what += f"engine, which vLLM pads to whole blocks of {_BLOCK}: weights could not be sent in parts"
    yield problem("rollout.tp", what, "rollout.vllm.enable_expert_parallel=true, which keeps experts whole")


def _router_bias(config: AnyConfig, role: str, shape: ModelShape) -> Iterator[Problem]:
    """Refuse to move biases that a model has not, or that belong to a frozen model."""
    model, key = config.trained_roles().get(role), f"{role}.router_bias_update_rate"
    if model is None or not model.router_bias_update_rate:
        return
    if shape.family is not None and shape.family not in ROUTERS_WITH_BIAS:
        what = f"{model.router_bias_update_rate:g}, but routers of family {shape.family} have no bias"
        yield problem(key, what, f"{key}=0")
    if model.lora is not None:
        what = f"{model.router_bias_update_rate:g}, but {role}.lora keeps the model frozen, with the biases of routers"
        yield problem(key, what, f"{key}=0")


def _score_head(config: AnyConfig, role: str, shape: ModelShape) -> Iterator[Problem]:
    """Refuse critics and reward models of families that transformers cannot load with a score head."""
    missing = _WITHOUT_SCORES.get(shape.family or "")
    if missing and (role == "critic" or isinstance(config, RmConfig)):
        part = "a critic" if role == "critic" else "a reward model"
        what = f"transformers has no {missing}, so a model of family {shape.family} cannot be {part}"
        yield problem(
            config.model_of(role)[0], what, "use a model of another family for it, or an algorithm without it"
        )


def _latent(role: str, model: MegatronModelConfig, shape: ModelShape) -> Iterator[Problem]:
    """Refuse settings that exist for one kind of attention only."""
    key, modules = f"{role}.megatron", model.megatron.get("recompute_modules") or ()
    if shape.latent is not None and model.megatron.get("apply_rope_fusion"):
        what = "with multi-latent attention, Megatron's fused kernel does not take the model's frequencies"
        yield problem(f"{key}.apply_rope_fusion", what, "remove this key")
    if shape.latent is None and shape.layers is not None and "mla_up_proj" in modules:
        what = "mla_up_proj, but the model has no multi-latent attention"
        yield problem(f"{key}.recompute_modules", what, "remove it from the list")


def _linear_attention(role: str, model: MegatronModelConfig, shape: ModelShape) -> Iterator[Problem]:
    """Refuse layouts that the gated delta rule does not support yet."""
    if shape.delta_heads is None:
        return
    key, tp = f"{role}.parallel", model.parallel.tp
    if model.parallel.cp > 1:
        what = f"{model.parallel.cp}, but linear attention reads the tokens of a row in order, all on one rank"
        yield problem(f"{key}.cp", what, f"{key}.cp=1")
    for heads, kind in ((shape.delta_heads, "key heads of linear attention"), (shape.kv_heads, "key-value heads")):
        if heads is not None and heads % tp:
            what = f"{tp} does not divide {heads} {kind}, whose gates Megatron splits with them"
            yield problem(f"{key}.tp", what, nearest(f"{key}.tp", near_divisors(tp, heads)))


def _states(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Refuse engines that cannot run linear attention."""
    heads, rollout = shape.delta_heads, config.rollout
    if heads is None:
        return
    if rollout.pp > 1:
        what = f"{rollout.pp}, but linear attention in engines with several stages has not been compared"
        yield problem("rollout.pp", what, "rollout.pp=1")
    if heads % rollout.tp:
        fix = nearest("rollout.tp", near_divisors(rollout.tp, heads))
        yield problem("rollout.tp", f"{rollout.tp} does not divide {heads} key heads of linear attention", fix)
    if config.cluster.device == "gpu" or rollout.engine != "vllm":
        return
    dtype = rollout.vllm.get("dtype", config.actor.dtype)
    if dtype != "bfloat16":
        what = f"{dtype}, but on a CPU vLLM computes linear attention only in bfloat16"
        yield problem("rollout.vllm.dtype", what, "rollout.vllm.dtype=bfloat16")
    if rollout.vllm.get("enable_prefix_caching"):
        key = "rollout.vllm.enable_prefix_caching"
        yield problem(key, "true, but on a CPU vLLM caches no states of linear attention", f"{key}=false")


def unchecked(path: str, shape: ModelShape | None) -> Iterator[str]:
    if shape is None:
        yield f'layers, heads and experts against the layouts: the files of "{path}" are not on this machine'
        return
    for part, size in (("layers", shape.layers), ("attention heads", shape.heads)):
        if size is None:
            yield f"{part} against the layouts: the model's config.json does not give their number"


def _positions(config: Config, shape: ModelShape) -> Iterator[Problem]:
    longest = longest_sample_tokens(config.rollout)
    taught = longest_teacher_tokens(config) if teaches_itself(config) else 0
    if shape.positions is not None and longest <= shape.positions < taught:
        what = f"with context_tokens, the teacher reads {taught} tokens, but the model has {shape.positions} positions"
        key, room = "algorithm.distillation.context_tokens", shape.positions - config.rollout.max_response_tokens
        yield problem(key, what, f"{key}={room}")
    if shape.positions is not None and longest > shape.positions and "hf_overrides" not in config.rollout.vllm:
        what = f"with max_prompt_tokens, a sample has {longest} tokens, but the model has {shape.positions} positions"
        room = shape.positions - config.rollout.max_prompt_tokens
        fix = f"rollout.max_response_tokens={room}" if room > 0 else "shorten the prompt and the response"
        yield problem("rollout.max_response_tokens", what, fix)


def _layers(role: str, model: MegatronModelConfig, shape: ModelShape) -> Iterator[Problem]:
    pp, vpp = model.parallel.pp, model.parallel.vpp
    if shape.layers is None:
        return
    if ends := [size for size in (model.parallel.first_stage_layers, model.parallel.last_stage_layers) if size]:
        yield from _uneven(role, model, shape.layers, ends)
        return
    if shape.layers % (pp * vpp) == 0:
        return
    if shape.layers % pp:
        key, sizes = "pp", near_divisors(pp, shape.layers)
    else:
        key, sizes = "vpp", near_divisors(vpp, shape.layers // pp)
    what = f"{shape.layers} layers do not split into pp x vpp = {pp * vpp} equal parts"
    yield problem(f"{role}.parallel.{key}", what, nearest(f"{role}.parallel.{key}", sizes))


def _uneven(role: str, model: MegatronModelConfig, layers: int, ends: list[int]) -> Iterator[Problem]:
    """Check stages with explicit numbers of layers, and that the other stages share the rest equally."""
    rest, num_others, vpp = layers - sum(ends), model.parallel.pp - len(ends), model.parallel.vpp
    stages = [*ends, *([rest // num_others] if num_others > 0 else [])]
    is_whole = rest >= num_others and (rest % num_others == 0 if num_others > 0 else rest == 0)
    key = f"{role}.parallel.first_stage_layers"
    if num_others < 0 or not is_whole:
        what = (
            f"{layers} layers minus {' and '.join(map(str, ends))} leave {rest} for {max(num_others, 0)} equal stages"
        )
        yield problem(key, what, f"{key}=null gives all stages the same number")
    elif any(stage % vpp for stage in stages):
        yield problem(key, f"stages of {stages} layers do not split into vpp {vpp} chunks each", "vpp=1")


def _heads(key: str, tp: int, shape: ModelShape) -> Iterator[Problem]:
    if shape.heads is not None and shape.heads % tp:
        what = f"{tp} does not divide {shape.heads} attention heads"
        yield problem(key, what, nearest(key, near_divisors(tp, shape.heads)))
    elif shape.kv_heads is not None and shape.kv_heads % tp and tp % shape.kv_heads:
        what = f"{tp} is not a divisor or a multiple of {shape.kv_heads} key-value heads"
        yield problem(key, what, nearest(key, near_divisors(tp, shape.kv_heads)))


def _window(key: str, cp: int, shape: ModelShape) -> Iterator[Problem]:
    if cp > 1 and shape.window is not None:
        what = (
            f"{cp}, but the model has a sliding window of {shape.window} tokens: Transformer Engine's fused attention "
            "does not compute a window over several context ranks"
        )
        yield problem(key, what, f"{key}=1")


def _experts(role: str, model: MegatronModelConfig, shape: ModelShape) -> Iterator[Problem]:
    at, key = model.parallel, f"{role}.parallel"
    if shape.experts is None:
        for name, size in (("ep", at.ep), ("etp", at.etp)):
            if size > 1:
                yield problem(f"{key}.{name}", f"{size}, but the model has no experts", f"{key}.{name}=1")
        return
    if shape.experts % at.ep:
        fix = nearest(f"{key}.ep", near_divisors(at.ep, shape.experts))
        yield problem(f"{key}.ep", f"{at.ep} does not divide {shape.experts} experts", fix)
    if at.tp > 1 and not at.sequence_parallel:
        fix = f"{key}.sequence_parallel=true"
        yield problem(f"{key}.sequence_parallel", "a model with experts and tp > 1 needs it", fix)
