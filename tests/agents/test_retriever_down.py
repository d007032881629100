"""A whole run whose retriever dies during a step and comes back: no conversation gets a score of 0 for that."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from mrl.demo.model import make_model
from mrl.events import Event, Retried, read_events
from mrl.observe.metrics import read_metrics
from tests.agents.searching import PASSAGE
from tests.apart import retriever, run_mrl

Kind = TypeVar("Kind", bound=Event)
ROWS, TURNS = 16, 3
KILLS_IN_TURN = ROWS * TURNS + ROWS // 2
"""Turn in which the retriever dies: in the second step, when half of its conversations have searched."""
CONFIG = """\
run: {{name: down, dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 16}}
actor: {{dtype: float32, max_tokens_per_device: 1024, optimizer: {{lr: 1e-5}}}}
rollout: {{engine: transformers, replicas: 1, max_prompt_tokens: 16, max_response_tokens: 200}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
agent:
  environments:
    wiki: {{name: search_r1, options: {{url: "{url}"}}, format: "tests.agents.searching:Searching", max_turns: {turns}}}
  num_workers: 2
reward: {{functions: {{found: {{name: "tests.agents.searching:everything_is_found"}}}}, num_workers: 1}}
training: {{steps: 3}}
"""


def train(directory: Path, down_s: float, *overrides: str) -> Path:
    """Run with a retriever that is down for this long in the second step, and return the run's directory."""
    corpus, config = directory / "corpus.jsonl", directory / "run.yaml"
    corpus.write_text(json.dumps({"id": "0", "contents": PASSAGE}) + "\n")
    model = make_model(directory / "model", seed=1)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 256}))
    with ThreadPoolExecutor(1) as pool:
        with retriever(corpus) as (process, url):
            config.write_text(CONFIG.format(directory=directory / "runs", model=model, url=url, turns=TURNS))
            variables = {"RETRIEVER": str(process.pid), "KILLS_IN_TURN": str(KILLS_IN_TURN)}
            running = pool.submit(run_mrl, "train", str(config), *overrides, **variables)
            process.wait(timeout=300)
        time.sleep(down_s)
        with retriever(corpus, int(re.search(r":(\d+)/", url)[1])):  # type: ignore[index]
            running.result(300)
    return directory / "runs" / "down"


def events_of(run: Path, kind: type[Kind]) -> list[Kind]:
    return [record.event for record in read_events(run / "events.jsonl") if isinstance(record.event, kind)]


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_retriever_that_is_down_for_20_s_costs_time_and_no_conversation(tmp_path: Path) -> None:
    """With the default retries: six requests within 15.5 s, then the conversation from its beginning."""
    run = train(tmp_path, 20.0)
    first, second, third = read_metrics(run / "metrics.jsonl")
    for line in (first, second, third):
        assert line["reward/num_samples"] == ROWS
        assert line["reward/found/mean"] == 1.0, "every search was answered by its passage"
        assert line["reward/wiki/searches/mean"] == TURNS - 1
    assert (first["agent/retried"], third["agent/retried"]) == (0, 0)
    again = events_of(run, Retried)
    assert len(again) == second["agent/retried"] > 0
    assert all("gave no answer in 6 attempts; the last: URLError" in event.reason for event in again)
    assert all(event.what.startswith("conversation ") for event in again)
