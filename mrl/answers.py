"""Where a mathematical text has its answer, be it a data set's solution or a model's response."""

from __future__ import annotations


def after_hashes(text: str) -> str | None:
    """Return the line after the last `####`."""
    _, hashes, answer = text.rpartition("####")
    lines = answer.strip().splitlines()
    return lines[0].strip() if hashes and lines else None


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` (or `\fbox`) holds, braces inside it included; None where it never closes."""
    begin = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if begin < 0:
        return None
    start = text.index("{", begin) + 1
    depth = 1
    for position in range(start, len(text)):
        if text[position - 1] == "\\" and text[position - 2 : position] != "\\\\":
            continue  # \{ and \} are braces of the answer
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None
