"""New weights arrive during conversations: each conversation continues, and the run is reproducible bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.data.row_files import read_newest_samples
from mrl.observe.metrics import read_metrics
from tests.agents.test_segments_run import SAMPLES, trained
from tests.apart import run_mrl, untimed

IN_FLIGHT = (
    "placement={pools: {all: 1, engines: 1}, roles: {actor: all, rollout: engines}}",
    "algorithm.correction={level: token, upper: 2.0}",
    "asynchrony={ahead: 2, weights: in_flight}",
    "rollout.max_response_tokens=48",
    "training.steps=5",
)


@pytest.mark.slow
@pytest.mark.on_demand
def test_conversations_go_on_with_newer_weights_and_a_slow_tool_delays_its_own_alone(tmp_path: Path) -> None:
    run = trained(tmp_path, '{name: "tests.agents.worlds:Waiting", max_turns: 4, max_turn_tokens: 8}', *IN_FLIGHT)
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["batch/samples"] for line in lines] == [SAMPLES] * 5
    assert max(line["async/versions_per_sample"] for line in lines) > 1, "no conversation met newer weights"
    assert max(line["async/staleness/max"] for line in lines) <= 2
    # Conversations of six seconds and more: one behind the other, five steps of them took half a minute.
    assert sum(line["timing_s/step"] for line in lines[1:]) < 4 * 6.0
    rows: list[dict[str, Any]] = read_newest_samples(run / "tensors", SAMPLES)
    assert all(sum(row["response_mask"]) == row["scores"] for row in rows), "a token too many or too few"

    run_mrl("train", "--replay", str(run))
    assert untimed(run.with_name("agents-replay")) == untimed(run)
