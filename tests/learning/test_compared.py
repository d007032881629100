"""`mrl compare` with real runs: a smaller learning rate is worse, and a configuration is no better than itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.compare import EXIT_UNDECIDED
from mrl.demo.model import make_model
from tests.apart import run_mrl
from tests.learning.test_learning import CONFIG

VALIDATED = (
    'data.validation={sums: {dataset: "toy:addition", options: {part: validation}}}',
    "validation={every: 8, first: false, samples_per_prompt: 2}",
)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_smaller_learning_rate_is_worse_and_nothing_is_better_than_itself(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    values: dict[str, Any] = {"directory": tmp_path, "model": make_model(tmp_path / "model", seed=1)}
    values |= {"advantage": "grpo", "reward": "digits", "steps": 8, "critic": "", "critic_role": ""}
    config.write_text(CONFIG.format(**values))
    command = ("compare", str(config), str(config), *VALIDATED, "--seeds", "3")
    run_mrl(*command, "--b", "actor.optimizer.lr=1e-5", "--name", "rates")
    found = json.loads((tmp_path / "rates" / "comparison.json").read_text())
    assert found["verdict"].startswith("B is worse than A"), found
    assert len(found["pairs"]) == 3
    assert all(a > b for a, b in found["pairs"])
    assert len({a for a, _ in found["pairs"]}) == 3, "each pair has its own seed"
    a, b = tmp_path / "rates" / "a-0", tmp_path / "rates" / "b-0"
    assert "B scores lower" in run_mrl("compare", str(a), str(b))
    printed = run_mrl(*command, "--name", "same", "training.steps=1", exit_code=EXIT_UNDECIDED)
    assert "no difference seen: A and B are equal in each pair" in printed
