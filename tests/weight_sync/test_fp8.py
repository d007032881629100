"""Weights that the trainer's ranks quantize before they send them: bits, bytes, and what is not on blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reshard_ranks import ReshardCase
from mrl.config.schema import ParallelConfig
from mrl.models.families import read_spec
from mrl.models.fp8_scales import Fp8Form
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.fp8 import block_scales, channel_scales, quantize, row_maxima
from mrl.weight_sync.row_planner import sizes_for_fp8
from tests.models.tiny_models import make_tiny
from tests.weight_sync.test_resharder import assert_arrived, world

BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "moe_intermediate_size": 256}
"""Sizes with which each of two ranks holds whole blocks."""


def quantized(matrix: torch.Tensor, form: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales = channel_scales(row_maxima(matrix)) if form == "channel" else block_scales(matrix)
    target = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    quantize(matrix, scales, target, form)
    return target, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["channel", "block"])
def test_every_bit_is_that_of_vllms_own_quantizer(
    dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large and small rows, a row of zeros, a block of zeros, and parts that do not end at a block's row."""
    from vllm.model_executor.layers.quantization.online import fp8 as online
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    from mrl.weight_sync import fp8

    monkeypatch.setattr(fp8, "_CHUNK_ELEMENTS", 100 * 384)
    torch.manual_seed(3)
    torch.compiler.set_stance("force_eager")
    matrix = (torch.randn(640, 384) * torch.logspace(-9, 3, 640).unsqueeze(1)).to(dtype)
    matrix[7], matrix[128:256, 256:] = 0, 0
    if form == "channel":
        wanted_scales = online._fp8_channel_scale(online.weight_amax(matrix, dim=-1, keepdim=True))
        wanted = online._fp8_quant_per_channel(matrix, wanted_scales)
    else:
        wanted, wanted_scales = per_block_cast_to_fp8(matrix, [128, 128], use_ue8m0=False)
    values, scales = quantized(matrix, form)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))


def test_every_worker_gets_the_bits_of_whole_rows_and_blocks_in_half_the_bytes(tmp_path: Path) -> None:
    """Real ranks, and messages that end inside of blocks; both sides split rows and columns in different ways. Where
    queries, keys and values of 64 rows alternate, blocks are not whole."""
    dense, moe = (str(make_tiny(family, tmp_path / family, sizes=BLOCKS)) for family in ("qwen3", "qwen3_moe"))
    narrow = str(make_tiny("qwen3", tmp_path / "narrow", sizes={**BLOCKS, "head_dim": 64}))
    common: dict[str, Any] = {"bucket_bytes": 800_000, "sockets": str(tmp_path), "dtype": torch.bfloat16}
    common["train_dtype"] = torch.bfloat16  # scales travel in float32 nevertheless
    etp = ParallelConfig(tp=2, ep=2, etp=2)
    layouts: list[tuple[str, ParallelConfig, EngineSizes, Fp8Form]] = [
        (dense, ParallelConfig(tp=2), EngineSizes(1), "block"),
        (narrow, ParallelConfig(tp=2, pp=2), EngineSizes(1), "block"),
        (moe, etp, EngineSizes(2), "channel"),
        (moe, ParallelConfig(pp=2, ep=2), EngineSizes(2, 2), "block"),
    ]
    cases = [ReshardCase(moe, etp, EngineSizes(2), **common)]
    for model, layout, sizes, form in layouts:
        in_fp8 = sizes_for_fp8(read_spec(model), layout, None, sizes, form)
        assert in_fp8.unaligned == ({"self_attn.qkv_proj"} if model == narrow else set())
        cases.append(ReshardCase(model, layout, in_fp8, **common))
    received = []
    for ranks in world(4, cases):
        assert_arrived(ranks, cases[0].bucket_bytes + (64 << 20))
        received.append(sum(outcome.report.bytes_received for outcome in ranks if outcome.report))
    assert 0.5 < received[3] / received[0] < 0.53, "one of 32 bytes is a scale, and embeddings stay in bfloat16"
