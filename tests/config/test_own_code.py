"""Options of a user's own function, read from its signature without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.keys import describe_type
from mrl.config.own_code import read_function
from mrl.config.resolved.load import load_config
from mrl.errors import ConfigError

SOURCE = '''
import not_installed
import mrl.config.bounds as b
from typing import Annotated

def method(tokens, config, *, a: int, b: b.Proportion | None = None, c: Annotated[float, more_than(2)] = 3.0,
           d: str = "x", e: list = [], **others):
    """Method (arXiv 1234.56789): l = 1."""
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_method_of_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_method_of_test"


def test_options_have_the_types_and_defaults_of_the_signature(own_module: str) -> None:
    function = read_function(f"{own_module}:method")
    assert function is not None
    described = {
        name: None if option.annotation is None else describe_type(option.annotation)
        for name, option in function.options.items()
    }
    assert described == {
        "a": "whole number",
        "b": "number, from 0 to 1 | null",
        "c": "number, more than 2",
        "d": "text",
        "e": None,
    }
    assert [name for name, option in function.options.items() if option.required] == ["a"]
    assert function.values({"a": 1}) == {"a": 1, "b": "None", "c": "3.0", "d": "'x'", "e": "[]"}
    assert function.takes_any
    assert read_function(f"{own_module}:other") is None


def test_every_mistake_in_the_options_is_reported(own_module: str) -> None:
    overrides = [f"algorithm.loss.policy={own_module}:method", "algorithm.loss.options={b: 2, c: 2, d: 1, z: 0}"]
    with pytest.raises(ConfigError) as caught:
        load_config("configs/laptop-grpo.yaml", overrides)
    problems = {problem.key: problem.what for problem in caught.value.problems}
    assert problems == {
        "algorithm.loss.options.a": f"is required by {own_module}:method and missing",
        "algorithm.loss.options.b": "must be from 0 to 1, not 2",
        "algorithm.loss.options.c": "must be more than 2, not 2",
        "algorithm.loss.options.d": "must be text, not 1",
        "algorithm.loss.policy": f"{own_module}:method has the option e without a type that can be checked",
    }
