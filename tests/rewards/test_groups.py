"""Functions that score all samples of a prompt at once, and functions that are coroutines."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.errors import RewardError
from mrl.events import EventLog, Retried, SampleSkipped
from mrl.rewards import sample as sample_module
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Score
from mrl.rewards.sample import Sample
from mrl.trainer.generation import Generator
from tests.rewards.conftest import HOSTILE, Bench, make_sample
from tests.trainer.fakes import END, Hybrid, Tokenizer, make_config, prompts_of

GROUPS = "tests.rewards.hostile:score_group"
BOTH = {
    "alone": RewardFunctionConfig(name=HOSTILE, weight=100.0),
    "place": RewardFunctionConfig(name=GROUPS, group=True),
}


def group(uid: str, *numbers: int, do: str = "ok") -> list[Sample]:
    return [dataclasses.replace(make_sample(do, row_id=number), uid=uid) for number in numbers]


def groups_of(bench: Bench, name: str = GROUPS, **settings: Any) -> RewardManager:
    return bench.manager(functions={"place": RewardFunctionConfig(name=name, group=True)}, **settings)


def test_a_group_is_scored_at_once_and_each_sample_gets_its_own(bench: Bench) -> None:
    samples = [*group("a", 7, 5, 9), *group("b", 3), *group("c", 1, 2)]
    random.Random(0).shuffle(samples)
    outcomes = bench.manager(functions=BOTH).score(samples)
    places = {7: 1.0, 5: 0.0, 9: 2.0, 3: 0.0, 1: 0.0, 2: 1.0}
    for sample, outcome in zip(samples, outcomes, strict=True):
        assert isinstance(outcome, Score)
        assert outcome.parts == {"alone": float(sample.row_id), "place": places[sample.row_id]}
        assert outcome.value == 100.0 * sample.row_id + places[sample.row_id]


def test_samples_of_a_group_come_in_the_order_of_their_rows(bench: Bench) -> None:
    manager = groups_of(bench, "tests.rewards.witness:order")
    for _ in range(2):
        samples = group("a", 4, 2, 3, 1)
        tickets = [manager.submit(sample, 4) for sample in samples]
        outcomes = manager.drain()
        assert [outcomes[ticket].value for ticket in tickets] == [3, 1, 2, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("too few", "bad_result", "place: the result is of type list of length 2, not a list of 3 results"),
        ("one is nan", "bad_result", "place: the result is nan, not a finite number"),
        ("os._exit 3", "crashed", "its process exited with status 3"),
        ("sleep forever", "timeout", "no answer within 0.5 s"),
    ],
)
def test_a_group_that_fails_fails_for_each_of_its_samples(bench: Bench, do: str, kind: str, message: str) -> None:
    manager = groups_of(bench, retries=1, num_workers=1)
    *failed, good, better = manager.score([*group("bad", 1, 2, 3, do=do), *group("good", 4, 5)])
    assert [
        (type(outcome), outcome.kind, outcome.detail, outcome.attempts)
        for outcome in failed
        if isinstance(outcome, Failure)
    ] == [(Failure, kind, message, 2)] * 3
    assert [outcome.value for outcome in (good, better) if isinstance(outcome, Score)] == [0.0, 1.0]
    events = bench.events()
    assert [event.row_id for event in events if isinstance(event, SampleSkipped)] == [1, 2, 3]
    (retried,) = (event for event in events if isinstance(event, Retried))
    assert retried.what == "reward of the 3 samples of uid bad, source unit/test"


def test_a_sample_whose_own_score_failed_leaves_its_group_alone(bench: Bench) -> None:
    samples = group("a", 1, 2, 3)
    samples[1].extra_info["do"] = "nan"
    one, failed, three = bench.manager(functions=BOTH).score(samples)
    assert isinstance(failed, Failure)
    assert [outcome.value for outcome in (one, three) if isinstance(outcome, Score)] == [100.0, 302.0]


def test_numbers_by_name_and_copies_of_its_own(bench: Bench) -> None:
    functions = {
        "spoil": RewardFunctionConfig(name="tests.rewards.hostile:spoil_group", group=True),
        "place": RewardFunctionConfig(name=GROUPS, group=True, weight=0.5),
    }
    manager = bench.manager(functions=functions)
    outcomes = manager.score([*group("a", 5, 4), *group("b", 1, 2, do="numbers by name")])
    assert [outcome.parts for outcome in outcomes if isinstance(outcome, Score)] == [
        {"spoil": 0.0, "place": 1.0},
        {"spoil": 0.0, "place": 0.0},
        *[{"spoil": 0.0, "place": 1.0, "place/size": 2.0}] * 2,
    ]


def test_coroutines_are_awaited(bench: Bench) -> None:
    functions = {
        "one": RewardFunctionConfig(name="tests.rewards.hostile:score_later"),
        "all": RewardFunctionConfig(name="tests.rewards.hostile:score_group_later", group=True, weight=10.0),
    }
    outcomes = bench.manager(functions=functions).score(group("a", 1, 2))
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [11.0, 11.0]


def test_a_group_that_is_too_large_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = group("a", 1, 2)
    size = sum(len(sample.to_json()) + 1 for sample in samples) + 1
    manager = groups_of(bench)
    monkeypatch.setattr(sample_module, "MAX_SAMPLE_BYTES", size - 1)
    with pytest.raises(RewardError, match=rf"uid a, .*: the samples have {size} bytes in total; at most {size - 1}"):
        manager.score(samples)


def test_a_group_is_what_one_round_of_generation_has_of_a_prompt(tmp_path: Path) -> None:
    """Three samples of each of two prompts, then one of each with the same uids, like ReMax."""
    config = make_config(tmp_path)
    settings = RewardConfig(functions={"size": RewardFunctionConfig(name="tests.rewards.witness:size", group=True)})
    with RewardManager(settings, EventLog(tmp_path / "events.jsonl")) as rewards:
        hybrid: Any = Hybrid([], lambda request, sampling: [100 + int(request.key), END])
        generator = Generator(config, hybrid, rewards, Tokenizer(END), lambda done, total: None)  # type: ignore[arg-type]
        many = generator.run(prompts_of([0, 1]).repeat(3), generator.training, 1).batch
        one = generator.run(prompts_of([0, 1]), generator.greedy, 1).batch
        uneven = generator.run(prompts_of([0, 1]).repeat(3).take([0, 3, 4]), generator.training, 1).batch
    assert many["scores"].tolist() == [3.0] * 6
    assert one["scores"].tolist() == [1.0, 1.0]
    assert uneven["scores"].tolist() == [1.0, 2.0, 2.0]
