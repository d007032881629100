"""Presets as subjects, with the devices that each is meant for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.resolved.load import load_config
from mrl.plan.plan_input import PlanInput, make_plan_input

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(
    path.stem for path in CONFIGS.glob("*.yaml") if path.stem.startswith(("dapo", "grpo", "ppo", "distill"))
)
REWARD_MODEL = {
    "reward_model": "{path: meta-llama/Llama-3.1-8B, max_tokens_per_device: 16384}",
    "placement__roles__reward_model": "all",
}
_ON_H200 = ("405b", "235b-a22b-lora", "235b-a22b-fp8")
HARDWARE = {preset: "h200" if any(name in preset for name in _ON_H200) else "h100" for preset in PRESETS}


@cache
def subject_of(preset: str, **changes: Any) -> PlanInput:
    """A preset with other values: `actor__parallel__tp=2`."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return make_plan_input(load_config(str(CONFIGS / f"{preset}.yaml"), overrides), HARDWARE[preset])
