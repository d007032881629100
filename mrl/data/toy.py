"""Tasks that a model of a million parameters learns in minutes: nothing is downloaded, answers are exact.

Row i of a task is a pure function of its options and i. `part` splits a task for training and validation, so that
no prompt is in both.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

from mrl.errors import DataError, did_you_mean

PARTS = ("all", "train", "validation")
VALIDATION_SHARE = 10  # one row in so many
TEACHERS_TAKES = 16
Task = Callable[[int], tuple[str, str]]


class ToyRows:
    """Rows in the field's schema: a question of the user, and its answer; with `pairs`, two answers to choose from.

    Every problem comes in so many pairs, of which a share `swapped` has the wrong answer as the chosen one.
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

    With `mistakes`, it is a careless teacher's exercise book: every problem is there 16 times, and that share of the
    answers has a wrong digit. With `pairs`, every problem is there so many times, each with the right answer as the
    chosen one and one with a wrong digit as the rejected; a share `swapped` stands the wrong way round.
    """
    if pairs < 0:
        raise DataError(f"toy:addition: pairs are 0 or more for each problem, not {pairs}")
    if pairs and mistakes:
        raise DataError("toy:addition: mistakes are of answers, and swapped is of pairs", fix="pairs=0, or mistakes=0")
    if not 0 <= swapped <= 1 or (swapped and not pairs):
        raise DataError(
            f"toy:addition: swapped is a share of the pairs, from 0 to 1, and was {swapped} of {pairs} pairs"
        )
    if not 10 <= largest <= 99:
        raise DataError(f"toy:addition adds two-digit numbers; the largest cannot be {largest}")
    if not 0 <= mistakes <= 1:
        raise DataError(f"toy:addition: mistakes is a share of the answers, from 0 to 1, and was {mistakes}")
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
    """Letters to be written backwards."""

    def make(number: int) -> tuple[str, str]:
        chance = random.Random(f"reversing {seed} {number}")
        text = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, longest)))
        return f"reverse {text}", text[::-1]

    return ToyRows("reversing", make, _part("reversing", size, part))


def sorting(size: int = 10_000, longest: int = 8, seed: int = 0, part: str = "all") -> ToyRows:
    """Digits to be put in order."""

    def make(number: int) -> tuple[str, str]:
        chance = random.Random(f"sorting {seed} {number}")
        digits = chance.choices(string.digits, k=chance.randint(2, longest))
        return f"sort {''.join(digits)}", "".join(sorted(digits))

    return ToyRows("sorting", make, _part("sorting", size, part))


TOY_TASKS: dict[str, Callable[..., ToyRows]] = {"addition": addition, "reversing": reversing, "sorting": sorting}


def _part(task: str, size: int, part: str) -> Sequence[int]:
    """Return the numbers of the rows of a part; which part a row is in never depends on the size."""
    if part not in PARTS:
        raise DataError(f'toy:{task} has no part "{part}"', fix=did_you_mean(part, PARTS))
    if part == "all":
        return range(size)
    wanted = part == "validation"
    return [number for number in range(size) if _is_validation(task, number) is wanted]


def _is_validation(task: str, number: int) -> bool:
    return hashlib.blake2b(f"{task} {number}".encode()).digest()[0] % VALIDATION_SHARE == 0
