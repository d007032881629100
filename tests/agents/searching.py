"""A model that searches in each turn, and a reward for the passages it finds."""

from __future__ import annotations

import os
import signal

from mrl.agents.environment import ToolCall
from mrl.agents.formats import SearchR1Tags
from mrl.rewards.sample import Sample

PASSAGE = '"Ada"\nShe wrote notes.'
READ = '<information>Doc 1(Title: "Ada") She wrote notes.</information>'


class Searching(SearchR1Tags):
    """Kills the retriever, the process `RETRIEVER`, just before the request of turn `KILLS_IN_TURN`."""

    stops = ("\ufffd", *map(chr, range(128)))  # any text ends its turn; otherwise the turn would be cut off

    def __init__(self) -> None:
        self._num_turns, self._kills_in_turn = 0, int(os.environ["KILLS_IN_TURN"])

    def parse(self, text: str) -> list[ToolCall]:
        self._num_turns += 1
        if self._num_turns == self._kills_in_turn:
            os.kill(int(os.environ["RETRIEVER"]), signal.SIGKILL)
        return [ToolCall(name="search", arguments={"query": "ada"})]


def everything_is_found(sample: Sample) -> float:
    """Return 1 if each search returned its passage, and 0 otherwise."""
    return float(all(READ in turn for turn in sample.turns[1::2]))
