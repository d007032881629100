"""Models whose projections are in FP8 with scales per block, as published files have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16, 32
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic"}


def quantize(path: Path) -> Path:
    """Quantize the projections of a model directory in place. Many end with smaller blocks."""
    tensors = load_file(path / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name in [name for name, tensor in tensors.items() if "_proj" in name and tensor.ndim == 2]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), generator=noise) + 0.5
        tensors[name] = (tensors[name] / expanded(scales, rows, columns)).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return path


def expanded(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scale of each element of a matrix."""
    return scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]


def pack_mxfp4(path: Path) -> Path:
    """Replace the experts of a model of gpt-oss, in place, by random numbers in MXFP4."""
    tensors = load_file(path / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=noise, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, generator=noise, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path
