"""Tasks and answers of an environment cross processes unchanged, or raise an error when they are created."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.agents.environment import Done, Environment, Observation, Start, Task, ToolCall, Turn, from_json, to_json
from mrl.errors import AgentError

USER = {"role": "user", "content": "Who?"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values, st.text(), st.dictionaries(st.text(), values, max_size=3))
@settings(max_examples=40)
def test_everything_arrives_as_it_was_sent(value: Any, text: str, arguments: dict[str, Any]) -> None:
    calls = [ToolCall(name="look", arguments=arguments), ToolCall(name="", problem="not JSON")]
    for sent in (
        Task(messages=[USER], ground_truth=value, extra_info={"more": value}, uid="7", sample=3, seed=2**62),
        Start(messages=[USER], tools=[{"name": text}]),
        Turn(number=1, text=text, calls=calls, ended="length", left_turns=2, left_tokens=30),
        Observation(results=[text], score=0.5, parts={"hits": 2}, text=text),
        Observation(text="so"),
        Done(score=None, final=text),
    ):
        arrived = from_json(to_json(sent))
        assert arrived == sent
        assert type(arrived) is type(sent)


def with_a_loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    return loop


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Observation(results="found"), "an Observation must contain text"),
        (lambda: Observation(), "an Observation is empty"),
        (lambda: Observation(results=[b"raw"]), "Observation is not plain data: Object of type bytes"),  # type: ignore[list-item]
        (lambda: Observation(text="so", score=math.nan), "Observation is not plain data"),
        (lambda: Done(score="1"), "Done: score is '1', not a number"),  # type: ignore[arg-type]
        (lambda: Done(parts={"hits": None}), "Done: hits is None, not a number"),  # type: ignore[dict-item]
        (lambda: Done(scores={"first": None}), "Done: the score of role 'first' is None, not a number"),  # type: ignore[dict-item]
        (lambda: Done(score=1.0, scores={"first": 1.0}), "Done has both score=1 and scores of first"),
        (lambda: Start(messages=[USER], role="a\nb"), "Start.role is 'a\\nb', not a printable text"),
        (lambda: Start(messages=[]), "Start.messages is not a list of messages"),
        (lambda: Start(messages=[{"role": "user"}]), "Start.messages is not a list of messages"),
        (lambda: Task(messages=[USER], ground_truth={1, 2}), "Task is not plain data: Object of type set"),
        (lambda: Task(messages=[USER], ground_truth=with_a_loop()), "Task is not plain data"),
        (lambda: ToolCall(name="look"), "has both arguments and a problem, or neither"),
    ],
)
def test_what_cannot_cross_is_refused_where_it_is_made(make: Callable[[], object], what: str) -> None:
    with pytest.raises(AgentError) as caught:
        make()
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"hello\n", b"\xff\xfe", b"[]", b"3", b"{}", b"[" * 99_999),
        *(b'{"kind": "os"}', b'{"kind": ["Done"]}', b'{"kind": "Done", "more": 1}', b'{"kind": "Turn", "calls": 3}'),
    ],
)
def test_garbage_of_another_process_is_a_typed_error(garbage: bytes) -> None:
    with pytest.raises(AgentError, match="is not a message of an environment") as caught:
        from_json(garbage)
    assert len(str(caught.value)) < 400


def test_what_crosses_is_checked_again_where_it_arrives() -> None:
    with pytest.raises(AgentError, match="score is 'high', not a number"):
        from_json('{"kind": "Done", "score": "high"}')


class Echo(Environment):
    """The smallest environment that a user can write."""

    def step(self, turn: Turn) -> Observation | Done:
        return Done(score=1.0) if "bye" in turn.text else Observation(text=turn.text)


def test_the_least_environment_begins_with_the_prompt_of_the_data() -> None:
    echo = Echo()
    assert echo.reset(Task(messages=[USER])) == Start(messages=[USER])
    turn = Turn(number=0, text="so", calls=(), ended="stop", left_turns=1, left_tokens=9)
    assert echo.step(turn) == Observation(text="so")
    echo.close()
