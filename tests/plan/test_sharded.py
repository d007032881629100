"""Plans of models that torch shards: bytes of shards and of whole layers, and commands that refuse the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.mesh import Mesh
from mrl.config.schema import FsdpConfig, MegatronModelConfig, TrainedModelConfig
from mrl.plan.known_models import model_spec
from mrl.plan.sharded import exchanged_bytes, gathered_bytes, role_activations, role_weights

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


def test_whole_weights_are_two_layers_and_the_root() -> None:
    root = 2 * SPEC.vocab * SPEC.hidden + SPEC.hidden
    layer = (SPEC.num_parameters - root) // SPEC.num_layers
    assert gathered_bytes(SPEC, trained(), "lm", backward=False) == 2 * (2 * layer + root)
    assert gathered_bytes(SPEC, trained(), "lm", backward=True) == 2 * (2 * layer + root) + 4 * max(layer, root)


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
    assert "whole weights of two layers and of embedding and head, and the largest whole gradient" in printed
    assert "whole weights and gradients" in printed
    assert "Megatron's flat buffers" not in printed


@pytest.mark.parametrize("command", [["plan", "--search"], ["rehearse"]], ids=" ".join)
def test_commands_for_megatron_refuse_it_by_name(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], PRESET, *command[1:]]) != 0
    said = capsys.readouterr().err
    assert "actor.strategy" in said
    assert "Megatron" in said


def test_explain_names_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", PRESET, "actor.fsdp.shard_size=4"]) == 0
    assert "torch shards the model of transformers over 4 ranks, in 2 copies" in capsys.readouterr().out
