"""Multi-latent attention: its Hugging Face tensors, the Megatron parameters built from them, and vLLM's.

Keys and values of all heads come from one small vector per token, the latent. Each key also has a part that all heads
share, which carries the position. Queries may come from another latent.

Files store rotated dimensions as pairs of neighbors. Megatron, vLLM and transformers rearrange them while they compute,
so the tables keep the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.models.parameters import Parameter, RowRange, columns_of, rows_of, whole_tensor
from mrl.models.regions import Shape
from mrl.models.spec import MlaSpec, ModelSpec


def hf_tensors(spec: ModelSpec, mla: MlaSpec) -> dict[str, Shape]:
    """Return the tensors of the attention of one layer, named below `self_attn.`."""
    q_rows = spec.num_heads * spec.head_dim
    tensors: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (mla.kv_rank + mla.rope_dim, spec.hidden),
        "kv_a_layernorm.weight": (mla.kv_rank,),
        "kv_b_proj.weight": (spec.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_rank),
        "o_proj.weight": (spec.hidden, spec.num_heads * mla.v_dim),
    }
    if mla.q_rank is None:
        return tensors | {"q_proj.weight": (q_rows, spec.hidden)}
    return tensors | {
        "q_a_proj.weight": (mla.q_rank, spec.hidden),
        "q_a_layernorm.weight": (mla.q_rank,),
        "q_b_proj.weight": (q_rows, mla.q_rank),
    }


def megatron_parameters(spec: ModelSpec, mla: MlaSpec, hf: str) -> Iterator[Parameter]:
    """Yield the parameters of one layer, named below `self_attention.`. Names in the files start with `hf`.

    All ranks hold the projections to the latents, since every head reads them.
    """
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_heads * (mla.nope_dim + mla.v_dim)
    if mla.q_rank is None:
        yield rows_of("linear_q_proj.weight", f"{hf}q_proj.weight", q_rows, spec.hidden)
    else:
        yield whole_tensor("linear_q_down_proj.weight", f"{hf}q_a_proj.weight", mla.q_rank, spec.hidden)
        yield whole_tensor("q_layernorm.weight", f"{hf}q_a_layernorm.weight", mla.q_rank)
        yield rows_of("linear_q_up_proj.weight", f"{hf}q_b_proj.weight", q_rows, mla.q_rank)
    down = f"{hf}kv_a_proj_with_mqa.weight"
    yield whole_tensor("linear_kv_down_proj.weight", down, mla.kv_rank + mla.rope_dim, spec.hidden)
    yield whole_tensor("kv_layernorm.weight", f"{hf}kv_a_layernorm.weight", mla.kv_rank)
    yield rows_of("linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", kv_rows, mla.kv_rank)
    yield columns_of("linear_proj.weight", f"{hf}o_proj.weight", spec.hidden, spec.num_heads * mla.v_dim)


def engine_parameters(spec: ModelSpec, mla: MlaSpec, hf: str) -> Iterator[Parameter]:
    """Yield vLLM's parameters of one layer, by their full names."""

    def named(name: str) -> tuple[str, str]:
        return f"{hf}{name}.weight", f"{hf}{name}.weight"

    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_heads * (mla.nope_dim + mla.v_dim)
    down = "kv_a_proj_with_mqa"
    if mla.q_rank is None:
        yield rows_of(*named("q_proj"), q_rows, spec.hidden)
        yield whole_tensor(*named(down), mla.kv_rank + mla.rope_dim, spec.hidden)
    else:
        sizes = {"q_a_proj": mla.q_rank, down: mla.kv_rank + mla.rope_dim}
        parts = tuple((RowRange(f"{hf}{name}.weight", 0, rows),) for name, rows in sizes.items())
        yield Parameter(f"{hf}fused_qkv_a_proj.weight", parts, spec.hidden)
        yield whole_tensor(*named("q_a_layernorm"), mla.q_rank)
        yield rows_of(*named("q_b_proj"), q_rows, mla.q_rank)
    yield whole_tensor(*named("kv_a_layernorm"), mla.kv_rank)
    yield rows_of(*named("kv_b_proj"), kv_rows, mla.kv_rank)
    yield columns_of(*named("o_proj"), spec.hidden, spec.num_heads * mla.v_dim)


def set_latent_epsilon(model: Any) -> None:
    """Give the norms of the latents in a model of transformers the epsilon of its file, as Megatron and vLLM do.

    transformers takes 1e-6 there for every file.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
