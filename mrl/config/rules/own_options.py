"""Options of the user's own advantage and policy loss: known, complete, and of the type in the function's signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.keys import convert_value
from mrl.config.own_code import OwnFunction, read_function
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.errors import Problem, did_you_mean

_TYPES = "annotate it with bool, int, float, str or a type of mrl.config.bounds, such as `width: Share = 0.2`"


def check_own_options(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    yield from _of_function("algorithm.options", "algorithm.advantage", algorithm.advantage, algorithm.options)
    yield from _of_function(
        "algorithm.loss.options", "algorithm.loss.policy", algorithm.loss.policy, algorithm.loss.options
    )


def _of_function(key: str, name_key: str, name: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    if ":" not in name:
        if given:
            section = name_key.rpartition(".")[0]
            what = f"options are for a function of your own; those of {name} are keys of the section {section}"
            yield problem(key, what, f"see `mrl algorithms {name}`")
        return
    function = read_function(name)
    if function is None:
        if given:
            what = f"the options of {name} cannot be read: its module has no `def {name.partition(':')[2]}(...)`"
            yield problem(key, what, "define it with `def` at the top level of a .py file on this machine")
        return
    yield from _unknown(key, function, given)
    for option in function.options.values():
        if option.annotation is None:
            yield problem(name_key, f"{name} has the option {option.name} without a type that can be checked", _TYPES)
        elif option.name in given:
            yield from convert_value(option.annotation, given[option.name], (*key.split("."), option.name))
        elif option.required:
            yield problem(f"{key}.{option.name}", f"is required by {name} and missing", f"{key}.{option.name}=...")


def _unknown(key: str, function: OwnFunction, given: Mapping[str, Any]) -> Iterator[Problem]:
    for option in given:
        if option not in function.options and not function.takes_any:
            fix = did_you_mean(option, function.options) or f"remove it: {function.path} has no keyword-only parameters"
            yield problem(f"{key}.{option}", f"{function.path} has no such option", fix)
