"""Which other sample of its prompt a teacher reads with each sample."""

from __future__ import annotations

from mrl.data.successes import other_successes


def test_each_sample_gets_the_first_other_success_of_its_prompt() -> None:
    uids = ["a", "a", "a", "b", "b", "c", "c", "d"]
    scores = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    # a: two successes. b: one, which has no other. c: none. d: a group of one sample.
    assert other_successes(uids, scores, 1.0) == [1, 2, 1, None, 3, None, None, None]


def test_a_score_equal_to_the_threshold_is_a_success_and_a_higher_one_is_not_preferred() -> None:
    assert other_successes(["a"] * 4, [0.5, 0.49, 0.9, 0.0], 0.5) == [2, 0, 0, 0]
    assert other_successes(["a"] * 2, [-1.0, -2.0], -1.0) == [None, 0], "scores may be negative"


def test_samples_of_a_prompt_need_not_follow_one_another() -> None:
    assert other_successes(["a", "b", "a", "b"], [0.0, 1.0, 1.0, 0.0], 1.0) == [2, None, None, 1]
