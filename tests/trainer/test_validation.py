"""mean@k, pass@k and maj@k of known answers, which samples they are made of, and what goes into a file of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import RewardModelConfig
from mrl.config.training import ValidationConfig
from mrl.data.rlhf_dataset import Prompt, SkippedRow
from mrl.data.rows import PromptRow
from mrl.data.sampler import Draw
from mrl.errors import DataError
from mrl.events import EventLog
from mrl.observe.confidence import with_intervals
from mrl.observe.figures import is_bound
from mrl.protocol import DataProto
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from mrl.trainer.generation import Generator
from mrl.trainer.model_scores import ModelScores, ScoringModel
from mrl.trainer.validation import Validator, check_best, pass_at, score_values, vote_values
from tests.trainer.fakes import END, Hybrid, Rewards, Tokenizer, make_config

NO_MODELS = ModelScores([])
REWARD = RewardConfig(functions={"rule": RewardFunctionConfig(name="gsm8k")})
ANSWERS = {
    "a": [("12", 1.0), ("12", 1.0), ("13", 0.0), ("14", 0.0)],  # the commonest answer is right
    "b": [("7", 0.0), ("7", 0.0), ("8", 1.0), ("9", 0.0)],  # it is wrong, another is right
    "c": [("1", 0.0), ("2", 0.0), ("3", 0.0), ("4", 0.0)],  # nothing is right
}


def figures(by_prompt: Any, **settings: Any) -> dict[str, float]:
    """Return all figures of these answers."""
    validation = ValidationConfig(**settings)
    values = score_values(by_prompt, validation) | vote_values(by_prompt, validation)
    return {"val/prompts": len(by_prompt)} | without_intervals(with_intervals("val", values))


def without_intervals(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not is_bound(name)}


def test_several_k_come_of_the_same_samples() -> None:
    found = figures(ANSWERS, samples_per_prompt=4, k=[4, 1, 2])
    assert found == pytest.approx(
        {
            "val/prompts": 3,
            "val/score/mean@4": (0.5 + 0.25) / 3,
            "val/solved/mean@4": (0.5 + 0.25) / 3,
            "val/solved/pass@2": (5 / 6 + 3 / 6) / 3,  # of the six pairs, five of `a` and three of `b`
            "val/solved/pass@4": 2 / 3,
            "val/solved/maj@2": (0.5 + 0.5) / 3,  # of two consecutive pairs, one of `a` and one of `b`
            "val/solved/maj@4": 1 / 3,
        }
    )


@pytest.mark.parametrize(("num_samples", "k"), [(6, 1), (6, 2), (6, 5), (6, 6), (3, 5)])
def test_pass_at_k_is_the_share_of_choices_that_have_a_right_one(num_samples: int, k: int) -> None:
    for num_right in range(num_samples + 1):
        choices = list(combinations(range(num_samples), min(k, num_samples)))
        share = sum(min(choice) < num_right for choice in choices) / len(choices)
        assert pass_at(k, num_samples, num_right) == pytest.approx(share)


def test_the_mark_itself_is_enough() -> None:
    found = figures({"a": [("x", 0.5), ("x", 0.5), ("y", 0.25)]}, samples_per_prompt=3, solved_at=0.5)
    assert found["val/solved/mean@3"] == pytest.approx(2 / 3)
    assert (found["val/solved/pass@3"], found["val/solved/maj@3"]) == (1.0, 1.0)


def test_the_first_of_equally_common_answers_is_the_majority() -> None:
    tie = {"a": [("x", 0.0), ("y", 1.0), ("y", 1.0), ("x", 0.0)], "b": [("y", 1.0), ("x", 0.0)]}
    assert figures(tie, samples_per_prompt=4)["val/solved/maj@4"] == 0.5


def test_samples_without_an_answer_do_not_vote() -> None:
    """Samples without an answer are the majority, and would be wrong. Without votes, nothing is solved."""
    mute = {"a": [("", 0.0), ("", 0.0), ("y", 1.0)], "b": [("", 0.0), ("", 0.0), ("", 1.0)]}
    assert figures(mute, samples_per_prompt=3)["val/solved/maj@3"] == 0.5


def test_every_prompt_counts_alike_however_many_of_its_samples_were_scored() -> None:
    answers = {"a": [("x", 1.0)], "b": [("x", 0.0), ("y", 0.0), ("z", 0.5)]}
    found = figures(answers, samples_per_prompt=3, solved_at=0.5)
    assert found["val/score/mean@3"] == pytest.approx((1 + 1 / 6) / 2)
    assert found["val/solved/mean@3"] == pytest.approx((1 + 1 / 3) / 2)


class Rows:
    """Prompts of two sources in turn; `bad` ones are too long."""

    def __init__(self, num_rows: int, bad: Sequence[int] = ()) -> None:
        self.num_rows, self.bad = num_rows, bad

    def __len__(self) -> int:
        return self.num_rows

    def draws(self, begin: int, end: int) -> list[Draw]:
        return [Draw(number, "all", 0, number) for number in range(begin, min(end, self.num_rows))]

    def read(self, draws: Sequence[Draw]) -> list[Any]:
        return [SkippedRow(draw, None, 99) if draw.number in self.bad else self._prompt(draw) for draw in draws]

    @staticmethod
    def _prompt(draw: Draw) -> Prompt:
        source = "even" if draw.number % 2 == 0 else "odd"
        row = PromptRow(({"role": "user", "content": "?"},), source, None, str(draw.number), {}, None, "a file")
        return Prompt(draw, row, f"prompt {draw.number}", [10 + draw.number])


class Stage:
    """A validator on a real generator: sample k of prompt n says 10 x n + k."""

    def __init__(self, directory: Path, outcome: Any, rows: Any, num_samples: int = 2, **settings: Any) -> None:
        models = {name: settings.pop(name) for name in ("reward_model", "reward") if name in settings}
        sections = {"samples_per_prompt": num_samples, "temperature": 0.25, "solved_at": 0.5} | settings
        config = make_config(
            directory, validation=sections, batch={"prompts_per_step": 1}, **({"reward": REWARD} | models)
        )
        self.hybrid, self.events = Hybrid([], self._answer), EventLog(directory / "events.jsonl")
        self.rewards = Rewards(outcome)
        arguments: Any = (config, self.hybrid, self.rewards, Tokenizer(), lambda done, total: None)
        self.generator = Generator(*arguments)
        self.validator = Validator(config, rows, self.generator, directory, self.events)
        self.num_samples = num_samples

    def _answer(self, request: GenerationRequest, sampling: Sampling) -> list[int]:
        prompt, number = divmod(int(request.key), self.num_samples)
        return [10 * prompt + number, END]


def half_right(sample: Sample) -> Outcome:
    """Prompts 0 to 2 are right once, 3 is right always, others never; the second sample of prompt 4 fails."""
    prompt, number = divmod(int(sample.response), 10)
    if (prompt, number) == (4, 1):
        return Failure("raised", "no", 0.0)
    return Score(float(prompt == 3 or (prompt < 3 and number == 0)), {}, 0.0, sample.response)


def test_validation_draws_from_its_own_distribution_the_same_each_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path, half_right, Rows(6))
    first, second = stage.validator.run(0, NO_MODELS), stage.validator.run(7, NO_MODELS)
    assert first == second
    assert {sampling.temperature for sampling in stage.hybrid.samplings} == {0.25}
    requests = stage.hybrid.requests
    assert [len(batch) for batch in requests] == [8, 4] * 2, "four steps' prompts at a time"
    seeds = [request.seed for batch in requests[:2] for request in batch]
    wanted = [request_seed(5, 0, f"all/0/{row}", number) for row in range(6) for number in (0, 1)]
    assert seeds == wanted
    assert [request.seed for batch in requests[2:] for request in batch] == wanted


def test_figures_are_of_each_source_and_of_all_together(tmp_path: Path) -> None:
    found = Stage(tmp_path, half_right, Rows(6)).validator.run(0, NO_MODELS)
    expected = {
        "val/even/prompts": 3,
        "val/even/score/mean@2": (0.5 + 0.5 + 0.0) / 3,
        "val/even/solved/pass@2": 2 / 3,
        "val/odd/prompts": 3,
        "val/odd/score/mean@2": (0.5 + 1.0 + 0.0) / 3,
        "val/odd/solved/pass@2": 2 / 3,
        "val/prompts": 6,
        "val/score/mean@2": (0.5 + 0.5 + 0.5 + 1.0) / 6,
        "val/solved/mean@2": (0.5 + 0.5 + 0.5 + 1.0) / 6,
        "val/solved/pass@2": 4 / 6,
        "val/solved/maj@2": 4 / 6,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    names = ("prompts", "score/mean@2", "solved/mean@2", "solved/pass@2", "solved/maj@2")
    known = {f"{prefix}/{name}" for prefix in ("val", "val/even", "val/odd") for name in names}
    assert set(without_intervals(found)) == known
    bounds = {f"{name}/{end}" for name in known if not name.endswith("/prompts") for end in ("low", "high")}
    assert set(found) - known == bounds
    assert all(found[f"{name}/low"] < found[name] < found[f"{name}/high"] for name in known if f"{name}/low" in found)


def test_what_is_too_long_is_skipped_and_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, half_right, Rows(6, bad=[1, 3]))
    found = stage.validator.run(0, NO_MODELS)
    assert (found["val/prompts"], found["val/odd/prompts"]) == (4, 1)
    assert stage.validator._skips.overlong == Counter({"all": 2})


def test_an_answer_in_one_sample_is_its_prompts(tmp_path: Path) -> None:
    found = Stage(tmp_path, half_right, Rows(3), num_samples=1).validator.run(0, NO_MODELS)
    prompts = {"val/even/prompts": 2.0, "val/odd/prompts": 1.0, "val/prompts": 3.0}
    prefixes, names = ("val/even", "val/odd", "val"), ("score/mean@1", "solved/mean@1")
    expected = prompts | {f"{prefix}/{name}": 1.0 for prefix in prefixes for name in names}
    assert without_intervals(found) == expected, "and no maj@1"
    assert "val/odd/score/mean@1/low" not in found, "one prompt has no interval"


def odd_alone_answers(sample: Sample) -> Outcome:
    """Everything is correct; the source `even` has no judged answers."""
    return Score(1.0, {}, 0.0, "one" if sample.data_source == "odd" else None)


def test_where_no_function_gives_an_answer_nobody_votes_which_is_said_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, odd_alone_answers, Rows(4))
    for _ in range(2):
        found = stage.validator.run(0, NO_MODELS)
        assert {name for name in without_intervals(found) if "maj@" in name} == {
            "val/odd/solved/maj@2",
            "val/solved/maj@2",
        }
        assert found["val/solved/maj@2"] == 1.0
    assert stage.validator.warnings == ["no maj@k for even: none of its reward functions returns the judged answer"]


def test_where_no_response_has_an_answer_nothing_is_solved_by_votes(tmp_path: Path) -> None:
    """A curve of maj@k has no holes where the policy was at its worst."""
    stage = Stage(tmp_path, lambda sample: Score(1.0, {}, 0.0, ""), Rows(4))
    assert stage.validator.run(0, NO_MODELS)["val/even/solved/maj@2"] == 0.0
    assert stage.validator.warnings == []


def test_responses_are_written_as_those_of_training_are(tmp_path: Path) -> None:
    Stage(tmp_path, half_right, Rows(3)).validator.run(20, NO_MODELS)
    rows = pq.read_table(tmp_path / "samples" / "validation-000020.parquet").to_pylist()
    assert [(row["uid"], row["response"], row["answer"], row["score"]) for row in rows] == [
        (f"all/0/{prompt}", str(10 * prompt + number), str(10 * prompt + number), float(number == 0))
        for prompt in range(3)
        for number in (0, 1)
    ]
    other = tmp_path / "other"
    other.mkdir()
    Stage(other, half_right, Rows(3), save_samples=False).validator.run(20, NO_MODELS)
    assert not (other / "samples").exists()


def test_greedy_is_one_response_of_the_likeliest_tokens(tmp_path: Path) -> None:
    stage = Stage(tmp_path, half_right, Rows(3), num_samples=1, temperature=1.0, greedy=True)
    assert stage.validator.run(0, NO_MODELS)["val/score/mean@1"] == 1.0
    assert {(each.temperature, each.top_k) for each in stage.hybrid.samplings} == {(1.0, 1)}


def test_the_best_is_of_a_source_that_is_there(tmp_path: Path) -> None:
    rows: Any = Rows(3)
    for source in ("odd", "even"):
        best = {"every": 1, "best_metric": f"val/{source}/score/mean@1"}
        check_best(make_config(tmp_path, validation=best, reward=REWARD), rows)
    config = make_config(tmp_path, validation={"every": 1, "best_metric": "val/ood/score/mean@1"}, reward=REWARD)
    with pytest.raises(DataError) as caught:
        check_best(config, rows)
    assert caught.value.fix == 'did you mean "odd"?'
    assert 'refers to the source "ood", but data.validation has no row of it' in caught.value.what


# --- what reward models say -------------------------------------------------------------------------------------------


def says(config: Any, *said: float) -> ModelScores:
    """A model of those settings that says these numbers of every prompt's samples, one after the other."""

    def compute_rm_score(batch: DataProto) -> DataProto:
        return batch.with_column("rm_scores", torch.tensor([said[row % len(said)] for row in range(len(batch))]))

    client: Any = SimpleNamespace(compute_rm_score=compute_rm_score)
    return ModelScores([ScoringModel("reward_model", config, client, None)])


@pytest.mark.parametrize(("said", "best"), [((1.0, 5.0, 2.0, 0.0), 0.5), ((5.0, 1.0, 2.0, 0.0), 1.0)])
def test_a_reward_model_is_measured_beside_the_rule(said: Sequence[float], best: float, tmp_path: Path) -> None:
    """Samples 0 and 2 of each prompt are right; of two pairs the model chooses one or both of them."""
    scorer = RewardModelConfig(path="scorer", max_tokens_per_device=64, weight=-1.0 if best == 0.5 else 1.0)
    said = [-each for each in said] if best == 0.5 else said
    stage = Stage(tmp_path, even_right, Rows(3), num_samples=4, k=[2, 4], reward_model=scorer)
    found = stage.validator.run(0, says(scorer, *said))
    assert found["val/solved/mean@4"] == found["val/score/mean@4"] == 0.5, "the rule alone says what is right"
    for prefix in ("val", "val/even", "val/odd"):
        assert found[f"{prefix}/model/mean@4"] == np.mean(said)
        assert found[f"{prefix}/solved/best@2"] == best
        assert found[f"{prefix}/solved/best@4"] == (1.0 if best == 1.0 else 0.0)
    rows = pq.read_table(tmp_path / "samples" / "validation-000000.parquet").to_pydict()
    assert rows["reward_model"][:4] == list(said), "the raw scores are saved"


def test_without_a_rule_there_is_what_the_model_says_and_no_more(tmp_path: Path) -> None:
    scorer = RewardModelConfig(path="scorer", max_tokens_per_device=64)
    nothing = RewardConfig()
    stage = Stage(tmp_path, even_right, Rows(3), num_samples=2, reward_model=scorer, reward=nothing)
    found = stage.validator.run(0, says(scorer, 1.0, 3.0))
    assert without_intervals(found) == {f"{prefix}/model/mean@2": 2.0 for prefix in ("val/even", "val/odd", "val")}


def test_mean_and_spread_of_a_model_learn_nothing_from_validation(tmp_path: Path) -> None:
    """The statistics come from training samples; otherwise validation would change what a run learns."""
    scorer = RewardModelConfig(path="scorer", max_tokens_per_device=64, running=True)
    models = says(scorer, 1.0, 3.0)
    before = models.state_dict()
    stage = Stage(tmp_path, even_right, Rows(3), num_samples=2, reward_model=scorer)
    stage.validator.run(0, models)
    assert models.state_dict() == before


def even_right(sample: Sample) -> Outcome:
    return Score(float(sample.row_id % 2 == 0), {}, 0.0)
