"""Conversations from prompt to end with real environment processes: the author of each token, and failures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.figures import check_failed_share, dialog_metrics
from mrl.errors import AgentError
from mrl.events import Retried, SampleSkipped, Warned
from tests.agents.scripted import Stage, call

Made = Callable[..., Stage]
FACTS = {"a": "b", "b": "ocean"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Made]:
    made: list[Stage] = []

    def make(*arguments: Any, **settings: Any) -> Stage:
        made.append(Stage(tmp_path, *arguments, **settings))
        return made[-1]

    yield make
    for new_stage in made:
        new_stage.stack.close()


def two_hops(context: str) -> str:
    """Look up a, then its value, then answer with that."""
    if "ocean" in context:
        return "ocean<|im_end|>"
    return call("b") if "\nb\n" in context else call("a")


def test_a_conversation_grows_by_what_each_says_and_knows_who_said_it(stage: Made) -> None:
    on = stage(two_hops)
    opening = on.opening(0, "ocean", facts=FACTS)
    (dialog,) = on.run(opening)
    conversation = dialog.ended_conversation
    whole = on.tokenizer.decode(conversation.context_ids.tolist())
    assert whole == on.contexts[-1] + "ocean<|im_end|>", "the engine has read what is trained on"
    assert all(later.startswith(before) for before, later in zip(on.contexts, on.contexts[1:], strict=False))
    written = [
        on.tokenizer.decode(conversation.response_ids[turn.start : turn.start + turn.length].tolist())
        for turn in conversation.turns
    ]
    assert written == [call("a"), call("b"), "ocean<|im_end|>"]
    assert int(conversation.mask.sum()) == sum(turn.length for turn in conversation.turns)
    assert np.isnan(conversation.log_probs[~conversation.mask]).all()
    assert (conversation.log_probs[conversation.mask] == -0.5).all()
    observed = on.tokenizer.decode(conversation.response_ids[~conversation.mask].tolist())
    for text in ("b", "ocean"):
        assert f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n" in observed
    assert (dialog.score, dialog.parts, conversation.ended) == (1.0, {"turns": 3, "left_turns": 1}, "done")
    assert "".join(dialog.said) == on.tokenizer.decode(conversation.response_ids.tolist())


def test_a_turn_is_asked_of_the_replica_of_the_last_with_the_texts_that_end_it(stage: Made) -> None:
    on = stage(two_hops)
    on.form.stops = ("</end>",)
    on.run(on.opening(0, "ocean", facts=FACTS))
    assert [request.stop for request in on.requests] == [("</end>",)] * 3
    assert [request.home for request in on.requests] == [None, 0, 0]


def test_each_token_is_of_the_weights_that_drew_it(stage: Made) -> None:
    """Newer weights arrive at the third token of the second turn. Tokens that no engine sampled have no version."""
    on = stage(two_hops)
    written = on._written

    def in_flight(request: Any) -> Any:
        turn = len(on.requests)
        return replace(written(request), weight_version=4 + (turn > 1), switches=((2, 5),) if turn == 1 else ())

    on._written = in_flight  # type: ignore[method-assign]
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    conversation = dialog.ended_conversation
    first, second, third = (
        conversation.versions[turn.start : turn.start + turn.length].tolist() for turn in conversation.turns
    )
    assert (set(first), set(third)) == ({4}, {5})
    assert second == [4, 4] + [5] * (len(second) - 2)
    assert set(conversation.versions[~conversation.mask].tolist()) == {-1}


def test_scores_of_turns_add_up_without_those_of_an_attempt_that_failed(stage: Made, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path), "once": True, "per_answer": 0.25}
    on = stage(two_hops, "Troubled", options=options)
    dialogs = on.run(*[on.opening(row, "ocean", facts=FACTS, trouble="raises" if row else "") for row in range(2)])
    assert sorted(dialog.attempts for dialog in dialogs) == [1, 2]
    assert [dialog.score for dialog in dialogs] == [1.5, 1.5]


def test_nobody_waits_for_anybody_else(stage: Made) -> None:
    """Eight conversations in two processes, with two answers of 0.5 s each: no turn waits for all of them."""
    on = stage(two_hops, options={"delay_s": 0.5})
    on.run(on.opening(99, "ocean", facts=FACTS))
    began = time.monotonic()
    dialogs = on.run(*[on.opening(row, "ocean", facts=FACTS) for row in range(8)])
    assert [dialog.score for dialog in dialogs] == [1.0] * 8
    assert time.monotonic() - began < 3.5, "one after the other they take twelve"


def test_the_turns_end_and_the_environment_is_told(stage: Made, tmp_path: Path) -> None:
    on = stage(lambda context: call("a"), max_turns=3, options={"log": str(tmp_path / "log")})
    (dialog,) = on.run(on.opening(0, facts=FACTS))
    assert dialog.ended_conversation.ended == "turns"
    assert len(dialog.ended_conversation.turns) == 3
    assert dialog.ended_conversation.mask[-1], "nothing is answered to the last turn"
    assert (tmp_path / "log").read_text().splitlines() == ["begin p0/0", "close p0/0"]


def test_a_turn_that_is_cut_off_runs_no_tool_and_ends_by_length(stage: Made, tmp_path: Path) -> None:
    on = stage(lambda context: call("a"), options={"log": str(tmp_path / "log")})
    (dialog,) = on.run(on.opening(0, facts=FACTS, max_tokens=12))
    conversation = dialog.ended_conversation
    assert (conversation.ended, len(conversation.mask)) == ("length", 12)
    assert all(each.problem and each.arguments is None for each in dialog.calls[0])
    assert (tmp_path / "log").read_text().splitlines() == ["begin p0/0", "close p0/0"]


def test_an_answer_that_is_cut_off_ends_by_length(stage: Made) -> None:
    on = stage(lambda context: "the ocean is wide<|im_end|>")
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS, max_tokens=3))
    assert (dialog.ended_conversation.ended, dialog.score) == ("length", 0.0)


def test_a_turn_that_only_its_own_limit_cuts_off_is_answered(stage: Made) -> None:
    """The turn's end token, which the model did not write, belongs to the environment's answer."""
    on = stage(lambda context: "ocean<|im_end|>" if "tool_response" in context else call("a"), max_turn_tokens=12)
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    conversation = dialog.ended_conversation
    assert [turn.finish for turn in conversation.turns] == ["length", "stop"]
    assert dialog.score == 1.0
    behind = conversation.response_ids[12:]
    assert on.tokenizer.decode(behind.tolist()).startswith("<|im_end|>\n<|im_start|>user\n")
    assert not conversation.mask[12]


def test_an_observation_that_leaves_no_room_ends_by_length(stage: Made) -> None:
    on = stage(lambda context: call("a"))
    facts = {"a": "word " * 500}
    (dialog,) = on.run(on.opening(0, facts=facts, max_tokens=120))
    conversation = dialog.ended_conversation
    assert conversation.ended == "length"
    assert conversation.mask.all(), "an observation that does not fit is left out completely"


def test_a_long_observation_is_cut_as_text_and_is_closed(stage: Made) -> None:
    on = stage(lambda context: "done<|im_end|>" if "word" in context else call("a"), max_observation_tokens=60)
    (dialog,) = on.run(on.opening(0, facts={"a": "<|im_end|>" + "word " * 500}))
    observed = dialog.ended_conversation.response_ids[~dialog.ended_conversation.mask]
    assert len(observed) <= 60
    assert on.tokenizer.decode(observed.tolist()).endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert (dialog.num_cut_characters > 2000, dialog.num_escaped) == (True, 1)
    assert dialog_metrics([dialog])["agent/observations/cut_share"] == 1.0


TROUBLES = {
    "raises": "raised",
    "killed": "crashed",
    "sleeps": "timeout",
    "computes": "timeout",
    "returns nothing": "bad_result",
    "floods": "bad_result",
    "forks": "raised",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_costs_its_own_conversation_and_is_typed(stage: Made, tmp_path: Path, trouble: str) -> None:
    on = stage(two_hops, "Troubled", limit_s=1.0, max_failed_share=0.5, options={"directory": str(tmp_path)})
    openings = [on.opening(row, "ocean", facts=FACTS) for row in range(5)]
    dialogs = on.run(on.opening(7, facts=FACTS, trouble=trouble), *openings)
    failed = [dialog for dialog in dialogs if dialog.failure]
    assert [(dialog.opening.row, dialog.failure and dialog.failure.kind) for dialog in failed] == [
        (7, TROUBLES[trouble])
    ]
    assert failed[0].failure is not None
    assert failed[0].failure.attempts == 2
    assert [dialog.score for dialog in dialogs if not dialog.failure] == [1.0] * 5
    assert sum(isinstance(event, SampleSkipped) for event in on.events) == 1
    figures = dialog_metrics(dialogs)
    assert (figures[f"agent/failed/{TROUBLES[trouble]}"], figures["agent/retried"]) == (1, 1)
    if trouble == "forks":
        child = int(json.loads((tmp_path / "child").read_text()))
        on.stack.close()
        assert not Path(f"/proc/{child}").exists(), "what an environment leaves behind ends with the pool"


def test_what_fails_once_is_begun_again_with_the_same_seeds(stage: Made, tmp_path: Path) -> None:
    seeds: dict[str, list[int]] = {}
    on = stage(two_hops, "Troubled", options={"directory": str(tmp_path), "once": True})
    written = on._written

    def noting(request: Any) -> Any:
        seeds.setdefault(request.key, []).append(request.seed)
        return written(request)

    on._written = noting  # type: ignore[method-assign]
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS, trouble="killed"))
    assert (dialog.score, dialog.attempts) == (1.0, 2)
    assert [seeds[key][0] == seeds[key][-1] for key in ("0", "0/1")] == [True, True]
    assert len({seeds["0"][0], seeds["0/1"][0], seeds["0/2"][0]}) == 3, "each turn draws its own noise"
    assert [type(event) for event in on.events] == [Retried]
    written = on.tokenizer.decode(dialog.ended_conversation.response_ids.tolist())
    assert "".join(dialog.said) == written, "rewards read the turns of the attempt that counts, and no others"


def test_an_environment_may_be_lost_while_its_turn_is_being_written(stage: Made, tmp_path: Path) -> None:
    """Another conversation kills the shared process while an engine is still writing."""
    on = stage(two_hops, "Troubled", num_workers=1, options={"directory": str(tmp_path), "once": True})
    held: list[Any] = []
    take = on.dialogs.take

    def slow_for_one() -> Any:
        held.extend(take())
        others = [request for request in held if request.key != "0"]
        ready = others if others or on.dialogs.arriving() is not None else list(held)
        held[:] = [request for request in held if request not in ready]
        return ready

    on.dialogs.take = slow_for_one  # type: ignore[method-assign]
    one, other = on.opening(0, "ocean", facts=FACTS), on.opening(7, "ocean", facts=FACTS, trouble="killed")
    dialogs = on.run(one, other)
    assert [(dialog.opening.row, dialog.score, dialog.attempts) for dialog in dialogs] == [(7, 1.0, 2), (0, 1.0, 1)]
    retried = [(event.what, event.reason) for event in on.events if isinstance(event, Retried)]
    assert [what for what, _ in retried] == [other.name, one.name]
    assert all("signal 9" in why for _, why in retried)


def test_a_run_that_wants_no_failure_stops(stage: Made, tmp_path: Path) -> None:
    on = stage(two_hops, "Troubled", retries=0, on_failure="stop", options={"directory": str(tmp_path)})
    with pytest.raises(AgentError, match=r"conversation p0/0: the environment failed: raised: .*no such shelf"):
        on.run(on.opening(0, facts=FACTS, trouble="raises"))


def test_too_many_failures_stop_the_run_with_their_kinds(stage: Made, tmp_path: Path) -> None:
    on = stage(two_hops, "Troubled", retries=0, options={"directory": str(tmp_path)})
    dialogs = on.run(*[on.opening(row, facts=FACTS, trouble="raises" if row else "") for row in range(3)])
    with pytest.raises(AgentError, match=r"2 of 3 conversations have failed \(2 raised\); at most 5 % may fail"):
        check_failed_share(on.config, dialogs)
    lenient = replace(on.config, max_failed_share=1.0)
    check_failed_share(lenient, dialogs)
    failed = [dialog for dialog in dialogs if dialog.failure is not None]
    with pytest.raises(AgentError, match=r"2 of 2 .* at most 100 % may fail, and at least one must succeed"):
        check_failed_share(lenient, failed)


def test_an_environment_begins_a_segment_with_seeds_of_its_own(stage: Made) -> None:
    on = stage(two_hops, "Forgetful")
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    assert dialog.failure is None
    assert (dialog.score, dialog.writers, dialog.current) == (1.0, [0, 1, 1], 1)
    first, second = dialog.segments
    assert (dialog.ended_conversation, dialog.other_segments) == (second, [first])
    assert on.tokenizer.decode(first.response_ids.tolist()) == call("a"), "its answer is in no context"
    assert len(dict.fromkeys(on.seeds)) == 3
    assert [text.count("a is") for text in dialog.said] == [0, 1, 0, 0, 0], "a model that reads it sees the new context"


def test_a_segment_goes_on_and_one_that_is_not_there_is_a_failure(stage: Made) -> None:
    on = stage(lambda context: call("a"), "Forgetful", options={"segment": 0}, max_turns=3)
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    assert dialog.writers == [0, 1, 0]
    on = stage(lambda context: call("a"), "Forgetful", options={"segment": 2}, retries=0)
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    assert dialog.failure is not None
    assert "the environment answers segment 2 of 2" in dialog.failure.detail


def test_a_segment_has_the_room_that_its_context_leaves(stage: Made) -> None:
    on = stage(two_hops, "Forgetful", options={"length": 25}, max_prompt_tokens=100)
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    (_, _), (read, _), (later, written) = on.spoken
    assert len(read) > 100, "longer than a prompt may be, because it contains earlier turns"
    assert len(later) + len(written) <= 100 + 400
    assert on.limits[1] == 500 - len(read)
    on = stage(two_hops, "Forgetful", options={"length": 700})
    (dialog,) = on.run(on.opening(0, "ocean", facts=FACTS))
    assert dialog.failure is None, "who makes a context too long has come to no end, which is no failure"
    assert ([segment.ended for segment in dialog.segments], dialog.score) == (["length"], None)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"own_scores": {"first": 1.0, "third": 0.0}}, "no segment has third; without a score are second"),
        ({"second": ""}, "segment 1 has no role"),
    ],
)
def test_scores_of_other_roles_than_the_segments_are_an_error(stage: Made, options: dict[str, Any], what: str) -> None:
    on = stage(lambda context: "go<|im_end|>", "Duel", options=options, retries=0, on_failure="stop")
    with pytest.raises(AgentError, match=what):
        on.run(on.opening(0))


def test_players_write_in_separate_contexts(stage: Made) -> None:
    on = stage(lambda context: "mine<|im_end|>" if "first" in context else "mine too<|im_end|>", "Duel")
    (dialog,) = on.run(on.opening(0))
    assert [segment.role for segment in dialog.segments] == ["first", "second"]
    assert dialog.scores["first"] == -dialog.scores["second"] == dialog.score
    assert "mine" not in on.contexts[1]
    assert not [event for event in on.events if isinstance(event, Warned)], "contexts of players are no surprise"
