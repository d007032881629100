"""Megatron's description of a packed micro-batch, with the segments for mrl's own core attention."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams

from mrl.engine.packed_rows import MicroBatch
from mrl.engine.segments import Segments


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]  # Megatron's class has no type information here
    segments: Segments | None = None


def packed_params(batch: MicroBatch) -> PackedParams:
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=batch.ends,
        cu_seqlens_kv=batch.ends,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
        segments=batch.segments,
    )
