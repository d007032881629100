"""All conversations of a rollout: engines write turns, environments answer, and no conversation waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mrl.agents.client import Again, EnvironmentAnswer, EnvironmentClient, environment_pool
from mrl.agents.conversation import Conversation, Ids, WrittenTurn, derived_seed
from mrl.agents.environment import Answer, Done, Message, Observation, Start, Task, ToolCall, Turn
from mrl.agents.formats import calls_of, load_format
from mrl.agents.observation import Speaker, TurnTemplate
from mrl.config.agent import AgentConfig
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, template_options
from mrl.errors import AgentError
from mrl.events import Event, Retried, SampleSkipped, Warned
from mrl.rewards.outcome import Failure
from mrl.rollout.requests import Generated, GenerationRequest

Ended = Literal["done", "turns", "length", "stop"]
_HAS_SEGMENTS = (
    "continues with a new context: such a segment is a separate row, which is trained on "
    "with the score of its conversation; agent/segments/mean counts them"
)


@dataclass(frozen=True)
class Opening:
    row: int
    """Row in the batch."""
    key: str
    uid: str
    sample: int
    data_source: str
    prompt_ids: Ids
    seed: int
    max_tokens: int
    """Limit of all tokens after the prompt."""
    messages: Sequence[Message] = ()
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"conversation {self.uid}/{self.sample}"

    def task(self) -> Task:
        return Task(
            messages=self.messages,
            ground_truth=self.ground_truth,
            data_source=self.data_source,
            extra_info=self.extra_info,
            uid=self.uid,
            sample=self.sample,
            seed=derived_seed(self.seed, "environment"),
        )


@dataclass(eq=False)
class Dialog:
    """A conversation with everything known about it in addition to its tokens."""

    opening: Opening
    environment: str | None
    """Name of the environment that answers, or None."""
    prompt_text: str | None = None
    """Prompt, if the environment began with other messages than the data, or with tools."""
    segments: list[Conversation] = field(default_factory=list)
    """Segments; more than one if the environment switched to another context."""
    current: int = 0
    """Segment that the model is writing, or wrote last."""
    writers: list[int] = field(default_factory=list)
    """Segment of each turn."""
    calls: list[list[ToolCall]] = field(default_factory=list)
    """Calls of each turn."""
    said: list[str] = field(default_factory=list)
    """Texts of the turns and the observations, alternating."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that its environment offers."""
    score: float | None = None
    """Score of the conversation. If roles have their own scores, that of the first segment's role."""
    scores: dict[str, float] = field(default_factory=dict)
    """Score of each role, if roles have their own scores."""
    parts: dict[str, float] = field(default_factory=dict)
    environment_s: float = 0.0
    num_cut_characters: int = 0
    """Characters cut from observations that were too long."""
    num_escaped: int = 0
    """Control tokens and tags in observations, which were escaped."""
    attempts: int = 1
    failure: Failure | None = None
    home: int | None = None
    ticket: int = 0
    """Ticket of its environment's latest attempt."""

    @property
    def begun(self) -> Conversation:
        assert self.segments, "the environment has begun the conversation"
        return self.segments[self.current]

    @property
    def ended_conversation(self) -> Conversation:
        """Segment with the last turn of a conversation that has ended without failure."""
        assert self.begun.ended, "the conversation has ended without failure"
        return self.begun

    @property
    def other_segments(self) -> list[Conversation]:
        """All segments except the one with the last turn."""
        return [segment for at, segment in enumerate(self.segments) if at != self.current]

    @property
    def prompt_ids(self) -> Ids:
        """Tokens that the model read before the segment of its last turn; for a failed conversation, the data's
        prompt."""
        return self.begun.prompt_ids if self.segments else self.opening.prompt_ids

    def written(self) -> Iterator[tuple[Ids, WrittenTurn]]:
        """Yield the model's turns in order, across segments."""
        turns = [iter(segment.turns) for segment in self.segments]
        for at in self.writers:
            turn = next(turns[at])
            yield self.segments[at].response_ids[turn.start : turn.start + turn.length], turn


class Dialogs:
    """Drives the conversations of rollouts. Later turns are the follow-up requests of a fleet."""

    def __init__(
        self,
        config: AgentConfig,
        environments: EnvironmentClient[Dialog] | None,
        speakers: Mapping[str, Speaker],
        decode: Callable[[list[int]], str],
        write: Callable[[Event], None],
    ) -> None:
        """Use these environments. Without environments, a conversation is one turn."""
        self._config = config
        self._environments, self._speakers = environments, speakers
        self._decode, self._write = decode, write
        self.has_environments = environments is not None
        self.end_ids = {token for speaker in speakers.values() for token in speaker.end_ids}
        """Tokens that end a turn for any of the environments."""
        self._ready: list[GenerationRequest] = []
        self._writing: dict[str, Dialog] = {}
        self._ended: list[Dialog] = []
        self._segmented: set[str] = set()
        """Environments for which the warning about segments was written."""

    @property
    def _client(self) -> EnvironmentClient[Dialog]:
        assert self._environments is not None, "a conversation with an environment has a client"
        return self._environments

    def begin(self, openings: Sequence[Opening]) -> list[Dialog]:
        dialogs = [Dialog(opening, self._config.name_for(opening.data_source)) for opening in openings]
        for dialog in dialogs:
            if dialog.environment is None:
                self._converse(dialog, dialog.opening.prompt_ids, dialog.opening.max_tokens)
            else:
                dialog.ticket = self._client.begin(dialog, dialog.environment, dialog.opening.task())
        return dialogs

    def take(self) -> list[GenerationRequest]:
        for dialog, answer in self._client.answers() if self.has_environments else ():
            if isinstance(answer, Failure):
                self._failed(dialog, answer)
            elif isinstance(answer, Again):
                self._again(dialog, answer.why)
            else:
                self._answered(dialog, answer)
        ready, self._ready = self._ready, []
        return ready

    def arriving(self) -> Future[Any] | None:
        """Return a future that is done when an environment has answered. Return None if none is pending."""
        return self._client.arriving() if self.has_environments else None

    def written(self, generated: Generated) -> None:
        """Add a turn that an engine wrote, and request the environment's answer."""
        dialog = self._writing.pop(generated.key)
        num_read = len(dialog.begun.context_ids)
        dialog.begun.write(generated.token_ids, generated.log_probs, generated.finish, generated.token_versions())
        dialog.begun.routes = generated.stored_routes
        dialog.begun.sampling_mask = generated.sampling_mask
        dialog.writers.append(dialog.current)
        dialog.home = generated.replica
        if dialog.environment is None:
            self._end(dialog, generated.finish)
            return
        ids, speaker = generated.token_ids.tolist(), self._speakers[dialog.environment]
        dialog.said.append(self._decode(ids))
        text = self._decode(ids[:-1]) if ids[-1] in speaker.end_ids else dialog.said[-1]
        dialog.calls.append(calls_of(speaker.format, text, generated.finish, dialog.tools))
        turn = Turn(
            number=len(dialog.calls) - 1,
            text=text,
            calls=dialog.calls[-1],
            ended=generated.finish,
            left_turns=self._config.environments[dialog.environment].max_turns - len(dialog.calls),
            left_tokens=dialog.begun.room,
            num_read=num_read,
            num_written=len(ids),
        )
        self._client.step(dialog.ticket, dialog, turn)

    def ended(self) -> list[Dialog]:
        ended, self._ended = self._ended, []
        return ended

    def _answered(self, dialog: Dialog, answer: EnvironmentAnswer) -> None:
        dialog.environment_s += answer.seconds
        try:
            if dialog.segments:
                self._hear(dialog, answer.said)
            else:
                self._begin(dialog, answer.said)
        except AgentError as error:
            self._client.let_go(dialog.ticket, dialog)
            self._failed(dialog, Failure("bad_result", str(error), answer.seconds))

    def _begin(self, dialog: Dialog, answer: Answer) -> bool:
        """Begin a segment with the environment's messages. Return whether a turn fits after them.

        The first segment begins with the prompt of the data, unless the environment sends other messages.
        """
        if not isinstance(answer, Start):
            raise AgentError(
                f"the conversation begins with {type(answer).__name__}, not Start", where=dialog.environment or ""
            )
        dialog.tools = answer.tools
        opening, name, is_first = dialog.opening, dialog.environment or "", not dialog.segments
        if is_first and not answer.tools and list(answer.messages) == list(opening.messages):
            self._converse(dialog, opening.prompt_ids, opening.max_tokens, answer.role)
            return True
        text, ids = self._speakers[name].render(answer)
        longest = self._speakers[name].max_prompt_tokens
        if is_first and len(ids) > longest:
            what = f"the prompt has {len(ids)} tokens, including the environment's additions; at most {longest}"
            raise AgentError(what, where=f"agent.environments.{name}", fix="raise rollout.max_prompt_tokens")
        room = min(opening.max_tokens, longest + opening.max_tokens - len(ids))
        if room < 1:
            return False
        if is_first:
            dialog.prompt_text = text
        else:
            dialog.said.append(text)
            if name not in self._segmented and not answer.role:
                self._segmented.add(name)
                self._write(Warned("agent", f"environment {name} {_HAS_SEGMENTS}"))
        self._converse(dialog, np.asarray(ids, np.int32), room, answer.role)
        return True

    def _converse(self, dialog: Dialog, prompt_ids: Ids, max_tokens: int, role: str = "") -> None:
        opening, number = dialog.opening, len(dialog.segments)
        key, seed = f"{opening.key}.{number}" if number else opening.key, derived_seed(opening.seed, "segment", number)
        dialog.segments.append(Conversation(key, opening.uid, prompt_ids, max_tokens=max_tokens, seed=seed))
        dialog.segments[-1].role = role
        dialog.current = number
        self._request(dialog)

    def _hear(self, dialog: Dialog, answer: Answer) -> None:
        """Continue with the environment's answer, if a turn and enough room are left."""
        limits = self._config.environments[dialog.environment or ""]
        is_last = len(dialog.writers) >= limits.max_turns
        if not isinstance(answer, Start):
            dialog.parts |= answer.parts
            if answer.score is not None:
                dialog.score = (dialog.score or 0.0) + answer.score
        cut_off = dialog.begun.turns[-1].finish == "length"
        if isinstance(answer, Done):
            if answer.scores:
                _score_roles(dialog, answer.scores)
            self._end(dialog, "length" if cut_off else "done")
        elif is_last or not (
            self._begin(dialog, answer) if isinstance(answer, Start) else self._observe(dialog, answer)
        ):
            self._client.let_go(dialog.ticket, dialog)
            self._end(dialog, "turns" if is_last and not cut_off else "length")

    def _observe(self, dialog: Dialog, observation: Observation) -> bool:
        """Add an observation and request a turn after it. Return whether both fit."""
        at = dialog.current if observation.segment is None else observation.segment
        if not 0 <= at < len(dialog.segments):
            raise AgentError(
                f"the environment answers segment {at} of {len(dialog.segments)}", where=dialog.environment or ""
            )
        calls = dialog.calls[max(turn for turn, writer in enumerate(dialog.writers) if writer == at)]
        segment = dialog.segments[at]
        encoded = self._speakers[dialog.environment or ""].encode(segment, calls, observation)
        if encoded is None or len(encoded.ids) >= segment.room:
            return False
        dialog.said.append(encoded.text)
        dialog.num_cut_characters += encoded.num_cut_characters
        dialog.num_escaped += encoded.num_escaped
        dialog.current = at
        segment.observe(encoded.ids)
        self._request(dialog)
        return True

    def _request(self, dialog: Dialog) -> None:
        limit: int | None = None
        stops: tuple[str, ...] = ()
        if dialog.environment is not None:
            limit = self._config.environments[dialog.environment].max_turn_tokens
            stops = self._speakers[dialog.environment].format.stops
        request = dialog.begun.request(limit or dialog.begun.room)
        self._writing[request.key] = dialog
        self._ready.append(replace(request, home=dialog.home, stop=stops))

    def _end(self, dialog: Dialog, how: Ended) -> None:
        for segment in dialog.segments:
            segment.end(how)
        self._ended.append(dialog)

    def _failed(self, dialog: Dialog, failure: Failure) -> None:
        if dialog.attempts <= self._config.retries:
            dialog.attempts += 1
            self._again(dialog, f"{failure.kind}: {failure.detail}")
            return
        dialog.failure = replace(failure, attempts=dialog.attempts)
        self._write(SampleSkipped(dialog.opening.row, f"environment {failure.kind}", failure.detail))
        if self._config.on_failure == "stop":
            raise AgentError(
                f"the environment failed: {failure.kind}: {failure.detail}",
                where=dialog.opening.name,
                fix="correct the environment, or set agent.on_failure=drop to continue without such conversations",
            )
        self._ended.append(dialog)

    def _again(self, dialog: Dialog, reason: str) -> None:
        """Start a conversation again with the same seeds. An environment without random numbers answers the same."""
        self._write(Retried(dialog.opening.name, dialog.attempts, reason))
        dialog.segments, dialog.current, dialog.writers = [], 0, []
        dialog.score, dialog.scores, dialog.parts = None, {}, {}
        dialog.calls, dialog.said = [], []
        dialog.ticket = self._client.begin(dialog, dialog.environment or "", dialog.opening.task())


def _score_roles(dialog: Dialog, scores: Mapping[str, float]) -> None:
    """Set the score of each role. Raise an error unless these are the roles of the segments."""
    where, roles = dialog.environment or "", [segment.role for segment in dialog.segments]
    if "" in roles:
        what = f"Done.scores has a score for each role, but segment {roles.index('')} has no role"
        raise AgentError(what, where=where, fix='begin each segment with Start(messages=..., role="NAME")')
    unknown, missing = (sorted(names) for names in ({*scores} - {*roles}, {*roles} - {*scores}))
    if unknown or missing:
        lists = {"no segment has": unknown, "without a score are": missing}
        named = "; ".join(f"{what} {', '.join(names)}" for what, names in lists.items() if names)
        fix = f"score the roles of the segments: {', '.join(dict.fromkeys(roles))}"
        raise AgentError(f"Done.scores has other roles than the segments: {named}", where=where, fix=fix)
    if dialog.score is not None:
        what = f"Done.scores has a score for each role, but observations gave the conversation {dialog.score:g}"
        raise AgentError(what, where=where, fix="add these scores to those of the roles at the end")
    dialog.scores, dialog.score = {**scores}, scores[roles[0]]


def open_dialogs(
    config: Config, tokenizer: ChatTokenizer, write: Callable[[Event], None], stack: ExitStack
) -> Dialogs | None:
    """Return the driver of conversations with environments, whose processes end with the stack. Return None without
    environments."""
    if not config.agent.environments:
        return None
    template = None if config.data.raw_text else TurnTemplate(tokenizer, template_options(config.data))
    speakers = {
        name: Speaker(
            tokenizer,
            load_format(environment.format),
            template,
            max_tokens=environment.max_observation_tokens or config.rollout.max_response_tokens,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            where=f"agent.environments.{name}",
        )
        for name, environment in config.agent.environments.items()
    }
    environments: EnvironmentClient[Dialog] = EnvironmentClient(environment_pool(config.agent), write)
    stack.callback(environments.close)
    return Dialogs(config.agent, environments, speakers, tokenizer.decode, write)


def has_stops(config: AgentConfig) -> bool:
    return any(load_format(environment.format).stops for environment in config.environments.values())
