"""Plans of models that torch shards: bytes of shards and of whole layers, and the layouts that a search tries."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.lora import LoraConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import FsdpConfig, MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.models.adapters import adapter_tensors
from mrl.models.small import small_config
from mrl.plan.known_models import known_config, model_spec
from mrl.plan.shard_layouts import shard_layouts
from mrl.plan.sharded import WholeTensors, copied_bytes, exchanged_bytes, role_activations, role_weights
from tests.plan.planning import subject_of

PRESET = str(Path(__file__).parents[2] / "configs" / "grpo-qwen2.5-7b-fsdp-1n8g.yaml")
SPEC = model_spec("Qwen2.5-7B")


def trained(**fsdp: object) -> TrainedModelConfig:
    return TrainedModelConfig(strategy="fsdp", max_tokens_per_device=1000, fsdp=FsdpConfig(**fsdp))  # type: ignore[arg-type]


def test_a_rank_holds_twelve_bytes_of_each_of_its_parameters() -> None:
    held = role_weights(SPEC, trained(), Mesh(8), "lm", 0)
    assert held.gradients == 0, "they exist only during an update"
    assert held.total == pytest.approx(12 * SPEC.num_parameters / 8, rel=1e-3)
    assert held.checkpoint == held.parameters + held.optimizer
    node = role_weights(SPEC, trained(shard_size=4), Mesh(8), "lm", 0)
    assert node.total == pytest.approx(2 * held.total, rel=1e-3)
    frozen = MegatronModelConfig(strategy="fsdp", max_tokens_per_device=1)
    assert role_weights(SPEC, frozen, Mesh(8), "lm", 0).total == pytest.approx(2 * SPEC.num_parameters / 8, rel=1e-3)


def test_a_frozen_model_has_only_the_state_of_its_adapters() -> None:
    plain, lora = trained(), LoraConfig(rank=32, alpha=64)
    adapted = replace(plain, lora=lora)
    learning = sum(math.prod(shape) for shape in adapter_tensors(SPEC, lora).values())
    held = role_weights(SPEC, adapted, Mesh(8), "lm", 0)
    assert held.parameters == pytest.approx((2 * SPEC.num_parameters + 4 * learning) / 8, rel=1e-3)
    assert held.optimizer == 8 * learning / 8
    assert held.checkpoint == 12 * learning / 8
    whole = WholeTensors.of(SPEC, adapted, "lm")
    assert whole.backward() == whole.weights + whole.in_layer * (2 + 4), "the output matrix has no gradient"
    assert held.building == whole.forward(), "the comparison needs less: only adapters have gradients"
    assert exchanged_bytes(SPEC, adapted, Mesh(8), trains=True) == (4 * SPEC.num_parameters + 4 * learning) * 7 / 8
    assert copied_bytes(SPEC, replace(trained(shard_size=4), lora=lora), Mesh(8)) == learning


def test_whole_weights_are_two_layers_and_the_root() -> None:
    root = 2 * SPEC.vocab * SPEC.hidden + SPEC.hidden
    layer = (SPEC.num_parameters - root) // SPEC.num_layers
    whole, output = WholeTensors.of(SPEC, trained(), "lm"), SPEC.vocab * SPEC.hidden
    assert whole.weights == 2 * (2 * layer + root)
    assert whole.forward() == whole.weights + 2 * root, "the root arrives before layers work"
    assert whole.forward(activations=2 * root) == whole.weights
    in_layers = whole.weights + 2 * output + 2 * layer + 4 * layer
    assert whole.backward(activations=6 * root) == in_layers
    assert whole.backward(activations=6 * root, released=layer) == in_layers - layer
    assert 6 * root > in_layers, "the root's gradient, in both dtypes, without layers"
    assert whole.backward() == 6 * root
    held = role_weights(SPEC, trained(), Mesh(8), "lm", 0)
    assert held.building == 2 * held.parameters + 6 * root, "the comparison of packed rows has two gradients"


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    kept = role_activations(SPEC, trained(recompute=True), 0, 9, "gpu").kept
    assert kept == SPEC.num_layers * 2 * SPEC.hidden * 1000
    assert role_activations(SPEC, trained(), 0, 9, "gpu").kept > 10 * kept


def test_a_micro_batch_exchanges_all_weights() -> None:
    assert exchanged_bytes(SPEC, trained(), Mesh(8), trains=False) == SPEC.num_parameters * 2 * 7 / 8
    assert exchanged_bytes(SPEC, trained(), Mesh(8), trains=True) == SPEC.num_parameters * 8 * 7 / 8


def test_the_preset_fits_and_shows_whole_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "whole weights of two layers and of embedding and head, and whole gradients" in printed
    assert "whole weights and gradients" in printed
    assert "Megatron's flat buffers" not in printed


def test_copies_send_each_other_their_gradients() -> None:
    assert copied_bytes(SPEC, trained(), Mesh(8)) == 0
    assert copied_bytes(SPEC, trained(shard_size=4), Mesh(8)) == 4 * SPEC.num_parameters / 4


def test_a_search_proposes_shards_and_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, "--search", "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "actor.max_tokens_per_device=65536" in printed
    assert "actor.fsdp.shard_size=8" in printed
    assert "actor.parallel.tp" not in printed


def test_copies_of_a_search_divide_the_pool() -> None:
    batch = {"batch.prompts_per_step": 96, "batch.samples_per_update": 384}
    three = subject_of("grpo-qwen2.5-7b-fsdp-1n8g").with_changes_unchecked({"cluster.nodes": 3, **batch})
    sizes = {layout["actor.fsdp.shard_size"] for layout in shard_layouts(three, "actor", 24)}
    assert sizes == {None, 8}, "16 ranks for a copy would leave 8"


def test_a_twin_has_all_kinds_of_layers_and_a_window_shorter_than_its_rows() -> None:
    small = small_config(known_config("Olmo-3-7B"), ParallelConfig())
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert small["sliding_window"] < 16


def test_explain_names_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", PRESET, "actor.fsdp.shard_size=4"]) == 0
    assert "torch shards the model of transformers over 4 ranks, in 2 copies" in capsys.readouterr().out
