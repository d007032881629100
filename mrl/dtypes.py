"""Data types by name: their size, their safetensors name, and torch's type. Only the last loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
"""Names for the types that mrl writes."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type: `torch.bfloat16` for `bfloat16`."""
    import torch

    if name not in ITEM_BYTES:
        raise ValueError(f'"{name}" is not one of the data types {", ".join(ITEM_BYTES)}')
    dtype: torch.dtype = getattr(torch, name)
    return dtype
