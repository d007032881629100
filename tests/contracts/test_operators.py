"""Operators that only GPUs implement: `mm` and `addmm` with `out_dtype`. torch declares them on a CPU too."""

from __future__ import annotations

import pytest
import torch

MM = "aten::mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"
ADDMM = (
    "aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, Scalar beta=1, "
    "Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)"
)


@pytest.mark.parametrize(("overload", "schema"), [("mm.dtype", MM), ("addmm.dtype_out", ADDMM)])
def test_products_of_bfloat16_with_results_in_float32_are_declared(overload: str, schema: str) -> None:
    packet, _, name = overload.partition(".")
    assert str(getattr(getattr(torch.ops.aten, packet), name)._schema) == schema
