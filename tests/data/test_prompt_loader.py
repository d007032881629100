"""Full batches despite skipped rows; limits, counts and events; and resuming between any two steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl import files
from mrl.config.data import SourceConfig
from mrl.data.prompt_loader import PromptLoader, SkipLog, one_pass
from mrl.data.sampler import Draw, PromptSampler
from mrl.errors import BadRow, DataError
from mrl.events import EventLog, SampleSkipped, read_events
from tests.data.conftest import OpenDataset, OpenLoader, good_row, jsonl

LONG = good_row(9, prompt="x" * 100)


def uids(loader: PromptLoader, steps: int) -> list[list[str]]:
    return [loader.next_batch()["uid"].tolist() for _ in range(steps)]


def skipped(log: EventLog) -> list[SampleSkipped]:
    return [recorded.event for recorded in read_events(log.path) if isinstance(recorded.event, SampleSkipped)]


def test_resuming_between_any_two_steps_gives_the_same_steps(here: Path, loader_of: OpenLoader) -> None:
    rows = [good_row(number) for number in range(11)]
    Path("rows.jsonl").write_bytes(jsonl(*rows[:4], LONG, *rows[4:8], b"{", *rows[8:]))
    sources = {
        "a": SourceConfig(dataset="rows.jsonl", weight=2),
        "b": SourceConfig(dataset="toy:sorting", options={"size": 5}, weight=1),
    }
    fields = {"train": sources, "overlong": "drop", "max_bad_rows": 1}
    whole = loader_of(prompts_per_step=3, **fields)
    states = [json.loads(json.dumps(whole.state_dict()))]
    steps = []
    for _ in range(15):  # three epochs of each source
        steps += uids(whole, 1)
        states.append(json.loads(json.dumps(whole.state_dict())))
    for stop, state in enumerate(states):
        resumed = loader_of(prompts_per_step=3, **fields)
        resumed.load_state_dict(state)
        assert uids(resumed, len(steps) - stop) == steps[stop:]
        assert resumed.state_dict() == states[-1]
    assert states[-1]["skips"]["overlong"] == {"a": 2}
    assert list(states[-1]["skips"]["bad_rows"]) == ["a/9"]


def test_overlong_prompts_are_dropped_and_counted(here: Path, loader_of: OpenLoader, events: EventLog) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(0), LONG, good_row(2)))
    loader = loader_of(train="rows.jsonl", overlong="drop", shuffle=False, prompts_per_step=2)
    assert uids(loader, 1) == [["train/0/0", "train/0/2"]]
    assert loader.skips.overlong == {"train": 1}
    assert skipped(events) == [SampleSkipped(1, "prompt too long", "train row 1: 103 tokens")]


def test_one_bad_row_more_than_allowed_stops(here: Path, loader_of: OpenLoader) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(), b"[]", good_row(1, prompt=None), good_row(2)))
    loader = loader_of(train="rows.jsonl", shuffle=False, max_bad_rows=1)
    loader.next_batch()
    with pytest.raises(DataError) as caught:
        loader.next_batch()
    assert str(caught.value) == (
        "2 bad rows, but data.max_bad_rows is 1; the last ones:\n"
        "  - rows.jsonl:2: a row must be an object of columns, not a list\n"
        "  - rows.jsonl:3: column `prompt` must be a list of messages or text, not null\n"
        "  fix: correct the rows, or raise data.max_bad_rows"
    )


def test_fewer_prompts_than_a_step(here: Path, loader_of: OpenLoader) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(), good_row()))
    with pytest.raises(DataError) as caught:
        loader_of(train="rows.jsonl", prompts_per_step=3)
    assert str(caught.value) == (
        "2 prompts for batch.prompts_per_step=3: a step would hold the same prompt twice\n"
        "  fix: add prompts, or set batch.prompts_per_step=2"
    )


def test_one_pass_gives_every_prompt_once_and_in_order(here: Path, dataset_of: OpenDataset, events: EventLog) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(0), LONG, good_row(2), b"", good_row(4)))
    dataset = dataset_of(train={"a": "rows.jsonl", "b": "rows.jsonl"}, overlong="drop")
    skips = SkipLog(2, events)
    batches = list(one_pass(dataset, 4, skips))
    assert [len(batch) for batch in batches] == [4, 2]
    assert [uid for batch in batches for uid in batch["uid"]] == [
        f"{source}/0/{row}" for source in "ab" for row in (0, 2, 4)
    ]
    assert skips.overlong == {"a": 1, "b": 1}
    with pytest.raises(BadRow, match=r"^rows.jsonl:4: the line is empty"):
        list(one_pass(dataset, 4, SkipLog(0, events)))


class Backwards(PromptSampler):
    """A sampler of the user."""

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, float | None], **options: Any) -> None:
        super().__init__(sizes, weights, seed=options["seed"], shuffle=False)
        assert options["pace"] == 2

    def draw(self) -> Draw:
        draw = super().draw()
        return replace(draw, row=self._sizes[draw.source] - 1 - draw.row)


def test_the_sampler_is_the_one_that_is_named(here: Path, loader_of: OpenLoader) -> None:
    Path("rows.jsonl").write_bytes(jsonl(*(good_row(number) for number in range(6))))
    own = {"sampler": f"{__name__}:Backwards", "sampler_options": {"pace": 2}}
    assert uids(loader_of(prompts_per_step=3, train="rows.jsonl", **own), 1) == [
        ["train/0/5", "train/0/4", "train/0/3"]
    ]
    loader = loader_of(prompts_per_step=3, train="rows.jsonl", sampler="difficulty", sampler_options={"rest": 1})
    first = uids(loader, 2)
    loader.learn({uid: 1.0 for batch in first for uid in batch[1:]})
    left = {batch[0].rpartition("/")[2] for batch in first}
    assert {uid.split("/")[2] for uid in uids(loader, 1)[0]} >= left, "unsolved prompts come first"


def test_options_that_a_sampler_does_not_take(here: Path, loader_of: OpenLoader) -> None:
    Path("rows.jsonl").write_bytes(jsonl(*(good_row(number) for number in range(6))))
    with pytest.raises(DataError, match=r"data.sampler_options: difficulty: (.|\n)*it takes between, rest"):
        loader_of(train="rows.jsonl", sampler="difficulty", sampler_options={"rests": 1})
    with pytest.raises(DataError, match=r"data.sampler_options: shares: (.|\n)*it takes none"):
        loader_of(train="rows.jsonl", sampler_options={"rest": 1})


def test_other_rows_of_the_same_number_are_not_gone_on_with(here: Path, loader_of: OpenLoader) -> None:
    rows = [good_row(number) for number in range(40)]
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    state = json.loads(json.dumps(loader_of(train="rows.jsonl").state_dict()))
    Path("rows.jsonl").rename("moved.jsonl")
    loader_of(train={"train": "moved.jsonl"}).load_state_dict(state)
    Path("moved.jsonl").write_bytes(jsonl(*rows[:-1], good_row(7)))
    with pytest.raises(DataError, match=r"data\.train: the files of train have changed since the run began"):
        loader_of(train="moved.jsonl").load_state_dict(state)
    del state["contents"]  # from an older checkpoint
    loader_of(train="moved.jsonl").load_state_dict(state)


def test_a_fingerprint_reads_little_and_sees_both_ends(here: Path) -> None:
    with Path("rows").open("wb") as file:
        file.truncate(100 << 30)  # mostly a hole
    before = files.fingerprint("rows")
    seen = {before}
    for place in (0, 100 << 29, (100 << 30) - 1):
        with Path("rows").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(files.fingerprint("rows"))
    assert len(seen) == 3  # between its samples nothing is read
