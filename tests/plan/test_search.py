"""The search finds what trying everything out finds, and what it finds may be used as it stands."""

from __future__ import annotations

import math
import shlex
from itertools import product

import pytest

from mrl.config.load import load_config
from mrl.plan import search as searching
from mrl.plan.memory import plan_memory
from mrl.plan.search import placements, search, try_out
from mrl.plan.subject import Subject, make_subject
from mrl.plan.timing import Lengths, assumed_lengths, plan_time
from tests.plan.planning import CONFIGS, REWARD_MODEL, subject_of

CASES = {
    "one role": ("grpo-qwen2.5-7b-1n8g", {}),
    "two roles": ("ppo-llama3.1-8b-1n8g", {}),
    "three roles": ("ppo-llama3.1-8b-1n8g", REWARD_MODEL),
    "little memory": ("ppo-llama3.1-8b-1n8g", {"actor__max_tokens_per_device": 8192}),
    "experts": ("grpo-qwen3-30b-a3b-2n8g", {}),
}


def exhaustive(subject: Subject, lengths: Lengths) -> dict[str, float]:
    """The fastest of each kind of placement, of all combinations."""
    fastest: dict[str, float] = {}
    for placement in placements(subject, lengths):
        for options in product(*placement.parts.values()):
            one = try_out(placement, dict(zip(placement.parts, options, strict=True)), lengths)
            if one is not None:
                fastest[placement.name] = min(one.time.seconds, fastest.get(placement.name, math.inf))
    return fastest


@pytest.mark.parametrize("case", CASES)
def test_the_fastest_of_all_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a space that is small enough to be gone through."""
    monkeypatch.setattr(searching, "_SIZES", (1, 4))
    monkeypatch.setattr(searching, "_CHUNKS", (1,))
    monkeypatch.setattr(searching, "_MOST_STAGES", 2)
    monkeypatch.setattr(searching, "_UTILIZATIONS", (0.5, 0.85))
    preset, changes = CASES[case]
    subject = subject_of(preset, **changes)
    lengths = assumed_lengths(subject.config)
    result = search(subject, lengths, most=1)
    assert result.is_complete
    assert {one.placement: one.time.seconds for one in result.found} == pytest.approx(exhaustive(subject, lengths))
    assert "colocated" in {one.placement for one in result.found}


def test_what_is_found_can_be_typed_and_is_what_was_promised() -> None:
    subject = subject_of("ppo-llama3.1-8b-1n8g")
    lengths = assumed_lengths(subject.config)
    result = search(subject, lengths)
    assert {one.placement for one in result.found} >= {"colocated", "hybrid"}
    seconds = [one.time.seconds for one in result.found]
    assert seconds == sorted(seconds)
    assert seconds[0] <= plan_time(subject, lengths).seconds
    for one in result.found:
        words = shlex.split(subject.overrides(one.changes))
        again = make_subject(load_config(str(CONFIGS / "ppo-llama3.1-8b-1n8g.yaml"), words), "h100")
        assert not plan_memory(again).shortages
        assert plan_time(again, lengths).seconds == pytest.approx(one.time.seconds)


def test_a_search_that_stops_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_MOST_TRIED", 1)
    subject = subject_of("ppo-llama3.1-8b-1n8g")
    assert not search(subject, assumed_lengths(subject.config)).is_complete
