"""Adapters of a running vLLM engine: new versions without the frozen weights, also between two tokens of a sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.lora import LoraConfig
from mrl.engine.adapter_files import merge_peft, write_peft
from mrl.errors import RolloutError
from mrl.models.adapters import adapter_tensors
from mrl.models.families import read_spec
from mrl.models.spec import ModelSpec
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Sampling
from mrl.weight_sync.vllm_adapters import adapter_directory, adapters_digest, num_pairs
from tests.models.tiny_models import tiny_config
from tests.rollout.conftest import Small, requests, run
from tests.rollout.test_in_flight import AT, finished, log_probs
from tests.rollout.trainer_side import update

LORA = LoraConfig(rank=4, alpha=8)
WANTED = requests(2, 2, 20)


def write_version(engine: RolloutEngine, base: Path, version: int) -> Path:
    """Write random adapters as the trainer does. Return their directory."""
    noise = torch.Generator().manual_seed(version)
    shapes = adapter_tensors(read_spec(base), LORA)
    tensors = {name: 0.3 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    directory = adapter_directory(engine.settings.sockets, version)
    write_peft(directory, tensors, LORA, str(base))
    return directory


def merged(base: Path, adapters: Path) -> Path:
    target = adapters.with_name(f"merged-{adapters.name}")
    merge_peft(str(adapters), base, torch.float32, target)
    return target


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    made = make_engine("vllm", small("qwen3"), in_flight=True, adapter_rank=LORA.rank)
    write_version(made, small("qwen3"), 1)
    update(made, small("qwen3"), 1)
    return made


def test_versions_after_the_first_need_the_adapters_only(engine: RolloutEngine, small: Small) -> None:
    base = small("qwen3")
    for version in (2, 3):
        adapters = write_version(engine, base, version)
        engine.receive_weights(version, adapters_only=True)
        assert engine.adapter_digest == adapters_digest(adapters / "adapter_model.safetensors")
        whole = merged(base, adapters)
        for sample in run(engine, WANTED, Sampling()).values():
            request = next(request for request in WANTED if request.key == sample.key)
            np.testing.assert_allclose(sample.log_probs, log_probs(whole, request, sample), rtol=0, atol=1e-4)


def test_samples_under_way_continue_with_the_new_adapters(engine: RolloutEngine, small: Small) -> None:
    base = small("qwen3")
    models = []
    for version in (4, 5):
        adapters = write_version(engine, base, version)
        models.append(merged(base, adapters))
        engine.receive_weights(version, "recompute", adapters_only=True)
        if version == 4:
            engine.start(WANTED, Sampling())
            for _ in range(AT):
                assert engine.step() == []
    samples = finished(engine)
    for request in WANTED:
        sample = samples[request.key]
        assert (sample.weight_version, sample.switches) == (4, ((AT, 5),))
        old, new = (log_probs(model, request, sample) for model in models)
        np.testing.assert_allclose(sample.log_probs[:AT], old[:AT], rtol=0, atol=1e-4)
        np.testing.assert_allclose(sample.log_probs[AT:], new[AT:], rtol=0, atol=1e-4)
        assert np.abs(old - new).min() > 1e-4, "the two models can be told apart at every token"


def test_frozen_weights_that_have_changed_are_named(engine: Any, small: Small) -> None:
    def spoil(worker: Any) -> None:
        worker.model_runner.model.model.norm.weight.data[3] += 1e-3

    engine._engine.collective_rpc(spoil)
    write_version(engine, small("qwen3"), 6)
    with pytest.raises(RolloutError, match=r"1 frozen parameters have changed since they arrived: model\.norm\.weight"):
        engine.receive_weights(6, adapters_only=True)
    assert engine.weight_version is None
    update(engine, small("qwen3"), 6)
    write_version(engine, small("qwen3"), 7)
    engine.receive_weights(7, adapters_only=True)


def test_adapters_that_are_not_there_are_an_error(engine: RolloutEngine, small: Small) -> None:
    shutil.rmtree(write_version(engine, small("qwen3"), 8))
    with pytest.raises(Exception, match="adapters-8"):
        engine.receive_weights(8, adapters_only=True)
    assert engine.weight_version is None


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.on_demand)])
def test_each_stage_applies_the_adapters_of_its_layers(
    make_engine: Callable[..., RolloutEngine], small: Small, tp: int, pp: int
) -> None:
    base = small("qwen3")
    engine: Any = make_engine("vllm", base, tp, in_flight=True, adapter_rank=LORA.rank, pp=pp)
    models = [merged(base, write_version(engine, base, version)) for version in (1, 2, 3)]
    update(engine, base, 1)
    engine.receive_weights(2, adapters_only=True)
    file = adapter_directory(engine.settings.sockets, 2) / "adapter_model.safetensors"
    assert engine.adapter_digest == adapters_digest(file)
    for sample in run(engine, WANTED, Sampling()).values():
        request = next(request for request in WANTED if request.key == sample.key)
        np.testing.assert_allclose(sample.log_probs, log_probs(models[1], request, sample), rtol=0, atol=1e-4)
    engine.start(WANTED, Sampling())
    for _ in range(AT):
        assert engine.step() == []
    engine.receive_weights(3, "recompute", adapters_only=True)
    for key, sample in finished(engine).items():
        request = next(request for request in WANTED if request.key == key)
        ((first, version),) = sample.switches
        assert version == 3
        old, new = (log_probs(model, request, sample) for model in models[1:])
        np.testing.assert_allclose(sample.log_probs[:first], old[:first], rtol=0, atol=1e-4)
        np.testing.assert_allclose(sample.log_probs[first:], new[first:], rtol=0, atol=1e-4)
        assert np.abs(old - new).min() > 1e-4, "the two models can be told apart at every token"


def test_a_stage_counts_the_adapters_of_its_layers(small: Small, tmp_path: Path) -> None:
    """A slot that holds the pairs of too few layers is an error, also in an engine with stages."""
    spec = read_spec(small("qwen3"))
    tensors = {name: torch.zeros(shape) for name, shape in adapter_tensors(spec, LORA).items()}
    write_peft(tmp_path, tensors, LORA, "base")
    file = tmp_path / "adapter_model.safetensors"
    whole = num_pairs(file, range(spec.num_layers))
    assert whole == len(tensors) / 2
    for layers in (range(1), range(1, spec.num_layers)):
        assert num_pairs(file, layers) == whole * len(layers) / spec.num_layers


@pytest.mark.slow
def test_adapters_of_latents_are_what_is_computed_with(
    make_engine: Callable[..., RolloutEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, vLLM applies no adapters next to experts, so no layer of this model has any."""
    monkeypatch.setattr(ModelSpec, "__post_init__", lambda spec: None)
    config = tiny_config("deepseek_v3")
    config.first_k_dense_replace = config.num_hidden_layers
    torch.manual_seed(1)
    base = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    engine = make_engine("vllm", base, adapter_rank=LORA.rank)
    models = [merged(base, write_version(engine, base, version)) for version in (1, 2)]
    update(engine, base, 1)
    engine.receive_weights(2, adapters_only=True)
    for sample in run(engine, WANTED, Sampling()).values():
        request = next(request for request in WANTED if request.key == sample.key)
        np.testing.assert_allclose(sample.log_probs, log_probs(models[1], request, sample), rtol=0, atol=5e-4)
        assert np.abs(sample.log_probs - log_probs(base, request, sample)).max() > 0.1
