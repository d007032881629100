"""All conversations of a rollout: engines write turns, environments answer them, and nobody waits for anybody else."""

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
    "goes on behind another context than what was said before: such a segment is a row of its own, which is trained on "
    "with the score of its conversation; agent/segments/mean counts them"
)


@dataclass(frozen=True)
class Opening:
    row: int
    """Of the batch."""
    key: str
    uid: str
    sample: int
    data_source: str
    prompt_ids: Ids
    seed: int
    max_tokens: int
    """Of everything behind the prompt."""
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
    """A conversation with what there is to know of it beside its tokens."""

    opening: Opening
    environment: str | None
    """Which of the environments answers; None where nobody does."""
    prompt_text: str | None = None
    """Where the environment has begun with other messages than the data, or with tools."""
    segments: list[Conversation] = field(default_factory=list)
    """More than one where the environment has begun with another context in between."""
    current: int = 0
    """Which of the segments the model writes, or has written last."""
    writers: list[int] = field(default_factory=list)
    """Which segment has each turn."""
    calls: list[list[ToolCall]] = field(default_factory=list)
    """Of each turn."""
    said: list[str] = field(default_factory=list)
    """What the model wrote in each turn, and what it was answered, by turns."""
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    environment_s: float = 0.0
    num_cut_characters: int = 0
    """Of observations that were too long."""
    num_escaped: int = 0
    """Control tokens and tags that observations held."""
    attempts: int = 1
    failure: Failure | None = None
    home: int | None = None
    ticket: int = 0
    """Of its environment's last attempt."""

    @property
    def begun(self) -> Conversation:
        assert self.segments, "its environment has begun it"
        return self.segments[self.current]

    @property
    def ended_conversation(self) -> Conversation:
        """The conversation of one that has not failed, as it ended: the segment with its last turn."""
        assert self.begun.ended, "it is over, and has not failed"
        return self.begun

    @property
    def other_segments(self) -> list[Conversation]:
        """All segments but that with the last turn."""
        return [segment for at, segment in enumerate(self.segments) if at != self.current]

    @property
    def prompt_ids(self) -> Ids:
        """What the model has read before its last turn's segment: of a failed one, the prompt of the data."""
        return self.begun.prompt_ids if self.segments else self.opening.prompt_ids

    def written(self) -> Iterator[tuple[Ids, WrittenTurn]]:
        """Yield what the model wrote, turn by turn, whichever segments they are in."""
        turns = [iter(segment.turns) for segment in self.segments]
        for at in self.writers:
            turn = next(turns[at])
            yield self.segments[at].response_ids[turn.start : turn.start + turn.length], turn


class Dialogs:
    """Drive the conversations of one rollout after another; their turns are the follow-ups that a fleet asks for."""

    def __init__(
        self,
        config: AgentConfig,
        environments: EnvironmentClient[Dialog] | None,
        speakers: Mapping[str, Speaker],
        decode: Callable[[list[int]], str],
        write: Callable[[Event], None],
    ) -> None:
        """Speak with these environments, or with nobody: a conversation is one turn then."""
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
        """Environments of which it has been said that they have segments."""

    @property
    def _client(self) -> EnvironmentClient[Dialog]:
        assert self._environments is not None, "a conversation that names an environment has one"
        return self._environments

    def begin(self, openings: Sequence[Opening]) -> list[Dialog]:
        dialogs = [Dialog(each, self._config.name_for(each.data_source)) for each in openings]
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
        """Return what is done when an environment has answered; None where none is asked."""
        return self._client.arriving() if self.has_environments else None

    def written(self, generated: Generated) -> None:
        """Add a turn that an engine wrote, and ask its environment for an answer."""
        dialog = self._writing.pop(generated.key)
        num_read = len(dialog.begun.context_ids)
        dialog.begun.write(generated.token_ids, generated.log_probs, generated.finish, generated.token_versions())
        dialog.writers.append(dialog.current)
        dialog.home = generated.replica
        if dialog.environment is None:
            self._end(dialog, generated.finish)
            return
        ids, speaker = generated.token_ids.tolist(), self._speakers[dialog.environment]
        dialog.said.append(self._decode(ids))
        text = self._decode(ids[:-1]) if ids[-1] in speaker.end_ids else dialog.said[-1]
        dialog.calls.append(calls_of(speaker.format, text, generated.finish))
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

    def _begin(self, dialog: Dialog, said: Answer) -> bool:
        """Begin a segment with what the environment says; return whether a turn fits behind it.

        The first begins with the prompt of the data, where the environment says nothing else.
        """
        if not isinstance(said, Start):
            raise AgentError(f"it begins with {type(said).__name__}, not Start", where=dialog.environment or "")
        opening, name, is_first = dialog.opening, dialog.environment or "", not dialog.segments
        if is_first and not said.tools and list(said.messages) == list(opening.messages):
            self._converse(dialog, opening.prompt_ids, opening.max_tokens)
            return True
        text, ids = self._speakers[name].render(said)
        longest = self._speakers[name].max_prompt_tokens
        if is_first and len(ids) > longest:
            what = f"the prompt has {len(ids)} tokens with what the environment adds; at most {longest}"
            raise AgentError(what, where=f"agent.environments.{name}", fix="raise rollout.max_prompt_tokens")
        room = min(opening.max_tokens, longest + opening.max_tokens - len(ids))
        if room < 1:
            return False
        if is_first:
            dialog.prompt_text = text
        else:
            dialog.said.append(text)
            if name not in self._segmented:
                self._segmented.add(name)
                self._write(Warned("agent", f"environment {name} {_HAS_SEGMENTS}"))
        self._converse(dialog, np.asarray(ids, np.int32), room)
        return True

    def _converse(self, dialog: Dialog, prompt_ids: Ids, max_tokens: int) -> None:
        opening, number = dialog.opening, len(dialog.segments)
        key, seed = f"{opening.key}.{number}" if number else opening.key, derived_seed(opening.seed, "segment", number)
        dialog.segments.append(Conversation(key, opening.uid, prompt_ids, max_tokens=max_tokens, seed=seed))
        dialog.current = number
        self._request(dialog)

    def _hear(self, dialog: Dialog, said: Answer) -> None:
        """Go on with what the environment answers, where there is a turn left and room for it."""
        limits = self._config.environments[dialog.environment or ""]
        is_last = len(dialog.writers) >= limits.max_turns
        if not isinstance(said, Start):
            dialog.parts |= said.parts
            if said.score is not None:
                dialog.score = (dialog.score or 0.0) + said.score
        cut_off = dialog.begun.turns[-1].finish == "length"
        if isinstance(said, Done):
            self._end(dialog, "length" if cut_off else "done")
        elif is_last or not (self._begin(dialog, said) if isinstance(said, Start) else self._observe(dialog, said)):
            self._client.let_go(dialog.ticket, dialog)
            self._end(dialog, "turns" if is_last and not cut_off else "length")

    def _observe(self, dialog: Dialog, said: Observation) -> bool:
        """Add an observation and ask for a turn behind it; return whether both fit."""
        at = dialog.current if said.segment is None else said.segment
        if not 0 <= at < len(dialog.segments):
            raise AgentError(f"it answers segment {at} of {len(dialog.segments)}", where=dialog.environment or "")
        calls = dialog.calls[max(turn for turn, writer in enumerate(dialog.writers) if writer == at)]
        segment = dialog.segments[at]
        encoded = self._speakers[dialog.environment or ""].encode(segment, calls, said)
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
                fix="mend the environment, or agent.on_failure=drop to go on without such conversations",
            )
        self._ended.append(dialog)

    def _again(self, dialog: Dialog, why: str) -> None:
        """Begin a conversation anew with the same seeds: environments that do not throw dice answer the same."""
        self._write(Retried(dialog.opening.name, dialog.attempts, why))
        dialog.segments, dialog.current, dialog.writers = [], 0, []
        dialog.score, dialog.parts = None, {}
        dialog.calls, dialog.said = [], []
        dialog.ticket = self._client.begin(dialog, dialog.environment or "", dialog.opening.task())


def open_dialogs(
    config: Config, tokenizer: ChatTokenizer, write: Callable[[Event], None], stack: ExitStack
) -> Dialogs | None:
    """Return what drives conversations with environments, whose processes end with the stack; None without any."""
    if not config.agent.environments:
        return None
    template = None if config.data.raw_text else TurnTemplate(tokenizer, template_options(config.data))
    speakers = {
        name: Speaker(
            tokenizer,
            load_format(each.format),
            template,
            max_tokens=each.max_observation_tokens or config.rollout.max_response_tokens,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            where=f"agent.environments.{name}",
        )
        for name, each in config.agent.environments.items()
    }
    environments: EnvironmentClient[Dialog] = EnvironmentClient(environment_pool(config.agent), write)
    stack.callback(environments.close)
    return Dialogs(config.agent, environments, speakers, tokenizer.decode, write)


def has_stops(config: AgentConfig) -> bool:
    return any(load_format(each.format).stops for each in config.environments.values())
