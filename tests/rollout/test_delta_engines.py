"""Weight updates of vLLM engines of models with the gated delta rule.

On CPUs vLLM computes it in bfloat16 only, so the oracle is another vLLM engine, which reads the same weights from their
files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.models.families import read_spec
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Generated, Sampling
from tests.models.torchvision_stand_in import provide
from tests.rollout.conftest import Small, requests, run
from tests.rollout.trainer_side import update

SAMPLING = Sampling(temperature=0.9)
Make = Callable[..., RolloutEngine]
Samples = dict[str, Generated]


@pytest.fixture(scope="module", autouse=True)
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        provide(tmp_path_factory.mktemp("torchvision"), patch)
        yield


def samples(engine: RolloutEngine) -> Samples:
    return run(engine, requests(3, 2, 12), SAMPLING)


def are_same(ours: Samples, theirs: Samples) -> bool:
    return all(
        np.array_equal(ours[key].token_ids, theirs[key].token_ids)
        and np.array_equal(ours[key].log_probs, theirs[key].log_probs)
        for key in theirs
    )


def fresh(make_engine: Make, model: Path, tp: int) -> Samples:
    """Return the samples of an engine that has read the weights itself. Its version number is only a name."""
    engine = make_engine("vllm", model, tp, dtype="bfloat16", loads_files=True)
    engine.weight_version = 1
    return samples(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3_5_text", 1, marks=pytest.mark.on_demand),
        ("qwen3_5_moe_text", 1),
        pytest.param("qwen3_5_moe_text", 2, marks=pytest.mark.on_demand),
        pytest.param("qwen3_next", 2, marks=pytest.mark.on_demand),
    ],
)
def test_an_updated_engine_equals_one_that_has_read_the_weights(
    make_engine: Make, small: Small, monkeypatch: pytest.MonkeyPatch, family: str, tp: int
) -> None:
    expected = [fresh(make_engine, small(family, seed), tp) for seed in (1, 2)]
    engine = make_engine("vllm", small(family), tp, dtype="bfloat16")
    assert not engine.full_tensor_reason
    for version, samples_of in enumerate(expected, start=1):
        update(engine, small(family, version), version)
        assert are_same(samples(engine), samples_of)
    monkeypatch.setattr(engine, "full_tensor_reason", "the test wants it")
    update(engine, small(family, 1), 3)
    assert are_same(samples(engine), expected[0])
    assert not are_same(expected[0], expected[1])


def with_vision(text: Path, target: Path) -> Path:
    """Save a language model as the part of a model with vision that its published files are."""
    shutil.copytree(text, target)
    tensors = load_file(text / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    wrapped |= {"model.visual.patch_embed.proj.weight": torch.zeros(4, 4), "mtp.fc.weight": torch.zeros(4, 4)}
    save_file(wrapped, target / "model.safetensors", {"format": "pt"})
    config = json.loads((text / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    (target / "config.json").write_text(json.dumps(whole | {"text_config": config}))
    return target


@pytest.mark.slow
def test_an_engine_of_a_model_with_vision_computes_with_the_text_that_it_is_sent(
    make_engine: Make, small: Small, tmp_path: Path
) -> None:
    text = small("qwen3_5_text", 1)
    expected = fresh(make_engine, text, 1)
    model = with_vision(text, tmp_path / "model")
    assert read_spec(model).family == "qwen3_5_text"
    engine = make_engine("vllm", model, 1, dtype="bfloat16")
    update(engine, model, 1)
    assert are_same(samples(engine), expected)
