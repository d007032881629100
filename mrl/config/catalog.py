"""The algorithms that a configuration can name: paper, formula and options, read from the sources of mrl.algos."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mrl.config.algorithm import KL_ESTIMATORS, AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from mrl.config.keys import describe_type, fields_of
from mrl.config.own_code import OwnFunction, OwnOption, read_function
from mrl.config.sft import DpoLossConfig

_SOURCES = Path(__file__).parents[1] / "algos"
_NAMED = re.compile(r"(?P<title>[^:]+?) \(arXiv (?P<paper>\d{4}\.\d{5})\): (?P<formula>.*)")


@dataclass(frozen=True)
class _Kind:
    name: str
    file: str
    decorators: tuple[str, ...]
    key: str
    section: type
    """Section whose keys its functions read."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Functions without a decorator -> their names in configurations."""


_KINDS = (
    _Kind("advantage", "advantages.py", ("ADVANTAGES.register", "by_group"), "algorithm.advantage", AlgorithmConfig),
    _Kind("policy loss", "losses.py", ("POLICY_LOSSES.register",), "algorithm.loss.policy", LossConfig),
    _Kind("aggregation", "aggregate.py", ("AGGREGATIONS.register",), "algorithm.loss.aggregation", LossConfig),
    _Kind("KL estimator", "kl.py", ("KL_ESTIMATORS.register",), "algorithm.kl.in_reward, in_loss", KlConfig),
    _Kind(
        "correction",
        "rollout_correction.py",
        ("RATIO_LEVELS.register",),
        "algorithm.correction.level",
        CorrectionConfig,
    ),
    _Kind("preference loss", "preference.py", ("PREFERENCE_LOSSES.register",), "preference.loss", DpoLossConfig),
    _Kind("preference loss", "kto.py", (), "preference.loss", DpoLossConfig, {"kto_losses": "kto"}),
)


@dataclass(frozen=True)
class Algorithm:
    names: tuple[str, ...]
    """The usual name first, then other names for the same function."""
    kind: str
    key: str
    """Key of a configuration that accepts the names."""
    paper: str
    """Title and number. Empty if the formula has none."""
    formula: str
    options: tuple[str, ...]
    """Keys of the same section that the function reads. For a user's own function, its options with their types."""


@cache
def algorithms() -> tuple[Algorithm, ...]:
    """Return all algorithms, by kind, in the order of the sources."""
    return tuple(algorithm for kind in _KINDS for algorithm in _of_kind(kind))


def find_algorithm(kind: str, name: str) -> Algorithm | None:
    """Return the algorithm of this kind, built in or the user's own. Return None if its source is not known."""
    if ":" in name:
        return None if (function := read_function(name)) is None else own_algorithm(function)
    return next((entry for entry in algorithms() if entry.kind == kind and name in entry.names), None)


def own_algorithm(function: OwnFunction) -> Algorithm:
    """Return the entry of a user's own function, from its documentation and signature."""
    paper, formula = _paper_and_formula(function.doc)
    options = tuple(map(_described, function.options.values()))
    return Algorithm(
        (function.path,), "your own", "algorithm.advantage, algorithm.loss.policy", paper, formula, options
    )


def _described(option: OwnOption) -> str:
    kind = "unknown type" if option.annotation is None else describe_type(option.annotation)
    return f"{option.name} ({kind}{'' if option.required else f', default {option.default}'})"


def _paper_and_formula(line: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(line)
    return (f"{match['title']}, {match['paper']}", match["formula"]) if match else ("", line)


def _of_kind(kind: _Kind) -> Iterator[Algorithm]:
    nodes = ast.parse((_SOURCES / kind.file).read_text(encoding="utf-8")).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        names = tuple(_registered_names(function, kind))
        if not names:
            continue
        paper, formula = _paper_and_formula((ast.get_docstring(function) or "").partition("\n")[0])
        by_name = [option for name in names for option in _options_for(name, kind.section)]
        options = tuple(dict.fromkeys([*sorted(_keys_read(function, functions)), *by_name]))
        yield Algorithm(names[::-1], kind.name, kind.key, paper, formula, options)
        if kind.file == "kl.py" and (plus := f"{names[-1]}+") in KL_ESTIMATORS:
            yield Algorithm((plus,), kind.name, kind.key, paper, f"The value of {names[-1]}, the gradient of k2.", ())


def _registered_names(function: ast.FunctionDef, kind: _Kind) -> Iterator[str]:
    if function.name in kind.functions:
        yield kind.functions[function.name]
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) in kind.decorators:
            yield str(ast.literal_eval(call.args[0]))


def _keys_read(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> set[str]:
    """Return the attributes of `config` that a function reads, and those of functions to which it passes `config`.

    A key that `replace(config, key=...)` sets is not read.
    """
    keys: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "config":
            keys.add(node.attr)
        if isinstance(node, ast.Call) and (called := functions.get(ast.unparse(node.func))) is not None:
            for argument in map(ast.unparse, node.args):
                if argument.startswith(("config", "replace(config, ")) and not argument.startswith("config."):
                    keys |= _keys_read(called, functions) - set(re.findall(r"(\w+)=", argument))
    return keys


def _options_for(name: str, section: type) -> Iterator[str]:
    """Yield the keys whose description starts with "For" and this name."""
    for name_of_key, key in fields_of(section).items():
        if f"`{name}`" in key.doc.partition(":")[0] and key.doc.startswith("For "):
            yield name_of_key
