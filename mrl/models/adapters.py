"""The table of low-rank adapters: PEFT's tensors, and their slices on one rank.

Each Hugging Face module has its own A and B. A Megatron matrix made of several modules has their A's stacked, and their
B's stacked in the same order; the rows of B are those of the modules that the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.lora import ALL_LINEAR, MLP_TARGETS, LoraConfig
from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.families import FAMILIES
from mrl.models.layout import RankPlace, check_layout
from mrl.models.parameters import Parameter, Piece, RowRange
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, layers_of_rank, shard_of

ADAPTER_SUFFIXES = (".lora_a", ".lora_b")
"""Ends of the names of adapters in Megatron's modules."""
_PREFIX = "base_model.model."
_ADAPTED = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
"""Megatron's weights that can have adapters."""


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
    splits_columns: bool
    """Whether tensor ranks split the inputs, and sum the outputs, instead of splitting the outputs."""


def adapter_names(hf: str) -> tuple[str, str]:
    """Return PEFT's names of the adapters of a Hugging Face weight."""
    module = hf.removesuffix(".weight")
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def adapter_tensors(spec: ModelSpec, lora: LoraConfig) -> dict[str, Shape]:
    """Return the names and shapes of all adapters in PEFT's files."""
    check_targets(spec, lora)
    tensors: dict[str, Shape] = {}
    for layer in range(spec.num_layers):
        for name, shape in FAMILIES[spec.family].tensors(spec, layer).items():
            if _module(name) in lora.modules and len(shape) == 2:
                a, b = adapter_names(name)
                tensors |= {a: (lora.rank, shape[1]), b: (shape[0], lora.rank)}
    return tensors


def adapter_flops_per_token(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the forward FLOPs of the adapters for one token."""
    return 2 * sum(math.prod(shape) for shape in adapter_tensors(spec, lora).values())


def check_targets(spec: ModelSpec, lora: LoraConfig) -> None:
    """Raise an error if the model has no such target, or if a target includes modules that cannot have adapters."""
    if spec.mla is not None:
        raise ModelError(f"multi-latent attention cannot have adapters yet, as in family {spec.family}")
    if spec.sinks:
        raise ModelError(f"family {spec.family} cannot have adapters yet: no test covers them next to its biases")
    if spec.gdn is not None:
        raise ModelError(f"linear attention cannot have adapters yet, as in family {spec.family}")
    if spec.moe is not None and (wrong := sorted(lora.modules & set(MLP_TARGETS))):
        what = f"experts cannot have adapters yet, but {', '.join(wrong)} are targets in a model of family"
        raise ModelError(f"{what} {spec.family}", fix="choose targets of the attention, such as [q_proj, v_proj]")
    adaptable = {
        _module(rows.hf)
        for layers in spec.layers_by_kind().values()
        for parameter in FAMILIES[spec.family].parameters(spec, layers[0])
        if parameter.name in _ADAPTED
        for part in parameter.parts
        for rows in part
    }
    linear = {
        _module(name)
        for layers in spec.layers_by_kind().values()
        for name, shape in FAMILIES[spec.family].tensors(spec, layers[0]).items()
        if len(shape) == 2
    }
    wanted = linear if ALL_LINEAR in lora.targets else lora.modules
    if missing := sorted(wanted - adaptable):
        problem = f"modules of a {spec.family} that can have adapters are {', '.join(sorted(adaptable))}"
        raise ModelError(f"{problem}; not {', '.join(missing)}", fix="set lora.targets to some of the former")


def adapter_pairs(spec: ModelSpec, lora: LoraConfig, layout: ParallelConfig, place: RankPlace) -> Iterator[AdapterPair]:
    """Yield the adapters that a rank holds. They depend only on its place in tp and pp."""
    check_layout(layout, spec)
    check_targets(spec, lora)
    for chunk, prefix, layer in layers_of_rank(spec, layout, place):
        for parameter in FAMILIES[spec.family].parameters(spec, layer):
            held = dict.fromkeys(rows.hf for part in parameter.parts for rows in part)
            targets = [hf for hf in held if _module(hf) in lora.modules]
            if parameter.name in _ADAPTED and targets:
                yield _pair((chunk, prefix), parameter, targets, lora.rank, (place.tp, layout.tp))


def _pair(
    where: tuple[int, str], parameter: Parameter, targets: list[str], rank: int, place: tuple[int, int]
) -> AdapterPair:
    """Return the adapters of a weight in a chunk, below a prefix, for one of some tensor ranks."""
    (chunk, prefix), (tp_rank, tp) = where, place
    weight = shard_of(chunk, prefix + parameter.name, parameter, tp_rank, tp)
    linear, splits_columns = prefix + parameter.name.removesuffix("weight"), parameter.split == "columns"
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
    b = Shard(chunk, f"{linear}lora_b", (end, rank), tuple(pieces), (), expert=False, split=not splits_columns)
    a_shard = shard_of(chunk, a.name, a, tp_rank, tp)
    return AdapterPair(weight, a_shard, b, tuple(num_rows), tuple(outputs), splits_columns)


def _module(hf: str) -> str:
    """Return the last part of the module's name, by which users choose it; empty for anything but a weight."""
    return hf.removesuffix(".weight").rpartition(".")[2] if hf.endswith(".weight") else ""
