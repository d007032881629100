"""The order of the prompts: every row once per epoch, constant shares, and exact resuming at any position."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from mrl.data.sampler import DifficultySampler, Draw, PromptSampler, shuffled
from mrl.errors import DataError

SIZES = {"math": 7, "code": 3, "one": 1}
NO_WEIGHTS: dict[str, float | None] = dict.fromkeys(SIZES)
WEIGHTS: dict[str, float | None] = {"math": 0.5, "code": 0.3, "one": 0.2}


def sampler(weights: dict[str, float | None] | None = None, seed: int = 3, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(SIZES, weights or NO_WEIGHTS, seed=seed, shuffle=shuffle)


def draws(source: PromptSampler, count: int) -> list[Draw]:
    return [source.draw() for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("weights", [NO_WEIGHTS, WEIGHTS], ids=["by size", "weighted"])
def test_resuming_at_every_point_gives_exactly_the_rest(weights: dict[str, float | None], shuffle: bool) -> None:
    whole = draws(sampler(weights, shuffle=shuffle), 5 * 11)
    for stop in range(len(whole) + 1):
        stopped = sampler(weights, shuffle=shuffle)
        assert draws(stopped, stop) == whole[:stop]
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = sampler(weights, shuffle=shuffle)
        resumed.load_state_dict(state)
        assert draws(resumed, len(whole) - stop) == whole[stop:]


def test_without_weights_every_row_comes_once_in_an_epoch() -> None:
    source = sampler()
    every_row = {(name, row) for name, size in SIZES.items() for row in range(size)}
    for epoch in range(20):
        drawn = draws(source, len(every_row))
        assert {(draw.source, draw.row) for draw in drawn} == every_row
        assert {draw.epoch for draw in drawn} == {epoch}


def test_shares_are_kept_all_along() -> None:
    drawn: Counter[str] = Counter()
    source = sampler(WEIGHTS)
    for count in range(1, 2001):
        drawn[source.draw().source] += 1
        for name, weight in WEIGHTS.items():
            assert weight is not None
            assert abs(drawn[name] - weight * count) <= 1.5
    assert drawn == {"math": 1000, "code": 600, "one": 400}


def test_uids_are_unique_and_numbers_count_the_draws() -> None:
    drawn = draws(sampler(WEIGHTS), 500)
    assert len({draw.uid for draw in drawn}) == 500
    assert [draw.number for draw in drawn] == list(range(500))
    assert drawn[0].uid == f"{drawn[0].source}/0/{drawn[0].row}"


def test_order_depends_on_seed_source_and_epoch_alone() -> None:
    by_epoch = [tuple(shuffled(50, f"3/math/{epoch}")) for epoch in range(30)]
    assert len(set(by_epoch)) == 30
    assert tuple(shuffled(50, "4/math/0")) != by_epoch[0] != tuple(shuffled(50, "3/code/0"))
    # Written down once: a change of these numbers would change the order of every run that resumes.
    assert shuffled(10, "3/math/0").tolist() == FIXED_ORDER
    unshuffled = [draw.row for draw in draws(sampler(shuffle=False), 22) if draw.source == "math"]
    assert unshuffled == [*range(7), *range(7)]


FIXED_ORDER = [3, 1, 0, 9, 2, 6, 4, 5, 7, 8]


def test_every_row_is_as_likely_in_every_place() -> None:
    size, times = 6, 6000
    places = [Counter[int]() for _ in range(size)]
    neighbours: Counter[tuple[int, int]] = Counter()
    for epoch in range(times):
        order = shuffled(size, f"0/x/{epoch}").tolist()
        for place, row in enumerate(order):
            places[place][row] += 1
        neighbours.update(pairwise(order))
    expected = times / size
    for counts in places:
        assert sum((counts[row] - expected) ** 2 / expected for row in range(size)) < 25  # chi-square, 5 degrees
    pair = times * (size - 1) / (size * (size - 1))
    assert sum((count - pair) ** 2 / pair for count in neighbours.values()) < 75
    assert len(neighbours) == 30


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (sampler(seed=4), "seed was 3, but now is 4"),
        (sampler(shuffle=False), "shuffle was True, but now is False"),
        (sampler(WEIGHTS), "weights was {'math': 7, 'code': 3, 'one': 1}, but now is {'math': 5, 'code': 3, 'one': 2}"),
        (
            PromptSampler({"math": 8, "code": 3, "one": 1}, NO_WEIGHTS, seed=3, shuffle=True),
            "sizes was {'math': 7, 'code': 3, 'one': 1}, but now is {'math': 8, 'code': 3, 'one': 1}",
        ),
    ],
)
def test_another_order_cannot_be_resumed(other: PromptSampler, what: str) -> None:
    with pytest.raises(DataError) as caught:
        other.load_state_dict(sampler().state_dict())
    assert str(caught.value) == (
        f"cannot continue with the prompts: {what}\n"
        "  fix: resume with the same data section and files, or start a new run"
    )


# --- by difficulty ----------------------------------------------------------------------------------------------


def rows_of_epoch(sampler: DifficultySampler, num_rows: int) -> list[int]:
    return sorted(sampler.draw().row for _ in range(num_rows))


def difficulty(**options: Any) -> DifficultySampler:
    return DifficultySampler({"math": 6}, {"math": None}, seed=3, shuffle=True, **options)


def test_what_is_too_easy_or_too_hard_rests_and_comes_back() -> None:
    sampler = difficulty(between=(0.0, 1.0), rest=1)
    assert rows_of_epoch(sampler, 6) == [0, 1, 2, 3, 4, 5]
    sampler.learn({"math/0/1": 1.0, "math/0/4": 0.0, "math/0/2": 0.5})
    assert rows_of_epoch(sampler, 4) == [0, 2, 3, 5]
    again = difficulty(between=(0.0, 1.0), rest=1)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert rows_of_epoch(sampler, 6) == [0, 1, 2, 3, 4, 5], "after the epoch of rest"
    assert rows_of_epoch(again, 6) == [0, 1, 2, 3, 4, 5], "and so after a resume"
    assert sampler.draw() == again.draw()


def test_only_easy_prompts_rest_unless_others_are_named() -> None:
    sampler = difficulty()
    rows_of_epoch(sampler, 6)
    sampler.learn({"math/0/1": 1.0, "math/0/4": 0.0})
    assert rows_of_epoch(sampler, 5) == [0, 2, 3, 4, 5]


def test_a_source_that_rests_as_a_whole_is_drawn_all_the_same() -> None:
    sampler = difficulty(rest=100)
    rows_of_epoch(sampler, 6)
    sampler.learn({f"math/0/{row}": 1.0 for row in range(6)})
    assert len({sampler.draw().uid for _ in range(12)}) == 12


def test_what_rests_rests_on_after_a_resume() -> None:
    def taught() -> DifficultySampler:
        return DifficultySampler({"a": 4}, {"a": None}, seed=1, shuffle=True, between=(0.0, 1.0), rest=2)

    stopped = taught()
    first = draws(stopped, 4)
    stopped.learn({first[0].uid: 1.0, first[1].uid: 0.0, first[2].uid: 0.5, first[3].uid: 0.5})
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = taught()
    resumed.load_state_dict(state)
    rest = draws(resumed, 12)
    assert rest == draws(stopped, 12)
    assert [draw.row for draw in rest[:4]] == [
        draw.row for draw in rest[:4] if draw.row in {first[2].row, first[3].row}
    ]
