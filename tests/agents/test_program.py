"""Agents independent of mrl, with OpenAI's client: supported and unsupported uses of a conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.conversation import Finish
from mrl.agents.environment import ToolCall, Turn
from mrl.agents.figures import dialog_metrics
from mrl.agents.loop import Dialog
from mrl.agents.program import _completion, _message, _Segment
from mrl.events import Warned
from tests.agents.scripted import Stage, call
from tests.agents.test_loop import FACTS, two_hops

AGENT = str(Path(__file__).with_name("looking_agent.py"))
Spoken = Callable[..., tuple[Stage, Dialog]]


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Spoken]:
    made: list[Stage] = []

    def speak(how: str = "well", script: Any = two_hops, **settings: Any) -> tuple[Stage, Dialog]:
        options = {"command": [sys.executable, AGENT, how]}
        made.append(Stage(tmp_path, script, "program", options=options, **{"retries": 0, "limit_s": 60.0, **settings}))
        (dialog,) = made[-1].run(made[-1].opening(0, "ocean", facts=FACTS, daemon=str(tmp_path / "daemon")))
        return made[-1], dialog

    yield speak
    for new_stage in made:
        new_stage.stack.close()


@pytest.mark.parametrize("how", ["well", "streams"])
def test_a_program_makes_a_trajectory_as_an_environment_does(spoken: Spoken, how: str, tmp_path: Path) -> None:
    stage, dialog = spoken(how)
    assert dialog.failure is None
    conversation = dialog.ended_conversation
    assert (dialog.score, conversation.ended) == (1.0, "done")
    asked_for = {"overridden/temperature": 1.0, "overridden/seed": 1.0} if how == "well" else {}
    assert dialog.parts == {"exact": 1.0} | asked_for
    assert '"name": "look"' in stage.contexts[0], "the prompt contains its tools"
    ours = Stage(tmp_path / "ours", two_hops, "WithTools")
    try:
        (by_environment,) = ours.run(ours.opening(0, "ocean", facts=FACTS))
    finally:
        ours.stack.close()
    other = by_environment.ended_conversation
    np.testing.assert_array_equal(conversation.response_ids, other.response_ids)
    np.testing.assert_array_equal(conversation.mask, other.mask)
    np.testing.assert_array_equal(conversation.log_probs, other.log_probs)


def doubts(context: str) -> str:
    """Look up a key, but refuse if only an ocean is asked for."""
    return "no<|im_end|>" if "user\nIs " in context else two_hops(context)


def check_segments(stage: Stage, dialog: Dialog, *texts: list[str]) -> None:
    """Check that each segment equals the engine's input and output tokens, and that nothing else is trained on."""
    assert dialog.failure is None
    turns = [(at, *turn) for at, turn in zip(dialog.writers, stage.spoken, strict=True)]
    for number, (segment, wanted) in enumerate(zip(dialog.segments, texts, strict=True)):
        mine = [(read, written) for at, read, written in turns if at == number]
        assert [stage.tokenizer.decode(written.tolist()) for _, written in mine] == wanted
        np.testing.assert_array_equal(segment.prompt_ids, mine[0][0])
        for turn, (read, written) in zip(segment.turns, mine, strict=True):
            begin = len(segment.prompt_ids) + turn.start
            np.testing.assert_array_equal(segment.context_ids[:begin], read)
            np.testing.assert_array_equal(segment.context_ids[begin : begin + turn.length], written)
            assert segment.mask[turn.start : turn.start + turn.length].all()
        assert int(segment.mask.sum()) == sum(len(written) for _, written in mine)
        assert (segment.log_probs[segment.mask] == -0.5).all()
        assert np.isnan(segment.log_probs[~segment.mask]).all()
        assert segment.ended == "done"


def test_history_that_is_rewritten_begins_a_segment(spoken: Spoken) -> None:
    stage, dialog = spoken("rewrites")
    check_segments(stage, dialog, [call("a")], [call("b"), "ocean<|im_end|>"])
    assert dialog.score == 1.0
    rewritten = stage.tokenizer.decode(dialog.segments[1].prompt_ids.tolist())
    assert "system\nLook it up." in rewritten
    assert f"{call('a')}\n<|im_start|>user\n<tool_response>\nb\n</tool_response>" in rewritten
    assert [event.about for event in stage.events if isinstance(event, Warned)] == ["agent"], "there is a warning"
    assert dialog_metrics([dialog])["agent/segments/mean"] == 2


def test_other_tools_begin_a_segment_that_says_so(spoken: Spoken) -> None:
    """In the old context the model would never read about them."""
    stage, dialog = spoken("other tools")
    check_segments(stage, dialog, [call("a")], [call("b"), "ocean<|im_end|>"])
    offered = ['"name": "ask"' in stage.tokenizer.decode(segment.prompt_ids.tolist()) for segment in dialog.segments]
    assert offered == [False, True]


def test_conversations_beside_each_other_are_segments_that_each_go_on(spoken: Spoken) -> None:
    stage, dialog = spoken("delegates", doubts, max_turns=5)
    check_segments(stage, dialog, [call("a"), call("b"), "ocean<|im_end|>"], ["no<|im_end|>"], ["no<|im_end|>"])
    assert dialog.writers == [0, 1, 0, 2, 0]
    assert "\nb\nno" in stage.tokenizer.decode(dialog.segments[0].response_ids.tolist())
    assert dialog.score == 1.0


def test_questions_at_once_are_segments(spoken: Spoken) -> None:
    stage, dialog = spoken("at once", lambda context: "ocean<|im_end|>")
    check_segments(stage, dialog, *[["ocean<|im_end|>"]] * 3)
    assert dialog.score == 1.0
    assert len({segment.context_ids.tobytes() for segment in dialog.segments}) == 3


def test_turns_are_counted_over_all_segments(spoken: Spoken) -> None:
    _, dialog = spoken("delegates", doubts, max_turns=3)
    assert dialog.failure is None
    assert ([segment.ended for segment in dialog.segments], dialog.writers) == (["turns", "turns"], [0, 1, 0])


def test_a_program_that_fails_is_a_failure_with_its_last_words(spoken: Spoken) -> None:
    _, dialog = spoken("fails")
    assert dialog.failure is not None
    assert "exited with status 1: there is no shelf" in dialog.failure.detail


def test_a_program_that_would_go_on_ends_with_the_turns(spoken: Spoken) -> None:
    _, dialog = spoken("forever", lambda context: "why<|im_end|>", max_turns=3)
    assert dialog.failure is None
    assert (dialog.ended_conversation.ended, len(dialog.ended_conversation.turns)) == ("turns", 3)


def test_a_daemon_that_a_program_leaves_behind_ends_with_it(spoken: Spoken, tmp_path: Path) -> None:
    """It holds the program's stderr. Waiting for the end of stderr would take until the time limit of the answer."""
    began = time.monotonic()
    _, dialog = spoken("leaves a daemon", limit_s=30.0)
    assert dialog.failure is None
    assert (dialog.score, dialog.ended_conversation.ended) == (1.0, "done")
    assert time.monotonic() - began < 20
    daemon = int((tmp_path / "daemon").read_text())
    assert not Path(f"/proc/{daemon}").exists(), "nothing is left, not even until the pool ends"


ASK = """
import json, os, sys, urllib.error, urllib.request
def ask(**body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                                     {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
user = [{"role": "user", "content": "ocean?"}]
for calls in ("f()", {"a": 1}):
    assert ask(model=%r, messages=[{"role": "assistant", "content": "", "tool_calls": calls}, *user]) == 400
assert ask(model="gpt-4o", messages=user) == 404
assert ask(model=%r, messages=user) == 200
"""


def test_a_request_that_is_none_costs_no_conversation_and_models_may_have_names(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK % ("mine", "mine")]
    options = {"command": command, "models": ["policy", "mine"]}
    stage = Stage(tmp_path, lambda context: "ocean<|im_end|>", "program", options=options, retries=0, limit_s=60.0)
    try:
        (dialog,) = stage.run(stage.opening(0, "ocean"))
    finally:
        stage.stack.close()
    assert dialog.failure is None
    assert len(dialog.writers) == 1


ASKED = {"role": "user", "content": "a?"}
TWO_CALLS = {"role": "assistant", "content": "", "tool_calls": [{"id": "c0"}, {"id": "c1"}]}
SAID = {"role": "assistant", "content": "It is b."}


def result(of: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": "b"}


@pytest.mark.parametrize(
    ("written", "repeated", "added", "goes_on"),
    [
        (TWO_CALLS, TWO_CALLS, [result("c0"), result("c1")], True),
        (TWO_CALLS, TWO_CALLS, [result("c0"), result("c1"), ASKED], True),
        (TWO_CALLS, TWO_CALLS | {"content": "looked"}, [result("c0"), result("c1")], True),
        (TWO_CALLS, TWO_CALLS, [result("c1"), result("c0")], False),
        (TWO_CALLS, TWO_CALLS, [result("c0")], False),
        (TWO_CALLS, TWO_CALLS, [ASKED, result("c0"), result("c1")], False),
        (SAID, SAID, [ASKED], True),
        (SAID, SAID | {"content": "It is c."}, [ASKED], False),
        (SAID, SAID | {"role": "user"}, [ASKED], False),
        (SAID, SAID, [], False),
        (SAID, SAID, [result("c0")], False),
    ],
)
def test_what_follows_a_turn_goes_on_with_it_only_if_it_is_its_answer(
    written: dict[str, Any], repeated: dict[str, Any], added: list[dict[str, Any]], goes_on: bool
) -> None:
    """Results in another order would belong to other calls, and a changed turn would count as written by the model."""
    segment = _Segment([ASKED], [], written)
    assert segment.added([ASKED, repeated, *added], []) == (added if goes_on else [])
    assert segment.added([ASKED | {"content": "c?"}, repeated, *added], []) == []
    assert segment.added([ASKED, repeated, *added], [{"type": "function"}]) == []


def turn(text: str = "b", ended: Finish = "stop", calls: Sequence[ToolCall] = (), number: int = 2) -> Turn:
    return Turn(
        number=number, text=text, calls=calls, ended=ended, left_turns=3, left_tokens=9, num_read=7, num_written=4
    )


def test_a_program_is_told_how_a_turn_ended_and_how_long_it_was() -> None:
    call = ToolCall(name="look", arguments={"key": "a"})
    for made, finish, has_calls in (
        (turn(), "stop", 0),
        (turn(calls=[call]), "tool_calls", 1),
        (turn(ended="length"), "length", 0),
        (turn(calls=[call, ToolCall(name="look", problem="unreadable")]), "stop", 0),
    ):
        completion = _completion(made, _message(made), "policy")
        (choice,) = completion["choices"]
        assert (choice["finish_reason"], len(choice["message"].get("tool_calls", ()))) == (finish, has_calls)
        assert completion["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    (called,) = _message(turn(calls=[call]))["tool_calls"]
    assert (called["function"]["name"], called["function"]["arguments"]) == ("look", '{"key": "a"}')
    assert called["id"] != _message(turn(calls=[call], number=3))["tool_calls"][0]["id"]


SCORES = """
import json, os, urllib.request
def post(path, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), head)
    urllib.request.urlopen(request).read()
user = {"role": "user", "content": "a?"}
post("/chat/completions", {"model": "policy", "messages": [user], "temperature": 0.5})
post("/score", {"score": 0.25, "parts": {"first": 1}})
post("/chat/completions", {"model": "policy", "messages": [user], "seed": 3})
post("/score", {"score": 0.5, "parts": {"second": 2}})
"""


def test_what_a_program_said_at_any_time_counts_at_its_end(tmp_path: Path) -> None:
    options = {"command": [sys.executable, "-c", SCORES]}
    stage = Stage(tmp_path, lambda context: "ocean<|im_end|>", "program", options=options, retries=0, limit_s=60.0)
    try:
        (dialog,) = stage.run(stage.opening(0, "ocean"))
    finally:
        stage.stack.close()
    overridden = {"overridden/seed": 1.0, "overridden/temperature": 1.0}
    assert (dialog.score, dialog.parts) == (0.5, {"first": 1.0, "second": 2.0} | overridden)
