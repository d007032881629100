"""The simulator of steps that overlap: closed forms, a token at a time, the gate's bound, and published runs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks import asynchrony_plan as published
from mrl.config.training import AsynchronyConfig
from mrl.plan.asynchrony import (
    Simulated,
    Workload,
    coarsened,
    faster_split,
    log_normal,
    plan_asynchrony,
    simulate,
    workload,
)
from mrl.plan.plan_input import PlanInput
from mrl.plan.timing import Lengths, plan_time
from tests.plan.planning import subject_of

LENGTHS = Lengths(prompt=512, response=2048)
SYNCHRONOUS, ONE_AHEAD = AsynchronyConfig(), AsynchronyConfig(ahead=1)
APART = {
    "placement__pools": "{all: null, train: 16, engines: 16}",
    "placement__roles": "{actor: train, rollout: engines}",
    "algorithm__correction": "{level: token}",
}


def in_flight(ahead: int, cache: str = "recompute") -> AsynchronyConfig:
    return AsynchronyConfig(ahead=ahead, weights="in_flight", cache="keep" if cache == "keep" else "recompute")


def load_of(**changes: object) -> Workload:
    """32 samples on two engines, whose steps are mostly overhead: the longest is eight times the mean."""
    load = Workload(
        samples=32,
        lengths=log_normal(64, 512),
        prompt_tokens=16,
        num_engines=2,
        rows=16,
        decode_s=lambda rows, context: 0.004 + 0.0004 * rows + 1e-6 * rows * context,
        prompt_s=0.001,
        token_s=1e-6,
        train_s=1.0,
        push_s=0.1,
    )
    return replace(load, **changes)  # type: ignore[arg-type]


def apart(**changes: object) -> PlanInput:
    return subject_of("grpo-qwen3-32b-4n8g", **APART | {"asynchrony__ahead": 1} | changes)


# --- one engine -------------------------------------------------------------------------------------------------------


def a_token_at_a_time(load: Workload, lengths: list[float]) -> float:
    """The seconds of one engine for a batch, every step on its own."""
    waiting, rows, seconds = list(lengths), list[list[float]](), 0.0
    while waiting or rows:
        while waiting and len(rows) < load.rows:
            rows.append([waiting.pop(0), 0.0])
            seconds += load.prompt_s
        seconds += load.decode_s(len(rows), fmean(load.prompt_tokens + done + 0.5 for _, done in rows))
        for row in rows:
            row[1] += 1
        rows = [row for row in rows if row[1] < row[0]]
    return seconds


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_engine_takes_as_long_as_token_by_token(rows: int) -> None:
    chance = random.Random(rows)
    lengths = [float(chance.randint(1, 60)) for _ in range(20)]
    load = load_of(samples=20, num_engines=1, rows=rows, lengths=lengths, push_s=0.0, train_s=0.0)
    found = simulate(load, SYNCHRONOUS, num_steps=5)
    for number, seconds in enumerate(found.step_s, start=2):
        drawn = random.Random(f"0 {number}")
        assert seconds == pytest.approx(a_token_at_a_time(load, [drawn.choice(lengths) for _ in range(20)]))


def test_lengths_have_their_mean_and_their_longest() -> None:
    for mean, longest in ((64, 512), (3200, 4096), (100, 100_000)):
        lengths = log_normal(mean, longest)
        assert fmean(lengths) == pytest.approx(mean)
        assert max(lengths) <= longest
        assert lengths == tuple(sorted(lengths))
    assert max(log_normal(64, 512)) == 512, "where the tail is longer it is cut"


# --- modes ------------------------------------------------------------------------------------------------------------


def test_nothing_ahead_is_the_sum_of_the_phases() -> None:
    load = load_of(samples=8, rows=4, lengths=[10.0], decode_s=lambda rows, context: 1.0, prompt_s=0.0)
    found = simulate(replace(load, train_s=4.0, push_s=2.0), SYNCHRONOUS, num_steps=6)
    assert found.step_s == pytest.approx([16.0] * 6)
    assert (found.trainer_idle, found.engines_idle) == pytest.approx((12 / 16, 6 / 16))
    assert found.ages == {0: 1.0}


@pytest.mark.parametrize("train_s", [0.2, 0.8, 2.0])
def test_between_batches_each_step_is_the_longer_side_and_the_push(train_s: float) -> None:
    load = load_of(train_s=train_s)
    alone = simulate(load, SYNCHRONOUS, num_steps=21).step_s[1:]  # of batches 3 to 22, as below
    expected = [max(seconds - load.push_s - train_s, train_s) + load.push_s for seconds in alone]
    found = simulate(load, ONE_AHEAD, num_steps=20)
    # Where a push cuts a stretch its middle is estimated.
    assert found.step_s == pytest.approx(expected, rel=1e-3)
    assert found.ages == {1: 1.0}


@pytest.mark.parametrize(("ahead", "train_s"), [(1, 0.1), (1, 3.0), (2, 0.8), (4, 0.1), (4, 3.0)])
def test_no_token_is_older_than_the_gate_allows(ahead: int, train_s: float) -> None:
    load = load_of(train_s=train_s)
    for mode in (AsynchronyConfig(ahead=ahead), in_flight(ahead)):
        found = simulate(load, mode)
        assert max(found.ages) == ahead, "the bound is reached"
        assert min(found.ages) >= 0
        assert sum(found.ages.values()) == pytest.approx(1)


@pytest.mark.parametrize("train_s", [0.2, 2.0])
def test_more_ahead_is_never_slower_in_flight(train_s: float) -> None:
    found = [simulate(load_of(train_s=train_s), in_flight(ahead, "keep"), 30).seconds for ahead in (0, 1, 2, 4)]
    for fewer, more in itertools.pairwise(found):
        assert more <= 1.02 * fewer


def _by_hand(cache: str, token_s: float = 0.0) -> Simulated:
    """One sample of ten tokens a batch, a second each, and four seconds of training, in which four are written."""
    load = load_of(samples=1, num_engines=1, rows=1, lengths=[10.0], prompt_tokens=0, prompt_s=0.0, token_s=token_s)
    load = replace(load, decode_s=lambda rows, context: 1.0, train_s=4.0, push_s=0.0)
    return simulate(load, in_flight(1, cache), num_steps=10)


def test_weights_that_arrive_in_flight_draw_the_rest_of_a_sample() -> None:
    found = _by_hand("keep")
    assert found.step_s == pytest.approx([10.0] * 10)
    assert found.ages == pytest.approx({0: 0.6, 1: 0.4})
    assert (found.trainer_idle, found.engines_idle) == pytest.approx((0.6, 0.0))


def test_a_cache_that_is_computed_anew_costs_the_prefill_of_what_is_under_way() -> None:
    assert _by_hand("recompute", token_s=0.5).step_s == pytest.approx([12.0] * 10)
    assert _by_hand("keep", token_s=0.5).step_s == pytest.approx([10.0] * 10)


def test_probes_wait_until_nothing_is_under_way() -> None:
    load = load_of(train_s=0.5)
    never, often = (simulate(replace(load, drain_every=every), in_flight(2), 30).seconds for every in (0, 3))
    assert often > 1.01 * never
    assert simulate(replace(load, drain_every=3), ONE_AHEAD, 30) == simulate(load, ONE_AHEAD, 30)


@pytest.mark.parametrize(
    ("mode", "train_s", "expected"),
    [
        (SYNCHRONOUS, 0.5, 11.5),
        (ONE_AHEAD, 0.5, 11),
        (ONE_AHEAD, 10.5, 11),
        (ONE_AHEAD, 12, 12),
        (in_flight(1), 0.5, 10),  # engines continue meanwhile
        (in_flight(1), 9.5, 10.25),  # two batches are written, have their rewards and are trained in twice that
        (in_flight(1), 12, 12),
    ],
)
def test_a_batch_is_trained_once_its_rewards_are_there(mode: AsynchronyConfig, train_s: float, expected: float) -> None:
    """Ten seconds of writing and one of rewards, which those have sooner that ended while others were trained."""
    load = load_of(samples=1, num_engines=1, rows=1, lengths=[10.0], prompt_tokens=0, prompt_s=0.0, token_s=0.0)
    load = replace(load, decode_s=lambda rows, context: 1.0, train_s=train_s, push_s=0.0, finish_s=1.0)
    assert simulate(load, mode, num_steps=6).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "train_s", "decode_beside", "train_beside", "expected"),
    [
        (SYNCHRONOUS, 10, 2.0, 2.0, 20),  # nothing overlaps
        (ONE_AHEAD, 10, 1.0, 1.25, 12),  # in ten seconds eight are done, and the engine ends
        (ONE_AHEAD, 4, 2.0, 1.0, 12),  # in four seconds two tokens are written, and eight follow
        (ONE_AHEAD, 10, 1.25, 1.25, 12.5),
    ],
)
def test_who_has_company_takes_longer(
    mode: AsynchronyConfig, train_s: float, decode_beside: float, train_beside: float, expected: float
) -> None:
    load = load_of(samples=1, num_engines=1, rows=1, lengths=[10.0], prompt_tokens=0, prompt_s=0.0, token_s=0.0)
    load = replace(load, decode_s=lambda rows, context: 1.0, train_s=train_s, push_s=0.0)
    found = simulate(replace(load, decode_beside=decode_beside, train_beside=train_beside), mode, num_steps=6)
    assert found.seconds == pytest.approx(expected)
    alone = train_s if mode is SYNCHRONOUS or train_beside == 1 else expected
    assert found.trainer_idle == pytest.approx(1 - alone / expected, abs=1e-6)


def test_batches_whose_lengths_are_known_have_them() -> None:
    load = load_of(samples=2, num_engines=1, rows=2, lengths=[7.0], prompt_tokens=0, prompt_s=0.0, push_s=0.0)
    load = replace(load, decode_s=lambda rows, context: 1.0, train_s=4.0, batches=[[9, 9], [3, 5], [2, 1]])
    assert simulate(load, SYNCHRONOUS, num_steps=4).step_s == pytest.approx([9, 6, 11, 11]), "of batches 2 to 5"


def test_the_same_seed_is_the_same_run() -> None:
    load = load_of()
    assert simulate(load, in_flight(2)) == simulate(load, in_flight(2))
    assert simulate(load, in_flight(2)) != simulate(load, in_flight(2), seed=1)


def test_rows_that_stand_for_several_take_about_as_long() -> None:
    load = load_of(samples=4096, rows=300)
    for mode in (SYNCHRONOUS, ONE_AHEAD, in_flight(2)):
        assert simulate(coarsened(load, 4), mode, 10).seconds == pytest.approx(
            simulate(load, mode, 10).seconds, rel=0.05
        )


# --- configurations ---------------------------------------------------------------------------------------------------


def test_the_simulated_step_is_about_the_planned_one() -> None:
    subject = apart()
    assert simulate(workload(subject, LENGTHS), SYNCHRONOUS).seconds == pytest.approx(
        plan_time(subject, LENGTHS).seconds, rel=0.15
    )


def test_a_plan_is_within_its_bound_and_says_what_sharing_would_take() -> None:
    for changes in ({}, {"asynchrony__ahead": 2, "asynchrony__weights": "in_flight"}):
        plan = plan_asynchrony(apart(**changes), LENGTHS)
        assert plan.bound_s == max(plan.generation_s, plan.training_s) + plan.push_s
        assert plan.bound_s * 0.98 < plan.asynchronous.seconds < plan.synchronous.seconds
        assert plan.shared is not None
        assert plan.shared.seconds < plan.synchronous.seconds
    bigger = apart(rollout__max_response_tokens=65536, actor__max_tokens_per_device=66560)
    assert plan_asynchrony(bigger, LENGTHS).shared is None, "all of it on the same devices does not fit"


def test_a_division_is_proposed_only_where_it_is_faster() -> None:
    recomputation = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": "null",
    }
    skewed = apart(
        placement__pools="{all: null, train: 8, engines: 24}",
        actor__parallel__tp=8,
        actor__parallel__pp=1,
        actor__parallel__vpp=1,
        **{f"actor__megatron__{name}": value for name, value in recomputation.items()},
    )
    present = plan_asynchrony(skewed, LENGTHS).asynchronous.seconds
    split = faster_split(skewed, LENGTHS, present)
    assert split is not None
    seconds, changes = split
    assert changes["placement.pools"] == {"train": 16, "engines": 16}
    varied = skewed.with_changes(changes)
    assert varied is not None
    assert plan_asynchrony(varied, LENGTHS).asynchronous.seconds == seconds < present
    assert faster_split(skewed, LENGTHS, seconds) is None


# --- published runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, float]]:
    return list(published.pairs())


@pytest.mark.slow
def test_published_pairs_are_predicted_as_well_as_the_benchmark_says(pairs: list[dict[str, float]]) -> None:
    assert len(pairs) == 9
    assert sum(abs(pair["error"]) <= published.TOLERANCE for pair in pairs) >= published.MIN_PAIRS


@pytest.mark.slow
def test_the_pair_that_became_slower_is_predicted_slower_and_its_trainer_is_the_cause(
    pairs: list[dict[str, float]],
) -> None:
    (pair,) = (pair for pair in pairs if pair["published"] < 0.8)
    assert pair["predicted"] < 1
    assert pair["trainer_idle"] < 0.02
    assert pair["engines_idle"] > 0.4


FEW_ENGINES = "{all: null, train: 16, engines: 4}"


def test_a_cache_is_planned_as_a_run_treats_it() -> None:
    ahead = {"asynchrony__ahead": 2, "asynchrony__weights": "in_flight", "placement__pools": FEW_ENGINES}
    ahead |= {"rollout__tp": 4, "actor__parallel": "{tp: 4, pp: 2, vpp: 1, sequence_parallel: true}"}
    by_default, kept, anew = (
        plan_asynchrony(apart(**ahead, **changes), LENGTHS).asynchronous.seconds
        for changes in ({}, {"asynchrony__cache": "keep"}, {"asynchrony__cache": "recompute"})
    )
    assert by_default == kept < anew
