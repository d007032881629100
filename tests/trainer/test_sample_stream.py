"""Batches ahead of the trained batch: the weights that draw them, their order, and their saved state."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.conversation import Conversation
from mrl.config.algorithm import CorrectionConfig, OverlongConfig
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import Config, PlacementConfig
from mrl.config.training import AsynchronyConfig
from mrl.errors import AuditFailed, CheckpointError, RolloutError
from mrl.observe.metrics import read_metrics
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rollout.gate import Gate
from mrl.trainer.audit import staleness_metrics, with_staleness
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.sample_stream import drawn_from_bytes, drawn_to_bytes
from mrl.trainer.segments import segment_of
from tests.trainer.fakes import SCORER, Scene, make_config, scene

APART = PlacementConfig(pools={"all": 4, "engines": 1}, roles={"actor": "all", "rollout": "engines"})
SCORE = "val/score/mean@1"


class Inline:
    """Replaces a thread: a task runs completely when it is submitted."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


def ahead(directory: Path, number: int = 1, **sections: Any) -> Config:
    """Six steps, with that many batches ahead."""
    algorithm = {"correction": CorrectionConfig()} | sections.pop("algorithm", {})
    training = {"steps": 6, "keep": 9} | sections.pop("training", {})
    settings = {"placement": APART, "asynchrony": AsynchronyConfig(ahead=number)} | sections
    return make_config(directory, algorithm=algorithm, training=training, **settings)


def figures(directory: Path, prefix: str = "async/") -> list[dict[str, float]]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name.startswith(prefix)} for line in lines]


def untimed(directory: Path) -> list[dict[str, Any]]:
    timed = ("timing_s", "perf/", "reward/seconds")
    return [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in read_metrics(directory / "metrics.jsonl")
    ]


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_batch_begins_as_early_as_it_may_and_no_earlier(number: int) -> None:
    """Over every order in which training and drawing may take turns."""
    for seed in range(50):
        chance, gate, steps = random.Random(seed), Gate(number, 12), 12
        begun: dict[int, int] = {}
        while gate.trained < steps:
            if chance.random() < 0.5:
                begun |= dict.fromkeys(itertools.islice(gate.open(), chance.randint(0, 2)), gate.trained)
            elif gate.trained + 1 in begun:
                gate.trained += 1
        assert list(begun) == list(range(1, steps + 1)), "in order, each once, and none beyond the run"
        ages = [batch - 1 - trained for batch, trained in begun.items()]
        assert 0 <= min(ages) <= max(ages) <= number
    gate = Gate(number, 12, trained=3, begun=3)
    assert list(gate.open()) == list(range(4, 5 + number)), "all of them at once if nothing waits"


@pytest.mark.parametrize("number", [1, 2])
def test_every_batch_is_drawn_by_the_weights_of_so_many_steps_before(number: int, tmp_path: Path) -> None:
    with scene(ahead(tmp_path, number), tmp_path) as found:
        found.trainer.fit()
    ages = [line["async/staleness/max"] for line in figures(tmp_path)]
    assert ages == [min(step, number) for step in range(6)]
    assert [line["async/staleness/mean"] for line in figures(tmp_path)] == ages
    assert [line[f"async/staleness/share_{number}"] for line in figures(tmp_path)][-1] == 1.0
    assert len(found.hybrid.requests) == 6, "nothing is drawn that no step trains"
    assert found.hybrid.fleet.is_closing


def test_a_thread_does_what_a_program_without_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("thread", "inline"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            if name == "inline":
                patch.setattr("mrl.trainer.sample_stream.ThreadPoolExecutor", Inline)
            with scene(ahead(tmp_path / name), tmp_path / name) as found:
                found.trainer.fit()
    assert untimed(tmp_path / "thread") == untimed(tmp_path / "inline")


def test_the_next_batch_is_generated_while_one_is_trained(tmp_path: Path) -> None:
    """The second batch ends only after the first update has begun, and the first update only while it is under way."""
    updating, generating = threading.Event(), threading.Event()
    with scene(ahead(tmp_path, training={"steps": 2}), tmp_path) as found:
        generate, update = found.hybrid.generate, found.components.actor.update_actor

        def slowly(*arguments: Any, **named: Any) -> Any:
            if found.hybrid.requests:
                generating.set()
                assert updating.wait(20), "nothing was trained meanwhile"
            yield from generate(*arguments, **named)

        def note(batch: DataProto) -> Any:
            assert generating.wait(20), "nothing was generated meanwhile"
            updating.set()
            return update(batch)

        found.hybrid.generate = slowly  # type: ignore[method-assign]
        found.components.actor.update_actor = note
        found.trainer.fit()
    assert [line["async/staleness/max"] for line in figures(tmp_path)] == [0, 1]


def test_validation_and_saving_wait_for_what_is_under_way(tmp_path: Path) -> None:
    config = ahead(tmp_path, training={"save_every": 2}, validation={"every": 2})
    with scene(config, tmp_path, validations=[0.1] * 4) as found:
        run, under_way = found.components.validator.run, found.components.stream._under_way

        def validate(step: int, models: Any) -> dict[str, float]:
            assert not under_way, "no samples are under way"
            assert found.hybrid.held == found.hybrid.version == step + 1
            return run(step, models)

        found.components.validator.run = validate
        found.trainer.fit()
    assert [line[SCORE] for line in figures(tmp_path, SCORE) if line] == [0.1] * 4


def resumed(directory: Path, at: int, **sections: Any) -> tuple[Scene, list[dict[str, Any]]]:
    """A run of that directory, from the checkpoint of a step."""
    for path in (directory / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > at:
            for file in sorted(path.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            path.rmdir()
    with scene(ahead(directory, training={"save_every": 1}, **sections), directory) as found:
        found.trainer.fit()
    return found, untimed(directory)


@pytest.mark.parametrize(("at", "number"), [(1, 1), (3, 2), (5, 3)])
def test_a_resumed_run_trains_the_batches_that_were_drawn_ahead(at: int, number: int, tmp_path: Path) -> None:
    with scene(ahead(tmp_path, number, training={"save_every": 1}), tmp_path) as whole:
        whole.trainer.fit()
    lines = untimed(tmp_path)
    drawn = [[request.key for request in requests] for requests in whole.hybrid.requests]
    found, again = resumed(tmp_path, at, asynchrony=AsynchronyConfig(ahead=number))
    theirs = [[request.key for request in requests] for requests in found.hybrid.requests]
    assert theirs == drawn[at + number :], "what the checkpoint holds is not drawn again, and nothing is left out"
    scores = ("critic/score/mean", "response_length/mean", "reward/score/mean")
    compared = ("step", "async/staleness/max", "async/staleness/mean", *scores)
    for mine, line in zip(again, lines, strict=True):
        assert {name: mine[name] for name in compared} == {name: line[name] for name in compared}


@pytest.mark.parametrize("apart", [False, True], ids=["carried over", "in flight"])
def test_a_resumed_run_has_what_was_learnt_of_the_batches_and_scores_none_twice(apart: bool, tmp_path: Path) -> None:
    """A batch drawn ahead is saved with its final score, which has updated the model's mean and spread."""
    sections: dict[str, Any] = {
        "asynchrony": AsynchronyConfig(ahead=2, weights="in_flight"),
        "algorithm": {"overlong": OverlongConfig(buffer_tokens=3, factor=0.5)},
        "reward_model": replace(SCORER, running=True),
        "reward": RewardConfig(functions={"rule": RewardFunctionConfig(name="gsm8k")}),
    }
    if not apart:
        sections["placement"] = PlacementConfig(pools={"all": 4}, roles={"actor": "all", "reward_model": "all"})
    else:
        sections["placement"] = replace(APART, roles=APART.roles | {"reward_model": "all"})
    with scene(ahead(tmp_path, training={"save_every": 1}, **sections), tmp_path) as whole:
        whole.trainer.fit()
    lines, learnt = untimed(tmp_path), whole.components.prompts.solved
    assert [len(shares) for shares in learnt] == [2] * 6
    assert lines[0]["reward/model/running_mean"] == 0.75, "of rows 0 to 3, each half its number"
    found, again = resumed(tmp_path, 2, **sections)
    compared = ("step", "critic/score/mean", "reward/model/running_mean", "reward/model/running_std")
    more = ("reward/overlong_penalty", "reward/model/mean")
    for mine, line in zip(again, lines, strict=True):
        assert {name: mine.get(name) for name in (*compared, *more)} == {
            name: line[name] for name in (*compared, *more)
        }
    assert found.components.prompts.solved == learnt, "what draws the prompts knows as much of them"


IN_FLIGHT = AsynchronyConfig(ahead=2, weights="in_flight")
RULE = RewardConfig(functions={"rule": RewardFunctionConfig(name="gsm8k")})


def test_a_batch_opens_when_engines_have_their_weights_and_the_last_is_learnt_from(tmp_path: Path) -> None:
    """Engines take a while to have them, and say so."""
    seen: list[tuple[int, int, int]] = []
    with scene(ahead(tmp_path, asynchrony=IN_FLIGHT, reward=RULE), tmp_path) as found:
        hybrid, prompts = found.hybrid, found.components.prompts
        draw, late = prompts.next_batch, itertools.count()

        def has_newest() -> bool:
            if next(late) % 3 == 2:
                hybrid.held = hybrid.version
            return bool(hybrid.held == hybrid.version)

        def next_batch() -> DataProto:
            seen.append((len(seen) + 1, hybrid.held, len(prompts.solved)))
            return draw()

        hybrid.has_newest = has_newest  # type: ignore[method-assign]
        prompts.next_batch = next_batch
        found.trainer.fit()
    assert [number for number, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    for number, held, num_learnt in seen:
        assert held >= number - 2, "steps before it whose weights the engines hold, and one"
        assert num_learnt >= number - 3


def test_who_compares_engines_or_validates_finds_nothing_under_way(tmp_path: Path) -> None:
    """Where engines take turns with the trainer: samples of the next batches are half done when a step begins."""
    together = PlacementConfig(pools={"all": 4}, roles={"actor": "all"})
    config = ahead(tmp_path, asynchrony=IN_FLIGHT, placement=together, validation={"every": 2})
    seen: list[str] = []
    with scene(config, tmp_path, validations=[0.1] * 4) as found:
        stream, probe, validator = found.components.stream, found.components.engine_probe, found.components.validator
        ask, run = probe.ask, validator.run

        def alone(what: str, call: Any, *given: Any) -> Any:
            assert stream._running is None, f"samples are under way at a {what}"
            seen.append(what)
            return call(*given)

        probe.ask = lambda step: alone("comparison", ask, step)
        validator.run = lambda step, models: alone("validation", run, step, models)
        take = stream._take
        halves = []
        stream._take = lambda step: (halves.append(stream._running is not None), take(step))[1]
        found.trainer.fit()
    assert seen.count("comparison") == 2 + 4, "every third step, and with each validation"
    assert seen.count("validation") == 4
    assert any(halves), "some are under way at other times"


def test_segments_of_what_is_drawn_ahead_are_kept_as_they_were(tmp_path: Path) -> None:
    talk = Conversation("0", "p", np.array([5, 6], np.int32), max_tokens=9, seed=0)
    talk.write(np.array([7, 8], np.int32), np.array([-0.5, -0.25], np.float32), "stop", 3)
    talk.observe(np.array([9], np.int32))
    talk.write(np.array([4], np.int32), np.array([-1.5], np.float32), "stop", np.array([4], np.int32))
    talk.end("done")
    talk.role = "first"
    segment = segment_of(talk)
    batch = DataProto.from_dict({"responses": from_rows([[1], [2]])}, {"other_segments": [[segment, segment], []]})
    drawn, _ = drawn_from_bytes(drawn_to_bytes({3: ScoredBatch(batch, {"a": 1.0})}, 7))
    kept = drawn[3].batch["other_segments"]
    assert [len(segments) for segments in kept] == [2, 0]
    for found in kept[0]:
        assert found.keys() == segment.keys()
        assert found.pop("role") == "first"
        for name, values in found.items():
            np.testing.assert_array_equal(values, segment[name])
            assert values.dtype == segment[name].dtype


def test_a_damaged_file_of_batches_is_an_error(tmp_path: Path) -> None:
    with scene(ahead(tmp_path, training={"save_every": 1, "steps": 2}), tmp_path) as found:
        found.trainer.step()
        content = drawn_to_bytes(found.components.stream.drawn_ahead(), 7)
    drawn, version = drawn_from_bytes(content)
    assert (list(drawn), version) == ([2], 7)
    assert set(drawn[2].batch.values("versions").tolist()) == {1}, "and so they are as old as then"
    assert drawn[2].metrics
    for length in (len(content) - 7, 1 << 40, (1 << 64) - 1):
        with pytest.raises(
            CheckpointError, match=f"a batch should have {length} bytes, but {len(content) - 8} are left"
        ):
            drawn_from_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="cannot read the batches"):
        drawn_from_bytes(drawn_to_bytes(drawn, float("inf")))  # type: ignore[arg-type]
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        else:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        with suppress(CheckpointError):  # no other error is allowed; the hash detects the rest
            drawn_from_bytes(bytes(damaged))


def test_what_fails_in_the_other_thread_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RolloutError("of the test")

    with scene(ahead(tmp_path), tmp_path) as found:
        found.trainer.step()
        found.trainer.step()
        found.hybrid.generate = broken  # type: ignore[method-assign]
        with pytest.raises(RolloutError, match="of the test"):
            found.trainer.fit()


def test_samples_that_are_too_old_stop_the_run(tmp_path: Path) -> None:
    versions = from_rows([[3, 3], [2, 4]])
    batch = DataProto.from_dict({"responses": from_rows([[1, 1], [1, 1]]), "versions": versions})
    assert staleness_metrics(with_staleness(batch, 4), 2)["async/versions_per_sample"] == 1.5
    with pytest.raises(AuditFailed, match=r"0 to 2 updates old, and asynchrony\.ahead is 1"):
        staleness_metrics(with_staleness(batch, 4), 1)
    with pytest.raises(AuditFailed, match="-1 to 1 updates old"):
        staleness_metrics(with_staleness(batch, 3), 1)
    assert staleness_metrics(with_staleness(batch.select("responses"), 4), 0) == {}


def test_tokens_that_nobody_drew_have_no_age() -> None:
    """Tokens of an environment must not make a conversation look younger, or as if drawn by more weights."""
    batch = DataProto.from_dict(
        {"responses": from_rows([[1, 1, 1], [1, 1]]), "versions": from_rows([[3, -1, 3], [2, 3]])}
    )
    found = staleness_metrics(with_staleness(batch, 4), 2)
    assert found["async/staleness/mean"] == pytest.approx((1 + 1 + 2 + 1) / 4)
    assert [found[f"async/staleness/share_{age}"] for age in range(3)] == [0.0, 0.75, 0.25]
    assert found["async/versions_per_sample"] == 1.5


def test_a_batch_that_was_drawn_ahead_needs_a_run_that_weighs_it(tmp_path: Path) -> None:
    """Without asynchrony it is trained where there is a correction, and else refused."""
    scored = ScoredBatch(DataProto.from_dict({"responses": from_rows([[1]])}), {})
    with scene(make_config(tmp_path), tmp_path) as found, pytest.raises(CheckpointError, match=r"asynchrony\.ahead=1"):
        found.components.stream.go_on(1, {2: scored})
