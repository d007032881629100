"""Run presets from their files through Ray and vLLM: a set that covers all families, placements and switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.schema import Config
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl
from tests.hub import make_hub_cache
from tests.presets.twins import CONFIGS, presets, switches
from tests.presets.whole import NOT_ON_A_CPU, overrides, write_data, write_model

WHOLE = {name: config for name, config in presets().items() if isinstance(config, Config) and "toy:" not in str(config)}
"""Presets with a model name and data files. The README has the others and is tested separately."""
COVERING = {
    "grpo-qwen2.5-0.5b-1n1g",
    "ppo-llama3.1-8b-1n8g",
    "grpo-qwen3-32b-4n8g",
    "grpo-qwen2.5-7b-async-2n8g",
    "grpo-qwen3-8b-32k-4n8g",
    "grpo-qwen3-30b-a3b-2n8g",
    "grpo-mixtral-8x22b-8n8g",
    "distill-qwen2.5-7b-from-72b-2n8g",
}


EVERY_TIME = ("grpo-qwen3-30b-a3b-2n8g", "distill-qwen2.5-7b-from-72b-2n8g")
"""The presets that run in each CI run: experts, and a teacher."""


def traits(name: str) -> set[str]:
    """Return the features that a run of this preset uses."""
    config = WHOLE[name]
    roles = " and ".join(sorted(config.model_roles()))
    family = config.model.path.rpartition("/")[2].split("-")[0]
    kinds = {
        kind
        for role in config.model_roles().values()
        for kind in ("tp", "pp", "vpp", "cp", "ep", "etp")
        if getattr(role.parallel, kind) > 1
    }
    passed_on = set().union(*(switches(role) for role in config.model_roles().values()))
    vllm = {f"vllm.{key}" for key in config.rollout.vllm if key not in NOT_ON_A_CPU}
    pools = "apart" if len(config.placement.pools) > 1 else "colocated"
    return {family, f"{roles} {pools}", f"kl in the {config.algorithm.kl.where}", *kinds, *passed_on, *vllm}


def test_the_covering_set_has_everything_that_a_preset_has() -> None:
    covered = set().union(*(traits(name) for name in COVERING))
    for name in WHOLE:
        assert traits(name) <= covered, f"{name}: {traits(name) - covered}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.on_demand, id=name) for name in WHOLE],
)
def test_a_preset_starts_by_its_names_and_does_three_steps(name: str, tmp_path: Path) -> None:
    config = WHOLE[name]
    for role in {"actor", "teacher"} & config.model_roles().keys():
        make_hub_cache(tmp_path / "hub", config.model_of(role)[1], write_model(config, tmp_path / role, role))
    write_data(config, tmp_path)
    preset = str(CONFIGS / f"{name}.yaml")
    run_mrl("train", preset, *overrides(config), cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"))
    lines = read_metrics(tmp_path / config.run.dir / config.run.name / "metrics.jsonl")
    assert [line["step"] for line in lines if line["step"]] == [1, 2, 3]
    for line in lines:
        if line["step"]:
            assert line["actor/grad_norm"] > 0
            difference = line.get("mismatch/log_prob_abs_diff_mean", line.get("actor/rollout_diff"))
            if not line.get("async/staleness/max"):  # otherwise the policy has changed since
                assert difference < 1e-5, "engine and trainer disagree on log-probs"
