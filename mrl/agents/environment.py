"""The interface of environments: the types that users work with, all of plain data.

Environments run in separate processes and communicate in JSON, so fields contain only text, finite numbers, lists and
dictionaries. An object with other values raises an error when it is created.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mrl.errors import AgentError

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, as chat templates read it."""


_MAX_ROLE_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class _Plain:
    def __post_init__(self) -> None:
        kind = type(self).__name__
        try:
            json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentError(
                f"{kind} is not plain data: {error}", fix="use only text, finite numbers, lists and dicts"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Task(_Plain):
    """Subject of a conversation: a row of the data."""

    messages: Sequence[Message]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    uid: str = ""
    """Id of the prompt. The conversations of a group share it; their tasks differ in `sample` and `seed`."""
    sample: int = 0
    seed: int = 0
    """Seed for the environment's random numbers, the same in every run of this conversation."""


@dataclass(frozen=True, kw_only=True)
class Start(_Plain):
    """Beginning of a conversation or, as the answer to a turn, of a segment with its own context.

    Earlier text is not part of that context, but of the conversation. Each segment is trained on with the context that
    preceded it, and all segments get the conversation's score, unless their roles have their own.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Tool schemas for the chat template."""
    role: str = ""
    """Name of the player or agent who writes the segment; empty if the conversation has no roles. Several segments may
    have the same role."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.role, str) or len(self.role) > _MAX_ROLE_LENGTH or not self.role.isprintable():
            what = f"Start.role is {self.role!r:.60}, not a printable text of at most {_MAX_ROLE_LENGTH} characters"
            raise AgentError(what, fix='role="first"')
        if not self.messages or not all(_is_message(message) for message in self.messages):
            raise AgentError("Start.messages is not a list of messages", fix='[{"role": "user", "content": "..."}]')


@dataclass(frozen=True, kw_only=True)
class ToolCall(_Plain):
    """A tool call of the model. A call with a `problem` must not be executed, and has no arguments."""

    name: str
    arguments: Mapping[str, Any] | None = None
    problem: str = ""
    """Problem of the call, worded for the model."""
    id: str = ""
    """Identifier of the call, if its result must repeat it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.arguments is None) != bool(self.problem):
            raise AgentError(f"the call of {self.name!r} has both arguments and a problem, or neither")


@dataclass(frozen=True, kw_only=True)
class Turn(_Plain):
    number: int
    """Number of the turn, from 0."""
    text: str
    """Text without the token that ends the turn. Other control tokens that the model wrote are included."""
    calls: Sequence[ToolCall]
    ended: Literal["stop", "length"]
    """`length`: the turn was cut off by a limit, and none of its calls may be executed."""
    left_turns: int
    left_tokens: int
    num_read: int = 0
    """Number of tokens that the model read before the turn."""
    num_written: int = 0


@dataclass(frozen=True, kw_only=True)
class _Scored(_Plain):
    score: float | None = None
    """Part of the conversation's score. If all parts are None, only the reward functions score."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """More numbers by name, for the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in {"score": self.score, **self.parts}.items():
            if not isinstance(value, int | float) and (value is not None or name != "score"):
                raise AgentError(f"{type(self).__name__}: {name} is {value!r:.40}, not a number")


@dataclass(frozen=True, kw_only=True)
class Observation(_Scored):
    """Answer of the environment. The model's next turn follows."""

    results: Sequence[str] = field(default_factory=list)
    """Results of the turn's calls, in their order: all or none."""
    text: str = ""
    """Additional text: a user message, or plain text if the format has no roles."""
    segment: int | None = None
    """Segment that continues, counted from 0. None is the segment of the turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.results, str) or not all(isinstance(text, str) for text in (*self.results, self.text)):
            raise AgentError("an Observation must contain text", fix='results=["...", ...], text="..."')
        if not self.results and not self.text:
            raise AgentError("an Observation is empty", fix="set results or text, or return Done")


@dataclass(frozen=True, kw_only=True)
class Done(_Scored):
    final: str = ""
    """Final text for people who read the conversation. The model never reads it."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Score of each role that has a segment, in place of a score of the conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for role, value in self.scores.items():
            if not isinstance(value, int | float):
                raise AgentError(f"Done: the score of role {role!r:.40} is {value!r:.40}, not a number")
        if self.scores and self.score is not None:
            what = f"Done has both score={self.score:g} and scores of {', '.join(self.scores)}"
            raise AgentError(what, fix="set score if all roles share it, or scores if each has its own")


Answer = Observation | Done | Start
"""Answer of an environment to a turn."""


class Environment(ABC):
    """The world of one conversation. Your own class gets its `options` as keywords.

    An exception in `step` is a failure of the environment: the conversation is retried or left out, never scored 0. A
    mistake of the model is an `Observation` that explains it, or `Done` with a score. Methods may be `async def`: while
    one waits, other conversations of its process continue.
    """

    def reset(self, task: Task) -> Start | Awaitable[Start]:
        """Begin the conversation. By default, it begins with the prompt of the data."""
        return Start(messages=task.messages)

    @abstractmethod
    def step(self, turn: Turn) -> Answer | Awaitable[Answer]:
        """Answer a turn."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027  # not every environment has something to close
        """Release the resources of the conversation. Called once, however it ended."""


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Task, Start, Turn, Observation, Done)}


def to_json(value: Task | Start | Turn | Observation | Done) -> str:
    return json.dumps({"kind": type(value).__name__, **asdict(value)}, allow_nan=False)


def from_json(text: str | bytes) -> Task | Start | Turn | Observation | Done:
    """Parse a message written by `to_json`. Raise an error for anything else."""
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        if kind is Turn:
            values["calls"] = [ToolCall(**call) for call in values["calls"]]
        message: Task | Start | Turn | Observation | Done = kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AgentError(f"{text[:60]!r} is not a message of an environment: {error!r}") from error
    return message


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
