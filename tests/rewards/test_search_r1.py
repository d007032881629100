"""Search-R1's scores, which only depend on the text of the model. Defects of the published code are cases here."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import RewardError
from mrl.rewards.functions.text import exact_match, search_r1
from mrl.rewards.sample import Sample

PROMPT = "For example, <answer> Beijing </answer>. <answer> and </answer>. Question: What is the capital of China?\n"
LOOK = "<think> I look. </think>\n<search> capital </search>"
FOUND = "\n\n<information>Doc 1(Title: China) Its capital is Beijing. <answer>Beijing</answer>\n</information>\n\n"
RIGHT, WRONG = "<think>I know.</think> <answer> the Beijing! </answer>", "<think>So.</think><answer>Xi'an</answer>"


def sample(*turns: str, truth: Any = None) -> Sample:
    return Sample(
        prompt=PROMPT,
        response="".join(turns[::2]),
        num_response_tokens=1,
        ground_truth={"target": ["Beijing", "Peking"]} if truth is None else truth,
        data_source="nq",
        extra_info={},
        uid="u",
        row_id=0,
        turns=[*turns],
    )


@pytest.mark.parametrize(
    ("turns", "value", "valid"),
    [
        ((LOOK, FOUND, RIGHT), 1, 1),
        ((RIGHT,), 1, 1),
        ((RIGHT + "\n<|im_end|>",), 1, 1),
        ((LOOK, FOUND, WRONG), 0.2, 1),
        ((WRONG,), 0.2, 1),
        (("<answer>Beijing</answer>",), 0.8, 0),
        (("So. " + RIGHT,), 0.8, 0),
        (("<search>capital</search>", FOUND, RIGHT), 0.8, 0),
        (("<answer>Rome</answer>",), 0.1, 0),
        ((LOOK, FOUND, LOOK), 0, 0),  # the search of the last turn is no valid end
        ((LOOK, FOUND, ""), 0, 0),  # no answer in the response; prompt and documents contain 0.1, or "Beijing"
        (("",), 0, 0),
        (("<think>I think",), 0, 0),
        (("<think><answer>a</answer></think> <answer>Beijing</answer>",), 0.1, 0),  # the first action counts
        ((LOOK + FOUND + RIGHT,), 0, 0),  # a model that copies the passage has searched, but not answered
        (("<answer>Beijing</answer><information>a</information>", "no", LOOK), 0, 0),  # an answer of another turn
    ],
)
def test_scores_by_answer_and_form(turns: tuple[str, ...], value: float, valid: float) -> None:
    result = search_r1(sample(*turns))
    assert (result["score"], result["valid"]) == (pytest.approx(value), valid)


def test_weights_and_what_was_found() -> None:
    weights = {"structure": 0.3, "final": 0.05, "retrieval": 0.1}
    assert search_r1(sample(LOOK, FOUND, WRONG), **weights)["score"] == pytest.approx(0.4)
    assert search_r1(sample(LOOK, "\n\n<information></information>\n\n", WRONG), **weights)["score"] == 0.3
    assert search_r1(sample(LOOK, FOUND, RIGHT), **weights)["score"] == 1
    assert search_r1(sample("<answer>Beijing</answer>"), **weights)["score"] == pytest.approx(0.7)
    assert search_r1(sample("<answer>Rome</answer>"), **weights)["score"] == 0.05


def test_to_write_an_accepted_answer_is_not_to_find_it() -> None:
    pasted = "<think>Beijing or Peking?</think><search>Beijing Peking</search>"
    result = search_r1(sample(pasted, "\n\n<information></information>\n\n", WRONG), retrieval=0.5)
    assert (result["score"], result["retrieved"]) == (0.2, 0)


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("The  Who!", {"target": ["who"]}, 1),
        ("U.S.", {"target": "us"}, 1),
        ("an apple", {"target": ["pear", "Apple"]}, 1),
        ("theory", {"target": ["ory"]}, 0),
        ("a\u2013b", {"target": ["\u2013b"]}, 1),  # an article ends where a word does
        ("1984", {"target": [1984]}, 1),
        ("Rome", ["rome"], 1),
    ],
)
def test_exact_match_takes_the_targets_of_search_r1(answer: str, truth: Any, right: float) -> None:
    assert exact_match(sample(f"<answer>{answer}</answer>", truth=truth), tag="answer")["score"] == right
    assert search_r1(sample(f"<answer>{answer}</answer>", truth=truth))["exact"] == right


def test_exact_match_reads_no_answer_out_of_prompt_or_documents() -> None:
    assert exact_match(sample(LOOK, FOUND, ""), tag="answer")["score"] == 0


@pytest.mark.parametrize("truth", [{"target": []}, {"targets": ["a"]}, {"target": {"a": 1}}])
def test_a_ground_truth_that_is_none_is_an_error(truth: Any) -> None:
    with pytest.raises(RewardError, match="not a text or a list of texts"):
        exact_match(sample("a", truth=truth), tag="answer")
