"""Rows and scores of the library reasoning-gym."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from mrl.config.data import SourceConfig
from mrl.data.reasoning_gym import score, warm_up
from mrl.errors import DataError
from tests.data.conftest import OpenDataset, batch_of

pytest.importorskip("reasoning_gym", reason="pip install mrl[reasoning-gym]")
TASKS = ("leg_counting", "basic_arithmetic", "countdown", "sudoku")


@dataclass
class Answered:
    response: str
    extra_info: dict[str, Any]


def source(task: str, **options: Any) -> SourceConfig:
    return SourceConfig(dataset=f"reasoning_gym:{task}", options={"size": 20, "seed": 1, **options})


@pytest.mark.parametrize("task", TASKS)
def test_its_own_answers_score_one_and_wrong_ones_less(task: str, dataset_of: OpenDataset) -> None:
    batch = batch_of(dataset_of(train={"gym": source(task)}, max_prompt_tokens=10_000), range(20))
    assert batch["data_source"].tolist() == [f"reasoning_gym:{task}"] * 20
    for truth, extra_info in zip(batch["ground_truth"], batch["extra_info"], strict=True):
        right = score(Answered(f"Let me think: 1.\n<answer>\n{truth}\n</answer>", extra_info))
        wrong = score(Answered("<answer>no idea</answer>", extra_info))
        missing = score(Answered(str(truth), extra_info))
        assert right == 1.0
        assert 0 <= wrong < 1
        assert 0 <= missing < 1


def test_the_scorer_takes_answers_that_differ_from_the_one_given(dataset_of: OpenDataset) -> None:
    dataset = dataset_of(train={"gym": source("countdown")}, max_prompt_tokens=10_000)
    batch = batch_of(dataset, range(20))
    for truth, extra_info in zip(batch["ground_truth"], batch["extra_info"], strict=True):
        assert score(Answered(f"<answer>({truth}) + 0 * 1</answer>", extra_info)) < 1  # uses numbers not given
        assert score(Answered(f"<answer>({truth})</answer>", extra_info)) == 1  # another text of the same value


def test_rows_depend_on_their_options_alone(dataset_of: OpenDataset) -> None:
    first, again, other = (
        batch_of(dataset_of(train={"gym": source("leg_counting", **options)}, max_prompt_tokens=10_000), range(20))
        for options in ({}, {}, {"seed": 2})
    )
    assert first["prompt_text"].tolist() == again["prompt_text"].tolist() != other["prompt_text"].tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (source("leg_count"), 'reasoning_gym has no task "leg_count"\n  fix: did you mean "leg_counting"?'),
        (
            source("leg_counting", min_animal=3),
            'reasoning_gym:leg_counting: unknown option "min_animal"\n  fix: did you mean "min_animals"?',
        ),
        (
            source("leg_counting", min_animals=0),
            "reasoning_gym:leg_counting: the task does not take these options: min_animals must be positive",
        ),
        (
            SourceConfig(dataset="reasoning_gym:leg_counting", options={"size": 3}),
            "reasoning_gym:leg_counting: options: missing a required argument: 'seed'\n"
            "  fix: it takes size, seed, options",
        ),
    ],
)
def test_wrong_tasks_and_options(given: SourceConfig, message: str, dataset_of: OpenDataset) -> None:
    with pytest.raises(DataError) as caught:
        dataset_of(train={"gym": given})
    assert str(caught.value) == message


def test_a_worker_loads_the_library_before_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    warm_up()
    loaded = set(sys.modules)
    score(Answered("<answer>4</answer>", {"task": "leg_counting", "options": {"size": 1, "seed": 1}, "index": 0}))
    assert {name for name in set(sys.modules) - loaded if name.startswith("reasoning_gym")} == set()
