"""Run presets from their files through Ray and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.schema import Config
from mrl.observe.metrics import read_metrics
from tests.apart import ROOT, run_mrl
from tests.hub import make_hub_cache
from tests.models.torchvision_stand_in import provide
from tests.presets.twins import CONFIGS, presets
from tests.presets.whole import overrides, write_data, write_model
from tests.rollout.test_engine_conformance import SGLANG

WHOLE = {name: config for name, config in presets().items() if isinstance(config, Config) and "toy:" not in str(config)}
"""Presets with a model name and data files. The README has the others and is tested separately."""
EVERY_TIME = "grpo-qwen3-30b-a3b-2n8g"
"""The preset that runs in each CI run, with experts and router replay."""


def needed(config: Config) -> tuple[pytest.MarkDecorator, ...]:
    return SGLANG if config.rollout.engine == "sglang" else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == EVERY_TIME else (pytest.mark.on_demand, *needed(config)), id=name)
        for name, config in WHOLE.items()
    ],
)
def test_a_preset_starts_by_its_names_and_does_three_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WHOLE[name]
    for role in {"actor", "teacher"} & config.model_roles().keys():
        make_hub_cache(tmp_path / "hub", config.model_of(role)[1], write_model(config, tmp_path / role, role))
    write_data(config, tmp_path)
    preset = str(CONFIGS / f"{name}.yaml")
    has_experts = name == EVERY_TIME
    replay = ["algorithm.router_replay=R3", "rollout.vllm.enable_prefix_caching=false"] if has_experts else []
    variables = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    if "qwen3.5" in name:
        provide(tmp_path / "stand-in", monkeypatch)
        variables["PYTHONPATH"] = f"{tmp_path / 'stand-in'}:{ROOT}"
    run_mrl("train", preset, *overrides(config), *replay, cwd=tmp_path, **variables)
    lines = read_metrics(tmp_path / config.run.dir / config.run.name / "metrics.jsonl")
    assert [line["step"] for line in lines if line["step"]] == [1, 2, 3]
    for line in lines:
        if line["step"]:
            assert line["actor/grad_norm"] > 0
            if has_experts:
                assert line["mismatch/other_experts"] == 0, "in float32, the trainer would choose the engine's experts"
                assert line["actor/other_experts"] > 0, "the second update of a step begins with other weights"
            difference = line.get("mismatch/log_prob_abs_diff_mean", line.get("actor/rollout_diff"))
            if not line.get("async/staleness/max"):  # otherwise the policy has changed since
                assert difference < (0.1 if "qwen3.5" in name else 1e-5), "engine and trainer disagree on log-probs"
