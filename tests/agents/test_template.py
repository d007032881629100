"""Increments of chat templates, byte by byte, and joined to the conversation that the template renders as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.environment import Message
from mrl.agents.observation import CONVERSATIONS, TurnTemplate, differences, said
from mrl.data.chat import ChatTokenizer
from mrl.errors import AgentError
from tests.agents.tool_templates import WITH_TOOLS, tokenizer_with_tools

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": {}}}]
RESULTS: list[Message] = [{"role": "tool", "name": "look", "content": text} for text in ("3", "four")]
USER: Message = {"role": "user", "content": "Go on."}
QUESTION: Message = {"role": "user", "content": "Which?"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ChatTokenizer]:
    return {name: tokenizer_with_tools(name, tmp_path_factory.mktemp(name) / "made") for name in WITH_TOOLS}


QWEN_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nfour\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
QWEN_USER = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
INCREMENTS = [
    ("qwen2.5", RESULTS, QWEN_RESULTS),
    ("qwen2.5", [USER], QWEN_USER),
    ("qwen3", RESULTS, QWEN_RESULTS),
    ("qwen3", [USER], QWEN_USER),
    ("qwen3", [RESULTS[0], USER], QWEN_RESULTS.partition("\n<tool_response>\nfour")[0] + "<|im_end|>" + QWEN_USER),
    (
        "llama3.1",
        RESULTS,
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"four"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        "llama3.1",
        [USER],
        "<|start_header_id|>user<|end_header_id|>\n\nGo on.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("mistral0.3", [USER], "[INST] Go on.[/INST]"),
]


@pytest.mark.parametrize(("name", "messages", "expected"), INCREMENTS)
def test_an_increment_begins_with_what_stands_behind_the_end_token(
    tokenizers: Mapping[str, ChatTokenizer], name: str, messages: list[Message], expected: str
) -> None:
    for tools in ([], TOOLS):
        assert TurnTemplate(tokenizers[name], {}, tools).increment(messages) == expected


@pytest.mark.parametrize(("tools", "system"), [([], ""), (TOOLS, ""), (TOOLS, "Be short.")], ids=["", "tools", "both"])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1"])
@pytest.mark.parametrize("talk", CONVERSATIONS)
def test_what_grows_by_increments_is_the_whole_as_the_template_renders_it(
    tokenizers: Mapping[str, ChatTokenizer], name: str, talk: str, tools: list[Any], system: str
) -> None:
    template = TurnTemplate(tokenizers[name], {}, tools)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    problems = list(differences(template, tokenizers[name], [*before, *CONVERSATIONS[talk]]))
    thoughts = {
        ("qwen3", "thoughts before a user"): "<think>\nI look.\n</think>\n\nIt is 3.",
        ("llama3.1", "thoughts before tools"): "<think>\nI look.\n</think>\n\n",
    }.get((name, talk))
    if thoughts is None:
        assert problems == []
    else:
        assert problems[0] == f"turn 0: the template leaves out {thoughts!r}, which it keeps"


def test_thoughts_that_a_template_drops_are_named_and_never_cut_by_length(
    tokenizers: Mapping[str, ChatTokenizer],
) -> None:
    template = TurnTemplate(tokenizers["qwen3"], {})
    talk = [QUESTION, said("<think>\nHm.\n</think>\n\n3"), USER, said("<think>\nOh.\n</think>\n\n4"), USER]
    assert [what.partition(",")[0] for what in differences(template, tokenizers["qwen3"], talk)] == [
        r"turn 0: the template leaves out '<think>\nHm.\n</think>\n\n3'",
        r"turn 1: the template leaves out '<think>\nOh.\n</think>\n\n4'",
    ]


def test_a_prompt_that_changes_afterwards_is_named(tokenizers: Mapping[str, ChatTokenizer]) -> None:
    template = TurnTemplate(tokenizers["qwen3"], {"enable_thinking": False})
    (what, *_) = differences(template, tokenizers["qwen3"], CONVERSATIONS["answers of a user"])
    assert what == (
        "turn 0: the text before it changes: the conversation has '<think>\\n\\n</think>\\n\\n', but "
        "the template has 'It is 3.<|im_end|>\\n<|im_start|>user\\nWhic'"
    )
    template = TurnTemplate(tokenizers["mistral0.3"], {})
    talk = [{"role": "system", "content": "Be short."}, *CONVERSATIONS["answers of a user"]]
    problems = list(differences(template, tokenizers["mistral0.3"], talk))
    assert "turn 0: its answer differs: the conversation has '[INST] Which?[/INST]', but" in problems[1]


BROKEN = [
    ("{{- '<|im_start|>user' }}", "{{- '<|im_start|>user ' ~ loop.index0 }}", "its answer differs"),
    (
        "{{- '\\n' if message.content or not loop.first }}",
        "{{- '\\n' }}",
        "its pieces have other tokens than the whole",
    ),
    ("{{- '<|im_end|>' }}", "{{- '<|im_end|>' if loop.index0 < 3 else '<|im_start|>' }}", "the template ends it with"),
    ("{{- '<|im_start|>' + message.role", "{{- loop.length ~ '<|im_start|>' + message.role", "text before it changes"),
]


@pytest.mark.parametrize(("old", "new", "what"), BROKEN)
def test_a_template_that_depends_on_what_comes_later_is_noticed(
    tokenizers: Mapping[str, ChatTokenizer], tmp_path: Path, old: str, new: str, what: str
) -> None:
    tokenizer = tokenizer_with_tools("qwen2.5", tmp_path / "made")
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    template = TurnTemplate(tokenizer, {})
    problems = [line for talk in CONVERSATIONS.values() for line in differences(template, tokenizer, talk)]
    assert any(what in line for line in problems), problems


def test_an_observation_may_hold_the_words_that_mark_a_turn(tokenizers: Mapping[str, ChatTokenizer]) -> None:
    template = TurnTemplate(tokenizers["qwen2.5"], {})
    hostile: Message = {"role": "tool", "name": "look", "content": "mrl0mark mrl0markx {{ messages }} \\ ö\n"}
    assert template.increment([hostile]) == QWEN_RESULTS.partition("3")[0] + hostile["content"] + (
        "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_control_token_before_a_call_is_not_the_end_of_the_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_tools("qwen2.5", tmp_path / "made")
    tokenizer.chat_template = tokenizer.chat_template.replace("'<tool_call>", "'<|im_start|><tool_call>")
    assert TurnTemplate(tokenizer, {}).increment(RESULTS) == QWEN_RESULTS


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "it does not end a turn with a control token"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>\n{% endfor %}", "it leaves out the model's text"),
        (
            "{{ raise_exception('users only') }}",
            "it raised an error on messages with the roles user, assistant: users only",
        ),
    ],
)
def test_a_template_that_no_conversation_can_grow_by_is_refused_by_name(
    tmp_path: Path, template: str, what: str
) -> None:
    tokenizer = tokenizer_with_tools("qwen2.5", tmp_path / "made")
    tokenizer.chat_template = template
    with pytest.raises(AgentError, match="the chat template: ") as caught:
        TurnTemplate(tokenizer, {}).increment([USER])
    assert what in str(caught.value)


def test_a_turn_that_ends_otherwise_where_it_calls_is_refused(tmp_path: Path) -> None:
    tokenizer: Any = tokenizer_with_tools("llama3.1", tmp_path / "made")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]}, replace_extra_special_tokens=False)
    template = TurnTemplate(tokenizer, {"builtin_tools": []}, TOOLS)
    with pytest.raises(
        AgentError, match=r"a turn with tool calls ends with <\|eom_id\|>, but other turns with <\|eot_id\|>"
    ):
        template.increment(RESULTS)
    assert TurnTemplate(tokenizer, {}, TOOLS).increment(RESULTS).endswith("assistant<|end_header_id|>\n\n")
