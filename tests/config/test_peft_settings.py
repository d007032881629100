"""Settings of an adapter's files against those of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.config.lora import LoraConfig
from mrl.config.peft_settings import read_peft_settings
from mrl.errors import ModelError

HELD = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "maker/Model-7B",
    "bias": "none",
}
ASKED: dict[str, Any] = {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}


def written(directory: Path, **values: Any) -> str:
    (directory / "adapter_config.json").write_text(json.dumps(HELD | values), encoding="utf-8")
    (directory / "adapter_model.safetensors").touch()
    return str(directory)


@pytest.mark.parametrize("model", ["maker/Model-7B", "maker/model-7b@0123", "/models/Model-7B/"])
def test_the_same_settings_have_no_difference(model: str, tmp_path: Path) -> None:
    assert not list(read_peft_settings(written(tmp_path)).differences("actor", LoraConfig(**ASKED), model))


@pytest.mark.parametrize(
    ("asked", "model", "key", "what", "fix"),
    [
        ({"rank": 16}, "maker/Model-7B", "rank", "is 16, but {} has 8", "actor.lora.rank=8"),
        ({"alpha": 8.0}, "maker/Model-7B", "alpha", "is 8, but {} has 16", "actor.lora.alpha=16"),
        ({"rslora": True}, "maker/Model-7B", "rslora", "is true, but {} has false", "actor.lora.rslora=false"),
        (
            {"targets": ["q_proj", "o_proj"]},
            "maker/Model-7B",
            "targets",
            "are q_proj, o_proj, but {} has adapters of q_proj, v_proj",
            "actor.lora.targets=[q_proj, v_proj]",
        ),
        ({}, "maker/Model-8B", "path", "{} belongs to the model maker/Model-7B, not to maker/Model-8B", "use maker/Mo"),
    ],
)
def test_a_difference_is_a_problem_with_both_values(
    asked: dict[str, Any], model: str, key: str, what: str, fix: str, tmp_path: Path
) -> None:
    settings = read_peft_settings(written(tmp_path))
    (difference,) = settings.differences("actor", LoraConfig(**{**ASKED, **asked}), model)
    assert difference[:2] == (f"actor.lora.{key}", what.format(tmp_path))
    assert difference[2].startswith(fix)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3, not LORA"),
        ({"use_dora": True}, "only plain low-rank adapters can be used, but use_dora=True"),
        ({"rank_pattern": {"q_proj": 4}}, "modules have different ranks"),
        ({"bias": "all"}, "biases were trained, too"),
        ({"r": None}, "r is None and lora_alpha is 16, not two positive numbers"),
    ],
)
def test_other_kinds_of_adapters_are_refused(values: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=what):
        read_peft_settings(written(tmp_path, **values))


def test_a_directory_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        read_peft_settings(str(tmp_path))
