"""From prompts to a batch through environments: columns, masks, scores, prompts with tools, and dropped
conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.algos.role_baselines import RoleBaselines
from mrl.config.agent import AgentConfig
from mrl.config.reward import RewardFunctionConfig
from mrl.errors import AgentError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rewards.outcome import Score
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.segments import ComparedParts, trained_rows, with_role_baselines
from mrl.trainer.step_metrics import batch_metrics, sample_columns, written_lengths
from tests.agents.scripted import Stage, call
from tests.trainer.fakes import Rewards, make_config

FACTS = {"a": "b", "b": "ocean"}


def two_hops(context: str) -> str:
    """Look up a, then its value, then answer with that. The second sample of a prompt gives up."""
    if "ocean" in context:
        return "ocean<|im_end|>"
    return call("b") if "\nb\n" in context else call("a")


class Engines:
    """Replaces a hybrid engine: continues every context by the stage's script."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.samplings: list[Sampling] = []

    def generate(self, requests: list[GenerationRequest], sampling: Sampling, follow_ups: Any) -> Iterator[Generated]:
        assert follow_ups is self.stage.dialogs
        self.samplings.append(sampling)
        yield from map(self.stage._written, requests)
        yield from self.stage._generate()


class Trainer:
    """A generator whose engine is a stage."""

    def __init__(self, directory: Path, world: str = "Facts", rewards: Rewards | None = None, **settings: Any) -> None:
        self.stage = Stage(directory, two_hops, world, **settings)
        agent: AgentConfig = self.stage.config
        functions = {"rule": RewardFunctionConfig(name="exact_match")} if rewards else {}
        limits = {"max_response_tokens": 400, "max_prompt_tokens": 200}
        config = make_config(directory, agent=agent, rollout=limits, reward={"functions": functions})
        self.engines = Engines(self.stage)
        arguments: Any = (config, self.engines, rewards, self.stage.tokenizer, lambda done, total: None)
        self.generator = Generator(*arguments, self.stage.dialogs)

    def batch(self, *extra_infos: dict[str, Any]) -> DataProto:
        """Return a prompt with one sample for each opening, all in one group."""
        openings = [self.stage.opening(row) for row in range(len(extra_infos))]
        return DataProto.from_dict(
            {"prompts": from_rows([torch.tensor(each.prompt_ids) for each in openings])},
            {
                "uid": ["p" for _ in openings],
                "prompt_text": [f"prompt {each.row}" for each in openings],
                "messages": [each.messages for each in openings],
                "data_source": ["facts" for _ in openings],
                "ability": [None for _ in openings],
                "ground_truth": ["ocean" for _ in openings],
                "extra_info": [{"facts": FACTS, **each} for each in extra_infos],
            },
        )

    def run(self, *extra_infos: dict[str, Any]) -> ScoredBatch:
        return self.generator.run(self.batch(*extra_infos), self.generator.training, 1)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    trainers: list[Trainer] = []

    def make(*arguments: Any, **settings: Any) -> Trainer:
        trainers.append(Trainer(tmp_path, *arguments, **settings))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.stage.stack.close()


def test_a_batch_of_conversations_has_columns_masks_and_figures(made: Any) -> None:
    scored = made().run({}, {})
    batch, metrics = scored.batch, scored.metrics
    mask_T, log_probs_T = batch.values("response_mask"), batch.values("rollout_log_probs")
    assert mask_T.dtype == torch.bool
    assert len(mask_T) == len(log_probs_T) == len(batch.values("responses"))
    assert torch.isnan(log_probs_T[~mask_T]).all()
    assert torch.isfinite(log_probs_T[mask_T]).all()
    written = written_lengths(batch)
    assert written.sum() == int(mask_T.sum()) < len(mask_T)
    assert written.tolist() == [int(row.sum()) for row in batch.columns()["response_mask"].rows()]
    assert batch_metrics(batch, 400, 0.5)["response_length/mean"] == written.mean()
    assert batch["scores"].tolist() == [1.0, 1.0]
    assert batch["truncated"].tolist() == [False, False]
    assert ["".join(turns) for turns in batch["turns"]] == list(batch["response_text"])
    assert ["tool_response" in turn for turn in batch["turns"][0]] == [False, True, False, True, False]
    assert list(batch["ended"]) == ["done", "done"]
    assert (metrics["agent/turns/mean"], metrics["agent/calls/mean"]) == (3.0, 2.0)
    assert (metrics["agent/calls/invalid_share"], metrics["agent/ended/done"]) == (0.0, 1.0)
    assert metrics["agent/turn_tokens/mean"] == written.sum() / 6
    assert metrics["agent/observed_share"] == pytest.approx(1 - written.sum() / len(mask_T))
    rows = trained_rows(batch)
    assert all(rows.columns()[name] is column for name, column in batch.columns().items())
    assert rows["sample"].tolist() == [0, 1]


def test_the_score_of_the_environment_is_a_part_beside_the_functions(made: Any) -> None:
    rewards = Rewards(lambda sample: Score(0.25, {"rule": 0.25}, 0.0))
    scored = made(rewards=rewards, weight=0.5).run({})
    assert scored.batch["scores"].tolist() == [0.75]
    figures = {name: scored.metrics[f"reward/{name}/mean"] for name in ("score", "rule", "world", "world/turns")}
    assert figures == {"score": 0.75, "rule": 0.25, "world": 1.0, "world/turns": 3.0}
    (sample,) = rewards.samples
    assert sample.response.splitlines()[-1] == "ocean"
    assert "tool_response" not in sample.response, "a reward reads what the model wrote"
    assert [turn.count("tool_response") > 0 for turn in sample.turns] == [False, True, False, True, False]
    assert sample.num_response_tokens == int(scored.batch.values("response_mask").sum())


def test_a_conversation_that_nobody_scores_is_a_failure_and_no_zero(made: Any) -> None:
    trainer = made(options={"scores": False})
    scored = trainer.run({})
    assert len(scored.batch) == 0
    assert scored.metrics["reward/failed/bad_result"] == 1


def test_a_conversation_that_comes_to_no_end_is_wrong_and_not_left_out(made: Any) -> None:
    trainer = made(max_turns=2)
    scored = trainer.run({}, {"facts": {"a": "ocean"}})
    assert [each.tolist() for each in (scored.batch.row_ids, scored.batch["scores"])] == [[0, 1], [0.0, 1.0]]
    assert scored.metrics["agent/ended/turns"] == 0.5
    assert scored.metrics["reward/world/mean"] == 0.5, "it is counted as what it is"
    assert scored.metrics["reward/failed_share"] == 0.0


def test_numbers_of_an_environment_are_counted_where_functions_alone_score(made: Any) -> None:
    rewards = Rewards(lambda sample: Score(0.25, {"rule": 0.25}, 0.0))
    scored = made(rewards=rewards, options={"scores": False}).run({})
    assert scored.batch["scores"].tolist() == [0.25]
    assert scored.metrics["reward/world/turns/mean"] == 3.0
    assert "reward/world/mean" not in scored.metrics, "it gave no score"


def test_what_an_environment_loses_is_in_no_group(made: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path)}
    trainer = made("Troubled", retries=0, max_failed_share=0.5, options=options)
    scored = trainer.run({}, {"trouble": "raises"}, {})
    assert scored.batch.row_ids.tolist() == [0, 2]
    assert scored.batch["scores"].tolist() == [1.0, 1.0]
    assert scored.metrics["agent/failed/raised"] == 1
    assert scored.metrics["reward/num_samples"] == 2, "a conversation without a turn has no score"


def test_tools_stand_in_the_prompt_that_is_trained_on(made: Any) -> None:
    trainer = made("WithTools")
    scored = trainer.run({})
    prompt = trainer.stage.tokenizer.decode(scored.batch.values("prompts").tolist())
    assert prompt == scored.batch["prompt_text"][0]
    assert '"name": "look"' in prompt
    assert trainer.stage.contexts[0] == prompt


def test_alone_is_told_the_engines(made: Any) -> None:
    trainer = made(deterministic=True)
    trainer.run({})
    assert [sampling.alone for sampling in trainer.engines.samplings] == [True]


def test_every_segment_is_a_row_that_is_trained_on_with_its_conversations_score(made: Any) -> None:
    trainer = made("Forgetful")
    scored = trainer.run({}, {"facts": {"a": "sea"}}, {})
    assert (len(scored.batch), scored.metrics["agent/segments/mean"]) == (3, 2)
    assert all("a is" in text for text in scored.batch["response_text"])
    rows = trained_rows(scored.batch)
    assert rows["sample"].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(set(rows.row_ids.tolist())) == 6
    assert rows["scores"].tolist() == scored.batch["scores"].tolist() * 2
    assert list(rows["uid"]) == ["p"] * 6
    columns = [rows.columns()[name].rows() for name in ("prompts", "responses", "response_mask")]
    trained = {}
    for prompt, response, mask in zip(*columns, strict=True):
        for at in [0, *(torch.nonzero(mask[1:] & ~mask[:-1]).flatten() + 1).tolist()]:
            end = at + int(mask[at:].int().cumprod(0).sum())
            trained[tuple(prompt.tolist() + response[:at].tolist())] = response[at:end].tolist()
    read = {tuple(context.tolist()): written.tolist() for context, written in trainer.stage.spoken}
    assert trained == read, "each turn once, behind what the engine has read"
    assert int(rows.values("response_mask").sum()) == sum(map(len, [each for _, each in trainer.stage.spoken]))
    assert sample_columns(scored.batch)["segments"] == [2, 2, 2]


LENGTHS = {("0", "first"): 5, ("0", "second"): 2, ("1", "first"): 1, ("1", "second"): 4}
"""Row and role -> number of words that the player writes."""


def player(context: str) -> str:
    """Write as many words as the table says."""
    (number,) = (length for (row, role), length in LENGTHS.items() if f"What is {row}? {role}" in context)
    return " go" * number + "<|im_end|>"


def test_players_of_a_game_are_rows_with_the_scores_of_their_roles(made: Any) -> None:
    trainer = made("Duel", weight=0.5)
    trainer.stage.script = player
    scored = trainer.run({}, {})
    assert scored.batch["scores"].tolist() == [4.5, -4.5], "the conversation has the score of its first role"
    assert (scored.metrics["agent/role/first/score"], scored.metrics["agent/role/second/score"]) == (0.0, 0.0)
    rows = trained_rows(scored.batch)
    assert list(zip(rows["sample"].tolist(), rows["role"], rows["scores"].tolist(), strict=True)) == [
        (0, "second", -4.5), (1, "second", 4.5), (0, "first", 4.5), (1, "first", -4.5)
    ]  # fmt: skip
    parts = ComparedParts.of(rows)
    assert parts.of_row == [0, 1, 2, 3]
    assert parts.groups[0] == parts.groups[1] != parts.groups[2] == parts.groups[3]
    assert sample_columns(scored.batch)["role_scores"] == [
        '{"first": 4.5, "second": -4.5}',
        '{"first": -4.5, "second": 4.5}',
    ]


def test_roles_that_share_a_score_are_compared_apart(made: Any) -> None:
    trainer = made("Duel", options={"scores": False})
    trainer.stage.script = player
    scored = trainer.run({}, {})
    rows = trained_rows(scored.batch)
    assert rows["scores"].tolist() == [9.0, -9.0] * 2
    assert ComparedParts.of(rows).of_row == [0, 1, 2, 3]
    assert scored.metrics["agent/role/second/score"] == 0.0
    assert "role_scores" not in sample_columns(scored.batch)


def test_segments_of_one_role_are_one_part(made: Any) -> None:
    trainer = made("Duel", options={"first": "player", "second": "player", "scores": False})
    trainer.stage.script = lambda context: " go<|im_end|>"
    parts = ComparedParts.of(trained_rows(trainer.run({}, {}).batch))
    assert (parts.of_row, parts.first_rows) == ([0, 1, 0, 1], [0, 1])
    assert len(set(parts.groups)) == 1


def test_baselines_of_roles_are_moving_averages(made: Any) -> None:
    """Against a loop over the conversations, in two steps."""
    trainer, baselines = made("Duel"), RoleBaselines()
    trainer.stage.script = player
    expected = {"first": 0.0, "second": 0.0}
    for _ in range(2):
        rows = with_role_baselines(trained_rows(trainer.run({}, {}).batch), baselines, 0.75)
        columns = (rows["sample"].tolist(), rows["role"], rows["baseline_scores"].tolist())
        found = {(sample, role): baseline for sample, role, baseline in zip(*columns, strict=True)}
        for sample, lead in enumerate([9.0, -9.0]):
            for role, score in (("first", lead), ("second", -lead)):
                expected[role] += 0.25 * (score - expected[role])
                assert found[sample, role] == pytest.approx(expected[role], rel=1e-12)
    assert baselines.figures() == {
        f"rae/baseline/facts/{role}": pytest.approx(value) for role, value in expected.items()
    }
    resumed = RoleBaselines()
    resumed.load_state_dict(json.loads(json.dumps(baselines.state_dict())))
    assert resumed.update("facts", "first", 1.0, 0.75) == baselines.update("facts", "first", 1.0, 0.75)
    assert resumed.update("other", "first", 1.0, 0.75) == 0.25, "each data source has its own"


def test_rae_without_roles_is_an_error(made: Any) -> None:
    rows = trained_rows(made().run({}).batch)
    with pytest.raises(AgentError, match=r"1 of 1 rows have no role.*prompt p"):
        with_role_baselines(rows, RoleBaselines(), 0.95)


def test_functions_cannot_score_a_conversation_whose_roles_have_scores(made: Any) -> None:
    trainer = made("Duel", rewards=Rewards(lambda sample: Score(0.25, {"rule": 0.25}, 0.0)))
    trainer.stage.script = player
    with pytest.raises(AgentError, match=r"gives each role its own score.*functions of reward"):
        trainer.run({})


def test_a_conversation_may_have_three_segments(made: Any) -> None:
    batch = made("Forgetful").run({}, {}).batch
    segments = [of_one * 2 for of_one in batch["other_segments"]]
    rows = trained_rows(batch.with_column("other_segments", segments))
    assert rows["sample"].tolist() == [0, 1, 0, 0, 1, 1]
    assert list(rows["uid"]) == ["p"] * 6
    responses = rows.columns()["responses"].rows()
    assert responses[2].tolist() == responses[3].tolist() == segments[0][0]["responses"].tolist()
