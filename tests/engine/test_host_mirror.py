"""Tensors whose memory leaves and comes back, on the CPU: contents, views, bytes on the way, and what is kept."""

from __future__ import annotations

import pytest
import torch

from mrl.engine.host_mirror import CopyStats, HostMirroredStorage
from mrl.errors import EngineError

SIZES = (3, 40, 7)


def movable() -> tuple[HostMirroredStorage, list[torch.Tensor]]:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in SIZES]
    return HostMirroredStorage(tensors, CopyStats(), None), tensors


def test_what_leaves_comes_back_to_the_bit_and_all_views_with_it() -> None:
    held, tensors = movable()
    before, view = [tensor.clone() for tensor in tensors], tensors[1].view(4, 10)[2]
    held.save_to_host()
    held.free()
    assert (held.on_device, held.device_bytes) == (False, 0)
    held.allocate()
    assert held.on_device
    assert held.host is not None
    held.load_from_host(held.host)
    assert held.device_bytes == 4 * sum(SIZES)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert torch.equal(view, before[1][20:30])


def test_bytes_are_counted_where_they_go() -> None:
    held, _ = movable()
    num_bytes = 4 * sum(SIZES)
    held.save_to_host()
    assert (held.traffic.to_host_bytes, held.traffic.to_device_bytes) == (num_bytes, 0)
    held.save_to_host()
    assert held.traffic.to_host_bytes == num_bytes  # the copy is current
    held.host_is_current = False
    held.save_to_host()
    assert held.traffic.to_host_bytes == 2 * num_bytes
    assert held.host is not None
    held.load_from_host(held.host)
    assert (held.traffic.to_host_bytes, held.traffic.to_device_bytes) == (2 * num_bytes, num_bytes)


def test_a_copy_that_is_out_of_date_is_made_anew() -> None:
    held, tensors = movable()
    held.save_to_host()
    tensors[0].fill_(5)
    held.host_is_current = False
    held.save_to_host()
    held.zero()
    assert not any(tensor.any() for tensor in tensors)
    assert held.host is not None
    held.load_from_host(held.host)
    assert tensors[0].tolist() == [5, 5, 5]


def test_each_content_has_an_aligned_place_of_the_host_buffer() -> None:
    held, tensors = movable()
    assert held.host_buffer_bytes == 64 + 192 + 64  # 12, 160 and 28 bytes
    held.save_to_host()
    assert held.host is not None
    assert held.host.numel() == held.host_buffer_bytes
    places = [held.host[start : start + 4 * size] for start, size in zip((0, 64, 256), SIZES, strict=True)]
    assert all(torch.equal(at.view(torch.float32), x) for at, x in zip(places, tensors, strict=True))


def test_other_tensors_take_the_place_of_those_before() -> None:
    held, tensors = movable()
    held.save_to_host()
    first = held.host
    grown = [*tensors, torch.ones(9)]
    held.hold(grown)
    assert held.host_buffer_bytes == 64 + 192 + 64 + 64
    held.host_is_current = False
    held.save_to_host()
    assert held.host is not first
    assert held.host is not None
    grown[3].zero_()
    held.load_from_host(held.host)
    assert grown[3].tolist() == [1.0] * 9


def test_a_host_buffer_is_used_again() -> None:
    held, _ = movable()
    held.save_to_host()
    first = held.host
    held.host_is_current = False
    held.save_to_host()
    assert held.host is first


def test_memory_that_numpy_has_seen_stays() -> None:
    held, tensors = movable()
    tensors[2].numpy()
    with pytest.raises(EngineError, match="memory that numpy has seen cannot leave the device"):
        held.free()
    assert held.on_device
    assert held.device_bytes == 4 * sum(SIZES)
