"""The data flow of a step, proven without running it: every column that a worker's method reads is written before."""

from __future__ import annotations

from mrl.config.schema import Config
from mrl.config.step_calls import SAMPLE_COLUMNS, step_calls


def column_problems(config: Config) -> list[str]:
    """The columns that a call of a step would miss."""
    # `position` goes along with the call itself; ReMax's baselines come with the scores.
    there = {*SAMPLE_COLUMNS, "position"}
    there |= {"baseline_scores"} if config.algorithm.advantage == "remax" else set()
    problems = []
    for call in step_calls(config):
        for column in dict.fromkeys(call.reads + call.needs(config)):
            if column not in there:
                now = ", ".join(sorted(there))
                problems.append(f"{call.method} needs `{column}`; nobody has written it; columns then: {now}")
            elif column not in call.reads + call.optional:
                problems.append(f"{call.method} needs `{column}`, but does not declare that it reads it")
        there |= set(call.writes)
    return problems
