"""An agent framework from the package index uses the endpoint. Its conversations equal those of an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.loop import Dialog
from mrl.config.agent import ToolConfig
from tests.agents.scripted import Stage, call
from tests.agents.test_loop import two_hops
from tests.agents.test_program import check_segments

pytest.importorskip("agents", reason="openai-agents is in none of mrl's requirements: make test-extras")
AGENT = [sys.executable, "-m", "tests.agents.framework_agent"]
Spoken = Callable[..., tuple[Stage, Dialog]]


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Spoken]:
    made: list[Stage] = []

    def speak(script: Any, world: str, **settings: Any) -> tuple[Stage, Dialog]:
        limits = {"retries": 0, "limit_s": 60.0, "max_turns": 5, "max_prompt_tokens": 800}
        made.append(Stage(tmp_path / str(len(made)), script, world, **{**limits, **settings}))
        (dialog,) = made[-1].run(made[-1].opening(0, max_tokens=800))
        assert dialog.failure is None, dialog.failure
        return made[-1], dialog

    yield speak
    for new_stage in made:
        new_stage.stack.close()


def twice(context: str) -> str:
    """Look up both keys in one turn, then answer with the results."""
    if "ocean" in context:
        return "ocean<|im_end|>"
    return call("a").removesuffix("<|im_end|>") + "\n" + call("b")


@pytest.mark.parametrize("how", ["well", "streams"])
@pytest.mark.parametrize("script", [two_hops, twice])
def test_an_agent_of_a_framework_makes_the_trajectory_of_tools(spoken: Spoken, how: str, script: Any) -> None:
    stage, by_framework = spoken(script, "program", options={"command": [*AGENT, how]})
    tools = {"look": ToolConfig(name="tests.agents.shelf:look")}
    ours, by_tools = spoken(script, "tools", tools=tools)
    theirs, own = by_framework.ended_conversation, by_tools.ended_conversation
    np.testing.assert_array_equal(theirs.response_ids, own.response_ids)
    np.testing.assert_array_equal(theirs.mask, own.mask)
    np.testing.assert_array_equal(theirs.log_probs, own.log_probs)
    assert (theirs.turns, theirs.ended, stage.seeds) == (own.turns, own.ended, ours.seeds)
    assert len(by_framework.segments) == 1
    assert by_framework.said == by_tools.said
    assert "Look a key up." in stage.contexts[0], "the prompt contains the framework's schema of the tool"


def test_an_agent_that_is_another_agents_tool_has_a_segment_of_its_own(spoken: Spoken) -> None:
    asks = f"<tool_call>\n{json.dumps({'name': 'ask_sage', 'arguments': {'input': 'b'}})}\n</tool_call><|im_end|>"

    def script(context: str) -> str:
        if "You know it." in context:
            return "ocean<|im_end|>"
        return "It is the ocean.<|im_end|>" if "<tool_response>\nocean" in context else asks

    stage, dialog = spoken(script, "program", options={"command": [*AGENT, "hands over"]})
    assert dialog.writers == [0, 1, 0]
    check_segments(stage, dialog, [asks, "It is the ocean.<|im_end|>"], ["ocean<|im_end|>"])
