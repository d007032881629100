"""A run whose engine stores its weights in a form that only vLLM's own loaders know. It gets whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.events import ReplicaServes, Warned, read_events
from tests.trainer.test_ppo import CONFIG, train


@pytest.mark.slow
def test_a_quantised_engine_follows_the_trainer_over_whole_tensors(tmp_path: Path) -> None:
    """Each rank of the engine quantizes the weights itself. Its samples are close to the trainer's, but not equal."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    vllm = ("rollout.tp=2", "rollout.vllm.quantization=fp8_per_channel", "rollout.vllm.dtype=bfloat16")
    vllm += ("algorithm.correction={upper: 2.0}",)
    lines, printed = train(config, "quantised", "training.steps=3", "sync.probe_tolerance=0.2", *vllm)
    events = [each.event for each in read_events(tmp_path / "runs" / "quantised" / "events.jsonl")]
    said = [event.message for event in events if isinstance(event, Warned) and event.about == "rollout"]
    assert len(said) == 1
    assert said[0].startswith("weights travel as whole tensors: ")
    assert "is stored by Fp8" in said[0]
    assert printed.count("weights travel as whole tensors") == 1
    assert [event.weight_version for event in events if isinstance(event, ReplicaServes)] == [1, 2, 3]
    for line in lines:
        assert line["sync/bytes_between_ranks"] == line["sync/least_bytes"] > 0
        assert 1e-4 < line["mismatch/log_prob_abs_diff_mean"] < 0.2
