"""Agents that know nothing of mrl, by OpenAI's own client: what they make of a conversation, and what they may not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.loop import Dialog
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
        (dialog,) = made[-1].run(made[-1].opening(0, "ocean", facts=FACTS))
        return made[-1], dialog

    yield speak
    for each in made:
        each.stack.close()


@pytest.mark.parametrize("how", ["well", "streams"])
def test_a_program_makes_a_trajectory_as_an_environment_does(spoken: Spoken, how: str, tmp_path: Path) -> None:
    stage, dialog = spoken(how)
    assert dialog.failure is None
    conversation = dialog.ended_conversation
    assert (dialog.score, conversation.ended) == (1.0, "done")
    assert dialog.parts == {"exact": 1.0, "overridden": 2.0 if how == "well" else 0.0}
    assert '"name": "look"' in stage.contexts[0], "its tools stand in the prompt"
    ours = Stage(tmp_path / "ours", two_hops, "WithTools")
    try:
        (by_environment,) = ours.run(ours.opening(0, "ocean", facts=FACTS))
    finally:
        ours.stack.close()
    other = by_environment.ended_conversation
    np.testing.assert_array_equal(conversation.response_ids, other.response_ids)
    np.testing.assert_array_equal(conversation.mask, other.mask)
    np.testing.assert_array_equal(conversation.log_probs, other.log_probs)


def test_history_that_is_rewritten_is_another_conversation_and_refused(spoken: Spoken) -> None:
    _, dialog = spoken("rewrites")
    assert dialog.failure is not None
    assert dialog.failure.kind == "raised"
    assert "message 0 is another than it was" in dialog.failure.detail


def test_a_program_that_fails_is_a_failure_with_its_last_words(spoken: Spoken) -> None:
    _, dialog = spoken("fails")
    assert dialog.failure is not None
    assert "left with status 1: there is no shelf" in dialog.failure.detail


def test_a_program_that_would_go_on_ends_with_the_turns(spoken: Spoken) -> None:
    _, dialog = spoken("forever", lambda context: "why<|im_end|>", max_turns=3)
    assert dialog.failure is None
    assert (dialog.ended_conversation.ended, len(dialog.ended_conversation.turns)) == ("turns", 3)


def test_a_call_that_cannot_be_read_is_text_to_the_program(spoken: Spoken) -> None:
    _, dialog = spoken("well", lambda context: call("a").replace('"arguments"', '"argument'))
    assert dialog.score == 0.0
    assert dialog.calls[0][0].problem
