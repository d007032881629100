"""Programs, run against tests in a contained process.

Tests come as data sets have them: pairs of input and output, calls of a function, asserts. What a program must give is
kept out of its process wherever it can be told apart from the test. An assert of the form `call == literal` becomes the
call; any other runs beside the program, which can see it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.contained import LOADED, NO_PROGRAM, plain
from mrl.rewards.sample import Sample
from mrl.rewards.sandbox import ContainedProgram, Limits, ProgramEnded

_FENCED = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_PASSED, _WRONG = "passed", "wrong"


def warm_up() -> None:
    """Contain a program that does nothing: where that cannot be, it is known before there is one."""
    with ContainedProgram({"program.py": ""}, "", range(0), Limits()):
        pass


def code(
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
        known = ", ".join(field.name for field in fields(Limits))
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
    def __init__(self, program: str, limits: Limits, tolerance: float) -> None:
        self._program = program
        self._limits = limits
        self._tolerance = tolerance
        self._left_s = limits.program_s

    def verdicts(self, tests: StdinTests | PythonTests) -> Generator[str]:
        """Yield what became of each test in turn; tests that the program has left itself no time for are not run."""
        if not isinstance(tests, PythonTests):
            for given, expected in tests:
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


_BEFORE_ASSERTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
_KNOWN = (
    "inputs and outputs of one length (fn_name where they are calls), a list of {input, output}, test_list of asserts, "
    "test with entry_point, or a text with asserts"
)


StdinTests = list[tuple[str, str]]
"""What a program reads and what it must print."""


@dataclass(frozen=True)
class PythonTests:
    """Functions `mrl_test_0`, `mrl_test_1`, ... and the results that each may have, in the words of `plain`."""

    source: str
    expected: Sequence[Sequence[str]]
    are_json: bool
    """Whether the results came as JSON, which knows no tuples."""

    def __len__(self) -> int:
        return len(self.expected)

    def accepts(self, number: int, reply: str, tolerance: float) -> bool:
        """Return whether what the program's process says is a result that the test may have."""
        try:
            value = json.loads(reply, object_hook=(lambda given: given.get("tuple", given)) if self.are_json else None)
        except (ValueError, RecursionError):
            return False
        return any(same_value(value, json.loads(expected), tolerance) for expected in self.expected[number])


def read_tests(sample: Sample, max_tests: int | None) -> StdinTests | PythonTests:
    """Return the tests of `extra_info.tests`, or else of the ground truth, or the first of them."""
    given = sample.extra_info.get("tests", sample.ground_truth)
    try:
        tests = _tests(given, sample.extra_info, slice(max_tests))
        if not len(tests):
            raise ValueError("there is none")
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        what = f"the tests cannot be read: {error}; they begin {given!r:.120}"
        raise RewardError(what, where=sample.name, fix=f"extra_info.tests or the ground truth is {_KNOWN}") from error
    return tests


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Compare line by line: white space within and around lines and empty lines do not count."""
    lines, expected_lines = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (output, expected)
    )
    if not tolerance or [*map(len, lines)] != [*map(len, expected_lines)]:
        return lines == expected_lines
    words = zip(output.split(), expected.split(), strict=True)
    return all(word == wanted or _near(_number(word), _number(wanted), tolerance) for word, wanted in words)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Compare as Python does, numbers with a tolerance."""
    if tolerance and isinstance(value, list) and isinstance(expected, list):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same_value(*pair, tolerance) for pair in pairs)
    if tolerance and isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            same_value(value[key], expected[key], tolerance) for key in value
        )
    if tolerance and isinstance(value, int | float) and isinstance(expected, int | float):
        return bool(value == expected) or _near(value, expected, tolerance)
    return bool(value == expected)


def _near(value: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number beyond all floats
        return False


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _tests(given: Any, extra: Mapping[str, Any], taken: slice) -> StdinTests | PythonTests:
    match given:
        case str():
            try:
                parsed = json.loads(given, parse_constant=_refuse_constant)
            except json.JSONDecodeError:
                return _of_text(given, extra.get("entry_point"), taken)
            return _tests(parsed, extra, taken)
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            name = given.get("fn_name") or extra.get("fn_name")
            if name:
                return _of_calls(name, inputs[taken], outputs[taken])
            pairs = zip(inputs[taken], outputs[taken], strict=True)
            return [(_joined(given), _joined(output)) for given, output in pairs]
        case {"test_list": list(asserts)}:
            setup = ast.parse(given.get("test_setup_code") or "").body
            return _of_statements(setup, [ast.parse(test).body for test in asserts[taken]])
        case {"test": str(text)}:
            return _of_text(text, given.get("entry_point") or extra.get("entry_point"), taken)
        case [{"input": _, "output": _}, *_]:
            return [(_joined(pair["input"]), _joined(pair["output"])) for pair in given[taken]]
        case [str(), *_]:
            return _tests({"test_list": given}, extra, taken)
    raise ValueError("they have none of the known forms")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _joined(lines: Any) -> str:
    """Return a text; a list is its lines."""
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return "\n".join(lines)
    if not isinstance(lines, str):
        raise ValueError(f"{lines!r:.60} is no text to read or print, and no fn_name says which function takes it")
    return lines


def _of_calls(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> PythonTests:
    """Each input is a list of arguments, or a text with one argument as JSON in each line."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name {name!r:.60} names no function")
    tests, expected = [], []
    for given, output in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            given, output = [json.loads(line) for line in given.splitlines()], json.loads(output)
        if not isinstance(given, list):
            raise ValueError(f"{given!r:.60} is no list of arguments")
        callee = f'(Solution().{name} if "Solution" in globals() else {name})'
        tests.append(ast.parse(f"return_value = {callee}(*{given!r})").body)
        # Many sets hold the result in a list of its own.
        results = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
        expected.append([plain(result) for result in results])
    functions = [_function(number, [ast.Return(test[0].value)]) for number, test in enumerate(tests)]  # type: ignore[attr-defined]
    return PythonTests(_source(functions), expected, are_json=True)


def _of_text(text: str, entry_point: Any, taken: slice) -> PythonTests:
    """Asserts after what they need are a test each, in `check(candidate)` as well; anything else is one test."""
    statements = ast.parse(text).body
    check = next((each for each in statements if isinstance(each, ast.FunctionDef) and each.name == "check"), None)
    if check is None:
        setup, tests = _split(statements) or ([], [statements])
        return _of_statements(setup, tests[taken])
    if not isinstance(entry_point, str) or not entry_point.isidentifier() or len(check.args.args) != 1:
        raise ValueError(f"check(candidate) needs an entry_point, the name of a function; it is {entry_point!r:.60}")
    others = [each for each in statements if each is not check]
    split = _split(check.body)
    if split is None or not all(_is_before_asserts(each) for each in others):
        return _of_statements([check], [[*others, *ast.parse(f"check({entry_point})").body]])
    named = ast.parse(f"{check.args.args[0].arg} = {entry_point}").body
    return _of_statements([*others, *named, *split[0]], split[1][taken])


def _split(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[list[ast.stmt]]] | None:
    """Return what stands before the first assert, and the asserts, where nothing else comes between or after them."""
    setup = [each for each in statements if not isinstance(each, ast.Assert)]
    asserts = [each for each in statements if isinstance(each, ast.Assert)]
    if statements != [*setup, *asserts] or not all(map(_is_before_asserts, setup)):
        return None
    return setup, [[each] for each in asserts]


def _is_before_asserts(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, _BEFORE_ASSERTS)


def _of_statements(setup: Sequence[ast.stmt], tests: Sequence[list[ast.stmt]]) -> PythonTests:
    functions, expected = [], []
    for number, statements in enumerate(tests):
        if not any(isinstance(node, ast.Assert) for each in [*setup, *statements] for node in ast.walk(each)):
            raise ValueError(f"test {number} asserts nothing")
        compared = _call_and_literal(statements)
        functions.append(_function(number, statements if compared is None else [ast.Return(compared[0])]))
        expected.append(["null" if compared is None else compared[1]])
    return PythonTests(_source([*setup, *functions]), expected, are_json=False)


def _call_and_literal(statements: list[ast.stmt]) -> tuple[ast.expr, str] | None:
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                try:
                    return expression, plain(ast.literal_eval(literal))
                except (ValueError, TypeError, AttributeError):  # no literal, or one without a plain value
                    continue
    return None


def _function(number: int, body: list[ast.stmt]) -> ast.stmt:
    (function,) = ast.parse(f"def mrl_test_{number}(): pass").body
    assert isinstance(function, ast.FunctionDef), "it was written as one"
    function.body = body
    return function


def _source(statements: Iterable[ast.stmt]) -> str:
    return ast.unparse(ast.Module([*statements], []))
