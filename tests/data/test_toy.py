"""Toy tasks have right answers and clean splits, their tokenizer is lossless, and own datasets work by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.config.data import SourceConfig
from mrl.data.chat import load_tokenizer
from mrl.data.toy import TOY_TASKS, addition
from mrl.demo.model import save_toy_tokenizer
from mrl.errors import DataError
from tests.data.conftest import OpenDataset, batch_of


def solved(question: str) -> str:
    """Compute the answer with another method than the task."""
    if match := re.fullmatch(r"(\d\d)\+(\d\d)=", question):
        return str(sum(map(int, match.groups())))
    verb, text = question.split()
    return (
        "".join(reversed(text)) if verb == "reverse" else "".join(digit * text.count(digit) for digit in "0123456789")
    )


@pytest.mark.parametrize("task", TOY_TASKS)
def test_answers_and_splits(task: str) -> None:
    whole = TOY_TASKS[task]()
    rows = [whole[index] for index in range(len(whole))]
    assert len(rows) >= 8100
    for row in rows:
        assert solved(row["prompt"][0]["content"]) == row["reward_model"]["ground_truth"]
    train, validation = TOY_TASKS[task](part="train"), TOY_TASKS[task](part="validation")
    parts = [[part[index]["extra_info"]["index"] for index in range(len(part))] for part in (train, validation)]
    assert sorted(parts[0] + parts[1]) == list(range(len(whole)))
    assert 0.08 < len(validation) / len(whole) < 0.12


@pytest.mark.parametrize("task", sorted(TOY_TASKS.keys() - {"addition"}))
def test_rows_depend_on_the_seed_alone(task: str) -> None:
    first, again, other = (TOY_TASKS[task](seed=seed) for seed in (1, 1, 2))
    assert [first[index] for index in range(50)] == [again[index] for index in range(50)]
    assert [first[index] for index in range(50)] != [other[index] for index in range(50)]


def test_rows_stay_what_they_are() -> None:
    first = TOY_TASKS["sorting"](seed=1)
    assert first[3]["prompt"][0]["content"] == FIXED_QUESTION


FIXED_QUESTION = "sort 56532099"


def test_datasets_by_name(dataset_of: OpenDataset) -> None:
    dataset = dataset_of(
        train={
            "sums": SourceConfig(dataset="toy:addition", options={"part": "validation"}),
            "mine": SourceConfig(dataset="tests.data.own_dataset:squares", options={"count": 4}),
        }
    )
    assert dataset.sizes["mine"] == 4
    assert batch_of(dataset, [len(dataset) - 1])["ground_truth"].tolist() == ["9"]


def test_tokenizer_files_and_template(tmp_path: Path) -> None:
    num_tokens = save_toy_tokenizer(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {f.name for f in tmp_path.iterdir()}
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer) == num_tokens == 262
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        tokenize=False,
        add_generation_prompt=False,
    )
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|>"
    (ids,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    assert len(ids) == 9
    assert ids[-1] == tokenizer.eos_token_id
    odd = "\tFüße 数\r\n\0"
    (ids,) = tokenizer([odd], add_special_tokens=False)["input_ids"]
    assert (len(ids), tokenizer.decode(ids)) == (len(odd.encode()), odd)


def test_addition_of_smaller_numbers() -> None:
    rows = addition(largest=12)
    assert [row["prompt"][0]["content"] for row in rows] == [
        f"{first}+{second}=" for first in (10, 11, 12) for second in (10, 11, 12)
    ]
    assert [row["reward_model"]["ground_truth"] for row in rows][-1] == "24"
    parts = [{row["extra_info"]["index"] for row in addition(part, 49)} for part in ("train", "validation")]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 1600
    with pytest.raises(DataError, match="largest must be 10 to 99, not 100"):
        addition(largest=100)


def test_a_careless_teacher() -> None:
    """Each problem with its right and wrong answers is on one side of the split, independent of the time."""
    rows = addition("train", 49, mistakes=0.6)
    problems = {row["prompt"][0]["content"] for row in addition("train", 49)}
    seen: dict[str, list[str]] = {}
    for row in rows:
        seen.setdefault(row["prompt"][0]["content"], []).append(row["reward_model"]["ground_truth"])
    assert seen.keys() == problems
    assert {len(answers) for answers in seen.values()} == {16}
    right = {problem: str(sum(map(int, problem.rstrip("=").split("+")))) for problem in seen}
    shares = [answer == right[problem] for problem, answers in seen.items() for answer in answers]
    assert abs(sum(shares) / len(shares) - 0.4) < 0.01
    differences = [
        sum(a != b for a, b in zip(answer, right[problem], strict=True))
        for problem, answers in seen.items()
        for answer in answers
    ]
    assert set(differences) == {0, 1}
    assert [rows[n] for n in (0, 999)] == [addition("train", 49, mistakes=0.6)[n] for n in (0, 999)]
    with pytest.raises(DataError, match=r"from 0 to 1, not 1\.5"):
        addition(mistakes=1.5)
