"""The search finds what exhaustive search finds, and its results can be used as written."""

from __future__ import annotations

import math
import random
import shlex
from itertools import product
from typing import Any

import pytest

from mrl.config.resolved.load import load_config
from mrl.plan import search as searching
from mrl.plan.memory import plan_memory
from mrl.plan.plan_input import PlanInput, make_plan_input, not_modeled
from mrl.plan.search import Found, Option, Placement, placements, search, try_out
from mrl.plan.timing import Lengths, TimedPhase, TimePlan, assumed_lengths, plan_time
from tests.plan.planning import CONFIGS, REWARD_MODEL, subject_of

CASES = {
    "one role": ("grpo-qwen2.5-7b-1n8g", {}),
    "three roles": ("ppo-llama3.1-8b-1n8g", REWARD_MODEL),
    "little memory": ("ppo-llama3.1-8b-1n8g", {"actor__max_tokens_per_device": 8192}),
    "sharded": ("grpo-qwen2.5-7b-fsdp-1n8g", {}),
    "experts": ("grpo-qwen3-30b-a3b-2n8g", {}),
}


def exhaustive(subject: PlanInput, lengths: Lengths) -> dict[str, list[float]]:
    """The seconds of all combinations of each kind of placement, the fastest first."""
    seconds: dict[str, list[float]] = {}
    for placement in placements(subject, lengths):
        for options in product(*placement.parts.values()):
            one = try_out(placement, dict(zip(placement.parts, options, strict=True)), lengths)
            if one is not None:
                seconds.setdefault(placement.name, []).append(one.time.seconds)
    return {name: sorted(found) for name, found in seconds.items()}


def num_combinations(subject: PlanInput, lengths: Lengths) -> int:
    return sum(math.prod(map(len, placement.parts.values())) for placement in placements(subject, lengths))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "experts" else ()) for case in CASES]
)
def test_the_fastest_of_all_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a space that is small enough to be gone through."""
    monkeypatch.setattr(searching, "_SIZES", (1, 4))
    monkeypatch.setattr(searching, "_CHUNKS", (1,))
    monkeypatch.setattr(searching, "_MAX_STAGES", 2)
    monkeypatch.setattr(searching, "_UTILIZATIONS", (0.5, 0.85))
    preset, changes = CASES[case]
    subject = subject_of(preset, **changes)
    lengths = assumed_lengths(subject.config)
    every = exhaustive(subject, lengths)
    for most in (1, 2, 5):
        result = search(subject, lengths, max_found=most)
        assert result.is_complete
        found: dict[str, list[float]] = {}
        for one in result.found:
            found.setdefault(one.placement, []).append(one.time.seconds)
        assert found.keys() == every.keys() >= {"colocated"}
        for name, seconds in found.items():
            assert seconds == pytest.approx(every[name][:most]), name
        assert sum(map(len, found.values())) <= result.num_tried <= num_combinations(subject, lengths)


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
        again = make_plan_input(load_config(str(CONFIGS / "ppo-llama3.1-8b-1n8g.yaml"), words), "h100")
        assert not plan_memory(again).shortages
        assert plan_time(again, lengths).seconds == pytest.approx(one.time.seconds)


def test_layout_of_the_reference_can_be_typed_though_it_follows_the_actor() -> None:
    """Settings that the search leaves unchanged must be written as well: another actor would give another layout."""
    given = ("cluster.nodes=2", "cluster.ray_address=auto", "algorithm.kl.where=loss")
    given += ("placement={pools: {all: 8, frozen: 8}, roles: {reference: frozen}}",)
    file = str(CONFIGS / "grpo-qwen2.5-7b-1n8g.yaml")
    subject = make_plan_input(load_config(file, given), "h100")
    lengths, layouts = assumed_lengths(subject.config), set()
    for one in search(subject, lengths).found:
        again = make_plan_input(load_config(file, [*given, *shlex.split(subject.overrides(one.changes))]), "h100")
        found = subject.with_changes_unchecked(one.changes).config
        assert found.reference is not None
        assert again.config.reference is not None
        assert again.config.reference.parallel == found.reference.parallel
        assert plan_time(again, lengths).seconds == pytest.approx(one.time.seconds)
        layouts.add((found.actor.parallel, found.reference.parallel))
    assert any(actor != reference for actor, reference in layouts)


def test_a_model_that_no_machine_holds_gets_engines_over_two() -> None:
    """The weights of Llama-3.1-405B alone are larger than eight H100. Two stages send less than 16 tensor ranks."""
    file = str(CONFIGS / "grpo-llama3.1-405b-18n8g.yaml")
    subject = make_plan_input(load_config(file, []), "h100")
    lengths = assumed_lengths(subject.config)
    fastest = search(subject, lengths, max_found=1).found[0]
    assert (fastest.changes["rollout.tp"], fastest.changes["rollout.pp"]) == (8, 2)
    again = make_plan_input(load_config(file, shlex.split(subject.overrides(fastest.changes))), "h100")
    assert again.config.rollout.pp == 2
    assert not plan_memory(again).shortages
    assert plan_time(again, lengths).seconds == pytest.approx(fastest.time.seconds)


def engine_splits(subject: PlanInput) -> set[tuple[int, int, int]]:
    """The tensor ranks, stages and data-parallel ranks of all engines that the search tries on the whole machines."""
    placement = next(placements(subject, assumed_lengths(subject.config)))
    changes = [option.changes for option in placement.parts["rollout"]]
    return {(given["rollout.tp"], given["rollout.pp"], given["rollout.dp"]) for given in changes}


def test_stages_and_data_parallel_ranks_are_tried_over_nodes() -> None:
    mixture = "grpo-deepseek-v3-32n8g"
    splits = engine_splits(subject_of(mixture, algorithm__router_replay="none"))
    over_two, over_four = {(1, 16), (2, 8), (4, 4), (8, 2)}, {(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)}
    assert {(tp, pp) for tp, pp, _ in splits if pp > 1} == over_two | over_four
    assert {split for split in splits if split[2] > 1} == {(1, 1, dp) for dp in (2, 4, 8, 16, 32)}
    dense = engine_splits(subject_of("grpo-llama3.1-405b-18n8g"))
    assert all(dp == 1 for _, _, dp in dense), "there are no experts to share"


def test_splits_that_a_rule_forbids_are_not_tried() -> None:
    """vLLM returns no routes from engines with stages."""
    tensor_ranks, data_parallel = {(tp, 1, 1) for tp in (1, 2, 4, 8, 16, 32)}, {(1, 1, dp) for dp in (2, 4, 8, 16, 32)}
    assert engine_splits(subject_of("grpo-deepseek-v3-32n8g")) == tensor_ranks | data_parallel


def test_the_judge_keeps_its_devices() -> None:
    asking = "reward.functions.judged={name: judge, options: {service: {max_tokens: 9}, template: '{response}'}}"
    pools = "placement={pools: {all: 4, judges: 4}, roles: {judge: judges}}"
    words = ["judge.path=some/judge", "rollout.tp=4", asking, pools]
    subject = make_plan_input(load_config(str(CONFIGS / "ppo-llama3.1-8b-1n8g.yaml"), words), "h100")
    assert list(not_modeled(subject.config)) == ["judge"]
    for placement in placements(subject, assumed_lengths(subject.config)):
        here = placement.placed.config.placement
        assert (here.pools["judge"], here.roles["judge"]) == (4, "judge")
        assert sum(here.pools.values()) <= 8


def test_a_search_that_stops_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_MAX_TRIED", 1)
    subject = subject_of("ppo-llama3.1-8b-1n8g")
    assert not search(subject, assumed_lengths(subject.config)).is_complete


@pytest.mark.parametrize("most", [1, 2, 3])
def test_none_of_the_fastest_is_missed_where_the_whole_takes_longer_than_its_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extra time of a combination beyond its parts, and whether it fits, is known only after it is tried."""
    subject, chance = subject_of("grpo-qwen2.5-7b-1n8g"), random.Random(7)
    memory, section = plan_memory(subject), subject.config.actor
    for _ in range(150):
        choices = [
            Placement(
                "any",
                subject,
                {"number": number},
                {
                    part: [Option(at, section, {part: at}) for at in sorted(chance.choices(range(1, 30), k=4))]
                    for part in ("actor", "rollout")
                },
            )
            for number in range(2)
        ]
        beside = {
            (number, picked, other): chance.choice([0.0, 1.0, 4.0, 15.0, math.inf])
            for number in range(2)
            for picked in range(30)
            for other in range(30)
        }

        def tried(placement: Placement, chosen: dict[str, Option], lengths: Lengths, beside: Any = beside) -> Any:
            parts = [option.seconds for option in chosen.values()]
            extra = beside[placement.changes["number"], *parts]
            time = TimePlan((TimedPhase("all", {"parts": sum(parts), "beside": extra}),), 1.0, 1)
            return None if math.isinf(extra) else Found("any", placement.changes, memory, time)

        every = [
            one.time.seconds
            for placement in choices
            for options in product(*placement.parts.values())
            if (one := tried(placement, dict(zip(placement.parts, options, strict=True)), Lengths(1, 1))) is not None
        ]
        monkeypatch.setattr(searching, "try_out", tried)
        result = searching._search(choices, Lengths(1, 1), most)
        assert [one.time.seconds for one in result.found] == sorted(every)[:most]
        assert result.is_complete


def test_layers_that_no_number_of_stages_divides_are_divided_unevenly() -> None:
    """61 layers are prime. The stages at both ends, with the embedding and the head, have fewer."""
    found = search(subject_of("grpo-deepseek-v3-32n8g"), Lengths(512, 3584), max_found=2).found
    assert found
    for match in found:
        stages, first, last = (
            match.changes[f"actor.parallel.{name}"] for name in ("pp", "first_stage_layers", "last_stage_layers")
        )
        inner = (61 - first - last) // (stages - 2)
        assert first + last + inner * (stages - 2) == 61
        assert 1 <= last <= first <= inner
