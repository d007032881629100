"""Programs, run against tests in a contained process."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.contained import LOADED, NO_PROGRAM
from mrl.rewards.program_tests import PythonTests, StdinTests, read_tests, same_text
from mrl.rewards.sample import Sample
from mrl.rewards.sandbox import ContainedProgram, Limits, ProgramEnded

_FENCED = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_PASSED, _WRONG = "passed", "wrong"


def warm_up() -> None:
    """Contain a program that does nothing: where that cannot be, it is known before there is one."""
    with ContainedProgram({"program.py": ""}, "", range(0), Limits()):
        pass


def score(
    sample: Sample,
    all_or_nothing: bool = False,
    tolerance: float = 0.0,
    max_tests: int | None = None,
    fenced_only: bool = False,
    limits: dict[str, Any] | None = None,
) -> dict[str, float]:
    """The share of tests that the program passes; with `all_or_nothing` 1 where it passes all, else 0.

    The program is the last block ```python of the response, or without one the whole response; with `fenced_only` it
    must be a block. Tests are those of `extra_info.tests` or else the ground truth, as plain data or JSON: `inputs`
    and `outputs` of standard input and output, or with `fn_name` of calls; asserts in `test_list`, as MBPP has them;
    `test` with `entry_point`, as HumanEval has it. Only the first `max_tests` count. Printed lines are compared word
    by word, and numbers within `tolerance`. `limits` has test_s, program_s, memory_bytes, output_bytes and
    file_bytes. `passed`, `total` and `late` count tests, `found` says whether there was a program.
    """
    try:
        allowed = Limits(**limits or {})
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(Limits))
        raise RewardError(f"limits: {error}", where="code", fix=f"known are {known}") from error
    tests = read_tests(sample, max_tests)
    blocks = _FENCED.findall(sample.response)
    counts: Counter[str] = Counter()
    found = bool(blocks) or not fenced_only
    if found:
        judge = _Judge(blocks[-1] if blocks else sample.response, allowed, tolerance)
        with contextlib.closing(judge.verdicts(tests)) as verdicts:
            for verdict in verdicts:
                counts[verdict] += 1
                if all_or_nothing and verdict != _PASSED:
                    break
    passed, total = counts[_PASSED], len(tests)
    value = float(passed == total) if all_or_nothing else passed / total
    return {"score": value, "passed": passed, "total": total, "late": counts["time"], "found": float(found)}


class _Judge:
    """Runs one program against its tests."""

    def __init__(self, program: str, limits: Limits, tolerance: float) -> None:
        self._program = program
        self._limits = limits
        self._tolerance = tolerance
        self._left_s = limits.program_s

    def verdicts(self, tests: StdinTests | PythonTests) -> Generator[str]:
        """Yield what became of each test in turn; tests that the program has left itself no time for are not run."""
        if isinstance(tests, StdinTests):
            for given, expected in tests.pairs:
                verdict = self._printed(given, expected)
                yield verdict
                if verdict == "syntax" or self._left_s <= 0:
                    return
        else:
            first = 0
            while first < len(tests) and self._left_s > 0:
                for verdict in self._called(tests, first):
                    first += 1
                    yield verdict

    def _printed(self, given: str, expected: str) -> str:
        """A process for each input."""
        try:
            with self._started({}, given, range(0)) as process:
                status, output = process.rest(self._limit_s)
        except ProgramEnded as ended:
            return ended.reason
        if status == NO_PROGRAM:
            return "syntax"
        is_right = status == 0 and same_text(output.decode(errors="replace"), expected, self._tolerance)
        return _PASSED if is_right else _WRONG

    def _called(self, tests: PythonTests, first: int) -> Iterator[str]:
        """One process for all that is left; where it ends early, the next test begins in another."""
        secret, numbers = secrets.token_hex(16), range(first, len(tests))
        try:
            with self._started({"tests.py": tests.source}, secret, numbers) as process:
                loaded = process.line(self._limit_s).decode(errors="replace")
                if loaded != f"{secret} {LOADED}":
                    yield from [_WRONG] * len(numbers)
                    return
                for number in numbers:
                    said, _, reply = process.line(self._limit_s).decode(errors="replace").partition(" ")
                    yield _PASSED if said == secret and tests.accepts(number, reply, self._tolerance) else _WRONG
                    if not said:
                        return
        except ProgramEnded as ended:
            yield ended.reason

    @property
    def _limit_s(self) -> float:
        return min(self._limits.test_s, self._left_s)

    @contextlib.contextmanager
    def _started(self, files: dict[str, str], stdin: str, numbers: range) -> Iterator[ContainedProgram]:
        files = files | {"program.py": self._program}
        with ContainedProgram(files, stdin, numbers, self._limits) as process:
            try:
                yield process
            finally:
                self._left_s -= process.used_s
