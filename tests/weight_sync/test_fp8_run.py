"""A run whose engine keeps its weights in FP8. Each rank of the engine gets its shards, and quantizes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.events import ReplicaServes, Warned, read_events
from tests.trainer.test_ppo import CONFIG, train


@pytest.mark.slow
@pytest.mark.on_demand
def test_an_engine_in_fp8_follows_the_trainer_with_shards(tmp_path: Path) -> None:
    """Its samples are close to the trainer's, but not equal. The shards are those of an engine in bfloat16."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    vllm = ("rollout.tp=2", "rollout.vllm.quantization=fp8_per_channel", "rollout.vllm.dtype=bfloat16")
    vllm += ("algorithm.correction={upper: 2.0}",)
    lines, _ = train(config, "quantised", "training.steps=3", "sync.probe_tolerance=0.2", *vllm)
    events = [each.event for each in read_events(tmp_path / "runs" / "quantised" / "events.jsonl")]
    assert not [event for event in events if isinstance(event, Warned) and "whole tensors" in event.message]
    assert [event.weight_version for event in events if isinstance(event, ReplicaServes)] == [1, 2, 3]
    for line in lines:
        assert line["sync/bytes_between_ranks"] == line["sync/least_bytes"]
        assert 1e-4 < line["mismatch/log_prob_abs_diff_mean"] < 0.2
