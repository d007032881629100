"""A run must learn a reward, and must not learn from unrelated scores: a small version of the demo on Ray and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl

KNOWN_AT_MOST, GOAL, STILL_AT_MOST = 0.10, 0.60, 0.15
"""Shares of digits in the responses. Ten of 263 tokens are digits, so at first the share is about 4 %."""
CONFIG = """\
run: {{dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all{critic_role}}}}}
model: {{path: {model}}}
algorithm: {{advantage: {advantage}}}
batch: {{prompts_per_step: 16, samples_per_prompt: 8, samples_per_update: 64}}
actor: {{dtype: float32, max_tokens_per_device: 2048, optimizer: {{lr: 2e-3, weight_decay: 0.0}}}}
{critic}rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
sync: {{offload: false}}
data:
  train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}
reward:
  functions:
    learnt: {{name: "tests.learning.rewards:{reward}"}}
    digits: {{name: "tests.learning.rewards:digits", weight: 0}}
  num_workers: 1
training: {{steps: {steps}, samples_every: 0}}
"""
CRITIC = "critic: {dtype: float32, max_tokens_per_device: 2048, optimizer: {lr: 2e-3, weight_decay: 0.0}}\n"
STEPS = 16


def shares_of_digits(directory: Path, advantage: str, reward: str) -> list[float]:
    """Run the configuration and return the share of digits at each step."""
    has_critic = advantage == "gae"
    config = directory / "run.yaml"
    values: dict[str, Any] = {"directory": directory, "model": make_model(directory / "model", seed=1)}
    values |= {"advantage": advantage, "reward": reward, "steps": STEPS}
    values |= {"critic": CRITIC if has_critic else "", "critic_role": ", critic: all" if has_critic else ""}
    config.write_text(CONFIG.format(**values))
    run_mrl("train", str(config), "run.name=it")
    return [line["reward/digits/mean"] for line in read_metrics(directory / "it" / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [pytest.param("gae", marks=pytest.mark.on_demand), "grpo"])
def test_what_is_rewarded_is_learned(advantage: str, tmp_path: Path) -> None:
    shares = shares_of_digits(tmp_path, advantage, "digits")
    assert shares[0] <= KNOWN_AT_MOST
    assert sum(shares[-3:]) / 3 >= GOAL, shares


@pytest.mark.slow
@pytest.mark.on_demand
def test_from_somebody_else_s_scores_nothing_is_learned(tmp_path: Path) -> None:
    shares = shares_of_digits(tmp_path, "grpo", "unrelated")
    assert max(shares) <= STILL_AT_MOST, shares
