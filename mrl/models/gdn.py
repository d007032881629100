"""The gated delta rule (GDN): its Hugging Face tensors, the Megatron parameters built from them, and vLLM's.

Each value head keeps a matrix of constant size instead of keys and values of all tokens. Several value heads share a
key head. Qwen3.5 stores each projection separately. Qwen3-Next stores them together, by key head.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.models.parameters import Parameter, RowRange, columns_of, whole_tensor
from mrl.models.regions import Shape
from mrl.models.spec import GdnSpec, ModelSpec


def hf_tensors(spec: ModelSpec, gdn: GdnSpec) -> dict[str, Shape]:
    """Return the tensors of the attention of one layer, named below `linear_attn.`."""
    values, heads = gdn.value_heads * gdn.value_dim, gdn.value_heads
    inputs = {"qkvz": gdn.conv_rows + values, "ba": 2 * heads}
    if not gdn.interleaved:
        inputs = {"qkv": gdn.conv_rows, "z": values, "b": heads, "a": heads}
    return {
        **{f"in_proj_{name}.weight": (rows, spec.hidden) for name, rows in inputs.items()},
        "conv1d.weight": (gdn.conv_rows, 1, gdn.kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (gdn.value_dim,),
        "out_proj.weight": (spec.hidden, values),
    }


def megatron_parameters(spec: ModelSpec, gdn: GdnSpec, hf: str) -> Iterator[Parameter]:
    """Yield the parameters of one layer, named below `self_attention.`. Names in the files start with `hf`."""
    q, k, v, z = (_rows(gdn, hf, name) for name in "qkvz")
    inputs = (q, k, v, z, _rows(gdn, hf, "b"), _rows(gdn, hf, "a"))
    yield Parameter("in_proj.weight", inputs, spec.hidden, "rows")
    yield from _own(gdn, hf, "conv1d.weight")
    yield whole_tensor("out_norm.weight", f"{hf}norm.weight", gdn.value_dim)
    yield columns_of("out_proj.weight", f"{hf}out_proj.weight", spec.hidden, gdn.value_heads * gdn.value_dim)


def engine_parameters(spec: ModelSpec, gdn: GdnSpec, hf: str) -> Iterator[Parameter]:
    """Yield vLLM's parameters of one layer, by their full names."""
    values, heads = gdn.value_heads * gdn.value_dim, gdn.value_heads
    for stacked, names in (("qkvz", "qkvz"), ("ba", "ba")):
        name = f"{hf}in_proj_{stacked}.weight"
        parts = tuple(_rows(gdn, hf, part) for part in names)
        if gdn.interleaved:  # vLLM keeps the order of the file
            rows = gdn.conv_rows + values if stacked == "qkvz" else 2 * heads
            parts = ((RowRange(name, 0, rows),),)
        yield Parameter(name, parts, spec.hidden, "rows")
    yield from _own(gdn, hf, f"{hf}conv1d.weight", prefix=hf)
    yield whole_tensor(f"{hf}norm.weight", f"{hf}norm.weight", gdn.value_dim)
    yield columns_of(f"{hf}out_proj.weight", f"{hf}out_proj.weight", spec.hidden, values)


def _own(gdn: GdnSpec, hf: str, conv: str, prefix: str = "") -> Iterator[Parameter]:
    """Yield the convolution, and the decay of each head. Its logarithm is float32 in models of any dtype."""
    keys, end = gdn.key_heads * gdn.key_dim, gdn.conv_rows
    name = f"{hf}conv1d.weight"
    parts = tuple((RowRange(name, start, stop),) for start, stop in ((0, keys), (keys, 2 * keys), (2 * keys, end)))
    yield Parameter(conv, parts, 1, "rows", tail=(gdn.kernel,))
    heads = gdn.value_heads
    yield Parameter(f"{prefix}A_log", ((RowRange(f"{hf}A_log", 0, heads),),), None, "rows", dtype="float32")
    yield Parameter(f"{prefix}dt_bias", ((RowRange(f"{hf}dt_bias", 0, heads),),), None, "rows")


def _rows(gdn: GdnSpec, hf: str, part: str) -> tuple[RowRange, ...]:
    """Return the rows of one of q, k, v, z, b and a, in the order of the heads."""
    if gdn.interleaved:
        return _rows_by_key_head(gdn, hf, part)
    keys, values = gdn.key_heads * gdn.key_dim, gdn.value_heads * gdn.value_dim
    if part in "qkv":
        start = "qkv".index(part) * keys
        return (RowRange(f"{hf}in_proj_qkv.weight", start, start + (values if part == "v" else keys)),)
    return (RowRange(f"{hf}in_proj_{part}.weight", 0, values if part == "z" else gdn.value_heads),)


def _rows_by_key_head(gdn: GdnSpec, hf: str, part: str) -> tuple[RowRange, ...]:
    """Return these rows of a file that stores, for each key head, its q, k, v and z, and its b and a."""
    shared = gdn.value_heads // gdn.key_heads
    values = shared * gdn.value_dim
    sizes = {"b": shared, "a": shared}
    if part in "qkvz":
        sizes = {"q": gdn.key_dim, "k": gdn.key_dim, "v": values, "z": values}
    name = f"{hf}in_proj_{''.join(sizes)}.weight"
    before = sum(size for other, size in sizes.items() if list(sizes).index(other) < list(sizes).index(part))
    starts = (head * sum(sizes.values()) + before for head in range(gdn.key_heads))
    return tuple(RowRange(name, start, start + sizes[part]) for start in starts)
