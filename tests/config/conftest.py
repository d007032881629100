"""A small valid configuration, and a function that writes variants of it to the current directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

VALID = """\
run:
  name: demo
cluster:
  devices_per_node: 4
  device: cpu
placement:
  pools:
    train: 4
  roles: {actor: train, critic: train}
model:
  path: tiny/model
algorithm:
  advantage: gae
  kl: {where: loss}
batch:
  prompts_per_step: 8
  samples_per_prompt: 4
  samples_per_update: 16
actor:
  parallel: {tp: 2}
  max_tokens_per_device: 1024
  optimizer: {lr: 1e-6}
critic:
  parallel: {tp: 2}
  max_tokens_per_device: 1024
data: {train: {sums: {dataset: "toy:addition"}}}
reward: {functions: {answer: {name: gsm8k}}}
training: {steps: 10}
rollout:
  max_prompt_tokens: 256
  max_response_tokens: 256
"""


@pytest.fixture
def valid() -> str:
    """Text of a configuration that passes every check."""
    return VALID


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Function that writes a configuration into an empty current directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes, name: str = "run.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write_file
