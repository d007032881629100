"""Files of models with vision: the language model trains, and an export has the rest unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from mrl.errors import ModelError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import HfWriter
from mrl.models.spec import ModelSpec
from mrl.models.table import hf_tensors
from tests.models.tiny_models import SIZES, tiny_config

Tensors = dict[str, torch.Tensor]
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
}


def with_vision(family: str, directory: Path, stacked: bool = True) -> Path:
    """Save a model as it is published: with a vision tower, layers that predict more tokens, and stacked experts."""
    torch.manual_seed(0)
    text = tiny_config(family)
    kind = Qwen3_5MoeConfig if "moe" in family else Qwen3_5Config
    config = kind(text_config=text.to_dict(), vision_config=VISION, pad_token_id=0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory, save_original_format=not stacked)
    file = directory / "model.safetensors"
    tensors = {**load_file(file), "mtp.fc.weight": torch.randn(64, 128).bfloat16()}
    save_file(tensors, file, {"format": "pt"})
    return directory


def copy(source: Path, target: Path, spec: ModelSpec, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Export all tensors, with a change, and return the files' tensors."""
    reader = HfReader(source)
    with HfWriter(target, spec, source, "lm", torch.float32) as writer:
        for name in hf_tensors(spec, "lm"):
            writer.write(name, change(reader.whole(name)))
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize(("family", "stacked"), [("qwen3_5_text", False), ("qwen3_5_moe_text", True)])
def test_an_export_has_new_text_and_the_same_vision(tmp_path: Path, family: str, stacked: bool) -> None:
    source = with_vision(family, tmp_path / "source", stacked)
    spec = read_spec(source)
    assert spec.family == family
    with pytest.warns(UserWarning, match=r"tensors belong to vision or predict more tokens .*\(model\.visual, mtp\)"):
        HfReader(source).check(spec, "lm")
    before, after = load_file(source / "model.safetensors"), copy(source, tmp_path / "target", spec, lambda x: x + 1)
    assert any(name.endswith("experts.gate_up_proj") for name in before) == stacked
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_carried = name.startswith(("model.visual.", "mtp."))
        assert torch.equal(after[name], tensor if is_carried else tensor + 1), name
        assert after[name].dtype == tensor.dtype
    one, other = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "target"))
    assert one == other | {"dtype": one["dtype"]}
    model: Any
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        model, report = kind.from_pretrained(tmp_path / "target", output_loading_info=True)
        assert not report["missing_keys"]
    expected = after["model.language_model.layers.0.linear_attn.A_log"]
    assert torch.equal(model.model.layers[0].linear_attn.A_log, expected)


def test_each_expert_of_a_stack_is_the_one_that_transformers_takes(tmp_path: Path) -> None:
    source = with_vision("qwen3_5_moe_text", tmp_path / "source")
    experts = Qwen3_5MoeForConditionalGeneration.from_pretrained(source).model.language_model.layers[1].mlp.experts
    reader = HfReader(source)
    parts = [reader.whole(f"model.layers.1.mlp.experts.3.{name}_proj.weight") for name in ("gate", "up", "down")]
    assert torch.equal(torch.cat(parts[:2]), experts.gate_up_proj[3])
    assert torch.equal(parts[2], experts.down_proj[3])
    box = reader.read("model.layers.1.mlp.experts.3.up_proj.weight", ((5, 7), (8, 20)))
    assert torch.equal(box, parts[1][5:7, 8:20])


def test_a_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    source = with_vision("qwen3_5_moe_text", tmp_path / "source")
    file, name = source / "model.safetensors", "model.language_model.layers.1.mlp.experts.down_proj"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:7].contiguous()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.down_proj has shape \[7, 64, 48\], but .* \[64, 48\] of 8 experts"):
        HfReader(source).check(read_spec(source), "lm")


def test_another_wrapper_is_refused(tmp_path: Path) -> None:
    source = with_vision("qwen3_5_text", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForConditionalGeneration"]}))
    with pytest.raises(ModelError, match="only Qwen3_5ForConditionalGeneration are supported"):
        read_spec(source)
