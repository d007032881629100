"""A model that searches in each of its turns, and a reward for the passages it finds."""

from __future__ import annotations

import os
import signal

from mrl.agents.environment import ToolCall
from mrl.agents.formats import SearchR1Tags
from mrl.rewards.sample import Sample

PASSAGE = '"Ada"\nShe wrote notes.'
READ = '<information>Doc 1(Title: "Ada") She wrote notes.</information>'


class Searching(SearchR1Tags):
    """In turn `KILLS_IN_TURN` the retriever, the process `RETRIEVER`, dies just before it would be asked."""

    stops = ("\ufffd", *map(chr, range(128)))  # whatever it writes ends its turn, which would be cut off otherwise

    def __init__(self) -> None:
        self._num_turns, self._kills_in_turn = 0, int(os.environ["KILLS_IN_TURN"])

    def parse(self, text: str) -> list[ToolCall]:
        self._num_turns += 1
        if self._num_turns == self._kills_in_turn:
            os.kill(int(os.environ["RETRIEVER"]), signal.SIGKILL)
        return [ToolCall(name="search", arguments={"query": "ada"})]


class Hesitating(Searching):
    """From then on every other turn answers: not every conversation needs a retriever."""

    def parse(self, text: str) -> list[ToolCall]:
        calls = super().parse(text)
        answers = self._num_turns > self._kills_in_turn and self._num_turns % 2
        return [ToolCall(name="answer", arguments={"answer": ""})] if answers else calls


def everything_is_found(sample: Sample) -> float:
    """1 where each search was answered by its passage, 0 where one was answered by anything else."""
    return float(all(READ in turn for turn in sample.turns[1::2]))
