"""Competition mathematics as DAPO scores it: right or wrong is +1 or -1, and only the end is read."""

from __future__ import annotations

import re

from mrl.rewards.sample import Sample

_END_CHARACTERS = 300
_BOXED_END_CHARACTERS = 100

# DAPO compares as Minerva did: one after the other, in this order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = tuple(map(re.compile, (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}")))
_BOXED = re.compile(r"\\boxed\{(.*)\}")


def score(sample: Sample, boxed: bool = False) -> dict[str, float | str]:
    r"""1 where the last line `Answer: ...` within the last 300 characters gives the ground truth, else -1.

    Both are compared as text in Minerva's normal form: without some units, signs of currency and spaces, `\frac12` as
    `\frac{1}{2}`, and only what follows the last `=`. 0.5 is not 1/2 there; `math` compares values. With `boxed` it is
    the last `\boxed{...}` that lies within the last 100, compared as it stands; a ground truth may be boxed too.
    `accuracy` is 1 or 0, `found` whether there was an answer.
    """
    truth = sample.truth_text
    if boxed:
        answer = _last_boxed(sample.response[-_BOXED_END_CHARACTERS:])
        is_right = answer is not None and answer in (truth, _last_boxed(truth))
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.response[-_END_CHARACTERS:])
        answer = _normal_form(lines[-1]) if lines else None
        is_right = answer is not None and answer == _normal_form(truth)
    figures = {"accuracy": float(is_right), "found": float(answer is not None)}
    return {"score": 1.0 if is_right else -1.0, **figures, "answer": answer or ""}


def _last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{` holds as it stands; unlike `mrl.answers`, each brace counts, escaped or not."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position]
    return None


def _normal_form(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for what, instead in (*_REPLACED, *((removed, "") for removed in _REMOVED)):
        text = text.replace(what, instead)
    text = "\n".join(map(_formula, text.split("\n")))
    for wrapper in (*_UNWRAPPED, _BOXED):
        text = wrapper.sub(r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def _formula(line: str) -> str:
    """Return the first formula between signs of dollar, or the whole line where there is none."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line
