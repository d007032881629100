"""The environment `program`: an external agent, which reaches its model at an OpenAI-compatible address.

Each of its requests to the model is a turn. Messages that it adds after an earlier turn are observations. If it
continues from anything else, such as a shortened or summarized history or a second agent's, a new segment begins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.agents.chat_completion import text_of
from mrl.agents.chat_server import MODEL, ChatRequest, ChatServer, Session
from mrl.agents.environment import Answer, Done, Environment, Message, Observation, Start, Task, Turn
from mrl.agents.program_process import ProgramProcess
from mrl.errors import AgentError

_TASK_VARIABLE = "MRL_TASK"
_DECIDED_BY_RUN = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "max_completion_tokens"), None),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "reasoning_effort", "top_logprobs"), None),
    "n": 1,
    "logprobs": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
"""Parameters that the run decides or leaves to the model, ignoring the client's value, with the values that are not
counted as overridden."""
_SERVER = ChatServer()


class Program(Environment):
    """Runs a command for each conversation, with `OPENAI_BASE_URL`, `OPENAI_API_KEY` and the task in its environment.

    The conversation ends with the command. An exit status other than 0 is a failure. The command reports its score by a
    POST of `{"score": 1.0}` to `$OPENAI_BASE_URL/score`; otherwise reward functions score what was written. Parts
    `overridden/NAME` are 1 for parameters that it requested but the run decides: temperature, seed, n and the like.
    """

    def __init__(self, command: Sequence[str], models: Sequence[str] = (MODEL,)) -> None:
        """Run this command, whose first word is searched in PATH. It calls its model by one of these names."""
        if isinstance(command, str) or not command:
            raise AgentError("a command must be a list of words", where="options.command", fix="[python, -m, my_agent]")
        if isinstance(models, str) or not models:
            raise AgentError("models must be a list of names", where="options.models", fix=f"[{MODEL}]")
        self._command, self._models = list(command), list(models)
        self._process: ProgramProcess | None = None
        self._session: Session | None = None
        self._pending: ChatRequest | None = None
        self._segments: list[_Segment] = []
        self._current = 0
        """Segment whose turn was requested."""
        self._overridden: set[str] = set()

    async def reset(self, task: Task) -> Start:
        self._session, address = await _SERVER.open(self._models)
        row = {"messages": list(task.messages), "ground_truth": task.ground_truth, "data_source": task.data_source}
        details = {"extra_info": dict(task.extra_info), "uid": task.uid, "sample": task.sample, "seed": task.seed}
        access = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": self._session.key}
        variables = {**access, _TASK_VARIABLE: json.dumps(row | details)}
        self._process = await ProgramProcess.start(self._command, variables, self._session.key)
        request = await self._next()
        if request is None:
            raise AgentError("the program ended before its first request", where=self._command[0])
        started = self._answer(request)
        assert isinstance(started, Start), "the first answer begins a segment"
        return started

    async def step(self, turn: Turn) -> Answer:
        assert self._pending is not None, "the program has requested this turn"
        assert self._session is not None, "the program has started"
        written = self._segments[self._current].written = _message(turn)
        self._pending.answer(_completion(turn, written, self._pending.body.get("model", "")))
        request = await self._next()
        if request is None:
            parts = {**self._session.parts, **{f"overridden/{name}": 1.0 for name in sorted(self._overridden)}}
            return Done(score=self._session.score, parts=parts)
        return self._answer(request)

    async def close(self) -> None:
        if self._session is not None:
            _SERVER.close(self._session)
        if self._pending is not None:
            self._pending.refuse(409, "the conversation is over")
        if self._process is not None:
            await self._process.close()

    async def _next(self) -> ChatRequest | None:
        """Return the program's next request. Return None if the program has ended successfully."""
        assert self._process is not None, "the program has started"
        assert self._session is not None, "the program has started"
        asked, ended = asyncio.ensure_future(self._session.requests.get()), self._process.ended
        try:
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                status, last_words = ended.result()
                if status:
                    raise AgentError(f"the program exited with status {status}: {last_words or 'no output'}")
                return None
            request = asked.result()
        finally:
            asked.cancel()
        self._overridden |= {
            name for name, usual in _DECIDED_BY_RUN.items() if request.body.get(name) not in (None, usual)
        }
        return request

    def _answer(self, request: ChatRequest) -> Start | Observation:
        """Return the messages that the program adds after a turn, of the segment with the longest common history, or
        the start of a segment.

        The program gets one answer at a time, even if it sends several requests at once.
        """
        self._pending, messages, tools = request, _messages(request), request.body.get("tools") or []
        continued = {at: segment.added(messages, tools) for at, segment in enumerate(self._segments)}
        continuing = [at for at, added in continued.items() if added]
        if not continuing:
            self._segments.append(_Segment(messages, tools))
            self._current = len(self._segments) - 1
            return Start(messages=messages, tools=tools)
        self._current = at = max(continuing, key=lambda at: len(self._segments[at].messages))
        self._segments[at].messages = messages
        added = continued[at]
        results = [str(message["content"]) for message in added if message["role"] == "tool"]
        text = "".join(str(message["content"]) for message in added if message["role"] == "user")
        return Observation(results=results, text=text, segment=at)


@dataclass(eq=False)
class _Segment:
    messages: list[Message]
    tools: list[Mapping[str, Any]]
    written: Message | None = None

    def added(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> list[Message]:
        """Return the answer to the turn: a tool message for each call, in their order, and at most one user message.
        Return nothing if these messages do not continue this segment in that way."""
        num = len(self.messages)
        if self.written is None or tools != self.tools or messages[:num] != self.messages:
            return []
        turn, added = messages[num : num + 1], messages[num + 1 :]
        if not turn or not _is_same(turn[0], self.written):
            return []
        calls = [call["id"] for call in self.written.get("tool_calls") or ()]
        results = [message.get("tool_call_id") for message in added if message["role"] == "tool"]
        roles, tools_first = [message["role"] for message in added], ["tool"] * len(results)
        is_answer = results in (calls, []) and roles in (tools_first, [*tools_first, "user"])
        return added if is_answer else []


def _messages(request: ChatRequest) -> list[Message]:
    return [_as_template_reads(message) for message in request.body["messages"]]


def _as_template_reads(message: Mapping[str, Any]) -> Message:
    """Return a client's message with plain text content, parsed arguments, and a role that templates support."""
    converted = {**message, "content": text_of(message.get("content"))}
    if message["role"] == "developer":
        converted["role"] = "system"
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
    return converted


def _function(called: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**called, "arguments": json.loads(called["arguments"])}
    except (KeyError, TypeError, ValueError, RecursionError):
        return called  # unchanged: the model did not write JSON


def _message(turn: Turn) -> Message:
    """Return a turn in the form that clients expect: valid calls separately, everything else as written."""
    calls = [call for call in turn.calls if call.arguments is not None]
    if len(calls) < len(turn.calls) or not calls:
        return {"role": "assistant", "content": turn.text}
    listed = [
        {
            "id": f"call{turn.number:03}{at:02}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for at, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def _completion(turn: Turn, message: Message, model: str) -> dict[str, Any]:
    finish = "length" if turn.ended == "length" else "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": dict(message), "finish_reason": finish}
    read, written = turn.num_read, turn.num_written
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    header = {"id": f"turn-{turn.number}", "object": "chat.completion", "created": 0, "model": model}
    return {**header, "choices": [choice], "usage": usage}


def _is_same(message: Message, written: Message) -> bool:
    """Return whether a client's message repeats the turn that the model wrote."""
    ids = [[call["id"] for call in turn.get("tool_calls") or ()] for turn in (message, written)]
    return (
        message["role"] == "assistant"
        and ids[0] == ids[1]
        and (bool(ids[0]) or message["content"] == written["content"])
    )
