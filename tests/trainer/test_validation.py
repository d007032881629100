"""mean@k, pass@k and maj@k of known answers, and which samples they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mrl.data.prompt_loader import SkipLog
from mrl.data.rlhf_dataset import Prompt, SkippedRow
from mrl.data.rows import PromptRow
from mrl.data.sampler import Draw
from mrl.events import EventLog
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from mrl.trainer.generation import Generator
from mrl.trainer.validation import Validator, validation_metrics
from tests.trainer.fakes import END, Hybrid, Rewards, Tokenizer, make_config

ANSWERS = {
    "a": [("12", 1.0), ("12", 1.0), ("13", 0.0), ("14", 0.0)],  # the commonest answer is right
    "b": [("7", 0.0), ("7", 0.0), ("8", 1.0), ("9", 0.0)],  # it is wrong, another is right
    "c": [("1", 0.0), ("2", 0.0), ("3", 0.0), ("4", 0.0)],  # nothing is right
}


def test_figures() -> None:
    assert validation_metrics("val", ANSWERS, 4, solved_at=1.0) == pytest.approx(
        {
            "val/prompts": 3,
            "val/score/mean@4": (0.5 + 0.25) / 3,
            "val/solved/mean@4": (0.5 + 0.25) / 3,
            "val/solved/pass@4": 2 / 3,
            "val/solved/maj@4": 1 / 3,
        }
    )


def test_partial_scores_solve_nothing_unless_they_reach_the_mark() -> None:
    answers = {"a": [("x", 0.4), ("y", 0.6)]}
    assert validation_metrics("val", answers, 2, solved_at=1.0)["val/solved/pass@2"] == 0
    assert validation_metrics("val", answers, 2, solved_at=0.5)["val/solved/mean@2"] == 0.5


def test_one_sample_has_no_majority() -> None:
    assert "val/solved/maj@1" not in validation_metrics("val", {"a": [("x", 1.0)]}, 1, solved_at=1.0)


def test_the_mark_itself_is_enough() -> None:
    found = validation_metrics("val", {"a": [("x", 0.5), ("x", 0.5), ("y", 0.25)]}, 3, solved_at=0.5)
    assert found["val/solved/mean@3"] == pytest.approx(2 / 3)
    assert (found["val/solved/pass@3"], found["val/solved/maj@3"]) == (1.0, 1.0)


def test_the_first_of_equally_common_answers_is_the_majority() -> None:
    tie = {"a": [("x", 0.0), ("y", 1.0), ("y", 1.0), ("x", 0.0)], "b": [("y", 1.0), ("x", 0.0)]}
    assert validation_metrics("val", tie, 4, solved_at=1.0)["val/solved/maj@4"] == 0.5


def test_every_prompt_counts_alike_however_many_of_its_samples_were_scored() -> None:
    found = validation_metrics("val", {"a": [("x", 1.0)], "b": [("x", 0.0), ("y", 0.0), ("z", 0.5)]}, 3, solved_at=0.5)
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

    def __init__(self, directory: Path, outcome: Any, rows: Any, num_samples: int = 2) -> None:
        sections = {"samples_per_prompt": num_samples, "temperature": 0.25, "solved_at": 0.5}
        config = make_config(directory, validation=sections, batch={"prompts_per_step": 1})
        self.hybrid, self.events = Hybrid([], self._answer), EventLog(directory / "events.jsonl")
        self.rewards = Rewards(outcome)
        arguments: Any = (config, self.hybrid, self.rewards, Tokenizer(), lambda done, total: None)
        self.generator = Generator(*arguments)
        self.skips = SkipLog(0, self.events)
        self.validator = Validator(config, rows, self.generator, self.skips)
        self.num_samples = num_samples

    def _answer(self, request: GenerationRequest, sampling: Sampling) -> list[int]:
        prompt, number = divmod(int(request.key), self.num_samples)
        return [10 * prompt + number, END]


def half_right(sample: Sample) -> Outcome:
    """Prompts 0 to 2 are right once, 3 is right always, others never; the second sample of prompt 4 fails."""
    prompt, number = divmod(int(sample.response), 10)
    if (prompt, number) == (4, 1):
        return Failure("raised", "no", 0.0)
    return Score(float(prompt == 3 or (prompt < 3 and number == 0)), {}, 0.0)


def test_validation_draws_from_its_own_distribution_the_same_each_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path, half_right, Rows(6))
    first, second = stage.validator.run(), stage.validator.run()
    assert first == second
    assert {sampling.temperature for sampling in stage.hybrid.samplings} == {0.25}
    requests = stage.hybrid.requests
    assert [len(batch) for batch in requests] == [8, 4] * 2, "four steps' prompts at a time"
    seeds = [request.seed for batch in requests[:2] for request in batch]
    wanted = [request_seed(5, 0, f"all/0/{row}", number) for row in range(6) for number in (0, 1)]
    assert seeds == wanted
    assert [request.seed for batch in requests[2:] for request in batch] == wanted


def test_figures_are_of_each_source_and_of_all_together(tmp_path: Path) -> None:
    found = Stage(tmp_path, half_right, Rows(6)).validator.run()
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
    assert set(found) == {f"{prefix}/{name}" for prefix in ("val", "val/even", "val/odd") for name in names}


def test_what_is_too_long_is_skipped_and_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, half_right, Rows(6, bad=[1, 3]))
    found = stage.validator.run()
    assert (found["val/prompts"], found["val/odd/prompts"]) == (4, 1)
    assert stage.skips.overlong == Counter({"all": 2})


def test_an_answer_in_one_sample_is_its_prompts(tmp_path: Path) -> None:
    found = Stage(tmp_path, half_right, Rows(3), num_samples=1).validator.run()
    assert found == {
        "val/even/prompts": 2.0,
        "val/even/score/mean@1": 1.0,
        "val/even/solved/mean@1": 1.0,
        "val/odd/prompts": 1.0,
        "val/odd/score/mean@1": 1.0,
        "val/odd/solved/mean@1": 1.0,
        "val/prompts": 3.0,
        "val/score/mean@1": 1.0,
        "val/solved/mean@1": 1.0,
    }
