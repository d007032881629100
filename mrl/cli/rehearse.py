"""`mrl rehearse`: run the training code of each kind of rank at full size, without GPUs, and build vLLM's ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.cli.arguments import add_config, aligned, load_one, split_arguments
from mrl.config.arithmetic import shares_actor
from mrl.config.resolved.load import Resolved
from mrl.config.schema import Config
from mrl.errors import ConfigError, Problem, counted, did_you_mean
from mrl.observe.metrics import read_metrics
from mrl.plan.assumptions import GIB
from mrl.plan.memory import gib, plan_memory
from mrl.plan.plan_input import Planned, make_plan_input
from mrl.plan.rehearsed import remember
from mrl.plan.search import advise
from mrl.preflight.findings import SFT_ADVICE

if TYPE_CHECKING:
    from mrl.rehearse.comparison import Compared
    from mrl.rehearse.processes import Rehearsed

EXAMPLE = "mrl rehearse configs/ppo-llama3.1-70b-8n8g.yaml --role actor"
_DOES_NOT_FIT = 2
_BASE = "critic.lora.base"
_BUSIEST_RANK = "actor/experts/busiest_rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--role", help="rehearse only this role; `rollout`: an engine")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="RANK",
        help="rehearse only the kinds of these trainer ranks; default: all kinds, and an engine",
    )
    parser.add_argument(
        "--phase", metavar="NAME", nargs="+", help="show only these phases, with what is largest in each"
    )
    parser.add_argument(
        "--lengths",
        metavar="RUN",
        help="lengths of the samples of this run, or of a parquet file; default: the longest",
    )
    parser.add_argument(
        "--routing",
        metavar="FACTOR | RUN",
        help="tokens of a rank's experts, relative to the mean, or the largest of this run; default: that of the plan",
    )
    parser.add_argument("--headroom", action="store_true", help="also find the largest max_tokens_per_device that fits")
    parser.add_argument(
        "--model", help="model whose sizes to use: a directory, or a published model; default: model.path"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file (`-`: only to the output)")


def run(arguments: argparse.Namespace) -> int:
    """Print the memory of every kind of rank next to the plan's. Return 2 if one does not fit."""
    resolved = load_one(arguments.config)
    (path,), overrides = split_arguments(arguments.config)
    subject, copied = _subject(resolved, arguments.model)
    # Import late: a wrong configuration fails before torch and Megatron load.
    from mrl.rehearse.comparison import compared, largest_budget
    from mrl.rehearse.engine_weights import ENGINE_ROLE
    from mrl.rehearse.lengths import recorded_steps
    from mrl.rehearse.processes import rehearse, rehearse_engine
    from mrl.rehearse.rank_kinds import rank_kinds
    from mrl.rehearse.subject import Request

    if arguments.lengths:
        next(recorded_steps(Path(arguments.lengths)))  # a wrong file fails here, not in every process
    roles = _roles(subject, arguments.role, ENGINE_ROLE)
    trained = [role for role in roles if role != ENGINE_ROLE]
    kinds = [kind for role in trained for kind in rank_kinds(subject.config, role, subject.specs[role])]
    if arguments.ranks:
        kinds = [kind for kind in kinds if set(arguments.ranks) & set(kind.ranks)]
    routing = recorded_routing(arguments.routing)
    overrides = [*overrides, *copied]
    request = Request(path, overrides, "", 0, arguments.model, arguments.lengths, routing, arguments.headroom)
    show = _silent if arguments.json == "-" else _show
    has_engine = ENGINE_ROLE in roles and (
        arguments.role == ENGINE_ROLE or not (arguments.ranks or arguments.phase or arguments.lengths)
    )
    counts = f"{counted(len(kinds), 'kind')} of ranks" + " and an engine" * has_engine
    show(f"{resolved.path}: {counts}, at full size on this machine's CPU")
    fits, listed = True, []
    budgets: dict[str, int] = {}
    for done in rehearse(kinds, request, _progress):
        rows = list(compared(subject, done, has_full_batches=request.lengths is None))
        show("\n".join(["", *_lines(done, rows, arguments.phase)]))
        listed.append(_values(done, rows))
        fits &= _fits(subject, done)
        if (budget := largest_budget(subject, done)) is not None:
            budgets[done.kind.role] = min(budget, budgets.get(done.kind.role, budget))
    if has_engine:
        _progress(ENGINE_ROLE)
        engine = rehearse_engine(subject.config, request)
        show("\n".join(["", *engine.lines()]))
        listed.append({"role": ENGINE_ROLE} | dataclasses.asdict(engine))
    if arguments.json:
        text = json.dumps(listed, indent=1)
        print(text) if arguments.json == "-" else _write(arguments.json, text)
    for role, budget in budgets.items():
        now = subject.config.model_roles()[role].max_tokens_per_device
        show(f"\n`{role}.max_tokens_per_device` may be about {budget:,}; it is {now:,}.")
    if kinds:
        show("\n" + _verdict(subject, fits))
    if has_engine:
        engine.check()
    if not (arguments.role or arguments.ranks or arguments.model):
        remember(resolved.config)
    return 0 if fits else _DOES_NOT_FIT


def _subject(resolved: Resolved[Any], model: str | None) -> tuple[Planned[Any], list[str]]:
    """Return the configuration as a rehearsal can run it, and the overrides that make it so."""
    subject = make_plan_input(resolved, None, model)
    if not shares_actor(subject.config, "critic"):
        return subject, []
    print("The critic has a copy of the frozen model here, in the plan's figures too. A run has none.", file=sys.stderr)
    return subject.with_changes_unchecked({_BASE: "own"}), [f"{_BASE}=own"]


def recorded_routing(text: str | None) -> float | None:
    """Return the factor that is given, or the largest of the run's updates."""
    if text is None:
        return None
    with suppress(ValueError):
        return float(text)
    lines = read_metrics(Path(text) / "metrics.jsonl")
    if factors := [float(line[_BUSIEST_RANK]) for line in lines if line.get(_BUSIEST_RANK)]:
        return max(factors)
    what = f"no step of the run recorded {_BUSIEST_RANK}: its actor has no experts, or it did no update"
    raise ConfigError(
        [
            Problem("command line", "--routing", what, "give a number"),
        ]
    )


def _show(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Keep the output for the figures."""


def _roles(subject: Planned[Any], role: str | None, engine: str) -> list[str]:
    roles = [*subject.specs, *([engine] if isinstance(subject.config, Config) else [])]
    if role is None:
        return roles
    if role not in roles:
        what = f'"{role}" is not a role of this configuration; its roles are {", ".join(roles)}'
        raise ConfigError([Problem("command line", "--role", what, did_you_mean(role, roles))])
    return [role]


def _progress(kind: object) -> None:
    print(f"rehearsing {kind}", file=sys.stderr, flush=True)


def _lines(done: Rehearsed, rows: Sequence[Compared], phases: Sequence[str] | None) -> Iterator[str]:
    yield f"{done.kind}: {done.num_parameters / 1e9:.3f} billion parameters, {done.seconds:.0f} s"
    yield f"  micro-batches: {done.batch}"
    rows = _chosen(rows, phases)
    table: list[Sequence[str]] = [("phase, GiB", "before", "peak", "after", "plan", "difference", "TFLOP")]
    for row in rows:
        memory = row.memory
        sizes = [f"{size / GIB:.2f}" for size in (memory.before, memory.peak, memory.after)]
        planned = ("", "") if row.planned is None else (f"{row.planned / GIB:.2f}", f"{row.difference / GIB:+.2f}")
        table.append((memory.name, *sizes, *planned, f"{memory.flops / 1e12:,.1f}" if memory.flops else ""))
    yield from aligned(table)
    memories = [row.memory for row in rows]
    for memory in memories if phases else [max(memories, key=lambda memory: memory.peak)]:
        yield f"  largest at the peak of `{memory.name}`:"
        yield from aligned([("", gib(size), str(maker)) for maker, size in memory.holders])
    for row in rows:
        if row.differs:
            yield f"  `{row.memory.name}` differs from the plan by {row.difference / GIB:+.2f} GiB"


def _chosen(rows: Sequence[Compared], phases: Sequence[str] | None) -> Sequence[Compared]:
    """Return the rows of these phases, or all."""
    if not phases:
        return rows
    if not (chosen := [row for row in rows if row.memory.name in phases]):
        known = list(dict.fromkeys(row.memory.name for row in rows))
        what = f'"{phases[0]}" is not a phase of this role'
        raise ConfigError([Problem("command line", "--phase", what, did_you_mean(phases[0], known))])
    return chosen


def _values(done: Rehearsed, rows: Sequence[Compared]) -> dict[str, Any]:
    phases = [dataclasses.asdict(row.memory) | {"planned": row.planned} for row in rows]
    kind = {"role": done.kind.role, "rank": done.kind.rank, "stages": done.kind.stages}
    sizes = {name: getattr(done, name) for name in ("num_parameters", "batch", "tokens", "num_rows", "seconds")}
    return kind | sizes | {"phases": phases}


def _fits(subject: Planned[Any], done: Rehearsed) -> bool:
    """Return whether the role alone fits: its fullest phase and the process itself."""
    from mrl.rehearse.comparison import process_of

    return max(phase.peak for phase in done.phases) + process_of(subject, done) <= subject.hardware.memory_bytes


def _verdict(subject: Planned[Any], fits: bool) -> str:
    device = f"{subject.hardware.name} with {gib(subject.hardware.memory_bytes)}"
    if fits:
        return f"Every role fits on {device}, if it is alone. `mrl plan` adds engines and roles on the same device."
    return f"A role does not fit on {device}. {_advice(subject)}"


def _advice(subject: Planned[Any]) -> str:
    """Return the smallest change that makes it fit by the plan, or how to find one."""
    if not isinstance(subject.config, Config):
        return f"Set {SFT_ADVICE}."
    if not plan_memory(subject).shortages:
        return "By the plan it fits: `--headroom` finds the largest max_tokens_per_device, `--phase` what takes more."
    found = advise(subject, max_found=1)
    return f"It fits with:\n  {subject.overrides(found[0][0])}" if found else "No change that was tried makes it fit."


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
