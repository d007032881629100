"""Tasks that a model of a million parameters learns in minutes. Nothing is downloaded, and answers are exact.

Row i of a task is a pure function of its options and i. `part` splits a task into training and validation, so that no
prompt is in both.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

from mrl.errors import DataError, did_you_mean

PARTS = ("all", "train", "validation")
VALIDATION_SHARE = 10  # one row out of this many
TEACHERS_TAKES = 16
Task = Callable[[int], tuple[str, str]]


class ToyRows:
    """Rows in the usual schema: a user's question and its answer; with `pairs`, two answers to choose from.

    Every problem comes in `pairs` pairs. In a share `swapped` of them, the wrong answer is the chosen one.
    """

    def __init__(self, name: str, make: Task, numbers: Sequence[int], pairs: int = 0, swapped: float = 0.0) -> None:
        self._name, self._make, self._numbers = name, make, numbers
        self._pairs, self._swapped = pairs, swapped

    def __len__(self) -> int:
        return len(self._numbers) * max(1, self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at, take = divmod(index, max(1, self._pairs))
        number = self._numbers[at]
        question, answer = self._make(number)
        row = {"prompt": [{"role": "user", "content": question}], "data_source": f"toy:{self._name}"}
        if self._pairs:
            chance = random.Random(f"pair {number * self._pairs + take}")
            pair = [answer, _with_a_wrong_digit(int(answer), chance)]
            chosen, rejected = pair[::-1] if chance.random() < self._swapped else pair
            return row | {"chosen": chosen, "rejected": rejected}
        truth = {"reward_model": {"ground_truth": answer}, "extra_info": {"index": number}}
        return row | {"ability": self._name} | truth


def addition(
    part: str = "all", largest: int = 99, mistakes: float = 0.0, pairs: int = 0, swapped: float = 0.0
) -> ToyRows:
    """Return every sum of two two-digit numbers that are at most `largest`.

    With `mistakes`, the answers come from a careless teacher: every problem occurs 16 times, and that share of the
    answers has a wrong digit. With `pairs`, every problem occurs that many times, each with the right answer as the
    chosen one and an answer with a wrong digit as the rejected one; in a share `swapped` they are exchanged.
    """
    if pairs < 0:
        raise DataError(f"toy:addition: pairs must be at least 0, not {pairs}")
    if pairs and mistakes:
        raise DataError("toy:addition: pairs and mistakes exclude each other", fix="set pairs=0 or mistakes=0")
    if not 0 <= swapped <= 1 or (swapped and not pairs):
        raise DataError(
            f"toy:addition: swapped must be a share of the pairs, from 0 to 1, not {swapped} of {pairs} pairs"
        )
    if not 10 <= largest <= 99:
        raise DataError(f"toy:addition adds two-digit numbers; largest must be 10 to 99, not {largest}")
    if not 0 <= mistakes <= 1:
        raise DataError(f"toy:addition: mistakes must be a share of the answers, from 0 to 1, not {mistakes}")
    count = largest - 9
    takes = TEACHERS_TAKES if mistakes else 1

    def make(number: int) -> tuple[str, str]:
        problem = number // takes
        first, second = 10 + problem // count, 10 + problem % count
        chance = random.Random(f"addition {number}")
        is_wrong = chance.random() < mistakes
        return f"{first}+{second}=", _with_a_wrong_digit(first + second, chance) if is_wrong else str(first + second)

    problems = _part("addition", count * count, part)
    numbers = [problem * takes + take for problem in problems for take in range(takes)]
    return ToyRows("addition", make, numbers, pairs, swapped)


def _with_a_wrong_digit(answer: int, chance: random.Random) -> str:
    digits = list(str(answer))
    place = chance.randrange(len(digits))
    digits[place] = chance.choice([digit for digit in string.digits if digit != digits[place]])
    return "".join(digits)


def reversing(size: int = 10_000, longest: int = 8, seed: int = 0, part: str = "all") -> ToyRows:
    """Rows that ask for letters in reverse order."""

    def make(number: int) -> tuple[str, str]:
        chance = random.Random(f"reversing {seed} {number}")
        text = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, longest)))
        return f"reverse {text}", text[::-1]

    return ToyRows("reversing", make, _part("reversing", size, part))


def sorting(size: int = 10_000, longest: int = 8, seed: int = 0, part: str = "all") -> ToyRows:
    """Rows that ask for digits in ascending order."""

    def make(number: int) -> tuple[str, str]:
        chance = random.Random(f"sorting {seed} {number}")
        digits = chance.choices(string.digits, k=chance.randint(2, longest))
        return f"sort {''.join(digits)}", "".join(sorted(digits))

    return ToyRows("sorting", make, _part("sorting", size, part))


TOY_TASKS: dict[str, Callable[..., ToyRows]] = {"addition": addition, "reversing": reversing, "sorting": sorting}


def _part(task: str, size: int, part: str) -> Sequence[int]:
    """Return the numbers of the rows of a part. The part of a row does not depend on the size."""
    if part not in PARTS:
        raise DataError(f'toy:{task} has no part "{part}"', fix=did_you_mean(part, PARTS))
    if part == "all":
        return range(size)
    is_wanted = part == "validation"
    return [number for number in range(size) if _is_validation(task, number) is is_wanted]


def _is_validation(task: str, number: int) -> bool:
    return hashlib.blake2b(f"{task} {number}".encode()).digest()[0] % VALIDATION_SHARE == 0
