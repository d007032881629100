"""Programs, run against tests in a contained process.

Tests come in the formats of data sets: pairs of input and output, calls of a function, asserts. Expected results stay
outside of the program's process if they can be separated from the test. An assert of the form `call == literal` becomes
the call; any other assert runs in the same process as the program, which can see it.
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
    """Run an empty program, to find out early whether programs can be contained."""
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
    """Score the share of tests that the program passes; with `all_or_nothing`, 1 if it passes all, else 0.

    The program is the last ```python block of the response, or the whole response without such a block; with
    `fenced_only` a block is required. Tests come from `extra_info.tests` or else from the ground truth, as plain data
    or JSON: `inputs` and `outputs` of standard input and output, or with `fn_name` of calls; asserts in `test_list`, as
    in MBPP; `test` with `entry_point`, as in HumanEval. Only the first `max_tests` count. Printed lines are compared
    word by word, and numbers within `tolerance`. `limits` has test_s, program_s, memory_bytes, output_bytes and
    file_bytes. `passed`, `total` and `late` count tests, `found` is 1 if there was a program.
    """
    try:
        allowed = Limits(**limits or {})
    except TypeError as error:
        known = ", ".join(field.name for field in fields(Limits))
        raise RewardError(f"limits: {error}", where="code", fix=f"known limits are {known}") from error
    tests = read_tests(sample, max_tests)
    blocks = _FENCED.findall(sample.response)
    counts: Counter[str] = Counter()
    has_program = bool(blocks) or not fenced_only
    if has_program:
        judge = _Judge(blocks[-1] if blocks else sample.response, allowed, tolerance)
        with contextlib.closing(judge.verdicts(tests)) as verdicts:
            for verdict in verdicts:
                counts[verdict] += 1
                if all_or_nothing and verdict != _PASSED:
                    break
    passed, total = counts[_PASSED], len(tests)
    value = float(passed == total) if all_or_nothing else passed / total
    return {"score": value, "passed": passed, "total": total, "late": counts["time"], "found": float(has_program)}


class _Judge:
    def __init__(self, program: str, limits: Limits, tolerance: float) -> None:
        self._program = program
        self._limits = limits
        self._tolerance = tolerance
        self._left_s = limits.program_s

    def verdicts(self, tests: StdinTests | PythonTests) -> Generator[str]:
        """Yield the result of each test in turn. Tests for which the program has no time left are not run."""
        if not isinstance(tests, PythonTests):
            for stdin, expected in tests:
                verdict = self._printed(stdin, expected)
                yield verdict
                if verdict == "syntax" or self._left_s <= 0:
                    return
        else:
            first = 0
            while first < len(tests) and self._left_s > 0:
                for verdict in self._called(tests, first):
                    first += 1
                    yield verdict

    def _printed(self, stdin: str, expected: str) -> str:
        """Run one process for each input."""
        try:
            with self._started({}, stdin, range(0)) as process:
                status, output = process.rest(self._limit_s)
        except ProgramEnded as ended:
            return ended.reason
        if status == NO_PROGRAM:
            return "syntax"
        is_right = status == 0 and same_text(output.decode(errors="replace"), expected, self._tolerance)
        return _PASSED if is_right else _WRONG

    def _called(self, tests: PythonTests, first: int) -> Iterator[str]:
        """Run the remaining tests in one process. If it ends early, the next test starts in another."""
        secret, numbers = secrets.token_hex(16), range(first, len(tests))
        try:
            with self._started({"tests.py": tests.source}, secret, numbers) as process:
                loaded = process.line(self._limit_s).decode(errors="replace")
                if loaded != f"{secret} {LOADED}":
                    yield from [_WRONG] * len(numbers)
                    return
                for number in numbers:
                    token, _, reply = process.line(self._limit_s).decode(errors="replace").partition(" ")
                    yield _PASSED if token == secret and tests.accepts(number, reply, self._tolerance) else _WRONG
                    if not token:
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
    "inputs and outputs of equal length (with fn_name for calls), a list of {input, output}, test_list of asserts, "
    "test with entry_point, or a text with asserts"
)


StdinTests = list[tuple[str, str]]
"""Pairs of a program's input and its expected output."""


@dataclass(frozen=True)
class PythonTests:
    """Functions `mrl_test_0`, `mrl_test_1`, ... and the accepted results of each, in the form of `plain`."""

    source: str
    expected: Sequence[Sequence[str]]
    are_json: bool
    """Whether the results came as JSON, which has no tuples."""

    def __len__(self) -> int:
        return len(self.expected)

    def accepts(self, number: int, reply: str, tolerance: float) -> bool:
        """Return whether the output of the program's process is an accepted result of the test."""
        try:
            value = json.loads(reply, object_hook=(lambda item: item.get("tuple", item)) if self.are_json else None)
        except (ValueError, RecursionError):
            return False
        return any(same_value(value, json.loads(expected), tolerance) for expected in self.expected[number])


def read_tests(sample: Sample, max_tests: int | None) -> StdinTests | PythonTests:
    """Return the tests from `extra_info.tests`, or else from the ground truth, limited to the first `max_tests`."""
    raw = sample.extra_info.get("tests", sample.ground_truth)
    try:
        tests = _tests(raw, sample.extra_info, slice(max_tests))
        if not len(tests):
            raise ValueError("there are no tests")
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        what = f"the tests cannot be read: {error}; they begin with {raw!r:.120}"
        raise RewardError(
            what, where=sample.name, fix=f"extra_info.tests or the ground truth must be {_KNOWN}"
        ) from error
    return tests


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Compare line by line, ignoring white space inside and around lines, and empty lines."""
    lines, expected_lines = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (output, expected)
    )
    if not tolerance or [*map(len, lines)] != [*map(len, expected_lines)]:
        return lines == expected_lines
    words = zip(output.split(), expected.split(), strict=True)
    return all(word == correct or _near(_number(word), _number(correct), tolerance) for word, correct in words)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Compare like Python, but numbers with a tolerance."""
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
    except OverflowError:  # a whole number too large for a float
        return False


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _tests(raw: Any, extra: Mapping[str, Any], taken: slice) -> StdinTests | PythonTests:
    match raw:
        case str():
            try:
                parsed = json.loads(raw, parse_constant=_refuse_constant)
            except json.JSONDecodeError:
                return _of_text(raw, extra.get("entry_point"), taken)
            return _tests(parsed, extra, taken)
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            name = raw.get("fn_name") or extra.get("fn_name")
            if name:
                return _of_calls(name, inputs[taken], outputs[taken])
            pairs = zip(inputs[taken], outputs[taken], strict=True)
            return [(_joined(raw), _joined(output)) for raw, output in pairs]
        case {"test_list": list(asserts)}:
            setup = ast.parse(raw.get("test_setup_code") or "").body
            return _of_statements(setup, [ast.parse(test).body for test in asserts[taken]])
        case {"test": str(text)}:
            return _of_text(text, raw.get("entry_point") or extra.get("entry_point"), taken)
        case [{"input": _, "output": _}, *_]:
            return [(_joined(pair["input"]), _joined(pair["output"])) for pair in raw[taken]]
        case [str(), *_]:
            return _tests({"test_list": raw}, extra, taken)
    raise ValueError("they have no known form")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _joined(lines: Any) -> str:
    """Return a text. A list is joined as lines."""
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return "\n".join(lines)
    if not isinstance(lines, str):
        raise ValueError(f"{lines!r:.60} is not a text to read or print, and there is no fn_name for a call")
    return lines


def _of_calls(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> PythonTests:
    """Return tests of calls. Each input is a list of arguments, or a text with one argument as JSON per line."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name {name!r:.60} is not the name of a function")
    tests, expected = [], []
    for arguments, output in zip(inputs, outputs, strict=True):
        if isinstance(arguments, str):
            arguments, output = [json.loads(line) for line in arguments.splitlines()], json.loads(output)
        if not isinstance(arguments, list):
            raise ValueError(f"{arguments!r:.60} is not a list of arguments")
        callee = f'(Solution().{name} if "Solution" in globals() else {name})'
        tests.append(ast.parse(f"return_value = {callee}(*{arguments!r})").body)
        # Many data sets wrap the result in a list.
        results = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
        expected.append([plain(result) for result in results])
    functions = [_function(number, [ast.Return(test[0].value)]) for number, test in enumerate(tests)]  # type: ignore[attr-defined]
    return PythonTests(_source(functions), expected, are_json=True)


def _of_text(text: str, entry_point: Any, taken: slice) -> PythonTests:
    """Return tests from code. Asserts after their setup become one test each, also in `check(candidate)`; anything else
    is one test."""
    statements = ast.parse(text).body
    check = next((node for node in statements if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        setup, tests = _split(statements) or ([], [statements])
        return _of_statements(setup, tests[taken])
    if not isinstance(entry_point, str) or not entry_point.isidentifier() or len(check.args.args) != 1:
        raise ValueError(f"check(candidate) needs an entry_point, the name of a function; it is {entry_point!r:.60}")
    rest = [node for node in statements if node is not check]
    split = _split(check.body)
    if split is None or not all(_is_before_asserts(node) for node in rest):
        return _of_statements([check], [[*rest, *ast.parse(f"check({entry_point})").body]])
    alias = ast.parse(f"{check.args.args[0].arg} = {entry_point}").body
    return _of_statements([*rest, *alias, *split[0]], split[1][taken])


def _split(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[list[ast.stmt]]] | None:
    """Return the setup before the first assert, and the asserts. Return None if other code comes between or after
    them."""
    setup = [node for node in statements if not isinstance(node, ast.Assert)]
    asserts = [node for node in statements if isinstance(node, ast.Assert)]
    if statements != [*setup, *asserts] or not all(map(_is_before_asserts, setup)):
        return None
    return setup, [[node] for node in asserts]


def _is_before_asserts(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, _BEFORE_ASSERTS)


def _of_statements(setup: Sequence[ast.stmt], tests: Sequence[list[ast.stmt]]) -> PythonTests:
    functions, expected = [], []
    for number, statements in enumerate(tests):
        if not any(isinstance(node, ast.Assert) for statement in [*setup, *statements] for node in ast.walk(statement)):
            raise ValueError(f"test {number} has no assert")
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
                except (ValueError, TypeError, AttributeError):  # not a literal, or one without a plain value
                    continue
    return None


def _function(number: int, body: list[ast.stmt]) -> ast.stmt:
    (function,) = ast.parse(f"def mrl_test_{number}(): pass").body
    assert isinstance(function, ast.FunctionDef), "the source is one function"
    function.body = body
    return function


def _source(statements: Iterable[ast.stmt]) -> str:
    return ast.unparse(ast.Module([*statements], []))
