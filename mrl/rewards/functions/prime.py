"""Competition mathematics as PRIME scores it: the box, by its text or by its meaning (`pip install mrl[math]`)."""

from __future__ import annotations

from math_verify import parse, verify  # type: ignore[import-not-found]

from mrl.answers import last_boxed
from mrl.rewards.math_answer import normal_form, same_answer
from mrl.rewards.sample import Sample


def score(sample: Sample) -> dict[str, float | str]:
    r"""1 where the last `\boxed{...}` is the ground truth after normalization or symbolically, else 0.

    `found` says whether there was a box. Symbolic equality is that of the `math-verify` library, which evaluates no
    text as code; its own time limits are switched off, and the worker's holds.
    """
    answer = last_boxed(sample.response)
    if answer is None:
        return {"score": 0.0, "found": 0.0, "answer": ""}
    truth = last_boxed(sample.truth_text) or sample.truth_text
    is_right = same_answer(answer, truth)
    if not is_right:
        gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        is_right = bool(gold) and bool(given) and verify(gold, given, timeout_seconds=None)
    return {"score": float(is_right), "found": 1.0, "answer": normal_form(answer).text}
