"""Attention over packed rows on CUDA: fakes with torch's two signatures replace its variable-length kernel."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.engine.layer_spec import has_transformer_engine
from mrl.engine.packed_attention import in_blocks, varlen
from mrl.engine.segments import Segments

STORED = np.array([4, 12, 8])
HEADS, GROUPS, DIM = 4, 2, 8


def attend(
    qkv: tuple[Tensor, ...], ends: tuple[Tensor, Tensor], scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Compute the kernel's definition: a segment's last query is aligned with its last key."""
    results = []
    bounds = list(zip(*(end.tolist() for end in ends), strict=True))
    for (q0, k0), (q1, k1) in pairwise(bounds):
        q, k, v = qkv[0][q0:q1], qkv[1][k0:k1], qkv[2][k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        at = torch.arange(k1 - k0) - (torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0))[:, None]
        hidden = at > window[1] if window[0] < 0 else (at > window[1]) | (at < -window[0])
        results.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(results)


def torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    return attend((query, key, value), (cu_seq_q, cu_seq_k), scale, window_size)


def torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: Any = None,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1]), "this version needs enable_gqa if there are fewer key heads"
    return attend((query, key, value), (cu_seq_q, cu_seq_k), scale, window_size)


@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_13])
@pytest.mark.parametrize(("cp", "reach"), [(1, None), (1, 2), (2, None), (2, 3)])
def test_the_kernel_of_each_torch_is_called_as_it_wants_and_attends_as_on_the_cpu(
    kernel: Any, cp: int, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.manual_seed(0)
    key, value = (torch.randn(int(STORED.sum()), GROUPS, DIM) for _ in range(2))
    for rank in range(cp):
        segments = Segments.of(STORED, cp, rank, torch.device("cpu"))
        query = torch.randn(int(STORED.sum()) // cp, HEADS, DIM)
        qkv = (query, key, value)
        torch.testing.assert_close(varlen(qkv, segments, None, reach), in_blocks(qkv, segments, None, reach))


def test_layers_of_transformer_engine_need_its_extension_and_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not has_transformer_engine(), "the package alone has no kernels"
    (package / "wheel_lib").mkdir()
    (package / "wheel_lib" / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert has_transformer_engine()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not has_transformer_engine()
