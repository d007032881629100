"""Each preset's models train like a plain run: three steps of the twin against one rank without any switch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.verify.layout import verify_layout
from mrl.verify.parity import OPTIMIZER
from tests.presets.twins import presets, switches, training_twin, training_twins

TWINS = training_twins()
QUICK = {"grpo-qwen3-30b-a3b-2n8g:actor"}
SLOW = {
    "distill-qwen2.5-7b-from-72b-2n8g:actor",
    "ppo-llama3.1-8b-1n8g:critic",
    "grpo-mixtral-8x22b-8n8g:actor",
    "grpo-qwen3-8b-32k-4n8g:actor",
}
"""Together with QUICK these cover each switch and each kind of parallelism."""
MAX_PARAMETER_DIFFERENCE = 0.01 * 3 * OPTIMIZER["lr"]
"""A hundredth of the distance that three steps of Adam move."""


def marked(name: str) -> object:
    marks = () if name in QUICK else (pytest.mark.slow,) if name in SLOW else (pytest.mark.slow, pytest.mark.on_demand)
    return pytest.param(name, marks=marks, id=name)


def test_every_preset_has_its_twin() -> None:
    for preset, config in presets().items():
        for role in config.model_roles():
            assert training_twin(config, role) in TWINS.values(), f"{preset}:{role}"


def test_every_switch_and_kind_of_parallelism_is_tried_in_every_run_of_the_tests() -> None:
    tried = [TWINS[name] for name in QUICK | SLOW]
    for name, twin in TWINS.items():
        missing = switches(twin.settings) - set().union(*(switches(other.settings) for other in tried))
        assert not missing, f"{name}: {missing}"
        for kind in ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel"):
            size = getattr(twin.settings.parallel, kind)
            assert any(getattr(other.settings.parallel, kind) == size for other in tried), f"{name}: {kind} {size}"


@pytest.mark.parametrize("name", [marked(name) for name in TWINS])
def test_a_preset_trains_as_a_plain_run_does(name: str, tmp_path: Path) -> None:
    twin = TWINS[name]
    result = verify_layout(twin.values, twin.head, twin.settings, twin.num_ranks, tmp_path / "model")
    print(f"{name}: {result}")
    assert result.is_right, result
    assert result.parameters < MAX_PARAMETER_DIFFERENCE
