"""Settings of gpt-oss that Megatron, vLLM or mrl cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mrl.config.resolved.load import load_config
from mrl.errors import ConfigError
from tests.models import published

GRPO = [
    "cluster={nodes: 1, devices_per_node: 16, device: cpu}",
    "placement={pools: {train: 16}, roles: {actor: train, critic: null}}",
    "critic=null",
    "algorithm={advantage: grpo}",
    "actor.parallel={tp: 2, sequence_parallel: true}",
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.parallel={tp: 2, etp: 2, sequence_parallel: true}", "Megatron does not split experts with biases"),
        ("actor.parallel={tp: 16, sequence_parallel: true}", "16, but gpt-oss has 8 key-value heads, and vLLM"),
        ("rollout.tp=16", "16, but gpt-oss has 8 key-value heads, and vLLM"),
        ("actor.lora={rank: 8, alpha: 16}", "in vLLM, adapters of gpt-oss have not been compared"),
        (
            "actor.lora={rank: 8, alpha: 16, sync: merged, targets: [q_proj, up_proj]}",
            "up_proj, but gpt-oss has no",
        ),
    ],
)
def test_what_gpt_oss_cannot_do_is_refused(valid: str, write: Callable[..., str], setting: str, message: str) -> None:
    write(json.dumps(published.GPT_OSS_20B), "tiny/model/config.json")
    load_config(write(valid), GRPO)
    with pytest.raises(ConfigError, match=message):
        load_config(write(valid), [*GRPO, setting])
