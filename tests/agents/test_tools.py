"""Schemas of plain functions, compared with those of transformers, and checks of calls by these schemas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from mrl.agents.tools import Tool, tool_schema, violations
from mrl.errors import AgentError


def find(query: str, num: int, unit: Literal["km", "mile"] = "km", near: float = 1.0, exact: bool = False) -> str:
    """Find places.

    Args:
        query: Words to look for; words that matter: nouns.
        num: How many places,
            at most.
        unit: Of lengths.
        near: How near.
        exact: Whether words have to be the same.

    Returns:
        Their names.
    """
    return f"{num} of {query} within {near} {unit}{' exactly' * exact}"


def collect(rows: list[dict[str, int]], tags: list[str], options: dict[str, str] | None = None) -> dict[str, Any]:
    """Collect rows.

    Args:
        rows: The rows.
        tags: Their tags.
        options: More.
    """
    return {"rows": len(rows), "tags": tags, "options": options}


def read(page: str, root: str, *, depth: int, limit: int = 3) -> str:
    """Read a page."""
    return f"{root}/{page} {depth} {limit}"


def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    return asyncio.run(Tool(function).call(arguments))


def test_a_schema_is_what_transformers_makes_of_the_same_function() -> None:
    theirs = get_json_schema(find)
    assert theirs["function"].pop("return")["type"] == "string"  # which no model reads
    assert tool_schema(find, "find", set()) == theirs


def test_nested_types_have_schemas() -> None:
    made = tool_schema(collect, "collect", set())["function"]["parameters"]
    assert made["properties"]["rows"] == {
        "type": "array",
        "items": {"type": "object", "additionalProperties": {"type": "integer"}},
        "description": "The rows.",
    }
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    assert made["properties"]["options"] == {"anyOf": [texts, {"type": "null"}], "description": "More."}
    assert made["required"] == ["rows", "tags"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"query": "inn", "num": "2"}, 'num is "2", and has to be of type integer'),
        ({"query": "inn", "num": 2.0}, "num is 2.0, and has to be of type integer"),
        ({"query": "inn", "num": True}, "num is true, and has to be of type integer"),
        ({"query": "inn", "num": 2, "near": True}, "near is true, and has to be of type number"),
        ({"query": "inn", "num": 2, "exact": 1}, "exact is 1, and has to be of type boolean"),
        ({"query": "inn", "num": 2, "unit": "m"}, 'unit is "m", and has to be one of ["km", "mile"]'),
        ({"query": "inn", "num": 2, "q": 1}, "there is no q; there are: query, num, unit, near, exact"),
        ({}, "query is missing; num is missing"),
    ],
)
def test_wrong_arguments_are_told_the_model_and_the_function_does_not_see_them(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'the call of find is wrong: {told}')}$"):
        called(find, arguments)


def test_right_arguments_reach_the_function() -> None:
    assert called(find, {"query": "inn", "num": 2, "near": 3}) == "2 of inn within 3 km"
    assert called(find, {"query": "inn", "num": 2, "near": 0.5, "unit": "mile", "exact": True}) == (
        "2 of inn within 0.5 mile exactly"
    )
    result = called(collect, {"rows": [{"a": 1}], "tags": ["ö"], "options": None})
    assert result == '{"rows": 1, "tags": ["ö"], "options": null}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"rows": [{"a": 1}, {"b": "2"}], "tags": []}, 'rows[1].b is "2", and has to be of type integer'),
        ({"rows": [], "tags": ["a", 2]}, "tags[1] is 2, and has to be of type string"),
        ({"rows": [], "tags": [], "options": {"a": 1}}, "options.a is 1, and has to be of type string"),
    ],
)
def test_what_is_wrong_within_is_found(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        called(collect, arguments)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5
)
SCHEMA = tool_schema(find, "find", set())["function"]["parameters"]


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "more"]), plain))
def test_a_function_is_only_ever_called_with_what_its_hints_say(arguments: dict[str, Any]) -> None:
    if not list(violations(arguments, SCHEMA)):
        assert {"query", "num"} <= arguments.keys() <= SCHEMA["properties"].keys()
        kinds = {"query": str, "num": int, "unit": str, "near": (int, float), "exact": bool}
        assert all(isinstance(value, kinds[name]) for name, value in arguments.items())  # type: ignore[arg-type]
        find(**arguments)


def untyped(query) -> str:  # type: ignore[no-untyped-def]
    """Look."""
    return str(query)


def undescribed(query: str) -> str:
    return query


def odd(query: bytes) -> str:
    """Look."""
    return str(query)


def mixed(query: Literal[1, "a"]) -> str:
    """Look."""
    return str(query)


def anything(*query: str) -> str:
    """Look."""
    return str(query)


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (untyped, {}, "tool untyped, parameter query: every parameter of a tool needs a type"),
        (anything, {}, "tool anything, parameter query: every parameter of a tool needs a type"),
        (undescribed, {}, "tool undescribed: a tool needs a description for the model"),
        (odd, {}, "tool odd, parameter query: <class 'bytes'> has no JSON schema"),
        (mixed, {}, "has no JSON schema"),
        (read, {"rot": "a"}, 'tool read: the tool has no parameter rot\n  fix: did you mean "root"?'),
        (read, {"root": "a"}, "tool read: the tool needs the option depth\n  fix: options: {depth: ...}"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(
    function: Callable[..., Any], options: dict[str, Any], what: str
) -> None:
    with pytest.raises(AgentError) as caught:
        Tool(function, options)
    assert what in str(caught.value)


def test_what_the_configuration_gives_no_model_is_told() -> None:
    tool = Tool(read, {"root": "wiki", "depth": 1}, "open")
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["page"]
    assert asyncio.run(tool.call({"page": "Rome"})) == "wiki/Rome 1 3"
    with pytest.raises(ValueError, match="there is no limit; there are: page"):
        asyncio.run(tool.call({"page": "Rome", "limit": 9}))


def test_a_tool_may_be_a_coroutine() -> None:
    async def wait(query: str) -> str:
        """Wait."""
        await asyncio.sleep(0)
        return query

    assert called(wait, {"query": "a"}) == "a"
