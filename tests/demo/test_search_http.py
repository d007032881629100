"""The demo's search over HTTP: Search-R1's tags, a retriever in a separate process, and BM25 over its corpus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.data.row_files import read_newest_samples
from mrl.demo.demo import CONFIGS
from mrl.demo.facts import KEYS
from mrl.demo.model import make_model
from mrl.demo.tasks import SEARCH
from mrl.observe.metrics import read_metrics
from tests.apart import retriever, run_mrl
from tests.demo.passages import found, write_corpus

UPDATES, STEPS, EVERY = 700, 40, 20
WARM_UP = """\
extends: {config}
run: {{name: sft, dir: {directory}}}
cluster: {{devices_per_node: 1}}
placement: {{pools: {{laptop: 1}}}}
model: {{path: {directory}/initial}}
data:
  raw_text: true
  train:
    facts:
      dataset: "tests.demo.passages:lessons"
      columns: {{ground_truth: ground_truth, data_source: null, ability: null, extra_info: null}}
batch: {{rows_per_update: 80, max_prompt_tokens: 160, max_response_tokens: 24, messages: null, loss_on: last}}
training: {{steps: {updates}}}
"""
CONFIG = """\
extends: {config}
run: {{name: search, dir: {directory}}}
cluster: {{devices_per_node: 1}}
placement: {{pools: {{laptop: 1}}}}
model: {{path: {directory}/sft/model}}
actor: {{schedule: {{decay_steps: 100}}}}
rollout: {{max_response_tokens: 180}}
data:
  raw_text: true
  train: {{facts: {{dataset: "tests.demo.passages:questions", columns: {columns}}}}}
  validation: {{facts: {{dataset: "tests.demo.passages:questions", columns: {columns}}}}}
agent:
  environments:
    facts:
      name: search_r1
      format: search_r1
      options: {{url: "{url}", topk: 1}}
      max_turns: 3
      max_turn_tokens: 20
      max_observation_tokens: 64
reward: {{functions: {{answer: {{name: exact_match, options: {{tag: answer}}}}}}}}
training: {{steps: {steps}}}
validation: {{every: {every}, samples_per_prompt: 2}}
"""
COLUMNS = "{ground_truth: ground_truth, ability: null, extra_info: null}"
SEARCHED = re.compile(r"<search>(.*?)</search>", re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm-up after which the model sometimes copies from a passage, and enough steps that it always does."""
    directory = tmp_path_factory.mktemp("search")
    make_model(directory / "initial", seed=1, num_layers=SEARCH.num_layers, max_length=256)
    given = {"directory": directory, "updates": UPDATES, "steps": STEPS, "every": EVERY, "columns": COLUMNS}
    with retriever(write_corpus(directory / "corpus.jsonl")) as (_, url):
        for verb, text, config in (("sft", WARM_UP, SEARCH.warm_up), ("train", CONFIG, SEARCH.algorithms["grpo"])):
            path = directory / f"{verb}.yaml"
            path.write_text(text.format(config=CONFIGS / config, url=url, **given))
            run_mrl(verb, str(path))
    return directory / "search"


@pytest.mark.slow
@pytest.mark.on_demand
def test_every_search_is_answered_by_its_passage(run: Path) -> None:
    rows: list[dict[str, Any]] = read_newest_samples(run / "samples", SEARCH.samples_per_step)
    assert len(rows) == SEARCH.samples_per_step, "no conversation was lost"
    searched: list[str] = []
    for row in rows:
        for wrote, read in zip(row["turns"][::2], row["turns"][1::2], strict=False):
            if (search := SEARCHED.search(wrote)) and search[1] in KEYS:
                searched.append(search[1])
                assert wrote.endswith("</search>"), "nothing was written behind it"
                assert read == found(search[1])
    assert len(searched) >= len(rows) / 4, "it searches"
    assert len(set(searched)) >= 16, "for one key and for another"


@pytest.mark.slow
@pytest.mark.on_demand
def test_figures_of_the_steps(run: Path) -> None:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"]]
    assert len(lines) == STEPS
    for line in lines:
        assert line["reward/num_samples"] == SEARCH.samples_per_step
        assert line["reward/facts/searches/mean"] >= 0.25
        assert line["agent/ended/done"] >= 0.5, "most give an answer"
        assert line["agent/retried"] == 0
        assert line["mismatch/log_prob_abs_diff_mean"] <= 1e-5


@pytest.mark.slow
@pytest.mark.on_demand
def test_it_learns_to_search(run: Path) -> None:
    """Like in the demo, on keys that it was never trained on: right answers after one search and after two."""
    before, *_, after = [line for line in read_metrics(run / "metrics.jsonl") if "val/solved/mean@2" in line]
    assert before["step"] == 0
    assert before["val/solved/mean@2"] <= 0.4
    assert after["val/solved/mean@2"] >= 0.85
    assert after["val/hops-2/solved/mean@2"] >= 0.75
