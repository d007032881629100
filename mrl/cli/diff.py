"""`mrl diff A B`: the first step, phase, column, row, token or tensor and rank in which two runs part."""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.cli.arguments import aligned
from mrl.config.values import dotted, leaves_of
from mrl.errors import SetupError

if TYPE_CHECKING:
    from mrl.observe.step_diff import StepDifference
    from mrl.protocol.step_record import StepRecord

EXAMPLE = "mrl diff runs/laptop-ppo runs/laptop-ppo-replay-3"
EXIT_DIFFERENT = 3
_OWN_KEYS = (
    *("run.", "validation.", "deadlines.", "asynchrony.replay", "training.record", "training.samples_from"),
    *("training.samples_every", "training.dump_steps", "training.trackers", "training.steps", "training.save_every"),
    *("training.keep", "training.resume", "training.max_restarts", "training.fallback", "training.time_limit_s"),
)
"""Beginnings of keys that name files of a run or its length, and change nothing in a step."""
_MOST_SHOWN = 12
_METRICS_TOLERANCE = 1e-3
"""Largest difference of metrics, relative to their size if that is above 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, help="directories of two runs, or of a run and its replay")
    parser.add_argument("--step", type=int, help="compare only this step; default: all that both have recorded")
    parser.add_argument("--exact", action="store_true", help="accept no difference, not even that of rounding")


def run(arguments: argparse.Namespace) -> int:
    """Print where the runs part. Return 3 if they do."""
    one, other = (Path(path) for path in arguments.runs)
    return compare(one, other, step=arguments.step, exact=arguments.exact)


def compare(one: Path, other: Path, *, step: int | None = None, exact: bool = False) -> int:
    """Print the comparison of two runs. Return the exit code."""
    lines = comparison(one, other, step=step, exact=exact)
    while True:
        try:
            print(next(lines), flush=True)
        except StopIteration as end:
            return EXIT_DIFFERENT if end.value else 0


def comparison(one: Path, other: Path, *, step: int | None = None, exact: bool = False) -> Generator[str, None, bool]:
    """Yield the lines of a comparison up to the first difference. Return whether there is one."""
    # These load torch.
    from mrl.observe.step_diff import step_differences
    from mrl.protocol.step_record import StepRecord, recorded_steps

    for path in (one, other):
        if not (path / "config.yaml").is_file():
            raise SetupError(f"{path} is not the directory of a run: it has no config.yaml")
    steps, unexplained = [number for number in recorded_steps(one) if number in recorded_steps(other)], False
    if step is not None:
        steps = [step]
    else:
        parting, line = _first_metric(one, other, exact=exact)
        unexplained = parting is not None and parting not in steps
        yield line
    if not steps:
        yield "no step is recorded in both runs; training.record.every=1 records columns and tensors"
    for number in steps:
        pair = StepRecord.read(one, number), StepRecord.read(other, number)
        if number == steps[0]:
            yield from _circumstances(pair[0].facts, pair[1].facts)
            yield from _not_compared(*pair)
        found = list(step_differences(*pair, exact=exact))
        if any(difference.is_too_large for difference in found):
            yield from _parting(number, found)
            return True
        yield from _agreement(number, found)
    return unexplained


def _first_metric(one: Path, other: Path, *, exact: bool) -> tuple[int | None, str]:
    """Return the first step whose metrics differ, or None, and a line about it. The records of a step say more."""
    from mrl.observe.metrics import read_metrics, without_clock

    files = [path / "metrics.jsonl" for path in (one, other)]
    sides = [{line["step"]: without_clock(line) for line in read_metrics(f)} if f.is_file() else {} for f in files]
    steps = sorted(sides[0].keys() & sides[1].keys())
    tolerance = 0.0 if exact else _METRICS_TOLERANCE
    for step in steps:
        a, b = sides[0][step], sides[1][step]
        names = [name for name in a if name in b and not _is_close(a[name], b[name], tolerance)]
        if names:
            more = f", and {len(names) - 1} other metrics" if len(names) > 1 else ""
            return step, f"metrics first differ in step {step}: {names[0]} is {a[names[0]]} and {b[names[0]]}{more}"
    return None, f"metrics: no difference in {len(steps)} steps of both runs"


def _is_close(a: float | None, b: float | None, tolerance: float) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) <= tolerance * max(abs(a), abs(b), 1.0))


def _circumstances(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs in configuration, versions and hosts."""
    configs = [{dotted(path): value for path, value in leaves_of(facts["config"])} for facts in (one, other)]
    hosts = [
        {f"{role}, rank {rank['rank']}": rank["host"] for role, ranks in facts["ranks"].items() for rank in ranks}
        for facts in (one, other)
    ]
    for name, (a, b) in {
        "configuration": configs,
        "versions": (one["versions"], other["versions"]),
        "seeds": (one["seeds"], other["seeds"]),
        "hosts": hosts,
    }.items():
        keys = [key for key in dict.fromkeys([*a, *b]) if not key.startswith(_OWN_KEYS)]
        changed = [f"  {key}: {a.get(key)} and {b.get(key)}" for key in keys if a.get(key) != b.get(key)]
        yield f"{name}: {len(changed)} differences" if changed else f"{name}: equal"
        yield from changed[:_MOST_SHOWN]
        if len(changed) > _MOST_SHOWN:
            yield f"  and {len(changed) - _MOST_SHOWN} more"


def _not_compared(one: StepRecord, other: StepRecord) -> Iterator[str]:
    """Yield what only one of the records has."""
    columns = [set(record.batch.columns()) for record in (one, other)]
    kinds = [{part.kind for *_, part in record.prints} for record in (one, other)]
    for name, (a, b) in {"columns": columns, "kinds of tensors": kinds}.items():
        for side, only in (("first", a - b), ("second", b - a)):
            if only:
                yield f"{name} of only the {side} run, not compared: {', '.join(sorted(only))}"


def _parting(step: int, found: Sequence[StepDifference]) -> Iterator[str]:
    first = next(difference for difference in found if difference.is_too_large)
    yield f"step {step}: the first difference is in phase {first.phase}: {first.subject}"
    place = f"{first.place}: " if first.place else ""
    yield f"  {place}{first.values[0]} and {first.values[1]}"
    yield f"step {step}: all that differs by more than rounding explains"
    yield from aligned(_rows(difference for difference in found if difference.is_too_large))


def _agreement(step: int, found: Sequence[StepDifference]) -> Iterator[str]:
    largest = max((difference.size for difference in found), default=0.0)
    if largest == 0:
        yield f"step {step}: equal, bit for bit ({len(found)} comparisons)"
        return
    yield f"step {step}: equal within rounding"
    yield from aligned(_rows(difference for difference in found if difference.size))


def _rows(found: Any) -> Iterator[list[str]]:
    yield ["phase", "what", "where", "first", "second", "difference", "limit", ""]
    for d in found:
        size = "other" if math.isinf(d.size) else f"{d.size:.2g}"
        yield [d.phase, d.subject, d.place, *d.values, size, f"{d.limit:.2g}", d.note]
