"""The demo's search with real engines and a real trainer: some updates of its warm-up, then two steps."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mrl.data.chat import load_tokenizer
from mrl.data.row_files import read_newest_samples
from mrl.demo.demo import CONFIGS, DemoSettings, demo_yaml
from mrl.demo.model import make_model
from mrl.demo.tasks import SEARCH
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl

SAME = 1e-5
"""Allowed difference between log-probs of engine and trainer, in float32."""
UPDATES, STEPS = 100, 2
TURN = r"[^<]*<\|end\|>"
ANSWERED = rf"(<\|end\|>)?<\|tool\|>{TURN}<\|assistant\|>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("search")
    initial = make_model(directory / "initial", seed=1, num_layers=SEARCH.num_layers)
    values = [f"run.dir={directory}", f"model.path={initial}", f"training.steps={UPDATES}"]
    run_mrl("sft", str(CONFIGS / SEARCH.warm_up), *values, "cluster.devices_per_node=1", "placement.pools.laptop=1")
    settings = DemoSettings(directory, algorithm="grpo", tp=1, steps=STEPS, task=SEARCH)
    config = directory / "demo.yaml"
    config.write_text(demo_yaml(settings, directory / "sft" / "model", config))
    run_mrl("train", str(config), "training.dump_steps=[1]", "validation.every=0")
    return directory / SEARCH.run


def rows_of(run: Path) -> list[dict[str, Any]]:
    return read_newest_samples(run / "tensors", SEARCH.samples_per_step)


@pytest.mark.slow
@pytest.mark.on_demand
def test_what_the_model_wrote_is_masked_in_and_what_it_was_answered_out(run: Path) -> None:
    tokenizer = load_tokenizer(str(run.parent / "initial"))
    rows = rows_of(run)
    assert len(rows) == SEARCH.samples_per_step, "no conversation was lost"
    num_answers = 0
    for row in rows:
        ids, mask = row["responses"], row["response_mask"]
        changes = [0, *(at for at in range(1, len(ids)) if mask[at] != mask[at - 1]), len(ids)]
        for number, (begin, end) in enumerate(pairwise(changes)):
            text = tokenizer.decode(ids[begin:end])
            assert bool(mask[begin]) == (number % 2 == 0), "the model begins, and is answered in turns"
            assert mask[begin] or re.fullmatch(ANSWERED, text), text
            num_answers += not mask[begin]
        assert mask[-1], "the last word is the model's"
    assert num_answers >= len(rows) / 4, "it searches"


@pytest.mark.slow
@pytest.mark.on_demand
def test_the_engine_s_log_probs_of_all_turns_are_those_of_the_trainer(run: Path) -> None:
    for row in rows_of(run):
        columns = row["response_mask"], row["old_log_probs"], row["rollout_log_probs"]
        for is_written, trainer, engine in zip(*columns, strict=True):
            assert abs(trainer - engine) <= SAME if is_written else math.isnan(engine)


@pytest.mark.slow
@pytest.mark.on_demand
def test_figures_of_the_steps(run: Path) -> None:
    for line in read_metrics(run / "metrics.jsonl"):
        assert line["mismatch/log_prob_abs_diff_mean"] <= SAME
        assert 0.25 <= line["agent/calls/mean"] <= 3
        assert line["agent/turns/mean"] == pytest.approx(line["agent/calls/mean"] + 1, abs=0.2)
        assert 0 < line["agent/observed_share"] < 1
        assert line["reward/failed_share"] == 0
        assert line["critic/score/mean"] == line["reward/facts/mean"]
