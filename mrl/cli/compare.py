"""`mrl compare A B`: which of two configurations, or of two finished runs, is better, and how sure that is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import ndiff
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl import files
from mrl.cli.compare_runs import compare_runs
from mrl.cli.supervise import attempt
from mrl.config.resolved.load import Resolved, load_config
from mrl.config.resolved.render import render, render_difference
from mrl.config.schema import Config
from mrl.errors import EXIT_STOPPED, MrlError, SetupError

if TYPE_CHECKING:
    from mrl.observe.confidence import PairedDifference

EXAMPLE = "mrl compare configs/laptop-grpo.yaml configs/laptop-grpo.yaml --b algorithm.advantage=dr_grpo --seeds 5"
EXIT_UNDECIDED = 3
_SIDES = ("a", "b")
_OWN_KEYS = {"run.dir", "run.name", "training.seed", "data.seed"}
"""Keys that the comparison sets for each run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described = "a YAML file, or the directory of a finished run"
    parser.add_argument("sides", metavar="CONFIG | RUN", nargs=2, help=described)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values for both configurations")
    parser.add_argument("--a", metavar="KEY=VALUE", action="append", default=[], help="a value for the first only")
    parser.add_argument("--b", metavar="KEY=VALUE", action="append", default=[], help="a value for the second only")
    parser.add_argument("--seeds", type=int, default=5, help="largest number of pairs of runs (default 5)")
    parser.add_argument("--name", help="name of the comparison's directory in run.dir (default compare-A-B)")


def run(arguments: argparse.Namespace) -> int:
    """Compare. Return 0 if one side is better, or EXIT_UNDECIDED."""
    are_runs = [(Path(side) / "config.yaml").is_file() for side in arguments.sides]
    if any(are_runs):
        if not all(are_runs):
            raise SetupError("one side is a run and the other is not", fix="name two runs, or two configurations")
        if arguments.overrides or arguments.a or arguments.b:
            raise SetupError("finished runs take no overrides", fix="name two configurations to train them")
        lines, is_decided = compare_runs(*map(Path, arguments.sides))
        print("\n".join(lines))
        return 0 if is_decided else EXIT_UNDECIDED
    return _train_and_compare(_plan(arguments), arguments)


@dataclass(frozen=True)
class _Plan:
    """A comparison: two configurations, the figure that they are compared by, and its directory."""

    resolved: tuple[Resolved[Config], Resolved[Config]]
    directory: Path
    num_seeds: int

    @property
    def config(self) -> Config:
        return self.resolved[0].config

    @property
    def figure(self) -> str:
        return self.config.validation.best


def _plan(arguments: argparse.Namespace) -> _Plan:
    """Load and check both configurations."""
    from mrl.observe.sequential import FIRST_LOOK, MAX_PAIRS

    if not FIRST_LOOK <= arguments.seeds <= MAX_PAIRS:
        raise SetupError(f"--seeds is {arguments.seeds}, but a comparison needs {FIRST_LOOK} to {MAX_PAIRS} pairs")
    for value in (*arguments.a, *arguments.b):
        if value.partition("=")[0] in _OWN_KEYS:
            raise SetupError(f"{value} for one side only: it must be the same for both", fix=f"mrl compare A B {value}")
    name = arguments.name or "-".join(["compare", *(Path(side).stem for side in arguments.sides)])
    own = [[f"run.name={name}", *arguments.overrides, *values] for values in (arguments.a, arguments.b)]
    a, b = (load_config(path, values) for path, values in zip(arguments.sides, own, strict=True))
    for resolved in (a, b):
        if not resolved.config.validation.every:
            fix = "validation.every=N; the last step is always validated then"
            raise SetupError("nothing is validated: validation.every is 0", where=resolved.path, fix=fix)
        if resolved.config.training.resume != "auto":
            raise SetupError("a comparison resumes its runs", where=resolved.path, fix="training.resume=auto")
    for key, values in {
        "data.validation": [resolved.config.data.validation for resolved in (a, b)],
        "the section validation": [asdict(resolved.config.validation) for resolved in (a, b)],
        "the functions that score validation": [asdict(each.config.validation_reward()) for each in (a, b)],
    }.items():
        if values[0] != values[1]:
            raise SetupError(f"{key} differs, so the figures cannot be compared", fix="use the same on both sides")
    return _Plan((a, b), Path(a.config.run.dir, name), arguments.seeds)


def _train_and_compare(plan: _Plan, arguments: argparse.Namespace) -> int:
    """Train pairs of runs until the comparison is decided or the seeds end."""
    from mrl.observe.sequential import look

    _begin(plan)
    sign = 1 if plan.config.validation.best_mode == "max" else -1
    pairs: list[tuple[float, float]] = []
    while True:
        values = []
        for side, path in zip(_SIDES, arguments.sides, strict=True):
            overrides = [*arguments.overrides, *getattr(arguments, side)]
            if (code := _train(plan, side, path, overrides, len(pairs))) != 0:
                return code
            values.append(_measured(plan, side, len(pairs)))
        pairs.append((values[0], values[1]))
        difference, is_decided = look([sign * (b - a) for a, b in pairs], plan.num_seeds)
        print(f"{len(pairs)} of at most {plan.num_seeds} pairs: {_verdict(plan, difference, is_decided)}", flush=True)
        if is_decided or len(pairs) == plan.num_seeds:
            break
    _write(plan, pairs, difference, is_decided)
    return 0 if is_decided else EXIT_UNDECIDED


def _begin(plan: _Plan) -> None:
    """Create the directory, or check that it holds the same comparison."""
    stored = {"seeds": plan.num_seeds, "figure": plan.figure}
    file, fix = plan.directory / "plan.json", "choose another --name, or move that directory away"
    if file.exists():
        if json.loads(files.read_text(file)) != stored:
            what = f"this comparison was planned as {files.read_text(file).strip()}, not as {json.dumps(stored)}; "
            more = "seeds that are added because of the result so far would raise its error above 5 %"
            raise SetupError(what + more, where=str(plan.directory), fix=f"{fix}; for new pairs, another training.seed")
        for side, resolved in zip(_SIDES, plan.resolved, strict=True):
            before, after = map(_values, (files.read_text(plan.directory / f"{side}.yaml"), render(resolved)))
            if changed := [line for line in ndiff(before, after) if line.startswith(("-", "+"))]:
                what = f"configuration {side} has changed since this comparison began"
                raise SetupError("\n".join([what, *changed]), where=str(plan.directory), fix=fix)
        return
    plan.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side, resolved in zip(_SIDES, plan.resolved, strict=True):
        files.write_text(plan.directory / f"{side}.yaml", render(resolved), mode=0o600)
    files.write_text(file, json.dumps(stored) + "\n")


def _values(rendered: str) -> list[str]:
    """Return the lines of a rendered configuration without the origins of their values."""
    return [line.partition("  # ")[0].rstrip() for line in rendered.splitlines()]


def _train(plan: _Plan, side: str, path: str, overrides: Sequence[str], number: int) -> int:
    """Train one run, or resume it."""
    config = plan.config
    seeds = [f"training.seed={config.training.seed + number}", f"data.seed={config.data.seed + number}"]
    place = [f"run.dir={json.dumps(str(plan.directory))}", f"run.name={_run_name(side, number)}"]
    print(f"pair {number + 1}, {side}: {plan.directory / _run_name(side, number)}", flush=True)
    command = [sys.executable, "-m", "mrl.cli.main", "train", path, *overrides, *seeds, *place, "--quiet"]
    code = attempt(command)
    if code == 0:
        return 0
    what = "was stopped" if code == EXIT_STOPPED else f"ended with exit code {code}"
    print(f"the run {what}; the same command continues the comparison with it", file=sys.stderr)
    return code if code > 0 else 128 - code


def _run_name(side: str, number: int) -> str:
    return f"{side}-{number}"


def _measured(plan: _Plan, side: str, number: int) -> float:
    """Return the figure of a run's last validation."""
    from mrl.observe.metrics import read_metrics

    metrics = plan.directory / _run_name(side, number) / "metrics.jsonl"
    value = next((line[plan.figure] for line in reversed(read_metrics(metrics)) if plan.figure in line), None)
    if value is None:
        raise MrlError(f"the last validation has no finite {plan.figure}", where=str(metrics))
    return float(value)


def _verdict(plan: _Plan, difference: PairedDifference, is_decided: bool) -> str:
    """Say which side is better, or that no difference was seen. Differences are positive if B is better."""
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    size = f"{difference.mean:+.4g} in {plan.figure}, 95 % interval {low:+.4g} to {high:+.4g}"
    if plan.config.validation.best_mode == "min":
        size += ", positive where B is lower"
    if is_decided:
        return f"B is {'better' if difference.mean > 0 else 'worse'} than A: {size}"
    if difference.num_different == 0:
        return "no difference seen: A and B are equal in each pair"
    return f"no difference seen: {size}{difference.more('seed')}"


def _write(plan: _Plan, pairs: Sequence[tuple[float, float]], difference: PairedDifference, is_decided: bool) -> None:
    """Write the comparison as JSON and as a page."""
    from mrl.observe.metrics import read_metrics
    from mrl.observe.report import render_seeds

    verdict = _verdict(plan, difference, is_decided)
    result: dict[str, Any] = {"verdict": verdict, "is_decided": is_decided, "figure": plan.figure, "pairs": pairs}
    result |= {"effect": difference.mean, "half_width": difference.half_width}
    files.write_text(plan.directory / "comparison.json", json.dumps(result, indent=2) + "\n")
    runs = {
        _run_name(side, number): read_metrics(plan.directory / _run_name(side, number) / "metrics.jsonl")
        for number in range(len(pairs))
        for side in _SIDES
    }
    changed = render_difference(*plan.resolved)
    page = plan.directory / "comparison.html"
    files.write_text(page, render_seeds(plan.directory.name, verdict, plan.figure, pairs, runs, changed))
    print(page)
