"""Mathematics compared symbolically, by the `math-verify` library (`pip install mrl[math]`)."""

from __future__ import annotations

from math_verify import parse, verify  # type: ignore[import-not-found]

from mrl.errors import RewardError
from mrl.rewards.sample import Sample


def score(sample: Sample) -> dict[str, float | str]:
    """1 where math-verify finds the response's answer equal to the ground truth, else 0.

    Its own time limits are switched off: they rest on signals, and the worker's limit holds for everything.
    A ground truth that it cannot read is an error of the data, not a wrong answer.
    """
    truth = sample.truth_text
    gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
    if not gold:
        raise RewardError(f"math-verify cannot read the ground truth {truth!r:.200}", where=sample.name)
    answer = parse(sample.response, parsing_timeout=None)
    score = float(verify(gold, answer, timeout_seconds=None))
    return {"score": score, "found": float(bool(answer)), "answer": str(answer[0]) if answer else ""}
