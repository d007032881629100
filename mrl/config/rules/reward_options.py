"""Options of the built-in reward functions: their names, read from the sources of the functions, and allowed values."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.bounds import Bound
from mrl.config.keys import convert
from mrl.config.reward import BUILT_IN, JUDGE, JudgeOptions, RewardFunctionConfig
from mrl.config.rules.problems import problem
from mrl.config.values import Secrets
from mrl.errors import Problem, did_you_mean

_FUNCTIONS = Path(__file__).parents[2] / "rewards" / "functions"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _sources_of_functions() -> Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = [node for file in _FUNCTIONS.glob("*.py") for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, _FUNCTION) and node.name in BUILT_IN}


@cache
def reward_functions() -> Mapping[str, Mapping[str, bool]]:
    """Return the built-in functions, each with its options and whether they are required. The options are read from the
    source of the function."""
    return {name: _signature(function) for name, function in sorted(_sources_of_functions().items())}


def gives_answers(name: str) -> bool:
    """Return whether a function reports the answer that it judged. For a function that is not built in, assume so."""
    function = _sources_of_functions().get(name)
    return function is None or ast.unparse(function.returns or ast.Tuple([])) in ("dict[str, float | str]", "Any")


def asks_own_engines(function: RewardFunctionConfig) -> bool:
    """Return whether a reward function uses the run's own judge engines, which exist only during a run."""
    service = function.options.get("service")
    return function.name == JUDGE and isinstance(service, dict) and service.get("url") is None


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    _, *options = function.args.args  # the first is the sample
    num_required = len(options) - len(function.args.defaults)
    return {option.arg: number < num_required for number, option in enumerate(options)}


def check_options(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    """Check that the options of a built-in function are known, complete and within their ranges."""
    known, options = reward_functions()[function.name], function.options
    for name in options:
        if name not in known:
            fix = did_you_mean(name, known) or "remove it"
            yield problem(f"{key}.{name}", f"{function.name} has no such option", fix)
    for name, is_required in known.items():
        if is_required and name not in options:
            yield problem(key, f"{function.name} needs {name}", f"set {key}.{name}")
    if function.name == JUDGE:
        yield from _judge_options(key, options)
        return
    for name in known:
        bound = _OPTIONS.get(name, _TEXT)
        if name in options and not bound.allows(options[name]):
            shown = json.dumps(options[name], ensure_ascii=False, default=str)
            yield problem(f"{key}.{name}", f"must {bound}, not {shown}")
        elif name == "pattern" and name in options and (wrong := wrong_pattern(options[name])):
            yield problem(f"{key}.{name}", wrong)
    smaller = {"overlong": "buffer_tokens", "length": "target_tokens"}.get(function.name, "")
    few, many = options.get(smaller), options.get("max_tokens")
    if isinstance(few, int) and isinstance(many, int) and few >= many:
        yield problem(f"{key}.{smaller}", f"{few} must be less than max_tokens, which is {many}")


def _judge_options(key: str, given: dict[str, Any]) -> Iterator[Problem]:
    options, problems = convert(JudgeOptions, given, Secrets(), lambda path: "")
    for inner in problems:
        # skip keys that are already reported
        if inner.key.partition(".")[0] in given.keys() & reward_functions()[JUDGE].keys():
            yield problem(f"{key}.{inner.key}", inner.what, inner.fix)
    if options is None:
        return
    service, verdict, template = options.service, options.verdict, options.template
    if service.url is not None and service.model is None:
        yield problem(f"{key}.service.model", "with `service.url`, the name of the model on that server is required")
    for name in ("model", "key_variable"):
        if service.url is None and getattr(service, name) is not None:
            what = "has no effect without service.url: the run's own engines have one model and their own key"
            yield problem(f"{key}.service.{name}", what, "remove it, or set service.url")
    if "{response}" not in template and not Path(template).is_file():
        yield problem(f"{key}.template", "does not contain {response}, and is not the path of a file")
    if wrong := wrong_pattern(verdict.pattern):
        yield problem(f"{key}.verdict.pattern", wrong)
    elif (num_groups := re.compile(verdict.pattern).groups) != 1:
        what = f"has {num_groups} groups, but needs exactly one, which captures the verdict"
        yield problem(f"{key}.verdict.pattern", what, "write (?:...) for groups that capture nothing")
    if verdict.lowest >= verdict.highest:
        what = f"{verdict.lowest:g} must be less than highest, which is {verdict.highest:g}"
        yield problem(f"{key}.verdict.lowest", what)


def _between(lowest: float, highest: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _between(1)(value)


def _are_letters(value: Any) -> bool:
    return isinstance(value, str) and len(set(value)) == len(value) and re.fullmatch("[A-Z]{2,}", value) is not None


_TEXT = Bound("be text or null", lambda value: value is None or isinstance(value, str))
_OPTIONS = {
    **dict.fromkeys(("max_tokens", "buffer_tokens", "target_tokens", "attempts"), Bound("be a count", _is_count)),
    **dict.fromkeys(
        ("timeout_s", "backoff_s"), Bound("be a number of seconds", lambda value: _between(0)(value) and value > 0)
    ),
    **dict.fromkeys(
        ("last_number", "all_or_nothing", "fenced_only", "boxed", "share"),
        Bound("be true or false", lambda value: isinstance(value, bool)),
    ),
    **dict.fromkeys(("structure", "final", "retrieval"), Bound("be a number", _between(-math.inf))),
    "partial": Bound("be a number from 0 to 1", _between(0, 1)),
    "tolerance": Bound("be 0 or a number above it", _between(0)),
    "max_tests": Bound("be a count or null", lambda value: value is None or _is_count(value)),
    "limits": Bound("be numbers by name", lambda value: value is None or isinstance(value, dict)),
    "letters": Bound("be two or more different capital letters", _are_letters),
    "pattern": Bound("be text", lambda value: isinstance(value, str)),
    "url": Bound("begin with http:// or https://", lambda value: str(value).startswith(("http://", "https://"))),
}
"""Allowed values of each option, the same in every function that has it. All other options are texts."""


def wrong_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return ""
