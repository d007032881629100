"""Grouped-query attention: its Hugging Face tensors, the Megatron parameters built from them, and vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.models.parameters import Parameter, RowRange, columns_of, whole_tensor
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec


def hf_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return the tensors of the attention of one layer, named below `self_attn.`."""
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: dict[str, Shape] = {
        "q_proj.weight": (2 * q_rows if spec.output_gate else q_rows, spec.hidden),
        "k_proj.weight": (kv_rows, spec.hidden),
        "v_proj.weight": (kv_rows, spec.hidden),
        "o_proj.weight": (spec.hidden, q_rows),
    }
    if spec.qkv_bias:
        tensors["q_proj.bias"] = (q_rows,)
        tensors["k_proj.bias"] = tensors["v_proj.bias"] = (kv_rows,)
    if spec.qk_norm:
        tensors["q_norm.weight"] = tensors["k_norm.weight"] = (spec.head_dim,)
    return tensors


def megatron_parameters(spec: ModelSpec, hf: str) -> Iterator[Parameter]:
    """Yield the parameters of one layer, named below `self_attention.`. Names in the files start with `hf`."""
    yield Parameter("linear_qkv.weight", (_by_group(spec, hf, "weight"),), spec.hidden, "rows")
    if spec.qkv_bias:
        yield Parameter("linear_qkv.bias", (_by_group(spec, hf, "bias"),), None, "rows")
    if spec.qk_norm:
        yield whole_tensor("q_layernorm.weight", f"{hf}q_norm.weight", spec.head_dim)
        yield whole_tensor("k_layernorm.weight", f"{hf}k_norm.weight", spec.head_dim)
    yield columns_of("linear_proj.weight", f"{hf}o_proj.weight", spec.hidden, spec.num_heads * spec.head_dim)


def engine_parameters(spec: ModelSpec, hf: str, tp: int) -> Iterator[Parameter]:
    """Yield vLLM's parameters of one layer of an engine with `tp` ranks, by their full names."""
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        yield _stacked(spec, hf, kind, tp)
    if spec.qk_norm:
        for name in (f"{hf}q_norm.weight", f"{hf}k_norm.weight"):
            yield whole_tensor(name, name, spec.head_dim)
    output = f"{hf}o_proj.weight"
    yield columns_of(output, output, spec.hidden, spec.num_heads * spec.head_dim)


def _by_group(spec: ModelSpec, hf: str, kind: str) -> tuple[RowRange, ...]:
    """Return rows in Megatron's order: for each query group its query heads, its key head, its value head.

    The whole is split into equal runs of rows, even with fewer groups than ranks: then a rank's rows end inside a
    group, and Megatron gathers the outputs of the group's ranks.
    """
    q, kv = spec.num_heads // spec.num_kv_heads * spec.head_dim, spec.head_dim
    if spec.output_gate:
        return tuple(_gated(spec, hf, kind))
    return tuple(
        RowRange(f"{hf}{name}_proj.{kind}", group * size, (group + 1) * size)
        for group in range(spec.num_kv_heads)
        for name, size in (("q", q), ("k", kv), ("v", kv))
    )


def _gated(spec: ModelSpec, hf: str, kind: str) -> Iterator[RowRange]:
    """Yield for each query group its query heads, their gates, its key head, its value head.

    Files store the gate of each query head below that head.
    """
    size, num_heads = spec.head_dim, spec.num_heads // spec.num_kv_heads
    for group in range(spec.num_kv_heads):
        heads = range(group * num_heads, (group + 1) * num_heads)
        for start in (*(2 * head * size for head in heads), *((2 * head + 1) * size for head in heads)):
            yield RowRange(f"{hf}q_proj.{kind}", start, start + size)
        yield from (RowRange(f"{hf}{name}_proj.{kind}", group * size, (group + 1) * size) for name in "kv")


def _stacked(spec: ModelSpec, hf: str, kind: str, tp: int) -> Parameter:
    """Return queries, then keys, then values. With fewer key-value heads than ranks, each head is on several ranks."""
    num_copies, size = max(1, tp // spec.num_kv_heads), spec.head_dim
    heads = [head for head in range(spec.num_kv_heads) for _ in range(num_copies)]
    q_heads = spec.num_heads * (2 if spec.output_gate else 1)
    q = (RowRange(f"{hf}q_proj.{kind}", 0, q_heads * size),)
    k, v = (
        tuple(RowRange(f"{hf}{name}_proj.{kind}", head * size, (head + 1) * size) for head in heads) for name in "kv"
    )
    return Parameter(f"{hf}qkv_proj.{kind}", (q, k, v), spec.hidden if kind == "weight" else None, "rows")
