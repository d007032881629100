"""The tokens of a conversation to learn from, token by token, on published chat templates."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mrl.data.chat import ChatTokenizer
from mrl.data.conversation import Continuation, PromptEncoder
from mrl.data.rows import PromptRow
from mrl.errors import BadRow
from tests.data.chat_templates import TEMPLATES, save_tokenizer

THOUGHT = "<think>\nand so on\n</think>\n\n"
TALK = ["What is the sum of 1 and 2?", "It is 3.", "4 and 44?", "48\n\nand so on."]


def talk_of(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def row_of(messages: list[dict[str, str]], first: int) -> PromptRow:
    return PromptRow(tuple(messages[:first]), "talks", None, None, {}, None, "talks.jsonl:7", tuple(messages[first:]))


def learned(
    tokenizer: ChatTokenizer, messages: list[dict[str, str]], first: int, **options: Any
) -> tuple[list[int], Continuation]:
    """Return the prompt's tokens and the answer."""
    encoder, row = PromptEncoder(tokenizer, options), row_of(messages, first)
    text = encoder.render(row)
    (ids,) = encoder.encode([text])
    return ids, encoder.answer(row, text, ids)


def in_runs(tokenizer: Any, answer: Continuation) -> list[tuple[bool, str]]:
    """Return the answer as text, split at the borders of the learned parts."""
    pairs = zip(answer.is_learned, answer.ids, strict=True)
    runs = [(of, [token for _, token in pairs]) for of, pairs in groupby(pairs, key=lambda pair: pair[0])]
    return [(of, tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for of, ids in runs]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_masks_are_those_that_the_template_marks(name: str, system: bool, tmp_path: Path) -> None:
    """transformers finds the marked parts itself; the encoder sees the template as published."""
    if system and name == "mistral0.3":
        pytest.skip("its template leaves out the system's message if an answer is last")
    talk: Any = [{"role": "system", "content": "Be brief."}] * system + talk_of(*TALK, "4?", THOUGHT + "It is 4.")
    marked: Any = save_tokenizer(name, tmp_path / "marked", marked=True)
    encoded = marked.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], [bool(each) for each in encoded["assistant_masks"]]
    assert 0 < sum(mask) < len(mask)
    for tokenizer in (marked, save_tokenizer(name, tmp_path / "plain")):
        prompt, answer = learned(tokenizer, talk, 1 + system)
        num = len(prompt) + len(answer.ids)
        assert prompt + answer.ids == ids[:num]
        assert [False] * len(prompt) + answer.is_learned == mask[:num]
        assert not any(mask[num:]), "text of the template after the last end is never learned"


def test_the_last_answer_alone(tmp_path: Path) -> None:
    tokenizer = save_tokenizer("llama3.1", tmp_path)
    prompt, answer = learned(tokenizer, talk_of(*TALK), 3)
    assert in_runs(tokenizer, answer) == [(True, TALK[3] + "<|eot_id|>")]
    assert "It is 3." in tokenizer.decode(prompt)


def test_a_former_turn_that_loses_its_thinking_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer("qwen3", tmp_path)
    talk = talk_of(TALK[0], THOUGHT + TALK[1], TALK[2], THOUGHT + TALK[3])
    with pytest.raises(BadRow) as caught:
        learned(tokenizer, talk, 1)
    assert str(caught.value).startswith(
        "talks.jsonl:7: message 1 (assistant): the chat template leaves out a part of it, such as its thinking\n"
        "  fix: set batch.loss_on=last, "
    )
    _, answer = learned(tokenizer, talk, 3)
    assert in_runs(tokenizer, answer) == [(True, THOUGHT + TALK[3] + "<|im_end|>")]


def test_a_former_turn_that_was_called_for_otherwise_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer("qwen3", tmp_path)
    what = r"talks.jsonl:7: message 1 \(assistant\): the chat template renders the messages before it differently"
    with pytest.raises(BadRow, match=what):
        learned(tokenizer, talk_of(*TALK), 1, enable_thinking=False)
    _, answer = learned(tokenizer, talk_of(*TALK), 3, enable_thinking=False)
    assert in_runs(tokenizer, answer) == [(True, TALK[3] + "<|im_end|>")], "the empty thought belongs to the prompt"


def test_a_system_message_that_moves_is_refused(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *talk_of(*TALK)]
    with pytest.raises(BadRow, match=r"message 2 \(assistant\): the chat template renders the messages before it"):
        learned(save_tokenizer("mistral0.3", tmp_path), talk, 2)


def test_an_answer_that_begins_within_a_token_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer("qwen2.5", tmp_path)
    assert len(tokenizer(["\n\n"], add_special_tokens=False)["input_ids"][0]) == 1
    for first in (1, 3):
        with pytest.raises(BadRow, match=r"^talks.jsonl:7: message 3 \(assistant\) begins inside a token"):
            learned(tokenizer, talk_of(*TALK[:3], "\n48"), first)


def test_a_turn_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer("qwen2.5", tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    with pytest.raises(
        BadRow, match=r"message 1 \(assistant\): the chat template does not end it with a control token"
    ):
        learned(tokenizer, talk_of(*TALK[:2]), 1)


def test_an_answer_may_not_speak_with_another_voice(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match=r'message 1 \(assistant\) contains the control token "<\|im_end\|>"'):
        learned(save_tokenizer("qwen2.5", tmp_path), talk_of(TALK[0], "3<|im_end|>"), 1)
