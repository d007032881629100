"""Mathematics compared symbolically, with the `math-verify` library (`pip install mrl[math]`).

The library does not evaluate text as code. Its own time limits are disabled, because they use signals; the worker's
limit applies.
"""

from __future__ import annotations

from math_verify import parse, verify  # type: ignore[import-not-found]

from mrl.answers import last_boxed
from mrl.errors import RewardError
from mrl.rewards.functions.math import judged
from mrl.rewards.math_answer import same_answer
from mrl.rewards.sample import Sample


def math_verify(sample: Sample) -> dict[str, float | str]:
    """Score 1 if math-verify finds the response's answer equal to the ground truth, else 0.

    A ground truth that it cannot parse is an error of the data, not a wrong answer.
    """
    truth = sample.truth_text
    gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
    if not gold:
        raise RewardError(f"math-verify cannot read the ground truth {truth!r:.200}", where=sample.name)
    answer = parse(sample.response, parsing_timeout=None)
    score = float(verify(gold, answer, timeout_seconds=None))
    return {"score": score, "found": float(bool(answer)), "answer": str(answer[0]) if answer else ""}


def prime(sample: Sample) -> dict[str, float | str]:
    r"""Score 1 if the last `\boxed{...}` equals the ground truth after normalization or symbolically, else 0.

    `found` is 1 if there was a box. math-verify decides symbolic equality.
    """
    return judged(last_boxed(sample.response), last_boxed(sample.truth_text) or sample.truth_text, _means_the_same)


def _means_the_same(answer: str, truth: str) -> bool:
    if same_answer(answer, truth):
        return True
    gold, parsed = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return bool(gold and parsed and verify(gold, parsed, timeout_seconds=None))
