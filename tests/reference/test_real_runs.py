"""Whole runs with Ray's processes and a vLLM engine: recorded, judged, and compared with the reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.load import load_config
from tests.apart import run_python
from tests.reference.compare import hold, too_large
from tests.reference.judge import Judge
from tests.reference.matrix import make_case
from tests.reference.models import make_models
from tests.reference.rewards import FUNCTION

PLAIN = {
    "gamma": (1.0, 1.0),
    "in_reward": "k1",
    "in_loss": "k3",
    "policy": "ppo",
    "aggregation": "token-mean",
    "clip": (0.1, 0.2, 3.0),
    "temperature": 0.7,
    "updates": "2 updates",
    "schedule": "warmup linear",
    "entropy": 0.01,
    "correction": None,
    "sampling": "plain",
    "mask": False,
    "reward_model": None,
    "distillation": None,
    "resume": False,
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo-1": (
        {"advantage": "gae", "kl": "both adaptive", "whiten": True, "value_clip": 0.05, "warmup": 1, "head": "made"},
        {"parallel": {"tp": 2}},
    ),
    "masked-3": ({"advantage": "grpo", "kl": "both", "drawn_from": (12, 0.8)}, {"parallel": {"tp": 2}}),
    "remax-2": ({"advantage": "remax", "kl": "loss", "correction": ("token", "truncate"), "updates": "1 update"}, {}),
}
"""Options in addition to PLAIN, and settings of the actor, by name of the run. Each run has two devices."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ppo-1", *(pytest.param(run, marks=pytest.mark.on_demand) for run in ("masked-3", "remax-2"))]
)
def test_a_real_run_is_the_reference_s(name: str, tmp_path: Path) -> None:
    make_models(tmp_path / "models")
    options, own = RUNS[name]
    values = make_case(name, PLAIN | options, tmp_path / "models", num_ranks=2).values
    values |= {"run": {"name": name, "dir": str(tmp_path)}, "sync": {"probe_tolerance": 1e-4}}
    values["actor"] |= own
    values["rollout"] |= {"vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}}
    values["training"] |= {"save_every": 1, "keep": 3}
    config, file = tmp_path / "run.yaml", tmp_path / "recorded.json"
    config.write_text(json.dumps(values))
    run_python("-m", "tests.reference.record_run", str(config), str(file))
    recorded = json.loads(file.read_text())
    plain = dataclasses.asdict(load_config(str(config)).config)
    Judge(plain).judge(recorded)
    differences = hold(plain, recorded, FUNCTION)
    assert not too_large(differences)
    assert len(recorded["steps"]) == 3
    mismatch = [line["mismatch/k3_kl"] for line in recorded["metrics"] if line["step"] > 0]
    assert max(mismatch) < 1e-6, "the engine and the trainer compute the same distributions"
