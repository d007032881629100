"""`mrl plan` agrees with the rehearsal: each phase within 3 % or 0.3 GiB, and nothing stays after an offload.

The plan's own items without a tensor are not compared: the process itself, and blocks that the allocator cannot use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.plan.assumptions import GIB
from mrl.plan.known_models import known_config
from tests.rehearse import large_mixture
from tests.rehearse.held import CONFIGS, PRESETS, held, roles_of

ROLES = [(preset, role) for preset in PRESETS for role in roles_of(CONFIGS / f"{preset}.yaml")]
STAYS = 0.02 * GIB
"""Memory of a role after an offload: angles of the rotary embedding."""


def check(path: Path, role: str, overrides: tuple[str, ...] = ()) -> None:
    for rank in held(path, role, overrides):
        assert rank.differences() == []
        assert rank.after("offload") < STAYS, rank.kind


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("preset", "role"), ROLES)
def test_every_role_of_every_preset_needs_what_is_planned(preset: str, role: str) -> None:
    check(CONFIGS / f"{preset}.yaml", role)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_mixture_of_671b_on_512_devices_needs_what_is_planned(tmp_path: Path) -> None:
    check(large_mixture.write(tmp_path, CONFIGS / "base" / "grpo-large.yaml"), "actor")


def shortened(directory: Path, model: str, num_layers: int) -> Path:
    """Write the sizes of a published model with fewer layers."""
    directory.mkdir()
    values = known_config(model) | {"num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


@pytest.mark.slow
def test_stages_of_a_dense_model_need_what_is_planned(tmp_path: Path) -> None:
    model = shortened(tmp_path / "model", "Qwen2.5-7B", 8)
    check(CONFIGS / "grpo-qwen2.5-7b-1n8g.yaml", "actor", (f"model.path={model}",))


def test_experts_need_what_is_planned(tmp_path: Path) -> None:
    """With 8 experts for each of 2 ranks. All layers are recomputed, and a layer that is finished keeps nothing."""
    model = shortened(tmp_path / "model", "Qwen3-30B-A3B", 8)
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(values | {"num_experts": 16}), encoding="utf-8")
    layout = "{pp: 1, vpp: 1, tp: 2, ep: 2, sequence_parallel: true}"
    check(CONFIGS / "grpo-qwen3-30b-a3b-2n8g.yaml", "actor", (f"model.path={model}", f"actor.parallel={layout}"))


@pytest.mark.parametrize("quantization", [pytest.param("null", marks=pytest.mark.slow), "fp8_per_block"])
def test_adapters_need_what_is_planned(quantization: str, tmp_path: Path) -> None:
    model = shortened(tmp_path / "model", "Llama-3.1-8B", 2)
    changes = (f"model.path={model}", f"actor.lora.base_quantization={quantization}")
    check(CONFIGS / "grpo-llama3.3-70b-lora-1n8g.yaml", "actor", changes)


def test_a_critic_needs_what_is_planned(tmp_path: Path) -> None:
    model = shortened(tmp_path / "model", "Llama-3.1-8B", 4)
    check(CONFIGS / "ppo-llama3.1-8b-1n8g.yaml", "critic", (f"model.path={model}",))


@pytest.mark.slow
def test_a_frozen_teacher_needs_what_is_planned(tmp_path: Path) -> None:
    model = shortened(tmp_path / "model", "Qwen2.5-72B", 4)
    layout = "teacher.parallel={tp: 2, pp: 2, vpp: 1, sequence_parallel: true}"
    check(CONFIGS / "distill-qwen2.5-7b-from-72b-2n8g.yaml", "teacher", (f"teacher.path={model}", layout))


@pytest.mark.slow
def test_a_sharded_model_needs_what_is_planned(tmp_path: Path) -> None:
    """Also while it is loaded and compared with transformers, and when its rows go to engines."""
    model = shortened(tmp_path / "model", "Qwen2.5-7B", 4)
    check(CONFIGS / "grpo-qwen2.5-7b-fsdp-1n8g.yaml", "actor", (f"model.path={model}",))


@pytest.mark.slow
def test_adapters_of_a_sharded_model_need_what_is_planned(tmp_path: Path) -> None:
    model = shortened(tmp_path / "model", "Qwen2.5-7B", 4)
    changes = (f"model.path={model}", "actor.lora={rank: 32, alpha: 64}")
    check(CONFIGS / "grpo-qwen2.5-7b-fsdp-1n8g.yaml", "actor", changes)
