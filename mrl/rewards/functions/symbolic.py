"""Mathematics compared symbolically, by the `math-verify` library (`pip install mrl[math]`).

It evaluates no text as code. Its own time limits are switched off: they rest on signals, and the worker's limit holds
for everything.
"""

from __future__ import annotations

from math_verify import parse, verify  # type: ignore[import-not-found]

from mrl.answers import last_boxed
from mrl.errors import RewardError
from mrl.rewards.functions.math import judged
from mrl.rewards.math_answer import same_answer
from mrl.rewards.sample import Sample


def math_verify(sample: Sample) -> dict[str, float | str]:
    """1 where math-verify finds the response's answer equal to the ground truth, else 0.

    A ground truth that it cannot read is an error of the data, not a wrong answer.
    """
    truth = sample.truth_text
    gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
    if not gold:
        raise RewardError(f"math-verify cannot read the ground truth {truth!r:.200}", where=sample.name)
    answer = parse(sample.response, parsing_timeout=None)
    score = float(verify(gold, answer, timeout_seconds=None))
    return {"score": score, "found": float(bool(answer)), "answer": str(answer[0]) if answer else ""}


def prime(sample: Sample) -> dict[str, float | str]:
    r"""1 where the last `\boxed{...}` is the ground truth after normalization or symbolically, else 0.

    `found` says whether there was a box. Symbolic equality is that of math-verify.
    """
    return judged(last_boxed(sample.response), last_boxed(sample.truth_text) or sample.truth_text, _means_the_same)


def _means_the_same(answer: str, truth: str) -> bool:
    if same_answer(answer, truth):
        return True
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return bool(gold and given and verify(gold, given, timeout_seconds=None))
