"""The code reward: finding the program, forms of tests, correct results, and malformed data."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from mrl.errors import RewardError
from mrl.rewards.functions.programs import code, same_value
from mrl.rewards.sample import Sample

ADD = "def add(a, b):\n    return a + b\n"
PRINT = "a, b = map(int, input().split())\nprint(a + b)\n"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


def scored(response: str, truth: Any, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, float]:
    sample = Sample(
        prompt="?",
        response=response,
        num_response_tokens=1,
        ground_truth=truth,
        data_source="test",
        extra_info=extra or {},
        uid="u",
        row_id=3,
    )
    return code(sample, **options)


FORMS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "pairs": (PRINT, PAIRS, {}),
    "pairs as JSON": (PRINT, json.dumps(PAIRS), {}),
    "pairs of lines": (PRINT, {"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]]}, {}),
    "list of pairs": (PRINT, [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}], {}),
    "calls": (ADD, CALLS, {}),
    "calls as JSON": (ADD, json.dumps(CALLS), {}),
    "calls with the name outside": (ADD, {**CALLS, "fn_name": None}, {"fn_name": "add"}),
    "calls with results in lists": (ADD, {**CALLS, "outputs": [[3], [7]]}, {}),
    "calls as lines of JSON": (ADD, {**CALLS, "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}, {}),
    "calls of a method": (f"class Solution:\n  {ADD.replace('(', '(self, ').replace('    ', '      ')}", CALLS, {}),
    "asserts": (ADD, ["assert add(1, 2) == 3", "assert 7 == add(3, 4), 'no'"], {}),
    "asserts of MBPP": (
        ADD,
        {"test_setup_code": "import math", "test_list": ["assert math.isclose(add(1, 2), 3)", "assert add(3, 4) > 6"]},
        {},
    ),
    "text of asserts": (ADD, "seven = 7\nassert add(1, 2) == 3\nassert add(3, 4) == seven\n", {}),
    "check": (
        ADD,
        {"test": "META = {}\ndef check(f):\n    assert f(1, 2) == 3\n    assert f(3, 4) == 7", "entry_point": "add"},
        {},
    ),
    "check with the name outside": (
        ADD,
        'def check(f):\n    """Two."""\n    assert f(1, 2) == 3\n    assert f(3, 4) == 7\n',
        {"entry_point": "add"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    program, truth, extra = FORMS[form]
    right = scored(program, truth, extra)
    assert right == {"score": 1.0, "passed": 2.0, "total": 2.0, "late": 0.0, "found": 1.0}
    assert scored(program.replace("a + b", "3"), truth, extra)["score"] == 0.5


LOOP = "def check(f):\n    for n in range(9):\n        assert f(n, 1) == n + 1\n"


@pytest.mark.parametrize(("program", "expected"), [(ADD, 1.0), (ADD.replace("+", "-"), 0.0), ("", 0.0)])
def test_what_is_no_row_of_asserts_is_one_test(program: str, expected: float) -> None:
    assert scored(program, LOOP, {"entry_point": "add"})["score"] == expected
    unrolled = "x = add(1, 1)\nassert x == 2\nx = add(2, 1)\nassert x == 3\n"
    assert scored(program, unrolled) == {"score": expected, "passed": expected, "total": 1, "late": 0, "found": 1}


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        (PRINT, {}, (1, 1)),
        (PRINT, {"fenced_only": True}, (0, 0)),
        (f"So:\n```python\n{PRINT}```\nwhich prints it.", {"fenced_only": True}, (1, 1)),
        (f"```python\nprint(0)\n```\nNo:\n```Py\n{PRINT}```\nlike\n```\n3\n```\n", {}, (1, 1)),
        (f"```python\n{PRINT}```\nNo:\n```python3\nprint(0)\n```", {}, (0, 1)),
        ("```python\nprint('```')\n" + PRINT + "```", {}, (0, 1)),
        ("half a pair \ud800", {}, (0, 1)),
    ],
)
def test_which_text_is_the_program(response: str, options: dict[str, Any], expected: tuple[float, float]) -> None:
    result = scored(response, PAIRS, **options)
    assert (result["score"], result["found"]) == expected


@pytest.mark.parametrize(
    ("program", "form", "options", "expected"),
    [
        ("print('1 2')\nprint('3')", "1   2 \r\n\n3\n", {}, 1),
        ("print(0.3333)", "0.33333333", {}, 0),
        ("print('x', 0.3333)", "x 0.33333333", {"tolerance": 1e-3}, 1),
        ("print('y', 0.3333)", "x 0.33333333", {"tolerance": 1e-3}, 0),
        ("print('0.3333 1')", "0.33333333", {"tolerance": 1e-3}, 0),
    ],
)
def test_what_is_printed_right(program: str, form: str, options: dict[str, Any], expected: float) -> None:
    assert scored(program, {"inputs": [""], "outputs": [form]}, **options)["score"] == expected


@pytest.mark.parametrize(
    ("result", "test", "expected"),
    [
        ("(1, [2])", "assert f() == (1, [2])", 1),
        ("{2, 1}", "assert f() == {1, 2}", 1),
        ("{'b': 1, 'a': {2: None}}", "assert f() == {'a': {2: None}, 'b': 1}", 1),
        ("True", "assert f() == 1", 1),
        ("'1'", "assert f() == 1", 0),
        ("'\\u00e9\\n\\ud800'", "assert f() == '\\u00e9\\n\\ud800'", 1),
        ("b'a'", "assert f() == 'a'", 0),
        ("10**5000", f"assert f() == {hex(10**5000)}", 1),
        ("float('inf')", "assert f() == float('inf')", 1),
        ("object()", "assert f() == 1", 0),
        ("__import__('collections').Counter('aab')", "assert f() == {'a': 2, 'b': 1}", 1),
        ("None", "assert f()", 0),
    ],
)
def test_what_is_returned_right(result: str, test: str, expected: float) -> None:
    assert scored(f"def f():\n    return {result}", [test])["score"] == expected


def test_numbers_within_structures_have_the_tolerance_too() -> None:
    program, test = "def f():\n    return {'a': [0.1 + 0.2, 1]}", "assert f() == {'a': [0.3, 1]}"
    assert scored(program, [test], tolerance=1e-9)["score"] == 1
    assert scored(program, [test.replace("0.3", "0.4")], tolerance=1e-9)["score"] == 0
    assert scored(program, [test.replace("0.3, 1", "0.3")], tolerance=1e-9)["score"] == 0
    assert not same_value(10**400, 1.5, 1e-9)


def test_tuples_are_lists_where_the_results_are_json() -> None:
    assert scored("def f(x):\n    return x, 1", {"fn_name": "f", "inputs": [[2]], "outputs": [[2, 1]]})["score"] == 1


def test_tests_of_the_row_come_before_the_ground_truth() -> None:
    assert scored(PRINT, "not read", {"tests": PAIRS})["passed"] == 2


def test_all_or_nothing_and_the_first_tests() -> None:
    half = PRINT.replace("a + b", "3")
    assert scored(half, PAIRS, all_or_nothing=True)["score"] == 0
    assert scored(PRINT, PAIRS, all_or_nothing=True)["score"] == 1
    assert scored(half, PAIRS, all_or_nothing=True, max_tests=1) == scored(half, PAIRS, max_tests=1)
    assert scored(half, PAIRS, max_tests=1)["total"] == 1
    assert scored("while True: pass", PAIRS, all_or_nothing=True, limits={"test_s": 0.1})["late"] == 1, "and no more"


def test_a_late_test_costs_itself_and_a_late_program_the_rest() -> None:
    slow = "def add(a, b):\n    while a == 1: pass\n    return a + b\n"
    calls = {"fn_name": "add", "inputs": [[0, 2], [1, 2], [3, 4]], "outputs": [2, 3, 7]}
    late = scored(slow, calls, limits={"test_s": 0.2})
    assert (late["passed"], late["late"], late["total"]) == (2, 1, 3)
    out_of_time = scored(slow, calls, limits={"test_s": 0.2, "program_s": 0.1})
    assert (out_of_time["passed"], out_of_time["late"]) == (1, 1)


def test_no_test_takes_longer_than_the_program_has_left() -> None:
    began = time.monotonic()
    late = scored("import time\ntime.sleep(60)\n", PAIRS, limits={"test_s": 30, "program_s": 0.3})
    assert (late["late"], time.monotonic() - began < 15) == (1, True)


def test_a_test_begins_anew_where_the_one_before_has_ended_the_process() -> None:
    leaves = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b\n"
    assert scored(leaves, CALLS)["passed"] == 1


MALFORMED: dict[str, tuple[Any, str]] = {
    "empty": ("", "there are no tests"),
    "one output less": ({"inputs": ["1", "2"], "outputs": ["1"]}, "they have no known form"),
    "broken JSON": ('{"inputs": ["1"], "outp', "unterminated string literal"),
    "not finite": ('{"fn_name": "f", "inputs": [[NaN]], "outputs": [1]}', "NaN is not JSON"),
    "number as input": ({"inputs": [1], "outputs": ["1"]}, "1 is not a text to read or print, and there is no fn_name"),
    "odd name": (
        {"fn_name": "a.b()", "inputs": [[1]], "outputs": [1]},
        "fn_name 'a.b()' is not the name of a function",
    ),
    "no arguments": ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "1 is not a list of arguments"),
    "no assert": ("import unittest\nclass Test(unittest.TestCase): ...\n", "there are no tests"),
    "a call alone": (["assert add(1, 2) == 3", "add(1, 2)"], "test 1 has no assert"),
    "no Python": (["assert add(1"], "'(' was never closed"),
    "check without a name": ("def check(f):\n    assert f(1) == 2", "check(candidate) needs an entry_point"),
    "pair without output": ([{"input": "1", "output": "1"}, {"input": "2"}], "'output'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_tests_that_no_program_could_be_held_against(name: str) -> None:
    truth, what = MALFORMED[name]
    with pytest.raises(RewardError) as raised:
        scored(PRINT, truth)
    assert raised.value.where == "row 3 (uid u, source test)"
    assert raised.value.what.startswith(f"the tests cannot be read: {what}")


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"tests_s": 1}, "unexpected keyword argument 'tests_s'"),
        ({"test_s": 0}, "limits.test_s is 0, but must be a number above 0"),
        ({"memory_bytes": "1G"}, "limits.memory_bytes is '1G'"),
    ],
)
def test_wrong_limits(limits: dict[str, Any], what: str) -> None:
    with pytest.raises(RewardError, match=what):
        scored(PRINT, PAIRS, limits=limits)
