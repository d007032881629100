"""The environment `program`: an agent that nobody here wrote, which finds its model at an OpenAI-compatible address.

What it asks of the model is a turn of one conversation: messages that it adds are the environment's answer. It may not
change what was said before, for that would be another conversation than the one that is trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.agents.chat_server import ChatRequest, ChatServer, Session
from mrl.agents.environment import Done, Environment, Message, Observation, Start, Task, Turn
from mrl.errors import AgentError

_TASK_VARIABLE = "MRL_TASK"
_OURS = ("temperature", "top_p", "top_k", "n", "seed", "stop", "max_tokens", "max_completion_tokens", "logprobs")
"""What the run decides, whatever a client asks for."""
_MAX_SAID_BYTES = 2000
_SERVER = ChatServer()


class Program(Environment):
    """Runs a command for each conversation, with `OPENAI_BASE_URL`, `OPENAI_API_KEY` and the task in its environment.

    Its end ends the conversation; a status other than 0 is a failure. It scores itself by a POST of `{"score": 1.0}` to
    `$OPENAI_BASE_URL/score`, or reward functions score what was written. The part `overridden` counts the parameters
    that it asked for and the run decides: temperature, seed, n and the like.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Run this command, whose first word is found in PATH."""
        if isinstance(command, str) or not command:
            raise AgentError("a command is a list of words", where="options.command", fix="[python, -m, my_agent]")
        self._command = list(command)
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Future[str] | None = None
        """Done with the last words of the program, when it has ended."""
        self._session: Session | None = None
        self._pending: ChatRequest | None = None
        self._messages: list[Message] = []
        self._overridden: set[str] = set()

    async def reset(self, task: Task) -> Start:
        self._session, address = await _SERVER.open()
        told = {"messages": list(task.messages), "ground_truth": task.ground_truth, "data_source": task.data_source}
        more = {"extra_info": dict(task.extra_info), "uid": task.uid, "sample": task.sample, "seed": task.seed}
        named = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": self._session.key}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **named, _TASK_VARIABLE: json.dumps(told | more)},
            start_new_session=True,
        )
        self._end = asyncio.ensure_future(_last_words(self._process))
        request = await self._next()
        if request is None:
            raise AgentError("the program ended before it asked anything", where=self._command[0])
        self._pending, self._messages = request, _messages(request)
        return Start(messages=self._messages, tools=request.body.get("tools") or [])

    async def step(self, turn: Turn) -> Observation | Done:
        assert self._pending is not None, "it has asked for this turn"
        assert self._session is not None, "it has begun"
        message = _message(turn)
        self._pending.answer(_completion(turn, message, self._pending.body.get("model", "")))
        request = await self._next()
        if request is None:
            parts = {**self._session.parts, "overridden": float(len(self._overridden))}
            return Done(score=self._session.score, parts=parts, final=_said_of(self._overridden))
        self._pending = request
        return self._observation(message, _messages(request))

    async def close(self) -> None:
        if self._session is not None:
            _SERVER.close(self._session)
        if self._pending is not None:
            self._pending.refuse(409, "the conversation is over")
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _next(self) -> ChatRequest | None:
        """Return what the program asks next; None where it has ended well."""
        assert self._process is not None, "it has begun"
        assert self._session is not None, "it has begun"
        assert self._end is not None, "it has begun"
        asked = asyncio.ensure_future(self._session.requests.get())
        try:
            awaited: set[asyncio.Future[Any]] = {asked, self._end}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                if status := self._process.returncode:
                    raise AgentError(f"the program left with status {status}: {self._end.result() or 'no word'}")
                return None
            request = asked.result()
        finally:
            asked.cancel()
        self._overridden |= {name for name in _OURS if request.body.get(name) is not None}
        return request

    def _observation(self, written: Message, messages: list[Message]) -> Observation:
        """Return what the program adds behind the turn; refuse one that has changed what stood before."""
        before, added = messages[: len(self._messages)], messages[len(self._messages) + 1 :]
        turn = messages[len(self._messages) : len(self._messages) + 1]
        if before != self._messages or not turn or not _is_same(turn[0], written):
            assert self._pending is not None, "it has just asked"
            at = next(
                (at for at, pair in enumerate(zip(before, self._messages, strict=False)) if pair[0] != pair[1]),
                len(before),
            )
            what = f"message {at} is another than it was: a conversation is continued, and not rewritten"
            self._pending.refuse(409, what)
            raise AgentError(what, where=self._command[0])
        self._messages = messages
        results = {
            str(message.get("tool_call_id")): str(message["content"]) for message in added if message["role"] == "tool"
        }
        texts = [str(message["content"]) for message in added if message["role"] == "user"]
        calls = [call["id"] for call in written.get("tool_calls") or ()]
        if len(results) + len(texts) != len(added) or len(texts) > 1 or (results and list(results) != calls):
            roles = ", ".join(str(message["role"]) for message in added)
            what = f"behind a turn with {len(calls)} calls come {roles or 'no messages'}: one tool message for each "
            raise AgentError(what + "call in their order, and one of the user at most", where=self._command[0])
        return Observation(results=list(results.values()), text="".join(texts))


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """Wait for the end of a process, and return the end of what it said."""
    assert process.stderr is not None, "it has a pipe"
    said = b""
    while more := await process.stderr.read(1 << 16):
        said = (said + more)[-_MAX_SAID_BYTES:]
    await process.wait()
    return said.decode(errors="replace").strip()


def _messages(request: ChatRequest) -> list[Message]:
    messages = request.body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        request.refuse(400, "there is no list of messages")
        raise AgentError("the program asked without messages")
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: Any) -> str:
    """Return a message's text, of which clients make a list of parts as well."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _message(turn: Turn) -> Message:
    """Return a turn as clients know it: calls that can be read apart, everything else as it was written."""
    calls = [call for call in turn.calls if call.arguments is not None]
    if len(calls) < len(turn.calls) or not calls:
        return {"role": "assistant", "content": turn.text}
    listed = [
        {
            "id": f"call_{turn.number}_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for at, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def _completion(turn: Turn, message: Message, model: str) -> dict[str, Any]:
    finish = "length" if turn.ended == "length" else "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": dict(message), "finish_reason": finish}
    return {"id": f"turn-{turn.number}", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}


def _is_same(message: Message, written: Message) -> bool:
    """Return whether this is the turn that the model wrote, as a client repeats it."""
    ids = [[call["id"] for call in each.get("tool_calls") or ()] for each in (message, written)]
    return (
        message["role"] == "assistant"
        and ids[0] == ids[1]
        and (bool(ids[0]) or message["content"] == written["content"])
    )


def _said_of(overridden: set[str]) -> str:
    return f"the run decided {', '.join(sorted(overridden))}, not the program" if overridden else ""
