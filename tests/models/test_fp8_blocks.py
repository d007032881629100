"""Models in FP8 with scales per block are read as transformers dequantizes them, and never written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.families import read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.table import shards_of
from mrl.verify.transformers_model import answer
from tests.models import published
from tests.models.quantized import BLOCK, SETTINGS, expanded, quantize
from tests.models.test_hf_reader import changed, refusal
from tests.models.test_hf_writer import write_from_ranks
from tests.models.tiny_models import make_tiny


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(make_tiny("deepseek_v3", tmp_path_factory.mktemp("fp8")))


def expected(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights by one multiplication per element."""
    tensors = load_file(path / "model.safetensors")
    return {
        name: tensor.float() * expanded(tensors[f"{name}_scale_inv"], *tensor.shape)
        if f"{name}_scale_inv" in tensors
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def test_whole_weights_are_those_of_transformers_to_the_bit(quantized: Path) -> None:
    tensors, reader, theirs = load_file(quantized / "model.safetensors"), HfReader(quantized), Fp8Dequantize(None)
    reader.check(read_spec(quantized), "lm")
    compared = 0
    for name in reader:
        scales = tensors.get(f"{name}_scale_inv")
        if scales is None or any(size % part for size, part in zip(tensors[name].shape, BLOCK, strict=True)):
            continue  # transformers refuses smaller blocks at the end, or takes all blocks for smaller ones
        found = reader.whole(name)
        assert torch.equal(found, theirs._dequantize_one(tensors[name], scales, torch.float32))
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2, sequence_parallel=True)])
def test_shards_that_cut_blocks_get_the_scales_of_their_elements(quantized: Path, layout: Layout) -> None:
    whole, reader, spec = expected(quantized), HfReader(quantized), read_spec(quantized)
    for rank in range(layout.tp):
        for shard in shards_of(spec, layout, RankPlace(tp=rank, ep=rank), "lm"):
            tensor = load_shard(reader, shard, torch.float32)
            for piece in shard.pieces:
                source, target = ([slice(*side) for side in box] for box in (piece.source, piece.target))
                assert torch.equal(tensor[target], whole[piece.hf][source]), shard.name


def test_the_model_is_compared_with_transformers_unquantized(quantized: Path, tmp_path: Path) -> None:
    tokens = torch.arange(20) * 7 % 131
    plain = make_tiny("deepseek_v3", tmp_path)
    save_file(expected(quantized), plain / "model.safetensors", {"format": "pt"})
    assert torch.equal(answer(quantized, "lm", tokens).hidden_TH, answer(plain, "lm", tokens).hidden_TH)


def test_an_export_is_not_quantized(quantized: Path, tmp_path: Path) -> None:
    write_from_ranks(quantized, tmp_path / "written", "lm")
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == expected(quantized).keys()
    assert all(torch.equal(tensor, expected(quantized)[name]) for name, tensor in written.items())


NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), f"{NAME}_scale_inv is missing: without scales the numbers of {NAME}"),
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(2, 2)}), "_scale_inv has shape [2, 2], not [4, 2]"),
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(4, 2).bfloat16()}), "_scale_inv holds BF16, not F32"),
        (lambda t: t.update({NAME: t[NAME].bfloat16()}), f"{NAME} holds BF16, but has scales for FP8: its numbers may"),
    ],
)
def test_wrong_scales_are_named(quantized: Path, tmp_path: Path, change: Any, message: str) -> None:
    assert message in refusal(changed(quantized, tmp_path / "changed", change))


def test_fp8_in_a_model_that_does_not_say_so_is_refused(quantized: Path, tmp_path: Path) -> None:
    path = changed(quantized, tmp_path / "changed", lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert "holds F8_E4M3, but config.json has no blocks for it: without scales its numbers are" in refusal(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "compressed-tensors"}, '"compressed-tensors" cannot be read, only "fp8" with blocks'),
        ({"bits": 4}, '"?" cannot be read'),
        (SETTINGS | {"fmt": "e5m2"}, "fmt: 'e5m2' is not supported, only 'e4m3'"),
        ({"quant_method": "fp8"}, "weight_block_size: is missing: FP8 with one scale per tensor cannot be read"),
        (SETTINGS | {"weight_block_size": [128]}, "weight_block_size: [128] is not a number of rows and of columns"),
    ],
)
def test_other_kinds_of_quantization_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(HfConfig(published.DEEPSEEK_V3 | {"quantization_config": settings}, "config.json"))
    assert message in str(caught.value)
