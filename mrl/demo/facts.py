"""The demo's search: an environment, its format and its data, as a user of mrl would write them.

A key maps to a number, or to another key, which maps to a number. The mapping is drawn for each conversation, so that
no model can know it: the model has to look up the key in the question, and again if it finds a key. Every other key
also maps to a number, but a wrong one.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.agents.environment import Done, Environment, Observation, Start, Task, ToolCall, Turn
from mrl.agents.formats import Format

Part = Literal["train", "validation"]
HOPS: Mapping[str, int] = {"one_hop": 1, "two_hops": 2}
"""Data source -> number of keys between its questions and their answers."""
VALIDATION_SHARE = 4  # one key out of this many
TEACHERS_TAKES = 40
KEYS = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]


def part_of(key: str) -> Part:
    """Return the part in which a key occurs. Keys of the validation never occur in training, as a question or on the
    way."""
    return "train" if hashlib.blake2b(key.encode()).digest()[0] % VALIDATION_SHARE else "validation"


class Facts:
    """Mapping of the keys in one conversation."""

    def __init__(self, key: str, hops: int, seed: int) -> None:
        self._seed, dice = seed, random.Random(seed)
        candidates = [other for other in KEYS if other != key and part_of(other) == part_of(key)]
        self.path = [key, *dice.sample(candidates, hops - 1)]
        """Keys that have to be looked up."""
        self.answer = _number(dice)
        self._found = dict(zip(self.path, [*self.path[1:], self.answer], strict=True))

    def look_up(self, key: str) -> str:
        return self._found.get(key) or _number(random.Random(f"{self._seed} {key}"))


class FactSearch(Environment):
    """Looks up keys, and scores the answer."""

    def reset(self, task: Task) -> Start:
        self._facts = Facts(task.messages[-1]["content"], HOPS[task.data_source], task.seed)
        self._searches = 0
        return Start(messages=task.messages)

    def step(self, turn: Turn) -> Observation | Done:
        if not turn.calls:
            score = float(turn.text == self._facts.answer and turn.ended == "stop")
            return Done(score=score, parts={"searches": self._searches})
        self._searches += 1
        return Observation(results=[self._found(call) for call in turn.calls])

    def _found(self, call: ToolCall) -> str:
        return call.problem if call.arguments is None else self._facts.look_up(call.arguments["key"])


class QuestionMark(Format):
    """`?ab` looks up the key `ab`. Text without a question mark at the beginning is the answer."""

    def parse(self, text: str) -> list[ToolCall]:
        if not text.startswith("?"):
            return []
        if re.fullmatch("[a-z]{2}", key := text[1:]):
            return [ToolCall(name="search", arguments={"key": key})]
        return [ToolCall(name="search", problem="no key")]


def questions(part: Part) -> list[dict[str, Any]]:
    """Return every key of a part as a question of each source. The answer is drawn in the conversation."""
    return [
        {
            "prompt": [{"role": "user", "content": key}],
            "data_source": source,
            "ability": "search",
            "extra_info": {"index": number},
        }
        for number, (key, source) in enumerate((key, source) for key in KEYS if part_of(key) == part for source in HOPS)
    ]


class Lessons(Sequence[Mapping[str, Any]]):
    """Conversations of a careless teacher, with each question in several of them.

    A third of them are right. In another third, the teacher looks up a key other than the one in the question, and
    believes the result. In the rest, the teacher looks up nothing and guesses.
    """

    def __init__(self) -> None:
        self._questions = [row for row in questions("train") for _ in range(TEACHERS_TAKES)]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        dice = random.Random(f"lesson {index}")
        row = self._questions[index]
        turns = lesson(row["prompt"][0]["content"], HOPS[row["data_source"]], dice)
        return {**row, "messages": [*row["prompt"], *turns]}


def lesson(key: str, hops: int, dice: random.Random) -> list[dict[str, str]]:
    facts = Facts(key, hops, dice.getrandbits(32))
    habit = dice.choice(("searches", "searches elsewhere", "guesses"))
    if habit == "guesses":
        return [{"role": "assistant", "content": _number(dice)}]
    keys = facts.path if habit == "searches" else [dice.choice([other for other in KEYS if part_of(other) == "train"])]
    results = [facts.look_up(searched) for searched in keys]
    turns = [
        message
        for searched, result in zip(keys, results, strict=True)
        for message in ({"role": "assistant", "content": f"?{searched}"}, {"role": "tool", "content": result})
    ]
    return [*turns, {"role": "assistant", "content": results[-1]}]


def _number(dice: random.Random) -> str:
    return f"{dice.randrange(100):02}"
