"""Weights of each family in a running SGLang engine: after every update, samples equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_models import tiny_config
from tests.rollout import small_models
from tests.rollout.small_models import make_small
from tests.rollout.test_engine_conformance import SGLANG
from tests.rollout.test_vllm_weights import Make, assert_follows

pytestmark = [*SGLANG, pytest.mark.on_demand]
MODELS = [("qwen3_moe", False, 1), ("qwen2", True, 1), ("llama", False, 1), ("qwen3", True, 2), ("qwen3_moe", False, 2)]


def config(family: str) -> Any:
    """Return a tiny configuration with sizes that SGLang does not pad on a CPU, and experts in each layer."""
    made = tiny_config(family)
    made.intermediate_size, made.num_key_value_heads = 128, 2
    if family == "qwen3_moe":
        made.moe_intermediate_size, made.mlp_only_layers = 128, []
    return made


@pytest.mark.parametrize(("family", "tied", "tp"), MODELS)
def test_new_weights_are_the_ones_in_use(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool, tp: int
) -> None:
    monkeypatch.setattr(small_models, "tiny_config", config)
    models = [make_small(family, tmp_path / str(seed), seed, tied) for seed in range(3)]
    engine = make_engine("sglang", models[0], tp=tp)
    try:
        assert_follows(engine, make_engine("transformers", models[0]), models[1:])
    finally:
        engine.close()
