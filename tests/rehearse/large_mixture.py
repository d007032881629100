"""A made-up mixture of experts of 671 billion parameters on 512 GPUs: the largest configuration that is rehearsed."""

from __future__ import annotations

import json
from pathlib import Path

from mrl.plan.known_models import known_config

NAME = "grpo-671b-64n8g"
_SIZES = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
}
_CONFIG = """
extends: {base}
run: {{name: grpo-671b}}
cluster: {{nodes: 64}}
placement: {{pools: {{all: 512}}}}
model: {{path: {model}}}
actor:
  parallel: {{tp: 8, pp: 8, ep: 64, first_stage_layers: 7, last_stage_layers: 6}}
  max_tokens_per_device: 8192
batch: {{prompts_per_step: 512, samples_per_update: 4096}}
rollout: {{tp: 8}}
"""


def write(directory: Path, base: Path) -> Path:
    """Write the model's sizes and its configuration to a directory. Return the configuration's path."""
    model = directory / "model-671b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(known_config("Qwen3-235B-A22B") | _SIZES), encoding="utf-8")
    path = directory / f"{NAME}.yaml"
    path.write_text(_CONFIG.format(base=base, model=model), encoding="utf-8")
    return path
