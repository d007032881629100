"""The trace of steps as Chrome's JSON, which Perfetto and chrome://tracing open, and its summary as text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.observe.idle import (
    CALLS,
    DRIVER,
    DRIVES,
    ENGINE,
    ENVIRONMENT,
    ENVIRONMENTS,
    GENERATION,
    MOVES,
    OTHERS,
    RANK,
    REWARD,
    REWARDS,
    SAVES,
    SLOWER,
    STARTS,
    Row,
    StepTimes,
)
from mrl.observe.intervals import seconds
from mrl.spans import Span, read_spans

if TYPE_CHECKING:
    from mrl.controller.traced import TracedProcess

_KEYS = {
    SLOWER: "ROLE.max_tokens_per_device",
    MOVES: "sync.offload",
    ENVIRONMENTS: "agent.num_workers",
    REWARDS: "reward.num_workers",
    GENERATION: "asynchrony.ahead",
    OTHERS: "asynchrony.weights",
    SAVES: "training.save_every",
    STARTS: "rollout.vllm.enforce_eager",
    CALLS: "batch.samples_per_update",
    DRIVES: "batch.prompts_per_step",
}
"""Cause of idleness -> the key that changes it. For another role's work it is `placement.roles` or, for engines,
`asynchrony.ahead`."""
_KINDS = {"reward worker": REWARD, "agent worker": ENVIRONMENT}
_MOST, _LEAST = 3, 0.005
_LINES = 10_000
_IDLE_THREAD = "idle"


def read_rows(processes: Sequence[TracedProcess]) -> list[Row]:
    """Return the rows of all processes, on the driver's clock. A process without spans has a row with the reason."""
    rows: list[Row] = []
    for process in processes:
        spans = read_spans(process.path) if process.path.exists() else {"": []}
        kind = RANK
        if process.role == DRIVER:
            kind = DRIVER
        elif process.is_engine:
            kind = ENGINE
        problem = process.problem if process.path.exists() else process.problem or "it wrote no spans"
        own = [_moved(span, process.clock.offset_ns) for span in spans.pop("")]
        if process.has_ended:
            _end(own)
        rows.append(Row(process.name, kind, process.role, own, process.thread, problem))
        for name, others in spans.items():
            kind = next(kind for start, kind in _KINDS.items() if name.startswith(start))
            rows.append(Row(name, kind, kind, others))
    names = [row.name for row in rows]
    return [
        row if names.count(row.name) == 1 else replace(row, name=f"{row.name} ({at})") for at, row in enumerate(rows)
    ]


def _end(spans: Sequence[Span]) -> None:
    """End the open spans of a process that has ended where it is last heard of: the moment of its death is unknown."""
    last = max((span.end or span.begin for span in spans), default=0)
    for span in spans:
        if span.end is None:
            span.end, span.facts = last, span.facts | {"ended": False}


def _moved(span: Span, offset_ns: int) -> Span:
    return replace(span, begin=span.begin + offset_ns, end=None if span.end is None else span.end + offset_ns)


def steps_of(rows: Sequence[Row], pools: Mapping[str, str]) -> list[StepTimes]:
    """Return the times of each step that the trace covers completely."""
    driver = next(row for row in rows if row.kind == DRIVER)
    steps = [span for span in driver.spans if span.name.startswith("step ") and span.end is not None]
    return [StepTimes(int(s.name.split()[1]), (s.begin, s.end or s.begin), rows, pools) for s in steps]


def write_trace(path: Path, steps: Sequence[StepTimes], facts: Mapping[str, Any]) -> None:
    """Write the trace. Times begin with the first step."""
    rows, zero = steps[0].rows, steps[0].window[0]
    events: list[dict[str, Any]] = []
    for pid, row in enumerate(rows, start=1):
        name = f"{row.name} ({row.problem})" if row.problem else row.name
        events += [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        ]
        first = pid * _LINES  # Perfetto takes the same number in two processes for one thread
        for tid, (thread, spans) in enumerate(_lanes(row.spans, steps[-1].window[1]), start=first):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
            events += [_slice(span, steps[-1].window[1], zero) | {"pid": pid, "tid": tid} for span in spans]
        idle = [item for step in steps for item in step.idle[row.name].items()]
        tid = first + _LINES - 1
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": _IDLE_THREAD}})
        for cause, times in idle:
            spans = [Span(f"idle: {cause}", begin, end, _IDLE_THREAD) for begin, end in times]
            events += [_slice(span, 0, zero) | {"pid": pid, "tid": tid, "cname": "grey"} for span in spans]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts)}))


def _slice(span: Span, last: int, zero: int) -> dict[str, Any]:
    end = last if span.end is None else span.end
    args = span.facts if span.end is not None else span.facts | {"ended": False}
    moved = sum(size for fact, size in span.facts.items() if fact.startswith("bytes_"))
    name = f"{span.name} ({moved / 1e6:.3g} MB)" if moved else span.name
    begin, end = (span.begin - zero) // 1000, (end - zero) // 1000  # whole numbers keep spans inside others
    return {"ph": "X", "name": name, "cat": span.name, "ts": begin, "dur": max(0, end - begin), "args": args}


def _lanes(spans: Sequence[Span], last: int) -> Iterator[tuple[str, list[Span]]]:
    """Yield the spans of each thread. Spans that overlap without one being inside the other get separate lines."""
    lines: dict[tuple[str, int], list[Span]] = {}
    stacks: dict[tuple[str, int], list[int]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.begin, -(s.end or last))):
        end = last if span.end is None else span.end
        for line in count():
            stack = stacks[span.thread, line]
            while stack and stack[-1] <= span.begin:
                stack.pop()
            if not stack or end <= stack[-1]:
                stack.append(end)
                lines.setdefault((span.thread, line), []).append(span)
                break
    for (thread, line), found in sorted(lines.items(), key=lambda item: (item[0][0] != "MainThread", item[0])):
        yield f"{thread or 'samples'}{f' {line + 1}' if line else ''}", found


def summary(steps: Sequence[StepTimes]) -> Iterator[str]:
    """Yield the critical path of each step, its largest causes of idle devices, and the times of each process."""
    for step in steps:
        length = seconds([step.window])
        yield f"step {step.step}: {length:.3f} s. Its critical path:"
        path = [(spent, f"{phase}: {activity}") for phase, activity, spent in step.critical_path()]
        rest = sum(spent for spent, _ in path if spent < _LEAST * length)
        for spent, what in [*(part for part in path if part[0] >= _LEAST * length), (rest, "other parts, all short")]:
            yield f"  {spent:8.3f} s {100 * spent / length:3.0f} %  {what}"
        yield "largest causes of idle devices (mean over the processes of the role), and the key that changes them:"
        for spent, role, cause, key in _largest(step)[:_MOST]:
            yield f"  {spent:8.3f} s {100 * spent / length:3.0f} %  {role}: {cause}: {key}"
        yield "each process:"
        for row in step.rows:
            idle = {cause: seconds(times) for cause, times in step.idle[row.name].items()}
            parts = ", ".join(f"{spent:.3f} s {cause}" for cause, spent in sorted(idle.items(), key=lambda i: -i[1]))
            said = f" [{row.problem}]" if row.problem else ""
            busy = length - sum(idle.values()) if row.kind == DRIVER else seconds(step.busy[row.name])
            yield f"  {row.name}{said}: busy {busy:.3f} s; idle: {parts or 'never'}"


def _largest(step: StepTimes) -> list[tuple[float, str, str, str]]:
    """Return seconds, role, cause and key of the idleness of devices, the longest first."""
    roles: dict[str, list[Row]] = defaultdict(list)
    for row in step.rows:
        if row.kind == ENGINE or row.role in step.pools:  # receivers of weights only serve engines
            roles["engines" if row.kind == ENGINE else row.role].append(row)
    found: dict[tuple[str, str], tuple[float, str, str, str]] = {}
    for role, rows in roles.items():
        pool = step.pools.get("rollout" if role == "engines" else role, role)
        shared = [cause.what for cause in step.causes(rows[0]) if not cause.counts]
        for cause in dict.fromkeys(cause for row in rows for cause in step.idle[row.name] if cause not in shared):
            spent = sum(seconds(step.idle[row.name].get(cause, [])) for row in rows) / len(rows)
            entry = (spent, role, cause, _key(cause, role))
            found[pool, cause] = max(found.get((pool, cause), entry), entry)  # roles of one pool wait together
    return sorted(found.values(), reverse=True)


def _key(cause: str, role: str) -> str:
    other = "asynchrony.ahead" if role == "engines" else f"placement.roles.{role}"
    return _KEYS.get(cause, other).replace("ROLE", role)
