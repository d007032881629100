"""The decoder layer of Llama and related models: its Hugging Face tensors, and the Megatron parameters built from them.

The two are defined separately, so that each verifies the other: `complete.py` finds what one has and the other does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mrl.errors import ModelError
from mrl.models.hf_config import HfConfig
from mrl.models.parameters import Parameter, RowRange
from mrl.models.regions import Shape
from mrl.models.rope import read_rope
from mrl.models.spec import ModelSpec, MoeSpec


@dataclass(frozen=True)
class ExpertNames:
    """Names of the parts of expert layers, below `model.layers.N.`."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts.{}_proj.weight"  # gate, up and down of the expert that every token uses


@dataclass(frozen=True)
class Family:
    """Models with Llama's layers, and the additions that a spec enables.

    A family with other layers overrides `tensors`, `parameters` and `expert`. The other tables need nothing else.
    """

    model_type: str
    class_prefix: str  # of the transformers classes: `Llama` in `LlamaForCausalLM`
    read: Callable[[HfConfig], ModelSpec]
    names: ExpertNames = ExpertNames()
    float32_router: bool = False  # whether vLLM keeps a router's weights in float32
    has_score_head: bool = True  # whether transformers has a class with one output instead of a vocabulary

    def architecture(self, head: Literal["lm", "score"]) -> str:
        """Return the transformers class of a model with that head. Raise an error if it does not exist."""
        if head == "score" and not self.has_score_head:
            raise ModelError(
                f"transformers has no {self.class_prefix}ForSequenceClassification: a model of family "
                f"{self.model_type} cannot have a score head, so it cannot be a critic or a reward model",
                fix="use a model of another family for that role, or an algorithm without it, such as GRPO",
            )
        return self.class_prefix + {"lm": "ForCausalLM", "score": "ForSequenceClassification"}[head]

    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        """Return the Hugging Face tensors of a layer, by their full names."""
        own = _attention_tensors(spec)
        if spec.moe and spec.has_experts(layer):
            own |= _expert_tensors(spec.moe, spec.hidden, self.names)
        else:
            own["mlp.gate_proj.weight"] = own["mlp.up_proj.weight"] = (spec.ffn, spec.hidden)
            own["mlp.down_proj.weight"] = (spec.hidden, spec.ffn)
        return {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """Yield Megatron's parameters of a layer without the experts, named below `decoder.layers.n.`."""
        prefix = f"model.layers.{layer}."

        def whole(name: str, hf: str, rows: int, columns: int | None = None) -> Parameter:
            return Parameter(name, ((RowRange(prefix + hf, 0, rows),),), columns)

        yield whole("input_layernorm.weight", "input_layernorm.weight", spec.hidden)
        yield Parameter("self_attention.linear_qkv.weight", (_qkv(spec, prefix, "weight"),), spec.hidden, "rows")
        if spec.qkv_bias:
            yield Parameter("self_attention.linear_qkv.bias", (_qkv(spec, prefix, "bias"),), None, "rows")
        if spec.qk_norm:
            yield whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", spec.head_dim)
            yield whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", spec.head_dim)
        o_proj = RowRange(f"{prefix}self_attn.o_proj.weight", 0, spec.hidden)
        yield Parameter("self_attention.linear_proj.weight", ((o_proj,),), spec.num_heads * spec.head_dim, "columns")
        yield whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", spec.hidden)
        if spec.moe and spec.has_experts(layer):
            yield from self._router_and_shared(spec, spec.moe, prefix)
        else:
            hf = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
            yield from _mlp("mlp.", hf, spec.ffn, spec.hidden)

    def _router_and_shared(self, spec: ModelSpec, moe: MoeSpec, prefix: str) -> Iterator[Parameter]:
        """Yield the parts of an expert layer that all ranks of ep have."""
        router = RowRange(prefix + self.names.router, 0, moe.num_experts)
        yield Parameter("mlp.router.weight", ((router,),), spec.hidden)
        if moe.correction_bias:
            # In bfloat16, different biases would become equal, and tokens would go to other experts.
            bias = RowRange(prefix + self.names.bias, 0, moe.num_experts)
            yield Parameter("mlp.router.expert_bias", ((bias,),), dtype="float32", trained=False)
        if moe.shared_ffn:
            shared = [prefix + self.names.shared.format(name) for name in ("gate", "up", "down")]
            yield from _mlp("mlp.shared_experts.", shared, moe.shared_ffn, spec.hidden)

    def expert(self, spec: ModelSpec, layer: int, expert: int) -> Iterator[Parameter]:
        """Yield Megatron's parameters of one expert of a layer, named below `mlp.experts.local_experts.n.`."""
        assert spec.moe is not None, "the model has no experts"
        names = (self.names.gate, self.names.up, self.names.down)
        hf = [f"model.layers.{layer}.{name.format(expert)}" for name in names]
        yield from _mlp("", hf, spec.moe.expert_ffn, spec.hidden)


def read_decoder(config: HfConfig, *, partial_rotary: bool = False, **own: Any) -> ModelSpec:
    """Return the spec of a Llama-like model, from the keys common to all families and the family's own."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config = config.defaulting(head_dim=hidden // num_heads, tie_word_embeddings=False)
    config.require("hidden_act", "silu")
    config.require("attention_dropout", 0.0, "mrl trains without dropout")
    head_dim = config.integer("head_dim")
    return ModelSpec(
        num_layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps"),
        tied=config.flag("tie_word_embeddings"),
        rope=read_rope(config, head_dim, partial=partial_rotary),
        max_positions=config.integer("max_position_embeddings"),
        dtype=config.text("dtype", "torch_dtype") if "dtype" in config or "torch_dtype" in config else None,
        **own,
    )


def _attention_tensors(spec: ModelSpec) -> dict[str, Shape]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (spec.hidden,),
        "self_attn.q_proj.weight": (q_rows, spec.hidden),
        "self_attn.k_proj.weight": (kv_rows, spec.hidden),
        "self_attn.v_proj.weight": (kv_rows, spec.hidden),
        "self_attn.o_proj.weight": (spec.hidden, q_rows),
        "post_attention_layernorm.weight": (spec.hidden,),
    }
    if spec.qkv_bias:
        tensors["self_attn.q_proj.bias"] = (q_rows,)
        tensors["self_attn.k_proj.bias"] = tensors["self_attn.v_proj.bias"] = (kv_rows,)
    if spec.qk_norm:
        tensors["self_attn.q_norm.weight"] = tensors["self_attn.k_norm.weight"] = (spec.head_dim,)
    return tensors


def _expert_tensors(moe: MoeSpec, hidden: int, names: ExpertNames) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {names.router: (moe.num_experts, hidden)}
    if moe.correction_bias:
        tensors[names.bias] = (moe.num_experts,)
    if moe.shared_ffn:
        for name in ("gate", "up"):
            tensors[names.shared.format(name)] = (moe.shared_ffn, hidden)
        tensors[names.shared.format("down")] = (hidden, moe.shared_ffn)
    for expert in range(moe.num_experts):
        tensors[names.gate.format(expert)] = tensors[names.up.format(expert)] = (moe.expert_ffn, hidden)
        tensors[names.down.format(expert)] = (hidden, moe.expert_ffn)
    return tensors


def _qkv(spec: ModelSpec, prefix: str, kind: str) -> tuple[RowRange, ...]:
    """Return rows in Megatron's order: for each query group its query heads, its key head, its value head.

    The whole is split into equal runs of rows, even with fewer groups than ranks: then a rank's rows end inside a
    group, and Megatron gathers the outputs of the group's ranks.
    """
    q, kv = spec.num_heads // spec.num_kv_heads * spec.head_dim, spec.head_dim
    return tuple(
        RowRange(f"{prefix}self_attn.{name}_proj.{kind}", group * size, (group + 1) * size)
        for group in range(spec.num_kv_heads)
        for name, size in (("q", q), ("k", kv), ("v", kv))
    )


def _mlp(prefix: str, hf: list[str], ffn: int, hidden: int) -> Iterator[Parameter]:
    """Yield gate above up in one parameter, each split separately, and down as another parameter."""
    gate, up, down = hf
    yield Parameter(f"{prefix}linear_fc1.weight", ((RowRange(gate, 0, ffn),), (RowRange(up, 0, ffn),)), hidden, "rows")
    yield Parameter(f"{prefix}linear_fc2.weight", ((RowRange(down, 0, hidden),),), ffn, "columns")
