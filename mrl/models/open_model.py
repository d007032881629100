"""Models of families without a table: names and shapes from the headers of their files, sizes from `config.json`.

Only torch's sharding trains them (`strategy: fsdp`): it takes the model itself from transformers. Engines get whole
tensors, which vLLM's own loaders cut.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl import files
from mrl.errors import ModelError
from mrl.models.decoder import Family
from mrl.models.hf_config import HfConfig
from mrl.models.regions import Shape
from mrl.models.rope import Rope
from mrl.models.spec import ModelSpec, MoeSpec

_LAYER = re.compile(r"(.*?\.?(?:layers|h|blocks|block)\.)(\d+)\.(.+)")
_HEAD = "lm_head.weight"
_EXPERT = re.compile(r"\.experts\.\d+\.")
NOT_WEIGHTS = (".rotary_emb.inv_freq", ".masked_bias", ".attention.bias", ".attn.bias")
"""Ends of the names of buffers in old files, which newer versions of transformers make again."""
_UNTRAINED = ("e_score_correction_bias", "expert_bias", ".layer_scalar")
"""Ends of the names of buffers that are weights: corrections of the choice of experts, and factors of layers."""
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class OpenSpec(ModelSpec):
    """A model without a table. `family` is its `model_type`."""

    weights: tuple[tuple[str, Shape], ...] = ()
    """Name and shape of each tensor in the files."""
    architecture: str = ""
    """Class of transformers."""

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for name, shape in self.weights if not name.endswith(_UNTRAINED))

    @property
    def flops_per_token(self) -> int:
        """Two per active weight: of experts only the chosen ones, of embeddings only the output matrix."""
        share = self.moe.experts_per_token / self.moe.num_experts if self.moe else 1.0
        active = 0.0
        for name, shape in self.weights:
            if len(shape) > 1 and _LAYER.fullmatch(name):
                active += math.prod(shape) * (share if ".experts." in name else 1.0)
        return 2 * (int(active) + self.vocab * self.hidden)

    def kind(self, layer: int) -> Hashable:
        """Return the names and shapes of the layer's tensors."""
        return self.layer_tensors[layer]

    @cached_property
    def layer_tensors(self) -> dict[int, tuple[tuple[str, Shape], ...]]:
        """Return the tensors of each layer, by the part of their names that all layers share."""
        layers: dict[int, list[tuple[str, Shape]]] = defaultdict(list)
        for name, shape in self.weights:
            if match := _LAYER.fullmatch(name):
                layers[int(match[2])].append((match[3], shape))
        return {layer: tuple(sorted(tensors)) for layer, tensors in layers.items()}

    def outer_tensors(self) -> dict[str, Shape]:
        """Return the tensors outside the layers."""
        return {name: shape for name, shape in self.weights if not _LAYER.fullmatch(name)}

    def untrained(self) -> frozenset[str]:
        return frozenset(name for name, shape in self.weights if name.endswith(_UNTRAINED) or not shape)


@dataclass(frozen=True)
class OpenFamily(Family):
    """A family without a table."""

    has_score_head: bool = False

    def architecture(self, head: Any) -> str:
        if head == "score":
            raise ModelError(
                f"mrl has no table for the family {self.model_type}, so it cannot have a score head yet",
                fix="use a model of another family for that role, or an algorithm without it, such as GRPO",
            )
        return ""

    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        assert isinstance(spec, OpenSpec), "only models without a table have such a family"
        return {f"{spec.layer_prefix}{layer}.{name}": shape for name, shape in spec.layer_tensors[layer]}


def open_family(model_type: str) -> OpenFamily:
    return OpenFamily(model_type, "", _no_reader)


def _no_reader(config: HfConfig) -> ModelSpec:
    raise ModelError("a model without a table is read with its files", where=config.where)


def require_table(spec: ModelSpec, role: str, known: Iterable[str]) -> None:
    """Raise an error if Megatron cannot run the model."""
    if isinstance(spec, OpenSpec):
        what = f'model_type: "{spec.family}" has no table, which strategy=megatron needs'
        fix = f"set strategy=fsdp for {role}: it trains any causal language model of transformers; with a table: "
        fix += ", ".join(known)
        raise ModelError(what, fix=fix)


def read_open_spec(path: Path, config: HfConfig) -> OpenSpec:
    """Return the spec of a model directory of any family."""
    if "text_config" in config:
        what = "models with vision or sound are supported only in families with a table"
        raise config.error("text_config", what, "save its language model as a separate model")
    return open_spec(config, dict(file_shapes(path)), str(path))


def open_spec(config: HfConfig, tensors: Mapping[str, Shape], where: str) -> OpenSpec:
    """Return the spec of a model with these tensors."""
    shapes = {name: shape for name, shape in sorted(tensors.items()) if not name.endswith(NOT_WEIGHTS)}
    tied = config.defaulting(tie_word_embeddings=_HEAD not in shapes).flag("tie_word_embeddings")
    if tied:
        shapes.pop(_HEAD, None)
    layers = {int(match[2]) for name in shapes if (match := _LAYER.fullmatch(name))}
    prefixes = {match[1] for name in shapes if (match := _LAYER.fullmatch(name))}
    if layers != {*range(len(layers))} or len(prefixes) != 1:
        what = f"the names of {len(shapes)} tensors do not show its layers ({', '.join(sorted(prefixes)) or 'none'})"
        raise ModelError(what, where=where, fix="use a causal language model with one stack of layers")
    hidden = config.integer("hidden_size", "n_embd", "d_model")
    heads = config.integer("num_attention_heads", "n_head", "num_heads")
    config = config.defaulting(num_key_value_heads=heads, head_dim=hidden // heads, intermediate_size=4 * hidden)
    config = config.defaulting(max_position_embeddings=1 << 20, architectures=[""])
    return OpenSpec(
        family=config.text("model_type"),
        num_layers=len(layers),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        ffn=config.integer("intermediate_size", "ffn_dim", "n_inner"),
        vocab=config.integer("vocab_size"),
        norm_eps=1e-6,
        qk_norm=any(name.endswith("q_norm.weight") for name in shapes),
        tied=tied,
        rope=Rope(config.integer("head_dim"), 10_000.0),
        max_positions=config.integer("max_position_embeddings", "n_positions"),
        dtype=config.text("dtype", "torch_dtype") if "dtype" in config or "torch_dtype" in config else None,
        moe=_experts(config, shapes),
        weights=tuple(shapes.items()),
        architecture=str(config.items("architectures", str)[0]),
        layer_prefix=prefixes.pop(),
    )


def _experts(config: HfConfig, shapes: dict[str, Shape]) -> MoeSpec | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not any(_EXPERT.search(name) for name in shapes) or not any(name in config for name in names):
        return None
    per_token = config.integer("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k")
    of_experts = {name: shape for name, shape in shapes.items() if _EXPERT.search(name)}
    layers = {int(match[2]) for name in shapes if (match := _LAYER.fullmatch(name))}
    routed = {int(match[2]) for name in of_experts if (match := _LAYER.fullmatch(name))}
    return MoeSpec(
        config.integer(*names),
        per_token,
        min(shape[0] for shape in of_experts.values()),
        norm_topk=False,
        aux_loss_coef=0.0,
        dense_layers=frozenset(layers - routed),
    )


def file_shapes(path: Path) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of each tensor in the safetensors files of a directory."""
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ModelError("has no safetensors files", where=str(path), fix="give a Hugging Face model directory")
    for file in found:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def _header(file: Path) -> dict[str, Any]:
    files.check_regular(file)
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise ModelError("is not a safetensors file", where=str(file), fix="download the file again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError("is not a safetensors file", where=str(file), fix="download the file again") from error
    return header
