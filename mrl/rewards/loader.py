"""From the name of a reward function to the function, with its options tried against its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.errors import NameUnknown, SetupError
from mrl.registry import load_attribute
from mrl.rewards.sample import Sample
from mrl.rewards.settings import FunctionSettings


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function with what the configuration says about it."""

    settings: FunctionSettings
    function: Callable[..., Any]

    def __call__(self, sample: Sample) -> Any:
        return self.function(sample, **self.settings.options)


def is_built_in(settings: FunctionSettings) -> bool:
    """Whether the function is mrl's own; any other name is `package.module:function`."""
    return ":" not in settings.name


def load_reward_function(settings: FunctionSettings) -> RewardFunction:
    """The function of that name; a built-in one is `score` in the module of its name."""
    path = f"mrl.rewards.functions.{settings.name}:score" if is_built_in(settings) else settings.name
    try:
        function = load_attribute(path)
    except ModuleNotFoundError as error:
        if not is_built_in(settings):
            raise
        raise SetupError(f"it needs {error.name}, which is not installed", fix='pip install "mrl[math]"') from error
    if not callable(function):
        raise NameUnknown(f'"{settings.name}" is a {type(function).__name__}, not a function')
    try:
        inspect.signature(function).bind(None, **settings.options)
    except TypeError as error:
        takes = f"{getattr(function, '__name__', 'score')}{inspect.signature(function)}"
        raise NameUnknown(
            f"{error}; the function is {takes}", fix=f"see reward.functions.{settings.label}.options"
        ) from error
    return RewardFunction(settings, function)
