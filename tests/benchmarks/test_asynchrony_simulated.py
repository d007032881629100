"""The simulation of a synchronous run, compared with a run with known engine and trainer."""

from __future__ import annotations

import random

import pytest

from benchmarks.asynchrony_simulated import (
    FIRST,
    MODES,
    MOST_AHEAD,
    SAMPLES,
    Beside,
    EngineStep,
    Law,
    Measured,
    beside_in,
    engine_work,
    fitted_law,
    mean,
    predict,
    workload,
)

STEPS, PROMPT = 9, 8
LAW = Law(base_s=2e-3, row_s=1e-4, context_s=1e-6, prompt_s=2e-5)
TRAIN_S, PUSH_S, FINISH_S = 0.7, 0.02, 0.05


def synchronous_run(seed: int, slower: float = 1.0, train_s: float = TRAIN_S) -> Measured:
    """Write a run that follows this law. Its first batches are slow, as during warm-up."""
    chance, now = random.Random(seed), 0.0
    steps, batches, lines = [], [], []
    for number in range(1, STEPS + 1):
        began, lengths = now, [chance.randint(1, 40) for _ in range(SAMPLES)]
        for token in range(max(lengths)):
            rows = sum(length > token for length in lengths)
            prompts = 0 if token else SAMPLES * PROMPT
            seconds = LAW.decode_s(rows, PROMPT + token) + LAW.prompt_s * prompts
            seconds *= slower * (1 if number >= FIRST else 3)
            steps.append(EngineStep(now, seconds, rows, rows * (PROMPT + token), prompts))
            now += seconds
        lines.append(
            {
                "step": number,
                "timing_s/step": now - began + train_s + PUSH_S + FINISH_S,
                "timing_s/rollout": now - began + PUSH_S + FINISH_S,
                "perf/generating_s": now - began,
                "sync/seconds": PUSH_S,
                "prompt_length/mean": PROMPT,
            }
        )
        now += TRAIN_S + PUSH_S + FINISH_S
        batches.append(lengths)
    return Measured(lines, steps, batches)


def test_the_law_of_an_engine_is_that_of_its_settled_steps() -> None:
    assert vars(fitted_law([synchronous_run(0)])) == pytest.approx(vars(LAW))
    twice = fitted_law([synchronous_run(0), synchronous_run(1, slower=2.0)])
    assert LAW.base_s < twice.base_s < 2 * LAW.base_s, "both runs count"


def test_the_synchronous_run_is_met_step_by_step() -> None:
    run = synchronous_run(0)
    predicted = predict(workload([run], Beside(decode=2.0, train=2.0)), MODES["synchronous"])
    measured = [line["timing_s/step"] for line in run.lines[FIRST - 1 : STEPS - MOST_AHEAD]]
    # The context between two ends is approximated by that of its middle.
    assert predicted.step_s == pytest.approx(measured, rel=2e-3)


@pytest.mark.parametrize(("decode", "train"), [(1.0, 1.0), (1.1, 1.3), (1.4, 1.0)])
def test_a_run_between_batches_says_how_much_both_sides_are_slowed(decode: float, train: float) -> None:
    alone = synchronous_run(0)
    _, seconds = engine_work(alone)
    generated_s = sum(seconds) / (STEPS - MOST_AHEAD - FIRST + 1)
    # Training is the longer: the engine is slowed all the time, the trainer while there is something to generate.
    assert generated_s * decode < TRAIN_S
    trained_s = TRAIN_S + (1 - 1 / train) * generated_s * decode
    between = synchronous_run(0, slower=decode, train_s=trained_s)
    slowdown = beside_in(between, alone)
    assert (slowdown.decode, slowdown.train) == pytest.approx((decode, train), rel=1e-6)


def test_every_mode_is_predicted_over_the_same_steps() -> None:
    load = workload([synchronous_run(0)], Beside())
    assert {len(predict(load, mode).step_s) for mode in MODES.values()} == {STEPS - MOST_AHEAD - FIRST + 1}


def test_a_step_counts_by_the_median_of_its_repeats() -> None:
    runs = [synchronous_run(0), synchronous_run(0), synchronous_run(0, slower=9.0)]
    assert mean(runs, "timing_s/step") == mean(runs[:1], "timing_s/step")
