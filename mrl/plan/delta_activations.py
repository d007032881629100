"""Memory of a layer with the gated delta rule, per token of a device."""

from __future__ import annotations

from mrl.models.spec import GdnSpec

_CHUNK = 64
_INDEX_BYTES = 16  # two places of each token, in the convolution's input and output


def delta_bytes(gdn: GdnSpec, tp: int, item: int) -> float:
    """Return the bytes that attention of the layer keeps for backward."""
    values = gdn.value_heads * gdn.value_dim
    convolution = 3 * item * gdn.conv_rows  # its input, its output, and queries, keys and values
    gate = 8 * values  # before and after its activation, in float32
    norm = values * (4 + 3 * item) + 4 * gdn.value_heads  # float32 and normalized, with weight, with gate
    decays = 16 * gdn.value_heads  # four numbers of each head, in float32
    return (convolution + gate + norm + decays) / tp + _INDEX_BYTES


def delta_work_bytes(gdn: GdnSpec, tp: int, *, backward: bool) -> float:
    """Return the bytes while the delta rule works, in float32. An estimate: the allocator's order was not measured.

    For each value head: queries, keys and values in chunks, decays and products between the tokens of a chunk, both
    sides of the triangular system, corrections and outputs. Backward has these again with gradients, and the matrices
    between chunks.
    """
    per_head = 6 * gdn.key_dim + 5 * gdn.value_dim + 4 * _CHUNK
    if backward:
        per_head = 2 * (per_head + 2 * gdn.key_dim * gdn.value_dim // _CHUNK)
    return 4 * gdn.value_heads * per_head / tp
