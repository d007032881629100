"""Whole runs with real engines and a real trainer: conversations in segments, and an agent of a framework."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.data.row_files import read_newest_samples
from mrl.demo.model import make_model
from mrl.events import Warned, read_events
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl

SAME = 1e-5
"""Allowed difference between log-probs of engine and trainer, in float32."""
SAMPLES = 16
CONFIG = """\
run: {{name: agents, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo, correction: {{upper: 1.0}}}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 8}}
actor: {{parallel: {{tp: 1}}, dtype: float32, max_tokens_per_device: 256, optimizer: {{lr: 1e-3}}}}
rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
agent: {{environments: {{world: {world}}}, num_workers: 1}}
training: {{steps: 2, dump_steps: [1], save_every: 0}}
"""


def trained(directory: Path, world: str, *overrides: str, **variables: str) -> Path:
    model = make_model(directory / "model", seed=1)
    config = directory / "run.yaml"
    config.write_text(CONFIG.format(directory=directory, model=model, world=world))
    run_mrl("train", str(config), *overrides, **variables)
    return directory / "agents"


@pytest.mark.slow
def test_a_run_trains_on_every_segment(tmp_path: Path) -> None:
    recorded = "training.record.every=1"
    run = trained(tmp_path, '{name: "tests.agents.worlds:NewContext", max_turns: 2}', recorded)
    lines = read_metrics(run / "metrics.jsonl")
    assert [(line["batch/samples"], line["agent/segments/mean"]) for line in lines] == [(SAMPLES, 2.0)] * 2
    assert all(line["mismatch/log_prob_abs_diff_mean"] <= SAME for line in lines)
    rows: list[dict[str, Any]] = read_newest_samples(run / "tensors", 2 * SAMPLES)
    assert len(rows) == 2 * SAMPLES
    for last, first in zip(rows[:SAMPLES], rows[SAMPLES:], strict=True):
        assert first["prompts"] != last["prompts"]
        assert first["scores"] == last["scores"] == sum(last["response_mask"])
        advantages = {value for row in (first, last) for value in row["advantages"]}
        assert len(advantages) == 1, "all segments have the conversation's advantage"
        for row in (first, last):
            for trainer, engine in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True):
                assert math.isfinite(engine)
                assert abs(trainer - engine) <= SAME
    records = read_events(run / "events.jsonl")
    warnings = [record.event.message for record in records if isinstance(record.event, Warned)]
    assert sum("continues with a new context" in message for message in warnings) == 1
    (sample, *_) = read_newest_samples(run / "samples", SAMPLES)
    assert (sample["segments"], len(sample["turns"])) == (2, 3)
    said = run_mrl("replay", str(run), "--step", "2", "--exact", "--quiet")  # both steps, from the untrained model
    assert "step 2: equal, bit for bit" in said


@pytest.mark.slow
@pytest.mark.on_demand
def test_each_segment_is_an_episode_to_a_critic_and_a_reward_model_reads_the_last(tmp_path: Path) -> None:
    """With gamma and lambda 1, each token's return is the whole score. The reward model's part is recomputed here."""
    scorer = make_model(tmp_path / "scorer", seed=1)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(scorer, num_labels=1))
    model.save_pretrained(scorer)
    run = trained(
        *(tmp_path, '{name: "tests.agents.worlds:NewContext", max_turns: 2}'),
        "placement.roles={actor: all, critic: all, reward_model: all}",
        "algorithm={advantage: gae, whiten: false, gamma: 1.0, lam: 1.0, kl: {where: none}}",
        "critic={dtype: float32, max_tokens_per_device: 256, optimizer: {lr: 1e-3}}",
        f"reward_model={{path: {scorer}, dtype: float32, max_tokens_per_device: 256, weight: 10}}",
    )
    rows: list[dict[str, Any]] = read_newest_samples(run / "tensors", 2 * SAMPLES)
    assert len(rows) == 2 * SAMPLES
    for last, first in zip(rows[:SAMPLES], rows[SAMPLES:], strict=True):
        with torch.no_grad():
            whole = torch.tensor([[*last["prompts"], *last["responses"]]])
            model_score = float(model.score(model.model(whole).last_hidden_state)[0, -1, 0])
        for row in (first, last):
            assert row["scores"] == pytest.approx(sum(last["response_mask"]) + 10 * model_score, abs=1e-4)
            for value, worth, advantage in zip(row["values"], row["returns"], row["advantages"], strict=True):
                assert worth == pytest.approx(row["scores"], abs=1e-4)
                assert advantage == pytest.approx(row["scores"] - value, abs=1e-4)


@pytest.mark.slow
@pytest.mark.on_demand
def test_with_remax_all_segments_are_measured_by_the_greedy_conversation(tmp_path: Path) -> None:
    run = trained(tmp_path, '{name: "tests.agents.worlds:NewContext", max_turns: 2}', "algorithm.advantage=remax")
    rows: list[dict[str, Any]] = read_newest_samples(run / "tensors", 2 * SAMPLES)
    assert len(rows) == 2 * SAMPLES
    baselines: dict[str, set[float]] = {}
    for last, first in zip(rows[:SAMPLES], rows[SAMPLES:], strict=True):
        (advantage,) = {value for row in (first, last) for value in row["advantages"]}
        baselines.setdefault(str(first["prompts"]), set()).add(round(last["scores"] - advantage, 4))
    assert [len(of_prompt) for of_prompt in baselines.values()] == [1] * 4
    assert all(0 < baseline <= 8 for of_prompt in baselines.values() for baseline in of_prompt), "tokens of a turn"


@pytest.mark.slow
@pytest.mark.on_demand
def test_players_learn_from_their_role_s_baseline_also_after_a_resume(tmp_path: Path) -> None:
    """Advantages of two steps against a loop over the conversations; the second step also in a resumed run."""
    world = '{name: "tests.agents.worlds:Duel", max_turns: 2}'
    rae = ("algorithm.advantage=rae", "algorithm.rae_decay=0.75", "training.dump_steps=[1, 2]")
    baselines = {"first": 0.0, "second": 0.0}
    for step in (1, 2):
        options = (*rae, f"training.steps={step}", "training.save_every=1")
        if step == 1:
            run = trained(tmp_path, world, *options)
        else:
            run_mrl("train", str(tmp_path / "run.yaml"), *options)
        rows: list[dict[str, Any]] = read_newest_samples(run / "tensors", 2 * SAMPLES)
        for second, first in zip(rows[:SAMPLES], rows[SAMPLES:], strict=True):
            lead = sum(first["response_mask"]) - sum(second["response_mask"])
            for role, row, score in (("first", first, lead), ("second", second, -lead)):
                baselines[role] += 0.25 * (score - baselines[role])
                assert row["scores"] == score
                assert row["advantages"] == pytest.approx([score - baselines[role]] * len(row["advantages"]), abs=1e-5)
        last = read_metrics(run / "metrics.jsonl")[-1]
        kept = {name.rpartition("/")[2]: value for name, value in last.items() if name.startswith("rae/baseline/")}
        assert kept == {role: pytest.approx(baseline, abs=1e-9) for role, baseline in baselines.items()}
