"""A conversation only grows, and records the author of every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.agents.conversation import Conversation, Ids, derived_seed
from mrl.agents.loop import Dialog
from mrl.errors import AgentError

PROMPT = np.array([7, 8, 9], np.int32)
PIECES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["stop", "length"])), max_size=8)


def conversation(max_tokens: int = 20, *, seed: int = 3) -> Conversation:
    return Conversation("5", "uid", PROMPT, max_tokens=max_tokens, seed=seed)


def ids_of(length: int, first: int = 100) -> Ids:
    return np.arange(first, first + length, dtype=np.int32)


def log_probs_of(length: int) -> Any:
    return -np.arange(1, length + 1, dtype=np.float32)


def write(talk: Conversation, length: int, finish: Any = "stop") -> None:
    talk.write(ids_of(length), log_probs_of(length), finish)


@given(st.integers(1, 60), PIECES, st.integers(1, 9))
def test_whatever_is_said_a_conversation_only_grows_and_its_columns_agree(
    max_tokens: int, pieces: list[tuple[int, int, str]], max_turn_tokens: int
) -> None:
    talk, sampled = conversation(max_tokens), 0
    for number, (length, answered, finish) in enumerate(pieces):
        if talk.ended:
            break
        before, request = talk.context_ids, talk.request(max_turn_tokens)
        assert len(PROMPT) < len(request.prompt_ids) + request.max_tokens <= len(PROMPT) + max_tokens
        assert request.max_tokens == min(max_turn_tokens, talk.room)
        assert request.prompt_ids.tolist() == before.tolist()
        written = min(length, request.max_tokens)
        write(talk, written, finish)
        sampled += written
        if number < len(pieces) - 1:
            talk.observe(ids_of(answered, 1000))
        else:
            talk.end("done")
        assert talk.context_ids[: len(before)].tolist() == before.tolist()
        assert talk.room >= 0 if talk.ended else talk.room >= 1 or talk.mask[-1]
        assert len(talk.response_ids) == len(talk.mask) == len(talk.log_probs) == max_tokens - talk.room
        assert [*talk.context_ids] == [*PROMPT, *talk.response_ids]
        assert talk.mask.sum() == sampled == sum(turn.length for turn in talk.turns)
        assert (np.isnan(talk.log_probs) == ~talk.mask).all()
        for turn in talk.turns:
            place = slice(turn.start, turn.start + turn.length)
            assert talk.mask[place].all()
            assert talk.response_ids[place].tolist() == ids_of(turn.length).tolist()
            assert talk.log_probs[place].tolist() == log_probs_of(turn.length).tolist()
            assert not talk.mask[turn.start + turn.length : turn.start + turn.length + 1].any()


def test_a_conversation_ends_on_what_the_model_wrote_so_that_its_score_has_a_place() -> None:
    talk = conversation(10)
    write(talk, 2)
    talk.observe(ids_of(3))
    with pytest.raises(AgentError, match="it ends by turns, but the model writes next"):
        talk.end("turns")
    write(talk, 1)
    talk.end("turns")
    assert talk.mask[-1]


@pytest.mark.parametrize(("observed", "ended", "length"), [(7, "", 9), (8, "length", 2), (80, "length", 2)])
def test_an_observation_that_leaves_no_room_ends_the_conversation(observed: int, ended: str, length: int) -> None:
    talk = conversation(10)
    write(talk, 2)
    talk.observe(ids_of(observed))
    assert (talk.ended, len(talk.mask)) == (ended, length)
    assert talk.mask[-1] == bool(ended), "what cannot be followed is not appended"


def test_no_turn_repeats_the_noise_of_another() -> None:
    seeds = [derived_seed(seed, "turn", turn) for seed in (3, 4) for turn in range(5)]
    seeds += [derived_seed(3, "environment"), derived_seed(4, "environment")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    draws = [np.random.default_rng(seed).random() for seed in seeds]
    assert len(set(draws)) == len(draws)
    assert [derived_seed(3, "turn", turn) for turn in range(3)] == [3, 3298312954515812642, 6448179994980840171]


def test_a_turn_is_named_and_seeded_by_its_place_alone() -> None:
    one, other = conversation(), conversation()
    for talk, length in ((one, 2), (other, 5)):
        first = talk.request(9)
        assert (first.key, first.prompt, first.seed) == ("5", "uid", 3), "a single turn is what it ever was"
        write(talk, length)
        talk.observe(ids_of(1))
    assert (
        (one.request(9).key, one.request(9).seed)
        == (other.request(9).key, other.request(9).seed)
        == (
            "5/1",
            derived_seed(3, "turn", 1),
        )
    )


@pytest.mark.parametrize(
    ("ids", "log_probs", "what"),
    [
        ([], [], "0 tokens and 0 log-probs, where 1 to 5 tokens fit"),
        ([1] * 6, [-1.0] * 6, "6 tokens and 6 log-probs, where 1 to 5 tokens fit"),
        ([1, 2], [-1.0], "2 tokens and 1 log-probs"),
        ([1, 2], [-1.0, np.nan], "token 1 of what the model wrote has log-prob nan"),
        ([1, 2], [-np.inf, -1.0], "token 0 of what the model wrote has log-prob -inf"),
    ],
)
def test_a_turn_that_cannot_be_is_refused_and_nothing_is_appended(ids: Any, log_probs: Any, what: str) -> None:
    talk = conversation(5)
    with pytest.raises(AgentError, match="conversation 5, turn 0: ") as caught:
        talk.write(np.array(ids, np.int32), np.array(log_probs, np.float32), "stop")
    assert what in str(caught.value)
    assert (talk.room, talk.turns) == (5, [])


def test_who_is_next_is_held() -> None:
    talk = conversation()
    for out_of_turn in (lambda: talk.observe(ids_of(1)), lambda: talk.end("done")):
        with pytest.raises(AgentError, match="but the model writes next"):
            out_of_turn()
    write(talk, 1)
    for out_of_turn in (lambda: write(talk, 1), lambda: talk.request(3) and None):
        with pytest.raises(AgentError, match="but an observation follows next"):
            out_of_turn()
    with pytest.raises(AgentError, match="an observation without tokens"):
        talk.observe(ids_of(0))
    talk.end("done")
    for too_late in (lambda: talk.observe(ids_of(1)), lambda: write(talk, 1), lambda: talk.end("turns")):
        with pytest.raises(AgentError, match="but it has ended by done"):
            too_late()


def test_nobody_else_can_change_what_was_said() -> None:
    given_ids = ids_of(2)
    talk = conversation()
    talk.write(given_ids, log_probs_of(2), "stop")
    given_ids[0] = 5
    assert talk.response_ids.tolist() == [100, 101]
    for column in (talk.context_ids, talk.response_ids, talk.mask, talk.log_probs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 5), ([1], 0)])
def test_a_conversation_without_a_prompt_or_room_is_refused(prompt: list[int], max_tokens: int) -> None:
    with pytest.raises(AgentError, match="at least 1 of each"):
        Conversation("5", "uid", np.array(prompt, np.int32), max_tokens=max_tokens, seed=0)


def test_what_the_model_wrote_is_each_turn_without_its_answer() -> None:
    nobody: Any = None
    spoken = conversation()
    for turn, answer in (([5, 6], [7]), ([8], [9, 10])):
        spoken.write(np.asarray(turn, np.int32), np.zeros(len(turn), np.float32), "stop")
        spoken.observe(np.asarray(answer, np.int32))
    dialog = Dialog(nobody, None, segments=[spoken], writers=[0, 0])
    assert [ids.tolist() for ids, _ in dialog.written()] == [[5, 6], [8]]
