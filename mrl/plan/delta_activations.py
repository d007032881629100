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
    norm = values * 3 * item + 4 * gdn.value_heads  # its input and output, the gated output, and one number per head
    decays = 16 * gdn.value_heads  # four numbers of each head, in float32
    return (convolution + gate + norm + decays) / tp + _INDEX_BYTES


def delta_forward_bytes(gdn: GdnSpec, tp: int, item: int) -> float:
    """Return the bytes of attention at the peak of a forward pass without backward.

    The products of the layer's input and the activated channels are alive while the delta rule works.
    """
    inputs = item * (2 * gdn.conv_rows + gdn.value_heads * gdn.value_dim) + 16 * gdn.value_heads
    return inputs / tp + _INDEX_BYTES + delta_work_bytes(gdn, tp, backward=False)


def delta_work_bytes(gdn: GdnSpec, tp: int, *, backward: bool) -> float:
    """Return the bytes at the peak of the delta rule, in float32.

    They were counted in `mrl.engine.delta_rule`. For each value head, forward holds queries, keys and values in chunks,
    both sides of the triangular system and its solution; backward also holds their gradients, and queries and keys as
    the layer below made them.
    """
    keys, values = gdn.key_dim, gdn.value_dim
    per_head = 6 * (keys + values) + 3 * _CHUNK + 3
    if backward:
        per_head = 9 * keys + 10 * values + 2 * _CHUNK + 7
    own_keys = 2 * keys * gdn.key_heads if backward else 0
    return 4 * (gdn.value_heads * per_head + own_keys) / tp
