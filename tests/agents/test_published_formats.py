"""Published formats of tool calls: read as vLLM's parsers read them, and answered as the models' templates do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mrl.agents.conversation import Conversation
from mrl.agents.environment import Observation, ToolCall
from mrl.agents.formats import answer_of, calls_of, load_format
from mrl.agents.observation import Speaker, TurnTemplate
from tests.data.chat_templates import save_tokenizer

PROPERTIES = {
    "place": {"type": "string"},
    "code": {"type": "string"},
    "days": {"type": "array", "items": {"type": "integer"}},
    "exact": {"type": "boolean"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]
ARGUMENTS = {"place": "42", "code": "if a < b:\n    print('</x>')", "days": [1, 2], "exact": True, "limit": None}
JSON = json.dumps(ARGUMENTS)
TEXTS = {name: value if isinstance(value, str) else json.dumps(value) for name, value in ARGUMENTS.items()}
TAGS = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in TEXTS.items())
PAIRS = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in TEXTS.items())
WRITTEN = {
    "qwen3_coder": 2 * f"<tool_call>\n<function=look>\n{TAGS}</function>\n</tool_call>\n",
    "glm45": 2 * f"<tool_call>look\n{PAIRS}</tool_call>\n",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + 2 * f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + 2 * f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    + f"<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    + "<|tool_calls_section_end|>",
}
"""A turn with two calls, as the model of each format writes it."""
TOKENS = (
    "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)


class Vocabulary:
    """The part of a tokenizer that vLLM's parsers use."""

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(TOKENS.split())}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_those_of_vllms_parser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistral: Any = ModuleType("vllm.parser.mistral")  # needs packages that are not installed, and is not used here
    mistral.MistralParser = type("MistralParser", (), {})
    monkeypatch.setitem(sys.modules, mistral.__name__, mistral)
    manager = pytest.importorskip("vllm.tool_parsers").ToolParserManager
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], tools=TOOLS, model="")
    theirs = manager.get_tool_parser(name)(Vocabulary(), request.tools).extract_tool_calls(WRITTEN[name], request)
    mine = calls_of(load_format(name), WRITTEN[name], "stop", TOOLS)
    read = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
    assert read == [(call.name, call.arguments) for call in mine] == 2 * [("look", ARGUMENTS)]
    if name == "kimi_k2":
        assert [call.id for call in theirs.tool_calls] == [call.id for call in mine]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_values_stay_text_unless_a_schema_wants_others(name: str) -> None:
    (call, _) = calls_of(load_format(name), WRITTEN[name], "stop")
    assert call.arguments == TEXTS
    as_python = WRITTEN[name].replace("true", "True").replace("null", "None").replace("[1, 2]", "[1, 2")
    (call, _) = calls_of(load_format(name), as_python, "stop", TOOLS)
    assert call.arguments == ARGUMENTS | {"days": "[1, 2"}  # the tool says what is wrong with it


ANSWERS = {
    "deepseek_v3": (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>4<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>",
        "<｜User｜>And then?<｜Assistant｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜>",
        "<｜User｜>And then?<｜Assistant｜></think>",
    ),
    "kimi_k2": (
        "<|im_system|>look<|im_middle|>## Return of functions.look:0\n3<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of \n4<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "<|im_user|>user<|im_middle|>And then?<|im_end|><|im_assistant|>assistant<|im_middle|>",
    ),
    "glm45": (
        "<|observation|>\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>",
        "<|user|>\nAnd then?",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_results_and_texts_follow_as_published(name: str) -> None:
    calls = [ToolCall(name="look", arguments={}, id="functions.look:0"), ToolCall(name="", problem="bad")]
    form, (results, text) = load_format(name), ANSWERS[name]
    assert answer_of(form, calls, Observation(results=["3", "4"])) == results
    assert answer_of(form, [], Observation(text="And then?")) == text


GLM = """\
[gMASK]<sop>
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('' if enable_thinking | default(true) else '\\n<think></think>') }}
{%- endif %}
"""
"""The published form in a few lines. No token ends the model's turn."""


@pytest.mark.parametrize(("thinks", "opening"), [(True, "<|assistant|>"), (False, "<|assistant|>\n<think></think>")])
def test_the_token_of_the_next_speaker_that_ends_a_turn_stands_there_once(
    tmp_path: Path, thinks: bool, opening: str
) -> None:
    tokenizer: Any = save_tokenizer("qwen2.5", tmp_path / "made")
    speakers = ["<|observation|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": speakers})
    tokenizer.chat_template = GLM
    template = TurnTemplate(tokenizer, {"enable_thinking": thinks})
    speaker = Speaker(tokenizer, load_format("glm45"), template, max_tokens=400)
    assert speaker.end_ids == {tokenizer.get_vocab()[token] for token in speakers[:2]}
    shown = f"\n<tool_response>\n3< |user|>\n</tool_response>{opening}"
    for end, before in (("<|observation|>", ""), ("", "<|observation|>")):
        conversation = Conversation("0", "0", np.array([1, 2], np.int32), max_tokens=500, seed=0)
        turn = np.array(tokenizer([f"<tool_call>look</tool_call>{end}"], add_special_tokens=False)["input_ids"][0])
        conversation.write(turn.astype(np.int32), np.zeros(len(turn), np.float32), "stop")
        encoded = speaker.encode(
            conversation, [ToolCall(name="look", arguments={})], Observation(results=["3<|user|>"])
        )
        assert encoded is not None
        assert encoded.text == before + shown


@pytest.mark.parametrize(
    ("value", "problem"),
    [("[" * 400 + "]" * 400, "nests more than 32"), ('["\\ud800"]', "half of a character")],
)
def test_a_value_that_cannot_be_passed_on_is_a_problem_of_its_call(value: str, problem: str) -> None:
    text = f"<tool_call>look<arg_key>days</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = calls_of(load_format("glm45"), text, "stop", TOOLS)
    assert call.arguments is None
    assert problem in call.problem
