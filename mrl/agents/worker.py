"""One worker: a process that holds the environments of many conversations, and may be killed at any time.

`python -m mrl.agents.worker` is the supervisor that starts such workers, as that of reward functions does its own.
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
from mrl.config.agent import AgentConfig, EnvironmentConfig, ToolConfig
from mrl.config.names import ENVIRONMENTS
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
    """What this process has in hand, by conversation."""

    def __init__(self, makers: Mapping[str, Make], memory_bytes: int) -> None:
        self._makers, self._memory_bytes = makers, memory_bytes
        self._held: dict[int, Environment] = {}

    async def answer(self, ticket: int, body: bytes) -> dict[str, Any]:
        """Return what an environment says to a task, to a turn, or to its conversation's end, or how it failed."""
        began = time.monotonic()
        kind: FailureKind
        try:
            said = await self._ask(ticket, json.loads(body))
            is_over = said is None or isinstance(said, Done)
            reply: dict[str, Any] = {"done" if is_over else "step": None if said is None else to_json(said)}
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
        except BaseException as error:  # whatever it is, SystemExit included, it is this conversation's failure
            kind, detail = "raised", describe(error)
        self._held.pop(ticket, None)
        return failure_reply(kind, detail, time.monotonic() - began)

    async def _ask(self, ticket: int, asked: dict[str, Any]) -> Answer | None:
        if "begin" in asked:
            environment = self._held[ticket] = self._makers[asked["begin"]]()
            task = from_json(asked["task"])
            assert isinstance(task, Task), "the run begins with a task"
            started: Start = _expect(await _result(environment.reset(task)), Start)
            return started
        if asked["step"] is None:
            return None
        turn = from_json(asked["step"])
        assert isinstance(turn, Turn), "the run goes on with a turn"
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
    wanted = " or ".join(kind.__name__ for kind in kinds)
    hint = "; is a `return` missing?" if returned is None else ""
    raise BadResult(f"it returned {type(returned).__name__}, not {wanted}{hint}")


def load_environment(label: str, config: EnvironmentConfig) -> Make:
    """Return what makes an environment anew for each conversation, after it has made one."""
    where = f"agent.environments.{label}"
    if ":" not in config.name and config.name not in ENVIRONMENTS:
        raise NameUnknown(
            f'unknown environment "{config.name}"', where=where, fix=f"{', '.join(ENVIRONMENTS)}, or your own"
        )
    made = load_attribute(ENVIRONMENTS.get(config.name, config.name))
    if not isinstance(made, type) or not issubclass(made, Environment):
        raise NameUnknown(f'"{config.name}" is no class of mrl.agents.Environment', where=where)
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
    """Answer what comes through the channel until it closes; never returns into the supervisor's code."""
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


def agent_workers(told: bytes) -> tuple[AgentConfig, RunWorker]:
    """Return the workers of the section `agent`, as the run wrote it with `asdict`."""
    values, environments = json.loads(told), {}
    for label, each in values.pop("environments").items():
        tools = {name: ToolConfig(**tool) for name, tool in each.pop("tools").items()}
        environments[label] = EnvironmentConfig(**each, tools=tools)
    config = AgentConfig(environments=environments, **values)
    return config, partial(run_worker, config)


if __name__ == "__main__":
    supervise(agent_workers, MAX_ANSWER_BYTES + 1024)
