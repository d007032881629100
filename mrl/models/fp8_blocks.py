"""Weights in FP8 with one scale per block, as DeepSeek-V3, Kimi-K2 and others are published: read, never written.

A matrix `X.weight` in float8_e4m3fn comes with `X.weight_scale_inv` in float32, one number per block of rows and
columns. The blocks at the end may be smaller. A weight is its number times the scale of its block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.models import mxfp4
from mrl.models.hf_config import HfConfig
from mrl.models.regions import Region, Shape

if TYPE_CHECKING:
    import torch

Block = tuple[int, int]
"""Rows and columns of a block."""
FILE_TYPE = "F8_E4M3"
SCALES = "_scale_inv"
"""End of the name of a weight's scales."""
_FIX = "use the full-precision model"


def read_block(config: HfConfig) -> Block | None:
    """Return the size of the blocks in a model's files, or None if the weights have none."""
    if "quantization_config" not in config:
        return None
    settings = config.section("quantization_config")
    method = settings.defaulting(quant_method="?").text("quant_method")
    if method == mxfp4.METHOD and config.text("model_type") == "gpt_oss":
        return None  # the names of its tensors say which are quantized
    if method != "fp8":
        raise config.error("quantization_config", f'"{method}" cannot be read, only "fp8" with blocks', _FIX)
    settings.require("fmt", "e4m3")
    if "weight_block_size" not in settings:
        what = "weight_block_size: is missing: FP8 with one scale per tensor cannot be read"
        raise config.error("quantization_config", what, _FIX)
    block = settings.items("weight_block_size", int)
    if len(block) != 2 or min(block) < 1:
        raise config.error("quantization_config", f"weight_block_size: {block} is not a number of rows and of columns")
    return block[0], block[1]


def scale_of(name: str) -> str:
    """Return the name of the scales of a weight."""
    return name + SCALES


def scales_shape(shape: Shape, block: Block) -> Shape:
    """Return the number of blocks in the rows and in the columns of a matrix."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def covering(box: Region, block: Block) -> Region:
    """Return the scales that a box of a matrix needs."""
    return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(box, block, strict=True))


def dequantized(weight: torch.Tensor, scales: torch.Tensor, box: Region, block: Block) -> torch.Tensor:
    """Return a box of a matrix in float32, from its numbers and the scales that cover it."""
    import torch

    rows, columns = (
        torch.arange(start, stop) // size - start // size for (start, stop), size in zip(box, block, strict=True)
    )
    return weight.float() * scales[rows][:, columns]
