"""One worker: a process that runs the environments of many conversations, and may be killed at any time.

`python -m mrl.agents.worker` is the supervisor of these workers, like the one of reward functions.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from mrl.agents.environment import Answer, Done, Environment, Observation, Start, Task, Turn, from_json, to_json
from mrl.config.agent import ENVIRONMENTS, AgentConfig, EnvironmentConfig, ToolConfig
from mrl.errors import MrlError, NameUnknown
from mrl.registry import load_attribute
from mrl.rewards.messages import control
from mrl.rewards.outcome import BadResult, FailureKind, failure_reply
from mrl.rewards.side_by_side import Running, SideBySide
from mrl.rewards.supervisor import RunWorker, supervise
from mrl.rewards.worker import contain_process, describe

MAX_ANSWER_BYTES = 4 << 20
Make = Callable[[], Environment]


class Environments:
    """Environments of this process, by conversation."""

    def __init__(self, makers: Mapping[str, Make], memory_bytes: int) -> None:
        self._makers, self._memory_bytes = makers, memory_bytes
        self._held: dict[int, Environment] = {}

    async def answer(self, ticket: int, body: bytes) -> dict[str, Any]:
        """Return an environment's answer to a task, a turn, or the end of its conversation, or its failure."""
        began = time.monotonic()
        kind: FailureKind
        try:
            answer = await self._ask(ticket, json.loads(body))
            is_over = answer is None or isinstance(answer, Done)
            reply: dict[str, Any] = {"done" if is_over else "step": None if answer is None else to_json(answer)}
            reply["seconds"] = time.monotonic() - began
            if (size := len(json.dumps(reply))) > MAX_ANSWER_BYTES:
                raise BadResult(f"the answer takes {size} bytes; at most {MAX_ANSWER_BYTES}")
            if is_over:
                await self._close(ticket)
            return reply
        except BadResult as error:
            kind, detail = "bad_result", str(error)
        except MemoryError:
            kind, detail = "memory", f"more than {self._memory_bytes / (1 << 20):g} MiB"
        except BaseException as error:  # any exception, including SystemExit, is a failure of this conversation
            kind, detail = "raised", describe(error)
        self._held.pop(ticket, None)
        return failure_reply(kind, detail, time.monotonic() - began)

    async def _ask(self, ticket: int, request: dict[str, Any]) -> Answer | None:
        if "begin" in request:
            environment = self._held[ticket] = self._makers[request["begin"]]()
            task = from_json(request["task"])
            assert isinstance(task, Task), "a conversation begins with a task"
            started: Start = _expect(await _result(environment.reset(task)), Start)
            return started
        if request["step"] is None:
            return None
        turn = from_json(request["step"])
        assert isinstance(turn, Turn), "a conversation continues with a turn"
        answer: Answer = _expect(await _result(self._held[ticket].step(turn)), Observation, Done, Start)
        return answer

    async def _close(self, ticket: int) -> None:
        environment = self._held.pop(ticket, None)
        if environment is not None:
            close: Callable[[], Any] = environment.close
            await _result(close())


async def _result(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _expect(returned: Any, *kinds: type[Any]) -> Any:
    if isinstance(returned, kinds):
        return returned
    expected = " or ".join(kind.__name__ for kind in kinds)
    hint = "; a `return` may be missing" if returned is None else ""
    raise BadResult(f"it returned {type(returned).__name__}, not {expected}{hint}")


def load_environment(label: str, config: EnvironmentConfig) -> Make:
    """Return a function that creates a new environment for each conversation, after creating one as a test."""
    where = f"agent.environments.{label}"
    if ":" not in config.name and config.name not in ENVIRONMENTS:
        raise NameUnknown(
            f'unknown environment "{config.name}"', where=where, fix=f"{', '.join(ENVIRONMENTS)}, or your own"
        )
    made = load_attribute(ENVIRONMENTS.get(config.name, config.name))
    if not isinstance(made, type) or not issubclass(made, Environment):
        raise NameUnknown(f'"{config.name}" is not a subclass of mrl.agents.Environment', where=where)
    options = config.options | ({"tools": config.tools} if config.tools else {})
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise NameUnknown(
            f"{error}; it is {made.__name__}{inspect.signature(made)}", where=f"{where}.options"
        ) from error

    def make() -> Environment:
        environment: Environment = made(**options)
        return environment

    make()
    return make


def run_worker(config: AgentConfig, channel: socket.socket, supervisor: int, running: Running) -> NoReturn:
    """Answer the requests of the channel until it closes. Never return to the supervisor's code."""
    status = 1
    try:
        makers, problems = {}, []
        try:
            contain_process(channel, config.memory_bytes, supervisor)
            for label, environment in config.environments.items():
                makers[label] = load_environment(label, environment)
        except MrlError as error:
            problems.append(str(error))
        except BaseException as error:  # importing a user's module may raise anything, SystemExit included
            problems.append(f"an environment cannot be loaded: {describe(error)}")
        if problems:
            channel.sendall(control(problems=problems))
        else:
            SideBySide(channel, config, running, Environments(makers, config.memory_bytes).answer).serve()
            status = 0
    finally:
        os._exit(status)


def agent_workers(section_json: bytes) -> tuple[AgentConfig, RunWorker]:
    """Return the workers of the section `agent`, which the run wrote with `asdict`."""
    values, environments = json.loads(section_json), {}
    for label, values_of_environment in values.pop("environments").items():
        tools = {name: ToolConfig(**tool) for name, tool in values_of_environment.pop("tools").items()}
        environments[label] = EnvironmentConfig(**values_of_environment, tools=tools)
    config = AgentConfig(environments=environments, **values)
    return config, partial(run_worker, config)


if __name__ == "__main__":
    supervise(agent_workers, MAX_ANSWER_BYTES + 1024)
