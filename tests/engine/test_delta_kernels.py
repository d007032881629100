"""The kernels of flash-linear-attention, run on the CPU by Triton's interpreter, compared with the rule in torch.

The interpreter has no bfloat16; float16 stands for the 16-bit types. `make test-extras` runs this file in a separate
process, because Triton reads `TRITON_INTERPRET` when it is imported.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.engine import delta_kernels, delta_rule
from mrl.engine.delta_rule import RowChunks, gated_delta_rule
from mrl.errors import EngineError

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("fla") is None,
    reason="needs fla-core, Triton, and TRITON_INTERPRET=1",
)
LENGTHS = np.array([70, 5])
CHUNKS = RowChunks.of(LENGTHS, torch.device("cpu"))


class _Index(int):
    """A number of a loop. Compiled kernels can convert it, and the interpreter's plain numbers cannot."""

    def to(self, _dtype: Any) -> int:
        return self


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "do_bench", property(lambda _: lambda *_, **__: [1.0, 1.0, 1.0]))  # needs a GPU
    from fla.ops.common import chunk_delta_h

    monkeypatch.setattr(chunk_delta_h, "range", lambda *ends: map(_Index, range(*ends)), raising=False)
    monkeypatch.setattr(delta_kernels, "_compared", False)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Queries and keys of one head, values, decays and strengths of two."""
    torch.manual_seed(0)
    num = int(LENGTHS.sum())
    q, k, v = (torch.randn(num, heads, size) for heads, size in ((1, 32), (1, 32), (2, 32)))
    return [*(x.to(dtype) for x in (q, k, v)), -2 * torch.rand(num, 2), torch.rand(num, 2)]


def with_gradients(tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, log_decay, beta = leaves
    outputs = gated_delta_rule((q, k, v), log_decay, beta, CHUNKS).float()
    weights = torch.sin(torch.arange(outputs.numel()).float()).view_as(outputs)
    return [outputs, *torch.autograd.grad((outputs * weights).sum(), leaves)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_kernels_equal_the_rule_in_torch_on_packed_rows(
    dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = with_gradients(inputs(dtype))
    monkeypatch.setattr(delta_kernels, "usable", lambda _: True)
    for value, exact in zip(with_gradients(inputs(dtype)), expected, strict=True):
        assert (value.float() - exact.float()).norm() < limit * exact.float().norm()


def test_kernels_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "usable", lambda _: True)
    plain = delta_rule.in_chunks
    monkeypatch.setattr(delta_rule, "in_chunks", lambda x, chunks: plain([*x[:3], x[3] * 1.3, x[4]], chunks))
    with pytest.raises(EngineError, match="kernels of flash-linear-attention differ from mrl's gated delta rule: outp"):
        with_gradients(inputs(torch.float16))
