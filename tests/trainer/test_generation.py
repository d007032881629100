"""From prompts to scored samples: every row gets its own response and its own score, in any order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.agents.loop import Dialog
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import ModelConfig
from mrl.protocol import DataProto
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.step_metrics import batch_metrics, reward_vector, sample_columns
from tests.trainer.fakes import END, Hybrid, Rewards, Tokenizer, make_config, prompts_of, score_of_row

TEXTS = ["100", "101 50", "102 50 50 50", "103"]
TOKENS = [[100, END], [101, 50, END], [102, 50, 50, 50], [103, END]]


def answer(request: GenerationRequest, sampling: Sampling) -> list[int]:
    """Row 2 does not come to an end; row 1 says 50 before it does."""
    return TOKENS[int(request.key)]


class Stage:
    """A generator between engines and rewards."""

    def __init__(self, directory: Path, outcome: Any = score_of_row, eos: int | None = END, **sections: Any) -> None:
        self.config = make_config(directory, **sections)
        self.hybrid = Hybrid([], answer)
        self.rewards = None if outcome is None else Rewards(outcome)
        self.progress: list[tuple[int, int]] = []
        arguments: Any = (self.config, self.hybrid, self.rewards, Tokenizer(eos), self._note)
        self.generator = Generator(*arguments)

    def _note(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def run(self, batch: DataProto | None = None, step: int = 3) -> ScoredBatch:
        """Two samples of each of two prompts."""
        return self.generator.run(
            prompts_of([0, 1]).repeat(2) if batch is None else batch, self.generator.training, step
        )


def rows_of(batch: DataProto, name: str) -> list[list[float]]:
    return [row.tolist() for row in torch.split(batch.values(name), batch.lengths(name).tolist())]


def test_each_row_has_its_own_response_and_score(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    batch = stage.run().batch
    assert batch.row_ids.tolist() == [0, 1, 2, 3]
    assert rows_of(batch, "responses") == TOKENS
    assert rows_of(batch, "rollout_log_probs") == [
        [-(row + place / 8) for place in range(len(ids))] for row, ids in enumerate(TOKENS)
    ]
    assert batch["scores"].tolist() == [0.0, 0.25, 0.5, 0.75]
    assert batch["scores"].dtype == torch.float64
    assert batch["truncated"].tolist() == [False, False, True, False]
    assert list(batch["response_text"]) == TEXTS
    assert list(batch["uid"]) == ["p0", "p0", "p1", "p1"], "and what the prompts had"
    assert stage.progress == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_score_of_each_function_reaches_the_advantages_that_read_it(tmp_path: Path) -> None:
    """A function that does not score a prompt's source has 0 for its samples; one without a weight is left out."""

    def outcome(sample: Sample) -> Score:
        parts = {"right": sample.row_id / 4, "right/detail": 9.0, "seen": 5.0}
        return Score(0.5, parts | ({"short": -1.0} if sample.row_id < 2 else {}), 0.0)

    functions = {"right": 2.0, "short": -0.5, "seen": 0.0}
    reward = RewardConfig(
        functions={label: RewardFunctionConfig(name="gsm8k", weight=weight) for label, weight in functions.items()}
    )
    batch = Stage(tmp_path, outcome, reward=reward, algorithm={"advantage": "gdpo"}).run().batch
    vector = reward_vector(batch, reward)
    assert vector == [(2.0, [0.0, 0.25, 0.5, 0.75]), (-0.5, [-1.0, -1.0, 0.0, 0.0])]
    assert batch_metrics(batch, 8, 1.0)["reward/right/uniform_share"] == 0.0
    assert batch_metrics(batch, 8, 1.0)["reward/short/uniform_share"] == 1.0
    assert sample_columns(batch)["reward/short"] == [-1.0, -1.0, 0.0, 0.0]
    other = Stage(tmp_path, outcome, reward=reward, algorithm={"advantage": "grpo"}).run().batch
    assert reward_vector(other, reward) == []


def test_a_reward_is_told_everything_of_its_sample(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.run()
    assert stage.rewards is not None
    by_row = sorted(stage.rewards.samples, key=lambda sample: sample.row_id)
    assert by_row == [
        Sample(
            prompt=f"prompt {row // 2}",
            response=TEXTS[row],  # without the end token, of which it is no part; nothing else is cut
            num_response_tokens=len(TOKENS[row]),
            ground_truth=f"truth {row // 2}",
            data_source=f"source {row // 2}",
            extra_info={"number": row // 2},
            uid=f"p{row // 2}",
            row_id=row,
        )
        for row in range(4)
    ]


def test_every_sample_is_asked_for_with_a_seed_of_its_own(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rollout={"max_response_tokens": 5})
    stage.run(step=3)
    (requests,) = stage.hybrid.requests
    assert [request.key for request in requests] == ["0", "1", "2", "3"]
    assert [request.prompt for request in requests] == ["p0", "p0", "p1", "p1"]
    assert [request.prompt_ids.tolist() for request in requests] == [[10], [10], [11, 11], [11, 11]]
    assert [request.max_tokens for request in requests] == [5] * 4
    wanted = [request_seed(5, 3, uid, number) for uid in ("p0", "p1") for number in (0, 1)]
    assert [request.seed for request in requests] == wanted
    assert len(set(wanted)) == 4


def test_samples_are_numbered_wherever_their_prompts_rows_stand(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    batch = prompts_of([0, 1]).repeat(2).take([2, 0, 3, 1])
    scored = stage.run(batch, step=8)
    (requests,) = stage.hybrid.requests
    assert [request.key for request in requests] == ["2", "0", "3", "1"]
    pairs = [("p1", 0), ("p0", 0), ("p1", 1), ("p0", 1)]
    assert [request.seed for request in requests] == [request_seed(5, 8, *pair) for pair in pairs]
    assert rows_of(scored.batch, "responses") == [TOKENS[row] for row in (2, 0, 3, 1)]
    assert scored.batch["scores"].tolist() == [0.5, 0.0, 0.75, 0.25]


def test_what_is_drawn_from_is_what_the_configuration_says(tmp_path: Path) -> None:
    rollout = {"temperature": 0.7, "top_p": 0.8, "top_k": 9}
    stage = Stage(tmp_path, rollout=rollout, validation={"temperature": 0.3, "top_p": 0.6})
    generator = stage.generator
    assert generator.training == Sampling(0.7, 0.8, 9, (END,))
    assert generator.validation == Sampling(0.3, 0.6, 0, (END,))
    assert generator.greedy == Sampling(1.0, 1.0, 1, (END,))
    generator.run(prompts_of([0]), generator.validation, 0)
    generator.run(prompts_of([0]), generator.greedy, 1)
    assert stage.hybrid.samplings == [generator.validation, generator.greedy]


def test_masks_become_a_column_of_training_samples(tmp_path: Path) -> None:
    """Samples arrive in another order than their rows. Greedy answers and validation need no masks."""
    algorithm = {"advantage": "remax", "keep_sampling_mask": True}
    stage = Stage(tmp_path, algorithm=algorithm, rollout={"top_k": 9})
    plain = stage.hybrid.generate

    def with_masks(requests: Any, sampling: Sampling, follow_ups: Any = None) -> Iterator[Generated]:
        for sample in plain(requests, sampling, follow_ups):
            mask = np.stack([sample.token_ids, sample.token_ids + 1], 1) if sampling.keeps_mask else None
            yield replace(sample, sampling_mask=mask)

    stage.hybrid.generate = with_masks  # type: ignore[method-assign]
    assert rows_of(stage.run().batch, "sampling_mask") == [[[token, token + 1] for token in ids] for ids in TOKENS]
    for sampling in (stage.generator.greedy, stage.generator.validation):
        assert "sampling_mask" not in stage.generator.run(prompts_of([0]), sampling, 1).batch.columns()


def test_a_tokenizer_without_an_end_stops_nothing(tmp_path: Path) -> None:
    generator = Stage(tmp_path, eos=None).generator
    assert [each.stop_token_ids for each in (generator.training, generator.validation, generator.greedy)] == [()] * 3
    assert Stage(tmp_path, eos=0).generator.training.stop_token_ids == (0,)


def test_any_of_the_end_tokens_ends_a_response_and_is_no_part_of_its_text(tmp_path: Path) -> None:
    """A text that ends a response stays in it. A last token that does not end responses stays, too."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 103]}')
    rollout = {"stop_token_ids": [7], "stop": ["50 50"]}
    stage = Stage(tmp_path, model=ModelConfig(path=str(model)), rollout=rollout)
    assert stage.generator.training == Sampling(0.7, 1.0, 0, (2, 7, 103), ("50 50",))
    ends = {0: [100, 7], 1: [101, 103], 2: [102, 50, 50], 3: [103, 60, 103]}
    stage.hybrid.answer = lambda request, sampling: ends[int(request.key)]
    stage.hybrid.finish = lambda ids: "stop"
    assert list(stage.run().batch["response_text"]) == ["100", "101", "102 50 50", "103 60"]
    assert rows_of(stage.run().batch, "responses") == list(ends.values()), "and is trained"


def test_the_models_own_ends_can_be_ignored(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rollout={"stop_token_ids": [7], "ignore_eos": True})
    assert stage.generator.training.stop_token_ids == stage.generator.validation.stop_token_ids == (7,)


def failing(sample: Sample) -> Outcome:
    """Row 1 fails; the others have a quarter of their row id, and a part."""
    if sample.row_id == 1:
        return Failure("timeout", "too slow", 10.0)
    return Score(sample.row_id / 4, {"format": float(sample.row_id)}, 0.5)


def test_a_sample_without_a_score_is_in_the_figures_and_not_in_the_batch(tmp_path: Path) -> None:
    scored = Stage(tmp_path, failing).run()
    assert scored.batch.row_ids.tolist() == [0, 2, 3]
    assert scored.batch["scores"].tolist() == [0.0, 0.5, 0.75]
    assert rows_of(scored.batch, "responses") == [TOKENS[0], TOKENS[2], TOKENS[3]]
    assert list(scored.batch["uid"]) == ["p0", "p1", "p1"]
    expected = {
        "reward/num_samples": 4,
        "reward/failed_share": 0.25,
        "reward/score/mean": 1.25 / 3,
        "reward/format/mean": 5 / 3,
        "reward/source 0/num_samples": 2,
        "reward/source 0/failed_share": 0.5,
        "reward/source 0/score/mean": 0.0,
        "reward/source 1/score/mean": 0.625,
        "reward/failed/timeout": 1,
        "reward/failed/raised": 0,
        "reward/seconds/max": 10.0,
    }
    assert {name: scored.metrics[name] for name in expected} == pytest.approx(expected)


def test_failed_conversations_make_their_group_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, agent={"max_failed_share": 1.0})
    generator, sizes = stage.generator, list[int]()
    ended, submit = generator.dialogs.ended, stage.rewards.submit  # type: ignore[union-attr]

    def with_failure() -> list[Dialog]:
        dialogs = ended()
        for dialog in dialogs:
            dialog.failure = Failure("raised", "no answer", 0.0) if dialog.opening.row == 1 else None
        return dialogs

    def note(sample: Sample, group_size: int) -> int:
        sizes.append(group_size)
        return submit(sample)

    monkeypatch.setattr(generator, "_waits_for_groups", True)
    monkeypatch.setattr(generator.dialogs, "ended", with_failure)
    monkeypatch.setattr(stage.rewards, "submit", note)
    assert stage.run().batch.row_ids.tolist() == [0, 2, 3]
    assert sizes == [1, 2, 2]


def test_without_reward_functions_scores_begin_at_nothing(tmp_path: Path) -> None:
    scored = Stage(tmp_path, None).run()
    assert scored.batch["scores"].tolist() == [0.0] * 4
    assert scored.batch["scores"].dtype == torch.float64
    assert rows_of(scored.batch, "responses") == TOKENS
    assert list(scored.batch["response_text"]) == TEXTS
    assert scored.metrics == {}
