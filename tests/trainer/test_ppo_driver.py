"""The driver's side of a step: what is done in which order, who is given what, and what comes of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mrl.agents.conversation import Conversation
from mrl.algos.kl import KLController
from mrl.config.agent import AgentConfig, EnvironmentConfig
from mrl.config.algorithm import DynamicSamplingConfig, KlConfig, OverlongConfig
from mrl.config.reward import RewardFunctionConfig
from mrl.errors import AuditFailed, RewardError
from mrl.events import Warned, read_events
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged, from_rows
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from mrl.trainer.collector import Collector
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.segments import segment_of
from tests.trainer.fakes import CRITIC, END, SCORER, Role, Scene, make_config, scene

KL = KlConfig(where="both", coef=0.1, target=4e-5, horizon_samples=100)
TWO_BY_TWO = {"samples_per_update": 2, "epochs_per_step": 2}
TRAIN_COLUMNS = {"prompts", "responses", "rollout_log_probs", "scores"}
LENGTHS = [2, 3, 4, 2]
"""Of the responses to rows 0 to 3; row 2's is cut off."""


def seen(role: Any, method: str) -> list[DataProto]:
    """Inputs of a role, call by call."""
    assert isinstance(role, Role)
    return role.batches.get(method, [])


def with_everything(directory: Path, **sections: Any) -> Any:
    """Critic, reward model, KL in reward and loss, two updates in each of two epochs."""
    algorithm = {"advantage": "gae", "kl": KL}
    settings = {"algorithm": algorithm, "batch": TWO_BY_TWO, "critic": CRITIC, "reward_model": SCORER} | sections
    return make_config(directory, **settings)


def phase(name: str, *within: Any) -> list[Any]:
    return [("phase", name), *within]


def test_a_step_goes_through_its_phases_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(with_everything(tmp_path), tmp_path) as found:
        monkeypatch.setattr(found.components.turns, "end", lambda: found.journal.append("turns end"))
        found.trainer.step()
    assert found.journal == [
        *phase("rollout", "awake", ("generate", 4)),
        *phase("reward_model", "paused", ("reward_model", "compute_rm_score", 4), ("ask", 1), "asleep"),
        *phase("old_log_prob", ("actor", "compute_log_prob", 4)),
        *phase("ref_log_prob", ("actor", "compute_ref_log_prob", 4)),
        *phase("values", ("critic", "compute_values", 4)),
        *phase("advantage", ("critic", "compute_advantages", 4)),
        *phase("update_critic", *[("critic", "update_critic", 2)] * 4),
        *phase("update_actor", *[("actor", "update_actor", 2)] * 4),
        *("weights changed", "turns end"),
    ]
    updates = found.screen.done[-8:]
    assert updates == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2, "each role reports how many of its updates are done"


def test_engines_are_compared_with_the_trainer_before_it_learns(tmp_path: Path) -> None:
    with scene(make_config(tmp_path), tmp_path) as found:
        for _ in range(3):
            found.trainer.step()
    asked = [what for what in found.journal if what[0] in ("ask", "compare")]
    assert asked == [("ask", 1), ("ask", 2), ("ask", 3), ("compare", 3)]
    at = found.journal.index(("compare", 3))
    around = [("ask", 3), "asleep", ("phase", "probe"), ("compare", 3), ("phase", "advantage")]
    assert found.journal[at - 3 : at + 2] == around, "when the trainer has its devices again"


def test_a_plain_step_leaves_out_what_it_does_not_need(tmp_path: Path) -> None:
    with scene(make_config(tmp_path), tmp_path) as found:
        found.trainer.step()
    assert found.journal == [
        *phase("rollout", "awake", ("generate", 4), ("ask", 1), "asleep"),
        *phase("advantage", ("actor", "compute_advantages", 4)),
        *phase("update_actor", ("actor", "update_actor", 4)),
        "weights changed",
    ]
    (update,) = seen(found.components.actor, "update_actor")
    assert update.row_ids.tolist() == [0, 1, 2, 3], "a single update has the rows in their order"
    assert set(update.columns()) == TRAIN_COLUMNS | {"advantages"}


def test_everyone_is_given_the_rows_that_are_its_own(tmp_path: Path) -> None:
    with scene(with_everything(tmp_path), tmp_path) as found:
        found.trainer.step()
    actor, critic = found.components.actor, found.components.critic
    (stored,) = found.stored
    assert set(stored.columns()) == TRAIN_COLUMNS
    assert torch.equal(stored["scores"], torch.tensor([0.0, 1.25, 2.5, 3.75], dtype=torch.float64)), (
        "the functions give a quarter of the row id, and the reward model its half, which weighs 2"
    )
    assert stored.lengths("responses").tolist() == LENGTHS
    (scored,) = seen(found.roles["reward_model"], "compute_rm_score")
    assert "response_text" in scored.columns(), "what it scores is still here"
    (advantage,) = seen(critic, "compute_advantages")
    wanted = TRAIN_COLUMNS | {"old_log_probs", "ref_log_probs", "values", "position"}
    assert set(advantage.columns()) == wanted
    assert advantage["position"].tolist() == [0, 1, 2, 3]
    (whole,) = critic.whole
    assert (list(whole.uids), whole.kl_coef) == (["p0", "p0", "p1", "p1"], 0.1)
    said = [batch.meta_info for role in (actor, critic) for batches in role.batches.values() for batch in batches]
    assert not any(said), "what workers say is for the figures, not for the next worker"
    fractions = {"old_log_probs": 0.125, "ref_log_probs": 0.25, "values": 0.5, "advantages": 0.75, "returns": 0.875}
    for role, method in ((critic, "update_critic"), (actor, "update_actor")):
        for rows in seen(role, method):
            assert set(rows.columns()) == TRAIN_COLUMNS | set(fractions), method
            lengths = rows.lengths("responses")
            assert lengths.tolist() == [LENGTHS[row] for row in rows.row_ids]
            for name, fraction in fractions.items():
                wanted_T = np.repeat(rows.row_ids + fraction, lengths)
                np.testing.assert_array_equal(rows.values(name).numpy(), wanted_T, err_msg=name)


def test_the_figures_of_a_step(tmp_path: Path) -> None:
    with scene(with_everything(tmp_path), tmp_path) as found:
        found.components.critic.kl = 5e-5
        report = found.trainer.step()
    metrics = report.metrics
    assert report.step == found.trainer.num_steps_done == 1
    assert report.batch.row_ids.tolist() == [0, 1, 2, 3]
    expected = {
        "reward/score/mean": (0 + 1 + 2 + 3) / 16,
        "reward/model/mean": (0 + 0.5 + 1 + 1.5) / 4,
        "critic/score/mean": 7.5 / 4,
        "mismatch/log_prob_abs_diff_mean": 0.001,
        "reward/kl": 5e-5,
        "actor/loss": 2.5,  # of the updates 1 to 4
        "critic/loss": 2.5,
        "actor/tokens": sum(LENGTHS) / 2,
        "actor/skipped": 0.0,
        "response_length/mean": 11 / 4,
        "response_length/clip_ratio": 0.25,
        "batch/samples": 4,
        "perf/total_num_tokens": 11 + (1 + 1 + 2 + 2),
        "sync/seconds": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    for name in ("actor", "critic"):  # 17 tokens in two epochs, at 3 x 5e9 operations, on 4 devices
        seconds = metrics[f"timing_s/update_{name}"]
        assert metrics[f"perf/{name}_tflops"] == pytest.approx(3 * 5e9 * 34 / seconds / 4 / 1e12)
    assert metrics["perf/throughput"] == pytest.approx(17 / metrics["timing_s/step"] / 4)
    assert metrics["perf/generated_per_s"] == pytest.approx(11 / metrics["timing_s/rollout"] / 4)


def test_the_kl_coefficient_is_steered_by_what_was_measured_on_all_samples(tmp_path: Path) -> None:
    with scene(with_everything(tmp_path), tmp_path) as found:
        assert isinstance(found.components.kl, KLController)
        found.components.critic.kl = 4.4e-5
        first = found.trainer.step()
        assert found.components.kl.coef == pytest.approx(0.1 * (1 + 0.1 * 4 / 100), rel=1e-9), (
            "4.4e-5 is a tenth too much"
        )
        second = found.trainer.step()
    used = [whole.kl_coef for whole in found.components.critic.whole]
    assert used == pytest.approx([0.1, 0.1004], rel=1e-9)
    assert [report.metrics["reward/kl_coef"] for report in (first, second)] == used


def test_the_policy_learns_after_the_warm_up_of_the_critic(tmp_path: Path) -> None:
    config = with_everything(tmp_path, training={"critic_warmup_steps": 2})
    with scene(config, tmp_path) as found:
        actor: list[int] = []
        for number in (1, 2, 3):
            report = found.trainer.step()
            assert ("actor/loss" in report.metrics) == (number == 3)
            assert found.journal.count("weights changed") == (number == 3)
            actor.append(len(seen(found.components.actor, "update_actor")))
            assert len(seen(found.components.critic, "update_critic")) == 4 * number
    assert actor == [0, 0, 4]


def test_steps_are_numbered_from_one_and_draw_other_seeds(tmp_path: Path) -> None:
    with scene(make_config(tmp_path, algorithm={"kl": KL}), tmp_path) as found:
        assert [found.trainer.step().step for _ in range(3)] == [1, 2, 3]
        assert found.run.clock.step == 3
        found.components.actor.kl = 0.5  # the audit of a first step would not have it
        found.trainer.step()
    for step, requests in enumerate(found.hybrid.requests, 1):
        prompts = (f"p{2 * step - 2}", f"p{2 * step - 1}")
        wanted = [request_seed(5, step, uid, number) for uid in prompts for number in (0, 1)]
        assert [request.seed for request in requests] == wanted


def test_a_step_that_learns_from_too_few_tokens_is_refused(tmp_path: Path) -> None:
    with scene(make_config(tmp_path, batch=TWO_BY_TWO), tmp_path) as found:
        found.trainer.updates = lambda batch, num_samples: [batch.take([0, 1])] * 2  # type: ignore[method-assign]
        with pytest.raises(AuditFailed, match=r"every response token is used once per epoch \(10 of 22"):
            found.trainer.step()
        assert found.trainer.num_steps_done == 0


def updates_of(found: Scene, done: int, num_rows: int = 8) -> list[list[int]]:
    """The row ids of each update, that many steps being done."""
    found.trainer.num_steps_done = done
    batch = DataProto.from_dict({"scores": torch.zeros(num_rows)}, row_ids=np.arange(num_rows) + 40)
    return [rows.row_ids.tolist() for rows in found.trainer.updates(batch, num_rows)]


def test_each_epoch_and_step_has_an_order_of_its_own(tmp_path: Path) -> None:
    batch = {"samples_per_update": 2, "epochs_per_step": 3}
    with scene(make_config(tmp_path, batch=batch), tmp_path) as found:
        by_step = [updates_of(found, done, 8) for done in range(3)]
        assert updates_of(found, 1, 8) == by_step[1], "a resumed run does the same"
    (tmp_path / "other").mkdir()
    with scene(make_config(tmp_path, batch=batch, training={"seed": 6}), tmp_path / "other") as found:
        by_step.append(updates_of(found, 0, 8))
    epochs = [parts[begin : begin + 4] for parts in by_step for begin in (0, 4, 8)]
    assert len(epochs) == 12
    for epoch in epochs:
        assert [len(rows) for rows in epoch] == [2, 2, 2, 2]
        assert sorted(itertools.chain(*epoch)) == list(range(40, 48))
    assert len({tuple(itertools.chain(*epoch)) for epoch in epochs}) == 12


@pytest.mark.parametrize(("num_rows", "sizes"), [(8, [4, 4]), (7, [4, 3]), (5, [5]), (1, [1]), (11, [4, 4, 3])])
def test_updates_are_as_many_as_the_samples_come_nearest_to(num_rows: int, sizes: list[int], tmp_path: Path) -> None:
    with scene(make_config(tmp_path, batch={"samples_per_update": 4}), tmp_path) as found:
        assert [len(rows) for rows in updates_of(found, 0, num_rows)] == sizes


def test_the_longest_responses_lose_score(tmp_path: Path) -> None:
    overlong = OverlongConfig(buffer_tokens=2, factor=0.5)  # 3 tokens of 4 are half way into it
    with scene(make_config(tmp_path, algorithm={"overlong": overlong}), tmp_path) as found:
        scored = found.components.stream.collector.collect(1)
    assert scored.batch.lengths("responses").tolist() == LENGTHS
    assert scored.batch["scores"].tolist() == [0.0, 0.25 - 0.25, 0.5 - 0.5, 0.75]
    assert scored.batch["scores"].dtype == torch.float64
    assert scored.metrics["reward/overlong_penalty"] == pytest.approx(-0.75 / 4)
    assert scored.metrics["reward/score/mean"] == pytest.approx(1.5 / 4), "as the functions gave it"


def remax_answer(request: GenerationRequest, sampling: Sampling) -> list[int]:
    """Greedy answers begin with 900, sampled ones with 100, and the row's id is added."""
    return [(900 if sampling.top_k == 1 else 100) + int(request.key), END]


def remax_outcome(sample: Sample) -> Outcome:
    value = int(sample.response)
    return Failure("raised", "no", 0.0) if value in (101, 902) else Score(float(value), {"rule": float(value)}, 0.0)


def test_the_baseline_of_remax_is_the_greedy_answer_to_the_same_prompt(tmp_path: Path) -> None:
    """Sample 1, of the first prompt, and the greedy answer to the third prompt get no score."""
    config = make_config(tmp_path, algorithm={"advantage": "remax"}, batch={"prompts_per_step": 3})
    with scene(config, tmp_path, remax_outcome, remax_answer) as found:
        report = found.trainer.step()
        generator, hybrid = found.components.stream.collector.generator, found.hybrid
    assert hybrid.samplings == [generator.training, generator.greedy]
    assert [len(requests) for requests in hybrid.requests] == [6, 3]
    assert report.batch.row_ids.tolist() == [0, 2, 3]
    assert report.batch["scores"].tolist() == [100.0, 102.0, 103.0]
    assert report.batch["baseline_scores"].tolist() == [900.0, 901.0, 901.0]
    assert report.metrics["reward/greedy/mean"] == pytest.approx(2702 / 3)
    assert report.metrics["reward/score/mean"] == pytest.approx(514 / 5), "of what was sampled"
    (advantage,) = seen(found.components.actor, "compute_advantages")
    assert set(advantage.columns()) == TRAIN_COLUMNS | {"baseline_scores", "position"}
    assert advantage["position"].tolist() == [0, 1, 2], "positions of their uids, not row ids"
    (whole,) = found.components.actor.whole
    assert list(whole.uids) == ["p0", "p1", "p1"]


def test_a_reward_model_scores_the_greedy_answers_too(tmp_path: Path) -> None:
    """It is asked when all is generated: the engines give their devices away once."""
    config = make_config(tmp_path, algorithm={"advantage": "remax"}, reward_model=SCORER)
    with scene(config, tmp_path) as found:
        report = found.trainer.step()
    assert found.journal[:9] == [
        *phase("rollout", "awake", ("generate", 4), ("generate", 2)),
        *phase("reward_model", "paused", ("reward_model", "compute_rm_score", 4)),
        *phase("reward_model", "paused"),
    ]
    assert report.batch["scores"].tolist() == [0.0, 1.25, 2.5, 3.75]
    assert report.batch["baseline_scores"].tolist() == [0.0, 0.0, 1.25, 1.25], "the greedy answers have rows 0 and 1"


def test_dynamic_sampling_goes_by_whole_scores(tmp_path: Path) -> None:
    """The rule gives all the same; by what the model says as well, the samples of a prompt differ."""
    algorithm = {"dynamic_sampling": DynamicSamplingConfig(most_rounds=1)}
    alike: Any = lambda sample: Score(0.5, {"rule": 0.5}, 0.0)  # noqa: E731
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    what = "only 0 of 2 prompts have samples with different scores"
    without = scene(make_config(tmp_path, algorithm=algorithm), tmp_path / "without", alike)
    with without as found, pytest.raises(RewardError, match=what):
        found.trainer.step()
    with scene(make_config(tmp_path, algorithm=algorithm, reward_model=SCORER), tmp_path / "with", alike) as found:
        report = found.trainer.step()
    assert report.batch["scores"].tolist() == [0.5, 1.5, 2.5, 3.5]


def test_tokens_that_the_model_did_not_write_are_not_counted(tmp_path: Path) -> None:
    with scene(make_config(tmp_path), tmp_path) as found:
        collected = found.components.stream.collector.collect(1)
        mask = from_rows([torch.tensor([False] + [True] * (length - 1)) for length in LENGTHS])
        column = DataProto.from_dict({"response_mask": mask}, row_ids=[0, 1, 2, 3])
        masked = ScoredBatch(collected.batch.union(column), collected.metrics)
        found.components.stream.collector.collect = lambda step: masked  # type: ignore[method-assign]
        report = found.trainer.step()
    assert report.metrics["actor/tokens"] == sum(LENGTHS) - 4
    for method in ("compute_advantages", "update_actor"):
        (batch,) = seen(found.components.actor, method)
        assert batch.values("response_mask").tolist() == mask.values.tolist()


# --- what users add, and what is written down on demand ---------------------------------------------------------


def longest_text(batch: DataProto) -> dict[str, float]:
    return {"longest_text": max(len(text) for text in batch["response_text"])}


def broken(batch: DataProto) -> dict[str, float]:
    raise KeyError("absent")


def test_own_metrics_stand_beside_the_others_and_cannot_hurt(tmp_path: Path) -> None:
    names = [f"{__name__}:broken", f"{__name__}:longest_text"]
    with scene(make_config(tmp_path, training={"metrics": names}), tmp_path) as found:
        reports = [found.trainer.step() for _ in range(2)]
    for report in reports:
        assert report.metrics["own/longest_text"] == max(map(len, report.batch["response_text"]))
    said = [record.event for record in read_events(tmp_path / "events.jsonl")]
    warned = [event.message for event in said if isinstance(event, Warned)]
    assert warned == [f"the function {names[0]} failed, so its metrics are missing: KeyError: 'absent'"], "once"


def test_the_tensors_of_a_step_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    config = with_everything(tmp_path, training={"dump_steps": [2]})
    with scene(config, tmp_path) as found:
        found.trainer.step()
        assert not (tmp_path / "tensors").exists()
        report = found.trainer.step()
    (path,) = (tmp_path / "tensors").iterdir()
    rows = pq.read_table(path).to_pylist()
    assert path.name == "step-000002.parquet"
    assert [row["row_id"] for row in rows] == report.batch.row_ids.tolist()
    for row, response in zip(rows, report.batch["responses"].rows(), strict=True):
        assert row["responses"] == response.tolist()
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns"):
            assert len(row[name]) == len(response), name
        assert row["values"] == [row["row_id"] + 0.5] * len(response)


REWARD = {"functions": {"rule": RewardFunctionConfig(name="digits")}}


WORLD = AgentConfig(environments={"world": EnvironmentConfig(name="tests.agents.worlds:Facts")})
ONE_SOURCE = {"functions": {"rule": RewardFunctionConfig(name="digits", sources=["source 1"])}}
ALL_SOLVED = {"p0": 0.0, "p1": 1.0}
"""A quarter of the row id each: 0 and 0.25, 0.5 and 0.75."""


@pytest.mark.parametrize(
    ("scored_by", "heard"),
    [
        ({"reward": REWARD}, ALL_SOLVED),
        ({"agent": WORLD}, ALL_SOLVED),
        ({"agent": WORLD, "reward_model": SCORER}, ALL_SOLVED),
        ({"reward": ONE_SOURCE, "reward_model": SCORER}, {"p1": 1.0}),
        ({"reward_model": SCORER}, {}),  # its scores have no mark from which a prompt is solved
    ],
    ids=["rule", "environment", "environment and model", "rule for one source", "model"],
)
def test_the_sampler_hears_what_was_solved_by_rule_or_environment(
    scored_by: dict[str, Any], heard: dict[str, float], tmp_path: Path
) -> None:
    with scene(make_config(tmp_path, validation={"solved_at": 0.5}, **scored_by), tmp_path) as found:
        found.trainer.step()
        prompts = found.components.prompts
    assert prompts.solved == [heard]


def test_segments_are_rows_of_the_step_but_call_for_no_more_updates(tmp_path: Path) -> None:
    segment = Conversation("2.1", "p1", np.array([7, 8], np.int32), max_tokens=4, seed=1)
    segment.write(np.array([9, 9, END], np.int32), np.full(3, -0.5, np.float32), "stop")
    batch = {"samples_per_update": 2}
    with scene(make_config(tmp_path, batch=batch, algorithm={"kl": KL}), tmp_path) as found:
        collected: list[DataProto] = []

        def collect(step: int) -> ScoredBatch:
            scored = Collector.collect(found.components.stream.collector, step)
            rows = scored.batch.with_column("response_mask", _all_written(scored.batch))
            collected.append(rows.with_column("other_segments", [[], [], [segment_of(segment)], []]))
            return ScoredBatch(collected[0], scored.metrics)

        found.components.stream.collector.collect = collect  # type: ignore[method-assign]
        report = found.trainer.step()
        actor: Any = found.components.actor
        (whole,) = actor.whole
        assert (len(whole.uids), whole.sample_of_row) == (4, [0, 1, 2, 3, 2])
        (rows,) = actor.batches["compute_advantages"]
        assert rows["position"].tolist() == [0, 1, 2, 3, 4]
        assert rows.columns()["responses"].rows()[-1].tolist() == [9, 9, END]
        assert rows["scores"].tolist()[-1] == rows["scores"].tolist()[2]
        assert [len(part) for part in actor.batches["update_actor"]] == [3, 2], "two updates, as without"
        assert len(report.batch) == 4, "what is shown are samples"
        num_tokens = int(report.batch.lengths("prompts").sum() + report.batch.lengths("responses").sum())
        assert report.metrics["perf/total_num_tokens"] == num_tokens + 5


def _all_written(batch: DataProto) -> Jagged:
    return from_rows([torch.ones(length, dtype=torch.bool) for length in batch.lengths("responses").tolist()])
