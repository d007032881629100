"""gpt-oss 20b and 120b: windows in every other layer, sinks in the softmax of attention, and experts with biases.

Its files hold all experts of a layer in one tensor, with transposed matrices and the rows of gate and up alternating.
vLLM keeps that order of the rows; Megatron has gate above up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from mrl.models import gqa
from mrl.models.decoder import ExpertNames, Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.parameters import Parameter, Piece, RowRange, whole_tensor
from mrl.models.regions import Region, Shape
from mrl.models.rope import Rope, YarnScaling
from mrl.models.spec import ModelSpec, MoeSpec
from mrl.models.stored import ExpertPart

_CLAMP = 7.0
_NAMES = ExpertNames(router="mlp.router.weight", bias="mlp.router.bias")
_PART = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def read_gpt_oss(config: HfConfig) -> ModelSpec:
    """Read gpt-oss: the window is in every other layer, beginning with the first, and everything has a bias."""
    config = config.defaulting(attention_bias=True, swiglu_limit=_CLAMP)
    config.require("attention_bias", True, "vLLM always has biases")
    config.require("swiglu_limit", _CLAMP, "transformers always has this one")
    num_layers = config.integer("num_hidden_layers")
    kinds = [f"{'full' if layer % 2 else 'sliding'}_attention" for layer in range(num_layers)]
    if config.defaulting(layer_types=kinds).items("layer_types", str) != kinds:
        what = "the window is supported in every other layer, beginning with the first, as in vLLM"
        raise config.error("layer_types", what, "use another model")
    experts = config.integer("num_local_experts", "num_experts")
    moe = MoeSpec(
        num_experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", "experts_per_token"),
        expert_ffn=config.integer("intermediate_size"),
        norm_topk=True,
        aux_loss_coef=config.defaulting(router_aux_loss_coef=0.0).number("router_aux_loss_coef"),
        clamp=_CLAMP,
    )
    return read_decoder(
        config,
        rope=_read_rope(config),
        family="gpt_oss",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        sliding_window=config.integer("sliding_window"),
        layers_without_window=frozenset(range(1, num_layers, 2)),
        moe=moe,
    )


def _read_rope(config: HfConfig) -> Rope:
    """Read YaRN. vLLM and transformers multiply cosines and sines by 0.1 ln(factor) + 1, or the softmax's scale twice.

    vLLM takes nothing else from the file.
    """
    known = [name for name in ("rope_scaling", "rope_parameters") if name in config]
    if not known:
        raise config.error("rope_scaling", "is missing", "use the config.json that belongs to these weights")
    settings = config.section(known[0])
    settings.require("rope_type", "yarn", "vLLM always takes yarn")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        settings.require(name, None, "vLLM does not read it")
    scaling = YarnScaling(
        factor=settings.number("factor"),
        beta_fast=settings.number("beta_fast"),
        beta_slow=settings.number("beta_slow"),
        original_max_positions=settings.integer("original_max_position_embeddings"),
        mscale=1.0,
        truncate=settings.defaulting(truncate=True).flag("truncate"),
    )
    theta = (settings if "rope_theta" in settings else config).number("rope_theta")
    return Rope(config.integer("head_dim"), theta, scaling)


class GptOss(Family):
    """gpt-oss, with the tensors that no other family has."""

    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        moe, prefix = _experts(spec), f"model.layers.{layer}."
        own: dict[str, Shape] = {
            "self_attn.o_proj.bias": (spec.hidden,),
            "self_attn.sinks": (spec.num_heads,),
            self.names.bias: (moe.num_experts,),
        }
        for expert in range(moe.num_experts):
            for name, rows in (("gate", moe.expert_ffn), ("up", moe.expert_ffn), ("down", spec.hidden)):
                own[f"mlp.experts.{expert}.{name}_proj.bias"] = (rows,)
        return super().tensors(spec, layer) | {prefix + name: shape for name, shape in own.items()}

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        prefix = f"model.layers.{layer}."
        yield from super().parameters(spec, layer)
        yield whole_tensor("self_attention.linear_proj.bias", f"{prefix}self_attn.o_proj.bias", spec.hidden)
        sinks = RowRange(f"{prefix}self_attn.sinks", 0, spec.num_heads)
        yield Parameter("self_attention.core_attention.softmax_offset", ((sinks,),), None, "rows")
        yield whole_tensor("mlp.router.bias", prefix + self.names.bias, _experts(spec).num_experts)

    def expert(self, spec: ModelSpec, layer: int, expert: int) -> Iterator[Parameter]:
        prefix, ffn = f"model.layers.{layer}.mlp.experts.{expert}.", _experts(spec).expert_ffn
        yield from super().expert(spec, layer, expert)
        gate_and_up = tuple((RowRange(f"{prefix}{name}_proj.bias", 0, ffn),) for name in ("gate", "up"))
        yield Parameter("linear_fc1.bias", gate_and_up, None, "rows")
        yield whole_tensor("linear_fc2.bias", f"{prefix}down_proj.bias", spec.hidden)

    def stored(self, name: str) -> ExpertPart | None:
        match = _PART.fullmatch(name)
        if match is None:
            return None
        prefix, expert, part, kind = match.groups()
        file = f"{prefix}{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
        if part == "down":
            return ExpertPart(file, int(expert))
        return ExpertPart(file, int(expert), first=int(part == "up"), step=2)


def engine_parameters(spec: ModelSpec, layer: int, tp: int) -> Iterator[Parameter]:
    """Yield vLLM's parameters of attention and of the router, by their full names."""
    prefix = f"model.layers.{layer}."
    hf, own = f"{prefix}self_attn.", f"{prefix}attn."
    for parameter in gqa.engine_parameters(spec, hf, tp):
        yield replace(parameter, name=parameter.name.replace(hf, own))
    yield whole_tensor(f"{own}o_proj.bias", f"{hf}o_proj.bias", spec.hidden)
    yield Parameter(f"{own}sinks", ((RowRange(f"{hf}sinks", 0, spec.num_heads),),), None, "rows")
    router, num_experts = f"{prefix}mlp.router.", _experts(spec).num_experts
    yield whole_tensor(f"{router}weight", f"{router}weight", num_experts, spec.hidden)
    yield whole_tensor(f"{router}bias", f"{router}bias", num_experts)


Stacked = tuple[str, Shape, tuple[Piece, ...], tuple[Region, ...], int]
"""Name, shape, pieces and zeros of a tensor of all experts, and the columns of the matrix in which they lie."""


def engine_experts(spec: ModelSpec, layer: int, experts: range, part: tuple[int, int]) -> Iterator[Stacked]:
    """Yield vLLM's tensors of these experts, for one of several ranks that split each of them.

    Rows of gate and up alternate: in a matrix of twice the columns, one is to the left of the other.
    """
    rank, num_ranks = part
    hf, name = f"model.layers.{layer}.mlp.experts.", f"model.layers.{layer}.mlp.experts.routed_experts."
    hidden, rows, count = spec.hidden, _experts(spec).expert_ffn // num_ranks, len(experts)
    own = rank * rows, (rank + 1) * rows

    def down(rows: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each expert with the rows that it has in a matrix of all."""
        yield from ((expert, (number * rows, (number + 1) * rows)) for number, expert in enumerate(experts))

    weights, biases = [], []
    for expert, place in down(rows):
        for side, kind in enumerate(("gate", "up")):
            columns = side * hidden, (side + 1) * hidden
            weights.append(Piece(f"{hf}{expert}.{kind}_proj.weight", (own, (0, hidden)), (place, columns)))
            biases.append(Piece(f"{hf}{expert}.{kind}_proj.bias", (own,), (place, (side, side + 1))))
    yield f"{name}w13_weight", (count, 2 * rows, hidden), tuple(weights), (), 2 * hidden
    yield f"{name}w13_bias", (count, 2 * rows), tuple(biases), (), 2
    outputs = [
        Piece(f"{hf}{expert}.down_proj.weight", ((0, hidden), own), (place, (0, rows)))
        for expert, place in down(hidden)
    ]
    yield f"{name}w2_weight", (count, hidden, rows), tuple(outputs), (), rows
    whole = (0, count * hidden), (0, 1)
    added = [Piece(f"{hf}{expert}.down_proj.bias", ((0, hidden),), (place, (0, 1))) for expert, place in down(hidden)]
    # The ranks' outputs are added up, so only the first has the bias.
    yield f"{name}w2_bias", (count, hidden), tuple(added) if rank == 0 else (), () if rank == 0 else (whole,), 1


def _experts(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None, "gpt-oss always has experts"
    return spec.moe


GPT_OSS = GptOss(
    "gpt_oss",
    "GptOss",
    read_gpt_oss,
    _NAMES,
    engine_embedding="model.embedding.weight",
    engine_repeats_ends=True,
)
