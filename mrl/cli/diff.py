"""`mrl diff A B`: the first step, phase, column, row, token or tensor and rank in which two runs part."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.cli.arguments import aligned
from mrl.config.values import dotted, leaves_of
from mrl.errors import SetupError

if TYPE_CHECKING:
    from mrl.observe.step_diff import StepDifference

EXAMPLE = "mrl diff runs/laptop-ppo runs/laptop-ppo-replay-3"
EXIT_DIFFERENT = 3
_OWN_KEYS = (
    *("run.", "validation.", "deadlines.", "asynchrony.replay", "training.record", "training.samples_from"),
    *("training.samples_every", "training.dump_steps", "training.trackers", "training.steps", "training.save_every"),
    *("training.keep", "training.resume", "training.max_restarts", "training.fallback", "training.time_limit_s"),
)
"""Beginnings of keys that name files of a run or its length, and change nothing in a step."""
_MOST_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, help="directories of two runs, or of a run and its replay")
    parser.add_argument("--step", type=int, help="compare only this step; default: all that both have recorded")
    parser.add_argument("--exact", action="store_true", help="accept no difference, not even that of rounding")


def run(arguments: argparse.Namespace) -> int:
    """Print where the runs part. Return 3 if they do."""
    one, other = (Path(path) for path in arguments.runs)
    return compare(one, other, step=arguments.step, exact=arguments.exact)


def compare(one: Path, other: Path, *, step: int | None = None, exact: bool = False) -> int:
    # These load torch.
    from mrl.observe.step_diff import step_differences
    from mrl.protocol.step_record import StepRecord, recorded_steps

    for path in (one, other):
        if not (path / "config.yaml").is_file():
            raise SetupError(f"{path} is not the directory of a run: it has no config.yaml")
    is_different = False
    if step is None:
        is_different = _metrics_differ(one, other, exact=exact)
    steps = [step] if step is not None else [s for s in recorded_steps(one) if s in recorded_steps(other)]
    if not steps:
        print("no step is recorded in both runs; training.record.every=1 records columns and tensors")
    for number in steps:
        pair = StepRecord.read(one, number), StepRecord.read(other, number)
        if number == steps[0]:
            print("\n".join(_circumstances(pair[0].facts, pair[1].facts)))
        found = list(step_differences(*pair, exact=exact))
        if any(difference.is_too_large for difference in found):
            print("\n".join(_parting(number, found)))
            return EXIT_DIFFERENT
        print("\n".join(_agreement(number, found, exact=exact)))
    return EXIT_DIFFERENT if is_different else 0


def _metrics_differ(one: Path, other: Path, *, exact: bool) -> bool:
    """Print the first step whose metrics differ by more than rounding, and return whether there is one."""
    from mrl.observe.metrics import read_metrics, without_clock

    sides = [
        {line["step"]: without_clock(line) for line in read_metrics(path / "metrics.jsonl")}
        if (path / "metrics.jsonl").is_file()
        else {}
        for path in (one, other)
    ]
    steps = sorted(sides[0].keys() & sides[1].keys())
    for step in steps:
        a, b = sides[0][step], sides[1][step]
        names = [name for name in a if name in b and not _is_close(a[name], b[name], 0.0 if exact else 1e-3)]
        if names:
            more = f", and {len(names) - 1} other metrics" if len(names) > 1 else ""
            print(f"metrics first differ in step {step}: {names[0]} is {a[names[0]]} and {b[names[0]]}{more}")
            return True
    print(f"metrics: no difference in {len(steps)} steps of both runs")
    return False


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


def _parting(step: int, found: Sequence[StepDifference]) -> Iterator[str]:
    first = next(difference for difference in found if difference.is_too_large)
    yield f"step {step}: the first difference is in phase {first.phase}: {first.subject}"
    place = f"{first.place}: " if first.place else ""
    yield f"  {place}{first.values[0]} and {first.values[1]}"
    yield f"step {step}: all that differs by more than rounding explains"
    yield from aligned(_rows(difference for difference in found if difference.is_too_large))


def _agreement(step: int, found: Sequence[StepDifference], *, exact: bool) -> Iterator[str]:
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
