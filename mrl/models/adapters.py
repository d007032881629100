"""The table of low-rank adapters: PEFT's tensors, and their slices on one rank.

Each Hugging Face module has its own A and B. A Megatron matrix made of several modules has their A's stacked, and their
B's stacked in the same order; the rows of B are those of the modules that the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mrl.config.lora import ALL_LINEAR, LoraConfig
from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.families import FAMILIES
from mrl.models.layout import RankPlace, check_layout
from mrl.models.open_model import OpenSpec
from mrl.models.parameters import Parameter, Piece, RowRange
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, layers_of_rank, shard_of

ADAPTER_SUFFIXES = ("lora_a", "lora_b")
"""Ends of the names of adapters in Megatron's modules."""
_PREFIX = "base_model.model."
_NEVER_ADAPTED = {"gate", "router", "shared_expert_gate", "kv_b_proj"}
"""Matrices that `all-linear` leaves out in every family."""
ADAPTED = tuple(
    f"{module}.weight"
    for module in (
        *(f"self_attention.linear_{name}" for name in ("qkv", "proj", "q_proj", "q_down_proj", "q_up_proj")),
        *(f"self_attention.{name}_proj" for name in ("in", "out")),  # of linear attention
        "self_attention.linear_kv_down_proj",
        *(f"{mlp}.linear_{name}" for mlp in ("mlp", "mlp.shared_experts") for name in ("fc1", "fc2")),
    )
)
"""Megatron's weights outside experts that can have adapters."""


@dataclass(frozen=True)
class AdapterPair:
    """The adapters of one Megatron weight on one rank."""

    weight: Shard
    a: Shard
    """`lora_a`: the A of each module, one below another."""
    b: Shard
    """`lora_b`: the rows of each module's B that belong to this rank's outputs, one module below another."""
    num_rows: tuple[int, ...]
    """Rows of `b` for each module."""
    outputs: tuple[tuple[int, int], ...]
    """Ranges of the weight's rows, and so of its outputs, that the rows of `b` belong to, in the order of `b`."""
    split: Literal["rows", "columns"] | None
    """Whether tensor ranks split the outputs of the weight, or its inputs, and then sum the outputs. None: each rank
    computes the product for its own tokens, or, in an expert, for those of all ranks that share it."""


def adapter_names(hf: str) -> tuple[str, str]:
    """Return PEFT's names of the adapters of a Hugging Face weight."""
    module = hf.removesuffix(".weight")
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def target_of(adapter: str) -> str:
    """Return the name by which PEFT's settings choose the module of an adapter."""
    return adapter.removesuffix(".weight").rpartition(".")[0].rpartition(".")[2]


def adapter_tensors(spec: ModelSpec, lora: LoraConfig) -> dict[str, Shape]:
    """Return the names and shapes of all adapters in PEFT's files."""
    check_targets(spec, lora)
    tensors: dict[str, Shape] = {}
    for layer in range(spec.num_layers):
        for name, shape in FAMILIES[spec.family].tensors(spec, layer).items():
            if is_target(spec, name, shape, lora):
                a, b = adapter_names(name)
                tensors |= {a: (lora.rank, shape[1]), b: (shape[0], lora.rank)}
    return tensors


def is_target(spec: ModelSpec, hf: str, shape: Shape, lora: LoraConfig) -> bool:
    if len(shape) != 2 or _module(hf) not in lora.modules:
        return False
    return ".experts." not in hf or adapts_experts(spec, lora)


def adapts_experts(spec: ModelSpec, lora: LoraConfig) -> bool:
    """Return whether experts get adapters. Those of gpt-oss do not: its files have no module of an expert."""
    return spec.moe is not None and not spec.sinks and lora.has_expert_targets


def splits_experts(spec: ModelSpec, lora: LoraConfig) -> bool:
    """Return whether each expert is multiplied by itself: it has adapters, or its weights are in FP8."""
    return adapts_experts(spec, lora) or (spec.moe is not None and lora.base_quantization is not None)


def adapter_flops_per_token(spec: ModelSpec, lora: LoraConfig) -> float:
    """Return the forward FLOPs of the adapters for one token, with the experts that it uses."""
    used = spec.moe.experts_per_token / spec.moe.num_experts if spec.moe else 1.0
    sizes = adapter_tensors(spec, lora).items()
    return 2 * sum(math.prod(shape) * (used if ".experts." in name else 1) for name, shape in sizes)


def check_targets(spec: ModelSpec, lora: LoraConfig) -> None:
    """Raise an error if the model has no such target, or if no module of it can have adapters."""
    if ALL_LINEAR in lora.targets:
        return
    modules = {
        _module(name)
        for layers in spec.layers_by_kind().values()
        for name, shape in FAMILIES[spec.family].tensors(spec, layers[0]).items()
        if is_target(spec, name, shape, LoraConfig(rank=1, alpha=1))
    }
    if missing := [name for name in lora.targets if not modules & LoraConfig(rank=1, alpha=1, targets=[name]).modules]:
        can = sorted(modules & LoraConfig(rank=1, alpha=1).modules)
        problem = f"modules of a {spec.family} that can have adapters are {', '.join(can)}"
        raise ModelError(f"{problem}; not {', '.join(missing)}", fix="set lora.targets to some of the former")


def check_sharded_targets(spec: ModelSpec, lora: LoraConfig) -> None:
    """Raise an error for targets that cannot have adapters if torch shards the model of transformers."""
    check_targets(spec, lora)
    family = FAMILIES[spec.family]
    names = {
        name: shape
        for layers in spec.layers_by_kind().values()
        for name, shape in family.tensors(spec, layers[0]).items()
    }
    if lora.has_expert_targets and any(".experts." in name for name in names):
        what = f"transformers stacks the experts of {spec.family} in one tensor, so they cannot have adapters yet"
        raise ModelError(what, fix="name modules of the attention only in lora.targets, or set strategy=megatron")
    if ALL_LINEAR not in lora.targets or not isinstance(spec, OpenSpec):
        return
    matrices = {_module(name) for name, shape in names.items() if len(shape) == 2} - {""}
    if others := sorted(matrices - lora.modules - _NEVER_ADAPTED):
        can = ", ".join(sorted(matrices & lora.modules)) or "none"
        what = f"{ALL_LINEAR} includes {', '.join(others)} of {spec.family}, which cannot have adapters"
        raise ModelError(what, fix=f"name the targets instead: {can} can have some")


def adapter_pairs(spec: ModelSpec, lora: LoraConfig, layout: ParallelConfig, place: RankPlace) -> Iterator[AdapterPair]:
    """Yield the adapters that a rank holds. They depend only on its place in tp, pp, ep and etp."""
    check_layout(layout, spec)
    check_targets(spec, lora)
    family, num_local = FAMILIES[spec.family], spec.moe.num_experts // layout.ep if spec.moe else 0
    for chunk, prefix, layer in layers_of_rank(spec, layout, place):
        for parameter in family.parameters(spec, layer):
            if parameter.name in ADAPTED and (targets := _targets(parameter, lora)):
                weight = shard_of(chunk, prefix + parameter.name, parameter, place.tp, layout.tp)
                yield _pair(weight, parameter, targets, lora.rank, (place.tp, layout.tp))
        for local in range(num_local) if spec.has_experts(layer) and adapts_experts(spec, lora) else ():
            expert = f"{prefix}mlp.experts.local_experts.{local}."
            for parameter in family.expert(spec, layer, place.ep * num_local + local):
                if targets := _targets(parameter, lora):
                    at = (place.etp, layout.etp)
                    weight = shard_of(chunk, expert + parameter.name, parameter, *at, expert=True)
                    yield _pair(weight, parameter, targets, lora.rank, at)


def _targets(parameter: Parameter, lora: LoraConfig) -> list[str]:
    """Return the Hugging Face tensors in a weight that have adapters."""
    held = dict.fromkeys(rows.hf for part in parameter.parts for rows in part)
    return [hf for hf in held if _module(hf) in lora.modules]


def _pair(weight: Shard, parameter: Parameter, targets: list[str], rank: int, place: tuple[int, int]) -> AdapterPair:
    """Return the adapters of a weight, for one of some tensor ranks."""
    (tp_rank, tp), linear = place, weight.name.removesuffix("weight")
    splits_columns = parameter.split == "columns"
    stacked = tuple((RowRange(adapter_names(hf)[0], 0, rank),) for hf in targets)
    a = Parameter(f"{linear}lora_a", stacked, parameter.columns, "columns" if splits_columns else None)
    pieces: list[Piece] = []
    outputs: list[tuple[int, int]] = []
    num_rows, end = [], 0
    for hf in targets:
        before = end
        for piece in weight.pieces:
            if piece.hf == hf:
                start, stop = piece.target[0]
                target = (end, end + stop - start)
                pieces.append(Piece(adapter_names(hf)[1], (piece.source[0], (0, rank)), (target, (0, rank))))
                outputs.append((start, stop))
                end += stop - start
        num_rows.append(end - before)
    if not outputs:
        what = f"tensor rank {tp_rank} of {tp} holds no outputs of {', '.join(map(_module, targets))}"
        raise ModelError(what, fix="choose a smaller parallel.tp, or add q_proj to lora.targets")
    b_shape, splits_rows = (end, rank), parameter.split == "rows"
    b = Shard(weight.chunk, f"{linear}lora_b", b_shape, tuple(pieces), (), expert=weight.expert, split=splits_rows)
    a_shard = shard_of(weight.chunk, a.name, a, tp_rank, tp, expert=weight.expert)
    split = None if weight.expert else parameter.split
    return AdapterPair(weight, a_shard, b, tuple(num_rows), tuple(outputs), split)


def _module(hf: str) -> str:
    """Return the last part of the module's name, by which users choose it; empty for anything but a weight."""
    return hf.removesuffix(".weight").rpartition(".")[2] if hf.endswith(".weight") else ""
