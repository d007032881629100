"""Values at the limits of the data: cuts, capacities, costs and missing prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.data import SourceConfig
from mrl.data import prompt_loader
from mrl.data.packing import PackingRules, RowCost
from mrl.data.rlhf_dataset import Overlong, shorten
from mrl.data.sampler import PromptSampler
from mrl.errors import DataError
from tests.data.conftest import OpenLoader, good_row, jsonl

LONG = good_row(9, prompt="x" * 100)


@pytest.mark.parametrize(
    ("overlong", "kept"),
    [("left", [3, 4, 5, 6, 7]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 5, 6, 7]), ("drop", None)],
)
def test_what_stays_of_a_prompt_that_is_too_long(overlong: Overlong, kept: list[int] | None) -> None:
    assert shorten(list(range(8)), 5, overlong, "here") == kept
    for at_the_limit in (overlong, "error"):
        assert shorten(list(range(5)), 5, at_the_limit, "here") == list(range(5))
    if kept is not None:
        assert len(shorten(list(range(8)), 1, overlong, "here") or []) == 1


def test_the_cost_of_a_row_and_the_room_of_a_micro_batch() -> None:
    assert RowCost(3.0, 0.5).of(np.array([1, 4])).tolist() == [3.5, 20.0]
    rules = PackingRules(RowCost(1, 1), row_multiple=4, pack_multiple=12, context_size=2)
    assert rules.capacity(29) == 48
    assert rules.stored(np.array([1, 4, 5]), 29).tolist() == [4, 4, 8]


def test_shares_follow_the_weights_or_else_the_sizes() -> None:
    weighted = PromptSampler({"a": 10, "b": 10, "c": 7}, {"a": 0.5, "b": 1.5, "c": None}, seed=0, shuffle=True)
    assert weighted.state_dict()["order"]["weights"] == {"a": 1, "b": 3, "c": 14}
    assert [weighted.draw().source for _ in range(36)].count("b") == 6
    first = PromptSampler({"a": 3, "b": 3}, {"a": 1.0, "b": 1.0}, seed=0, shuffle=False)
    assert [first.draw().source for _ in range(4)] == ["a", "b", "a", "b"], "the first of equals"


def test_a_usable_row_ends_a_drought(here: Path, loader_of: OpenLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_loader, "MAX_CONSECUTIVE_SKIPS", 3)
    rows = [LONG, LONG, good_row(1), LONG, LONG, good_row(2)]
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    loader = loader_of(train="rows.jsonl", overlong="drop", shuffle=False, prompts_per_step=1)
    assert [loader.next_batch()["uid"].tolist() for _ in range(4)] == [
        [f"train/{epoch}/{row}"] for epoch in range(2) for row in (2, 5)
    ]
    assert loader.skips.overlong == {"train": 8}
    Path("rows.jsonl").write_bytes(jsonl(*rows, LONG))
    dry = loader_of(train="rows.jsonl", overlong="drop", shuffle=False, prompts_per_step=1)
    for _ in range(2):
        dry.next_batch()
    with pytest.raises(DataError, match=r"none of the last 3 drawn rows is usable \(7 prompts were too long\)"):
        dry.next_batch()


def test_bad_rows_are_counted_by_source_and_once_each(here: Path, loader_of: OpenLoader) -> None:
    Path("a.jsonl").write_bytes(jsonl(good_row(0), b"[]", good_row(1)))
    Path("b.jsonl").write_bytes(jsonl(good_row(0), b"[]", good_row(1)))
    sources = {name: SourceConfig(dataset=f"{name}.jsonl") for name in "ab"}
    loader = loader_of(train=sources, shuffle=False, max_bad_rows=2, prompts_per_step=4)
    for _ in range(3):
        assert len(loader.next_batch()) == 4
    assert set(loader.skips.bad_rows) == {"a/1", "b/1"}
