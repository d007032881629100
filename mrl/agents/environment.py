"""What an environment is given and what it answers: the types that a user meets, all of plain data.

Environments run in processes of their own. What crosses is JSON, so fields hold text, finite numbers, lists and
dictionaries only; what is built of anything else is refused where it is built.
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


@dataclass(frozen=True, kw_only=True)
class _Plain:
    def __post_init__(self) -> None:
        kind = type(self).__name__
        try:
            json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentError(f"{kind} is not plain data: {error}", fix="text, finite numbers, lists, dicts") from error


@dataclass(frozen=True, kw_only=True)
class Task(_Plain):
    """What a conversation is about: a row of the data."""

    messages: Sequence[Message]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    uid: str = ""
    """Of the prompt: the conversations of a group share it, and their tasks differ in `sample` and `seed`."""
    sample: int = 0
    seed: int = 0
    """For the environment's own dice: the same whenever and wherever this conversation takes place."""


@dataclass(frozen=True, kw_only=True)
class Start(_Plain):
    """How the conversation begins; as the answer to a turn, how a segment with a context of its own does.

    What the model read and wrote before is no part of that context, but of the conversation: each segment is trained
    on behind what stood before it, and all of them have the conversation's score.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Schemas for the chat template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages or not all(_is_message(message) for message in self.messages):
            raise AgentError("Start.messages is no list of messages", fix='[{"role": "user", "content": "..."}]')


@dataclass(frozen=True, kw_only=True)
class ToolCall(_Plain):
    """A tool that the model calls; one with a `problem` must not be executed, and has no arguments."""

    name: str
    arguments: Mapping[str, Any] | None = None
    problem: str = ""
    """What is wrong with it, in words for the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.arguments is None) != bool(self.problem):
            raise AgentError(f"the call of {self.name!r} has both arguments and a problem, or neither")


@dataclass(frozen=True, kw_only=True)
class Turn(_Plain):
    number: int
    """From 0."""
    text: str
    """Without the token that ends the turn; other control tokens that the model wrote are there."""
    calls: Sequence[ToolCall]
    ended: Literal["stop", "length"]
    """`length`: it was cut off by a limit, and none of its calls may be executed."""
    left_turns: int
    left_tokens: int
    num_read: int = 0
    """How many tokens the model had before it."""
    num_written: int = 0


@dataclass(frozen=True, kw_only=True)
class _Scored(_Plain):
    score: float | None = None
    """Part of the conversation's score; where all of them are None, the reward functions score alone."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """More numbers by name, for the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in {"score": self.score, **self.parts}.items():
            if not isinstance(value, int | float) and (value is not None or name != "score"):
                raise AgentError(f"{type(self).__name__}: {name} is {value!r:.40}, not a number")


@dataclass(frozen=True, kw_only=True)
class Observation(_Scored):
    """What the environment answers, after which it is the model's turn."""

    results: Sequence[str] = field(default_factory=list)
    """Of the turn's calls, in their order; all of them, or none."""
    text: str = ""
    """What it says beside: a message of the user, or text as it is where the format knows no roles."""
    segment: int | None = None
    """Which of several segments goes on, by their number from 0; None is that of the turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.results, str) or not all(isinstance(text, str) for text in (*self.results, self.text)):
            raise AgentError("an Observation is not of text", fix='results=["...", ...], text="..."')
        if not self.results and not self.text:
            raise AgentError("an Observation says nothing", fix="results or text, or Done where nothing is to be said")


@dataclass(frozen=True, kw_only=True)
class Done(_Scored):
    final: str = ""
    """What there is to say of it, for who reads the conversation; the model never does."""


Answer = Observation | Done | Start
"""What an environment says to a turn."""


class Environment(ABC):
    """The world of one conversation; a class of yours is made with `agent.options` as its keywords.

    What `step` raises is a failure of the environment: the conversation is tried again or left out, never scored 0.
    What the model did wrong is an `Observation` that tells it, or `Done` with a score. Methods may be `async def`:
    while one waits, other conversations of its process go on.
    """

    def reset(self, task: Task) -> Start | Awaitable[Start]:
        """Begin the conversation; without a method of your own, with the prompt as the data has it."""
        return Start(messages=task.messages)

    @abstractmethod
    def step(self, turn: Turn) -> Answer | Awaitable[Answer]:
        """Answer a turn."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027  # not every environment has something to close
        """Give back what the conversation took; called once, however it ended."""


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Task, Start, Turn, Observation, Done)}


def to_json(value: Task | Start | Turn | Observation | Done) -> str:
    return json.dumps({"kind": type(value).__name__, **asdict(value)}, allow_nan=False)


def from_json(text: str | bytes) -> Task | Start | Turn | Observation | Done:
    """Return what `to_json` was given; an error where another process wrote something else."""
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        if kind is Turn:
            values["calls"] = [ToolCall(**call) for call in values["calls"]]
        found: Task | Start | Turn | Observation | Done = kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AgentError(f"{text[:60]!r} is no message of an environment: {error!r}") from error
    return found


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
