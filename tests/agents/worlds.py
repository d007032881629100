"""Environments for tests: a correct environment that answers each call, and several that each fail in one way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from mrl.agents.environment import Answer, Done, Environment, Observation, Start, Task, Turn


class Facts(Environment):
    """Answers from the task's `facts`. A final answer is right if it equals the ground truth."""

    def __init__(
        self, delay_s: float = 0.0, log: str = "", scores: bool = True, per_answer: float | None = None
    ) -> None:
        self._delay_s, self._log, self._scores, self._per_answer = delay_s, log, scores, per_answer

    def reset(self, task: Task) -> Start:
        self._task = task
        self._say(f"begin {task.uid}/{task.sample}")
        return Start(messages=task.messages)

    async def step(self, turn: Turn) -> Observation | Done:  # type: ignore[override]
        await asyncio.sleep(self._delay_s)
        if not turn.calls:
            score = float(turn.text.strip() == self._task.ground_truth) if self._scores else None
            return Done(score=score, parts={"turns": turn.number + 1, "left_turns": turn.left_turns})
        facts = self._task.extra_info["facts"]
        results = [call.problem or facts.get((call.arguments or {})["key"], "nothing") for call in turn.calls]
        return Observation(results=results, score=self._per_answer)

    def close(self) -> None:
        self._say(f"close {self._task.uid}/{self._task.sample}")

    def _say(self, what: str) -> None:
        if self._log:
            with Path(self._log).open("a") as log:
                log.write(what + "\n")


class WithTools(Facts):
    """Lists the available calls."""

    def reset(self, task: Task) -> Start:
        super().reset(task)
        function = {"name": "look", "description": "Look a key up.", "parameters": {"type": "object", "properties": {}}}
        return Start(messages=task.messages, tools=[{"type": "function", "function": function}])


class Forgetful(Facts):
    """Starts a new context with the first result."""

    def __init__(self, length: int = 1, segment: int | None = None) -> None:
        super().__init__()
        self._length, self._segment = length, segment

    async def step(self, turn: Turn) -> Answer:  # type: ignore[override]
        answer = await super().step(turn)
        if turn.number == 0 and isinstance(answer, Observation):
            return Start(messages=[{"role": "user", "content": f"a is\n{answer.results[0]}\n" * self._length}])
        if self._segment is not None and isinstance(answer, Observation):
            return replace(answer, segment=self._segment)
        return answer


class NewContext(Environment):
    """Asks twice, and starts a new context in between; longer text gets a higher score."""

    def step(self, turn: Turn) -> Answer:
        if turn.number == 0:
            return Start(messages=[{"role": "user", "content": "and"}])
        return Done(score=float(turn.num_written))


class Duel(Environment):
    """Each of two players writes a text in a separate context; the longer text wins by one point per token."""

    def __init__(
        self,
        first: str = "first",
        second: str = "second",
        scores: bool = True,
        own_scores: dict[str, float] | None = None,
    ) -> None:
        self._roles, self._scores, self._own_scores = (first, second), scores, own_scores

    def reset(self, task: Task) -> Start:
        self._opening, self._lengths = task.messages[-1]["content"], list[int]()
        return self._invite()

    def step(self, turn: Turn) -> Answer:
        self._lengths.append(turn.num_written)
        if len(self._lengths) < len(self._roles):
            return self._invite()
        lead = float(self._lengths[0] - self._lengths[1])
        if not self._scores:
            return Done(score=lead)
        return Done(scores=self._own_scores or dict(zip(self._roles, (lead, -lead), strict=True)))

    def _invite(self) -> Start:
        role = self._roles[len(self._lengths)]
        return Start(messages=[{"role": "user", "content": f"{self._opening} {role}"}], role=role)


class Waiting(Environment):
    """Answers twice. The first conversation of each prompt waits long for each answer."""

    async def step(self, turn: Turn) -> Observation | Done:  # type: ignore[override]
        await asyncio.sleep(0.0 if self._task.sample else 2.0)
        self._num_written += turn.num_written
        return Observation(text="7") if turn.number < 2 else Done(score=float(self._num_written))

    def reset(self, task: Task) -> Start:
        self._task, self._num_written = task, 0
        return super().reset(task)


class Troubled(Facts):
    """Does at its second turn what the task's `trouble` says. With `once`, only in the first attempt."""

    def __init__(self, directory: str, once: bool = False, per_answer: float | None = None) -> None:
        super().__init__(per_answer=per_answer)
        self._directory, self._once = Path(directory), once

    async def step(self, turn: Turn) -> Observation | Done:  # type: ignore[override]
        trouble = self._task.extra_info.get("trouble")
        before = self._directory / f"{self._task.uid}-{self._task.sample}"
        if trouble and turn.number == 1 and not (self._once and before.exists()):
            before.touch()
            return await self._fail(trouble)
        return await super().step(turn)

    async def _fail(self, trouble: str) -> Observation | Done:
        match trouble:
            case "raises":
                raise KeyError("no such shelf")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleeps":
                await asyncio.sleep(3600)
            case "computes":
                while True:
                    time.sleep(0.01)
            case "returns nothing":
                return None  # type: ignore[return-value]
            case "floods":
                return Observation(text="word " * (2 << 20))
            case "forks":
                child = subprocess.Popen(["sleep", "3600"])
                (self._directory / "child").write_text(json.dumps(child.pid))
                raise RuntimeError("the child lives on")
        raise AssertionError(f"no such trouble: {trouble}")


class Lethal(Environment):
    """Ends its process in its constructor."""

    def __init__(self) -> None:
        os._exit(9)

    def step(self, turn: Turn) -> Done:
        return Done()
