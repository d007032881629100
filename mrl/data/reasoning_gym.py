"""Tasks of the reasoning-gym library, with its questions, answers and scorer.

    data: {train: {legs: {dataset: "reasoning_gym:leg_counting", options: {size: 2000, seed: 1}}}}

Scoring needs the whole entry, which JSON may not be able to represent. So a row contains the options that created it,
and the scorer creates the entry again where it runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mrl.errors import DataError, SetupError, did_you_mean

FORMAT = "default"  # the library's instruction to put the answer between <answer> and </answer>


class ReasoningGymTask:
    """Rows of a task. Further options are the task's own."""

    def __init__(self, task: str, /, *, size: int, seed: int, **options: Any) -> None:
        options |= {"size": size, "seed": seed}
        self._made_from = {"task": task, "options": options}
        self._entries = _entries(task, options)
        self._instruction = _library("utils").SYSTEM_PROMPTS[FORMAT]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._entries[index]
        task = self._made_from["task"]
        return {
            "prompt": [
                {"role": "system", "content": self._instruction},
                {"role": "user", "content": entry["question"]},
            ],
            "data_source": f"reasoning_gym:{task}",
            "ability": self._entries.category,
            "reward_model": {"ground_truth": entry["answer"]},
            "extra_info": {**self._made_from, "index": index},
        }


def score(sample: Any) -> float:
    """Return the library's score, 0 to 1, of the text in the last <answer> of a response.

    As a reward function: `mrl.data.reasoning_gym:score`.
    """
    made_from = sample.extra_info
    entries = _entries_again(made_from["task"], json.dumps(made_from["options"], sort_keys=True))
    answer = _library("utils").extract_answer(sample.response)
    return float(entries.score_answer(answer, entries[made_from["index"]]))


def warm_up() -> None:
    """Import the library, which takes seconds, before the clock of the first sample starts."""
    _library("factory")


@lru_cache(maxsize=64)  # one entry per task and options, so a few
def _entries_again(task: str, options: str) -> Any:
    return _entries(task, json.loads(options))


def _entries(task: str, options: Mapping[str, Any]) -> Any:
    """Return the library's data set. Raise an error for unknown or invalid options."""
    factory = _library("factory")
    if task not in factory.DATASETS:
        raise DataError(f'reasoning_gym has no task "{task}"', fix=did_you_mean(task, factory.DATASETS))
    known = [field.name for field in dataclasses.fields(factory.DATASETS[task][1])]
    where = f"reasoning_gym:{task}"
    for name in options:
        if name not in known:
            raise DataError(f'unknown option "{name}"', where=where, fix=did_you_mean(name, known))
    try:
        return factory.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:  # the library checks its options with assert
        raise DataError(f"the task does not take these options: {error}", where=where) from error


def _library(module: str) -> Any:
    try:
        return importlib.import_module(f"reasoning_gym.{module}")
    except ModuleNotFoundError as error:
        raise SetupError(
            f"reasoning_gym: tasks need the library reasoning-gym, but the module {error.name} is missing",
            fix="pip install mrl[reasoning-gym]",
        ) from error
