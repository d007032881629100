"""One checked raw row of a source: chat messages, the correct answer, and other columns.

Nothing is repaired or guessed. A row that is not a prompt is a `BadRow` with file, row, column, the expected and the
actual value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.data import ColumnsConfig
from mrl.errors import BadRow, did_you_mean

ROLES = ("system", "user", "assistant", "tool")
ANSWERED_ROLES = ("user", "tool")
MAX_CHARACTERS = 1 << 20
_NEVER_NULL = ("prompt", "chosen", "rejected")
"""Columns that are always needed when they are read, so null is not suggested for them."""
GroundTruth = str | list[str] | dict[str, str | list[str]]
"""A text, a list of accepted texts, or `{"target": ...}` of either, as in question-answering data sets."""


def first_answer(truth: GroundTruth | None) -> str:
    """Return one text: the first of several that are right, or an empty text without a ground truth."""
    match truth:
        case dict():
            return first_answer(truth["target"])
        case list():
            return truth[0]
    return truth or ""


Message = dict[str, str]


@dataclass(frozen=True)
class PromptRow:
    """A row whose fields all have the right type."""

    messages: tuple[Message, ...]
    data_source: str
    ability: str | None
    ground_truth: GroundTruth | None
    extra_info: dict[str, Any]
    id: str | int | None
    where: str
    """File and row, for messages."""
    said: tuple[Message, ...] = ()
    """Messages after the prompt in a conversation to learn from. Empty if a model should answer."""
    is_ranked: bool = False
    """Whether each message in `said` is a separate response, best first."""
    labels: tuple[float, ...] = ()
    """Number of each ranked response, if given."""

    @property
    def responses(self) -> dict[str, tuple[Message, ...]]:
        """Return the possible continuations of the prompt, each learned separately, by their name in messages."""
        if not self.is_ranked:
            return {"answer": self.said} if self.said else {}
        names = (
            ["rejected response"]
            if len(self.said) == 2
            else [f"rejected response [{n}]" for n in range(len(self.said) - 1)]
        )
        return {name: (message,) for name, message in zip(["chosen response", *names], self.said, strict=True)}


ReadRow = Callable[[object, str], PromptRow]
"""Converts a raw row and its place to a prompt."""


def read_prompt(columns: ColumnsConfig, source_name: str, raw: object, where: str) -> PromptRow:
    """Return the row of a source, read by its column names. The data source comes from the row or is the source's
    name."""
    cells = Cells(raw, where)
    return PromptRow(
        messages=cells.messages(columns.prompt),
        ground_truth=cells.ground_truth(columns.ground_truth) if columns.ground_truth else None,
        extra_info=cells.extra_info(columns.extra_info) if columns.extra_info else {},
        **cells.names(columns, source_name),
    )


def describe(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return f"a value of type {type(value).__name__}"


class Cells:
    """Cells of one raw row. Each method returns a value of the right type or raises an error."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise BadRow(f"a row must be an object of columns, not {describe(raw)}", where=where)
        self.raw, self.where = raw, where

    def names(self, columns: ColumnsConfig, source_name: str) -> dict[str, Any]:
        """Return the fields that every row has in addition to its messages."""
        ability = columns.ability
        return {
            "data_source": self.text(columns.data_source, "data_source") if columns.data_source else source_name,
            "ability": self.text(ability, "ability") if ability and self.at(ability, "ability") is not None else None,
            "id": self.id(columns.id) if columns.id else None,
            "where": self.where,
        }

    def at(self, column: str, key: str) -> Any:
        value: Any = self.raw
        passed: list[str] = []
        for name in column.split("."):
            if not isinstance(value, Mapping):
                raise self.bad(".".join(passed), f"must be an object with `{name}`, not {describe(value)}")
            if name not in value:
                without = "" if key in _NEVER_NULL else ", or set it to null if not needed"
                fix = f"set columns.{key}{without} ({did_you_mean(column, _dotted_names(self.raw))})"
                raise BadRow(f"the column `{column}` does not exist", where=self.where, fix=fix)
            value = value[name]
            passed.append(name)
        return value

    def bad(self, column: str, what: str, fix: str = "") -> BadRow:
        return BadRow(f"column `{column}` {what}", where=self.where, fix=fix)

    def text(self, column: str, key: str) -> str:
        return self.text_of(self.at(column, key), column, key)

    def ground_truth(self, column: str) -> GroundTruth:
        value = self.at(column, "ground_truth")
        if isinstance(value, Mapping) and value.keys() == {"target"}:
            return {"target": self._answers(value["target"], f"{column}.target")}
        return self._answers(value, column)

    def _answers(self, value: Any, column: str) -> str | list[str]:
        if not isinstance(value, list):
            return self.text_of(value, column, "ground_truth")
        if not value:
            raise self.bad(column, "is an empty list, so no answer would be correct")
        return [self.text_of(item, f"{column}[{number}]", "prompt") for number, item in enumerate(value)]

    def text_of(self, value: Any, column: str, key: str) -> str:
        if not isinstance(value, str):
            fix = ""
            if isinstance(value, int | float) and not isinstance(value, bool):
                fix = f'write "{value}"'
            elif value is None and key not in _NEVER_NULL:
                fix = f"set columns.{key} to null if not needed"
            raise self.bad(column, f"must be text, not {describe(value)}", fix)
        self._check_text(value, column)
        if not value.strip():
            raise self.bad(column, "is blank")
        return value

    def extra_info(self, column: str) -> dict[str, Any]:
        value = self.at(column, "extra_info")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(column, f"must be an object, not {describe(value)}")
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:  # a UnicodeEncodeError is a ValueError
            raise self.bad(column, f"cannot be converted to JSON: {error}") from error
        return value

    def id(self, column: str) -> str | int:
        value = self.at(column, "id")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise self.bad(column, f"must be text or a whole number, not {describe(value)}")
        return value

    def messages(self, column: str) -> tuple[Message, ...]:
        value = self.at(column, "prompt")
        if isinstance(value, str):
            return ({"role": "user", "content": self.text(column, "prompt")},)
        if not isinstance(value, list):
            raise self.bad(column, f"must be a list of messages or text, not {describe(value)}")
        if not value:
            raise self.bad(column, "is an empty list, so there is nothing to answer")
        return self.prompt(tuple(self.message(item, f"{column}[{index}]") for index, item in enumerate(value)), column)

    def prompt(self, messages: tuple[Message, ...], column: str) -> tuple[Message, ...]:
        """Return these messages if the assistant can answer them. Otherwise raise an error."""
        if (num := sum(len(message["content"]) for message in messages)) > MAX_CHARACTERS:
            raise self.bad(column, f"has {num} characters in total; at most {MAX_CHARACTERS}")
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            raise self.bad(column, f"has no message of role user (roles: {', '.join(roles)})")
        if roles[-1] not in ANSWERED_ROLES:
            what = f"ends with a message of role {roles[-1]}, so there is nothing to answer"
            raise self.bad(column, what, f"the last message must be of role {' or '.join(ANSWERED_ROLES)}")
        return messages

    def message(self, message: object, place: str) -> Message:
        if not isinstance(message, dict):
            raise self.bad(place, f"must be an object with role and content, not {describe(message)}")
        for name in ("role", "content"):
            if name not in message:
                raise self.bad(place, f"has no {name}", did_you_mean(name, [str(key) for key in message]))
        role, content = message["role"], message["content"]
        if role not in ROLES:
            shown = f'"{role}"' if isinstance(role, str) else describe(role)
            raise self.bad(f"{place}.role", f"is {shown}", did_you_mean(str(role), ROLES))
        if isinstance(content, list):
            raise self.bad(f"{place}.content", "is a list of parts; mrl trains only on text")
        if not isinstance(content, str):
            raise self.bad(f"{place}.content", f"must be text, not {describe(content)}")
        self._check_text(content, f"{place}.content")
        if not content.strip():
            raise self.bad(f"{place}.content", "is blank")
        # A parquet column gives every message every key, with null for the missing ones.
        if extra := [key for key in message if key not in ("role", "content") and message[key] is not None]:
            raise self.bad(place, f"has `{extra[0]}`, which is not supported", "a message has only role and content")
        return {"role": role, "content": content}

    def _check_text(self, text: str, column: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise self.bad(column, f"has {len(text)} characters; at most {MAX_CHARACTERS}")
        if (at := text.find("\0")) >= 0:
            raise self.bad(column, f"contains the character NUL at position {at}", "remove it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"contains half of a surrogate pair (U+{ord(text[error.start]):04X}) at position {error.start}"
            raise self.bad(column, what, "the text was cut inside a character or escaped incorrectly") from error


def _dotted_names(raw: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the columns of a row, including nested ones, with dots."""
    names = []
    for name, value in raw.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            names += _dotted_names(value, f"{prefix}{name}.")
    return names
