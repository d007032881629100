"""The decoder layer of Llama and related models: its Hugging Face tensors, and the Megatron parameters built from them.

The two are defined separately, so that each verifies the other: `complete.py` finds what one has and the other does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mrl.errors import ModelError
from mrl.models import gdn, gqa, mla
from mrl.models.hf_config import HfConfig
from mrl.models.parameters import Parameter, RowRange, whole_tensor
from mrl.models.regions import Shape
from mrl.models.rope import Rope, read_rope
from mrl.models.spec import MlaSpec, ModelSpec, MoeSpec
from mrl.models.stored import ExpertPart

_MLP = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertNames:
    """Names of the parts of expert layers, below `model.layers.N.`."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts.{}_proj.weight"  # gate, up and down of the expert that every token uses
    shared_gate: str = "mlp.shared_expert_gate.weight"  # weighs that expert's output


@dataclass(frozen=True)
class Family:
    """Models with Llama's layers, and the additions that a spec enables.

    A family with other layers overrides `tensors`, `parameters` and `expert`, and `stored` if its files hold several of
    these tensors in one, as in `gpt_oss.py`. `rollout_table.py` has the engine's rows. The other tables need nothing
    else.
    """

    model_type: str
    class_prefix: str  # of the transformers classes: `Llama` in `LlamaForCausalLM`
    read: Callable[[HfConfig], ModelSpec]
    names: ExpertNames = ExpertNames()
    float32_router: bool = False  # whether vLLM keeps a router's weights in float32
    engine_overrides: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's `hf_overrides`
    has_score_head: bool = True  # whether transformers has a class with one output instead of a vocabulary
    engine_embedding: str = "model.embed_tokens.weight"  # vLLM's name of the embedding
    engine_repeats_ends: bool = False  # whether each stage of vLLM's model has embedding, last norm and head
    score_prefix: str = ""  # of that class, if it is another one
    wrapper: str = ""  # transformers class of models with vision that have such a language model
    passengers: tuple[str, ...] = ()  # beginnings of the names of tensors that mrl keeps, but does not train
    may_be_stacked: bool = False  # whether files may hold all experts of a layer in one tensor

    def architecture(self, head: Literal["lm", "score"]) -> str:
        """Return the transformers class of a model with that head. Raise an error if it does not exist."""
        if head == "score" and not self.has_score_head:
            raise ModelError(
                f"transformers has no {self.class_prefix}ForSequenceClassification: a model of family "
                f"{self.model_type} cannot have a score head, so it cannot be a critic or a reward model",
                fix="use a model of another family for that role, or an algorithm without it, such as GRPO",
            )
        if head == "score":
            return f"{self.score_prefix or self.class_prefix}ForSequenceClassification"
        return f"{self.class_prefix}ForCausalLM"

    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        """Return the Hugging Face tensors of a layer, by their full names."""
        own: dict[str, Shape] = dict.fromkeys(
            ("input_layernorm.weight", "post_attention_layernorm.weight"), (spec.hidden,)
        )
        attention = mla.hf_tensors(spec, spec.mla) if spec.mla else gqa.hf_tensors(spec)
        if spec.gdn and spec.is_linear(layer):
            attention = gdn.hf_tensors(spec, spec.gdn)
        own |= {attention_prefix(spec, layer) + name: shape for name, shape in attention.items()}
        if spec.moe and spec.has_experts(layer):
            own |= _expert_tensors(spec.moe, spec.hidden, self.names)
        else:
            own["mlp.gate_proj.weight"] = own["mlp.up_proj.weight"] = (spec.ffn, spec.hidden)
            own["mlp.down_proj.weight"] = (spec.hidden, spec.ffn)
        return {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        """Yield Megatron's parameters of a layer without the experts, named below `decoder.layers.n.`."""
        prefix = f"model.layers.{layer}."

        hf = prefix + attention_prefix(spec, layer)
        if spec.gdn and spec.is_linear(layer):
            attention = gdn.megatron_parameters(spec, spec.gdn, hf)
        else:
            attention = mla.megatron_parameters(spec, spec.mla, hf) if spec.mla else gqa.megatron_parameters(spec, hf)
        yield whole_tensor("input_layernorm.weight", f"{prefix}input_layernorm.weight", spec.hidden)
        for parameter in attention:
            yield replace(parameter, name=f"self_attention.{parameter.name}")
        yield whole_tensor("pre_mlp_layernorm.weight", f"{prefix}post_attention_layernorm.weight", spec.hidden)
        if spec.moe and spec.has_experts(layer):
            yield from self._router_and_shared(spec, spec.moe, prefix)
        else:
            yield from _mlp("mlp.", [f"{prefix}mlp.{name}_proj.weight" for name in _MLP], spec.ffn, spec.hidden)

    def stored(self, name: str) -> ExpertPart | None:
        """Return the place of an expert's tensor in a tensor of all experts; None if the files hold it alone."""
        return None

    def _router_and_shared(self, spec: ModelSpec, moe: MoeSpec, prefix: str) -> Iterator[Parameter]:
        """Yield the parts of an expert layer that all ranks of ep have."""
        yield whole_tensor("mlp.router.weight", prefix + self.names.router, moe.num_experts, spec.hidden)
        if moe.correction_bias:
            # In bfloat16, different biases would become equal, and tokens would go to other experts.
            bias = RowRange(prefix + self.names.bias, 0, moe.num_experts)
            yield Parameter("mlp.router.expert_bias", ((bias,),), dtype="float32", trained=False)
        if moe.shared_ffn:
            shared = [prefix + self.names.shared.format(name) for name in _MLP]
            yield from _mlp("mlp.shared_experts.", shared, moe.shared_ffn, spec.hidden)
        if moe.shared_gate:
            yield whole_tensor("mlp.shared_experts.gate_weight", prefix + self.names.shared_gate, 1, spec.hidden)

    def expert(self, spec: ModelSpec, layer: int, expert: int) -> Iterator[Parameter]:
        """Yield Megatron's parameters of one expert of a layer, named below `mlp.experts.local_experts.n.`."""
        assert spec.moe is not None, "the model has no experts"
        names = (self.names.gate, self.names.up, self.names.down)
        hf = [f"model.layers.{layer}.{name.format(expert)}" for name in names]
        yield from _mlp("", hf, spec.moe.expert_ffn, spec.hidden)


def attention_prefix(spec: ModelSpec, layer: int) -> str:
    """Return the beginning of the names of a layer's attention, below `model.layers.N.`."""
    return "linear_attn." if spec.is_linear(layer) else "self_attn."


def read_decoder(
    config: HfConfig,
    *,
    partial_rotary: bool = False,
    rope: Rope | None = None,
    mla: MlaSpec | None = None,
    **own: Any,
) -> ModelSpec:
    """Return the spec of a Llama-like model, from the keys common to all families and the family's own.

    A `rope` replaces the rotary embedding in the file.
    """
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config = config.defaulting(tie_word_embeddings=False)
    config.require("hidden_act", "silu")
    config.require("attention_dropout", 0.0, "mrl trains without dropout")
    if mla:
        head_dim = mla.nope_dim + mla.rope_dim
        rope = read_rope(config, mla.rope_dim, yarn=True)
    else:
        head_dim = config.defaulting(head_dim=hidden // num_heads).integer("head_dim")
        rope = rope or read_rope(config, head_dim, partial=partial_rotary)
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
        rope=rope,
        max_positions=config.integer("max_position_embeddings"),
        dtype=config.text("dtype", "torch_dtype") if "dtype" in config or "torch_dtype" in config else None,
        mla=mla,
        **own,
    )


def _expert_tensors(moe: MoeSpec, hidden: int, names: ExpertNames) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {names.router: (moe.num_experts, hidden)}
    if moe.correction_bias:
        tensors[names.bias] = (moe.num_experts,)
    if moe.shared_ffn:
        for name in ("gate", "up"):
            tensors[names.shared.format(name)] = (moe.shared_ffn, hidden)
        tensors[names.shared.format("down")] = (hidden, moe.shared_ffn)
    if moe.shared_gate:
        tensors[names.shared_gate] = (1, hidden)
    for expert in range(moe.num_experts):
        tensors[names.gate.format(expert)] = tensors[names.up.format(expert)] = (moe.expert_ffn, hidden)
        tensors[names.down.format(expert)] = (hidden, moe.expert_ffn)
    return tensors


def _mlp(prefix: str, hf: list[str], ffn: int, hidden: int) -> Iterator[Parameter]:
    """Yield gate above up in one parameter, each split separately, and down as another parameter."""
    gate, up, down = hf
    yield Parameter(f"{prefix}linear_fc1.weight", ((RowRange(gate, 0, ffn),), (RowRange(up, 0, ffn),)), hidden, "rows")
    yield Parameter(f"{prefix}linear_fc2.weight", ((RowRange(down, 0, hidden),),), ffn, "columns")
