"""Golden texts of each format, whole, cut and damaged: the parsed calls, the problems, and the text of results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.agents.environment import Observation, ToolCall, Turn
from mrl.agents.formats import (
    CUT_OFF,
    INVALID_ACTION,
    answer_of,
    calls_of,
    load_format,
    search_r1_documents,
)
from mrl.config.agent import FORMATS
from mrl.errors import AgentError, NameUnknown

SPIKE = '{"name": "run", "arguments": {"code": "print(\'</tool_call>\') # <think> <tool_call>{}"}}'
DEEP = '{"b":' * 99 + "1" + "}" * 99
GOLDEN: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("hermes", "It is 4.<|im_end|>", []),
    (
        "hermes",
        'First.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": -3.5}}\n</tool_call><|im_end|>',
        [("add", {"a": 12, "b": -3.5})],
    ),
    (
        "hermes",
        '<think>\nI call <tool_call>{"name": "no", "arguments": {}}</tool_call>?\n</think>\n\n'
        '<tool_call>{"arguments": {"q": "ö\\n"}, "name": "search"}</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("search", {"q": "ö\n"}), ("now", {})],
    ),
    ("hermes", f"<tool_call>{SPIKE}</tool_call>", [("run", json.loads(SPIKE)["arguments"])]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> and more',
        [("add", {"a": 1})],
    ),
    ("hermes", '<think>so <tool_call>{"name": "no", "arguments": {}}</tool_call>', []),
    ("llama3_json", "The set {1, 2} is finite.<|eot_id|>", []),
    ("llama3_json", '{"answer": 4}<|eot_id|>', []),
    ("llama3_json", '{"name": "add", "parameters": {"a": 12}}<|eom_id|>', [("add", {"a": 12})]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "x; {y}"}}; '
        '{"name": "now", "parameters": {}}<|eom_id|>',
        [("add", {"a": "x; {y}"}), ("now", {})],
    ),
    ("harmony", "<|channel|>final<|message|>It is 4, to=functions.add.<|return|>", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>I call functions.add, to=functions.no.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.add <|constrain|>json<|message|>{"a": 12, "q": "ö\\n"}<|call|>',
        [("add", {"a": 12, "q": "ö\n"})],
    ),
    (
        "harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}<|end|><|start|>assistant to=functions.look<|channel|>"
        'commentary<|message|>{"at": [1]}',
        [("now", {}), ("look", {"at": [1]})],
    ),
    (
        "qwen3_coder",
        "<think>\n<tool_call><function=no></function></tool_call></think>\nFirst.\n<tool_call>\n<function=add>\n"
        "<parameter=a>\n12\n</parameter>\n<parameter=q>\nö\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
        [("add", {"a": "12", "q": "ö\n</tool_call>"})],
    ),
    (
        "glm45",
        "\n<think>so</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>q</arg_key>\n"
        "<arg_value>ö\n</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [("add", {"a": "12", "q": "ö\n"}), ("now", {})],
    ),
    (
        "deepseek_v3",
        "<think>so <｜tool▁call▁begin｜>function<｜tool▁sep｜>no\n```json\n{}\n```<｜tool▁call▁end｜></think>"
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 12, "q": "```ö"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("add", {"a": 12, "q": "```ö"}), ("now", {})],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 12}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("add", {"a": 12}), ("now", {})],
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 12}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [("add", {"a": 12}), ("now", {})],
    ),
    ("search_r1", "<think> Who? </think>\n<search> who wrote\nit </search>", [("search", {"query": "who wrote\nit"})]),
    ("search_r1", "<answer> Beijing </answer>\n", [("answer", {"answer": "Beijing"})]),
    ("search_r1", "<answer> a <search> b </search>", [("search", {"query": "b"})]),
    ("search_r1", "<search> a <search> b </search> c", [("search", {"query": "a <search> b"})]),
    ("search_r1", "<answer>1</answer><search>2</search>", [("answer", {"answer": "1"})]),
]


def executable(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in calls if call.arguments is not None]


@pytest.mark.parametrize(("name", "text", "expected"), GOLDEN)
def test_a_whole_text_calls_what_it_says(name: str, text: str, expected: list[tuple[str, Any]]) -> None:
    calls = calls_of(load_format(name), text, "stop")
    assert executable(calls) == expected
    assert all(not call.problem for call in calls)


@pytest.mark.parametrize(("name", "text", "expected"), GOLDEN)
def test_half_a_call_is_never_executed_wherever_the_text_is_cut(
    name: str, text: str, expected: list[tuple[str, Any]]
) -> None:
    form = load_format(name)
    for end in range(len(text)):
        executed = executable(calls_of(form, text[:end], "stop"))
        assert executed == expected[: len(executed)], text[:end]
        calls = calls_of(form, text[:end], "length")
        assert executable(calls) == []
        assert {call.problem for call in calls} <= {CUT_OFF}


def test_a_cut_turn_is_told_of_the_limit_and_not_that_it_forgot_to_call() -> None:
    for name, text in (
        ("hermes", '<tool_call>{"name": "add"'),
        ("llama3_json", '{"name": "ad'),
        ("harmony", "<|channel|>commentary to=functions.add"),
        ("search_r1", "<think> Who"),
    ):
        (call,) = calls_of(load_format(name), text, "length")
        assert call.problem == CUT_OFF
    assert calls_of(load_format("hermes"), "It is", "length") == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "<tool_call></tool_call>", "not valid JSON: Expecting value at character 0."),
        ("hermes", "<tool_call> \n{'name': 'add'}</tool_call>", "Expecting property name enclosed in double quotes at"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "no </tool_call> behind the call."),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}} </tool_call>', "no </tool_call> behind the call."),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'no "arguments" that are a JSON object.'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', 'no "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'with the "name" of a tool'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number."),
        ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "a key occurs twice"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>', "half of a character"),
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"b": {"9" * 5000}}}}}</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call>" + "[" * 99_999, "nested too deeply"),
        (
            "hermes",
            f'<tool_call>{{"name": "a", "arguments": {DEEP}}}</tool_call>',
            "nests more than 32",
        ),
        ("llama3_json", "<|python_tag|>print(1)<|eom_id|>", "not valid JSON: Expecting value at character 0."),
        ("llama3_json", '{"name": "add"}', 'no "parameters"'),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1} {', "not valid JSON: Extra data"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>[1]", 'no "arguments" that are a JSON object.'),
        ("harmony", "<|channel|>commentary to=python<|message|>print(1)", "addressed to=functions.NAME"),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "addressed to=functions.NAME"),
        ("harmony", "<|channel|>commentary to=functions.add", "There is no <|message|> before the arguments"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "no name of a tool in the call"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>", "does not end after 1 arg"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>", "does not end after 0 arguments"),
        ("glm45", f"<tool_call>f{2 * '<arg_key>a</arg_key><arg_value>1</arg_value>'}</tool_call>", "a occurs twice"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>", 'with the "name" of a tool'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>add {}", "There is no <｜tool▁sep｜> in the call."),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", "no <|tool_call_end|> in"),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", 'with the "name" of a tool'),
        ("search_r1", "It is Beijing.", INVALID_ACTION),
        ("search_r1", "<search> who </answer>", INVALID_ACTION),
        ("search_r1", "<search> q </search><information> It is so. </information>", INVALID_ACTION),
    ],
)
def test_what_cannot_be_read_is_a_call_with_a_problem(name: str, text: str, problem: str) -> None:
    (call,) = calls_of(load_format(name), text, "stop")
    assert call.arguments is None
    assert problem in call.problem
    assert len(call.problem) < 300
    Turn(number=0, text=text, calls=[call], ended="stop", left_turns=1, left_tokens=1)


def test_a_bad_call_leaves_the_others_as_they_are() -> None:
    text = (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{bad}</tool_call>'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    )
    calls = calls_of(load_format("hermes"), text, "stop")
    assert [(call.name, bool(call.problem)) for call in calls] == [("a", False), ("", True), ("b", False)]
    text = '{"name": "a", "parameters": {}}; {"name": "b"}; {"name": "c", "parameters": {}}'
    calls = calls_of(load_format("llama3_json"), text, "stop")
    assert [(call.name, bool(call.problem)) for call in calls] == [("a", False), ("b", True)]


def test_thoughts_that_the_prompt_began_are_not_parsed() -> None:
    thought = '<tool_call>{"name": "no", "arguments": {}}</tool_call>'
    text = f'I could {thought}.\n</think>\n\n<tool_call>{{"name": "yes", "arguments": {{}}}}</tool_call>'
    assert executable(calls_of(load_format("hermes"), text, "stop")) == [("yes", {})]


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_no_text_is_an_error(name: str, data: st.DataObject) -> None:
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"]
    pieces += ['{"name": "f", ', '"arguments": ', '"parameters": ', *("{}", "}", "{", ";", "<|python_tag|>")]
    pieces += ['"', "\\ud800", "1", "<|channel|>", "to=functions.f", "<|message|>", "<|call|>"]
    pieces += ["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>"]
    pieces += ["<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
    pieces += [
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "\n```json\n",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12)))
    for finish in ("stop", "length"):
        for call in calls_of(load_format(name), text, finish):
            assert (call.arguments is None) == bool(call.problem)
            assert finish == "stop" or call.arguments is None


def test_results_go_back_as_messages_of_the_tools_and_one_of_the_user() -> None:
    calls = [ToolCall(name="add", arguments={}), ToolCall(name="", problem="bad")]
    for name in ("hermes", "llama3_json"):
        messages = answer_of(load_format(name), calls, Observation(results=["3", "bad"], text="Two turns are left."))
        assert messages == [
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "tool", "name": "", "content": "bad"},
            {"role": "user", "content": "Two turns are left."},
        ]
        assert answer_of(load_format(name), calls, Observation(text="Go on.")) == [
            {"role": "user", "content": "Go on."}
        ]


def test_search_r1_documents_have_numbers_and_titles() -> None:
    documents = search_r1_documents(['"Peking"\nPeking is a city.\nIt is old.', '"Rome"', ""])
    assert documents == 'Doc 1(Title: "Peking") Peking is a city.\nIt is old.\nDoc 2(Title: "Rome") \nDoc 3(Title: ) \n'
    assert load_format("search_r1").stops == ("</search>", "</answer>")


def test_an_environment_that_miscounts_its_results_is_named() -> None:
    with pytest.raises(AgentError, match="the environment has 2 results for 1 calls"):
        answer_of(load_format("hermes"), [ToolCall(name="a", arguments={})], Observation(results=["one", "two"]))


def test_a_format_of_the_users_own() -> None:
    form = load_format("tests.agents.own_format:Brackets")
    assert executable(calls_of(form, "[[look: here]] [[go", "stop")) == [("look", {"it": "here"})]
    assert executable(calls_of(form, "[[look: here]] [[go", "length")) == []
    with pytest.raises(NameUnknown, match='did you mean "hermes"'):
        load_format("hermess")
    with pytest.raises(AgentError, match="json:JSONDecoder is not a format"):
        load_format("json:JSONDecoder")
