"""Runs the rehearsals of several ranks in processes side by side, and that of an engine in one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from mrl.config.schema import Config
from mrl.rehearse.engine_weights import ENGINE_ROLE, EngineRanks, EngineReport, ParameterDifference, RehearsalError
from mrl.rehearse.rank_kinds import RankKind
from mrl.rehearse.subject import Request
from mrl.rehearse.timeline import Maker, PhaseMemory

LIMIT_S = 3600.0
"""The engine of DeepSeek-V3 over 32 ranks took 250 s, and a larger engine takes longer on a busy machine."""


@dataclass(frozen=True)
class Rehearsed:
    """A kind of rank with its phases, and the seconds that the rehearsal took."""

    kind: RankKind
    phases: tuple[PhaseMemory, ...]
    num_parameters: int
    batch: str
    """The micro-batch of the measured calls."""
    tokens: int
    num_rows: int
    seconds: float


def rehearse(kinds: Sequence[RankKind], request: Request, started: Callable[[RankKind], None]) -> Iterator[Rehearsed]:
    """Yield the rehearsals of these kinds in their order, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as threads:

        def run(kind: RankKind) -> Rehearsed:
            started(kind)
            return _run(kind, replace(request, role=kind.role, rank=kind.rank))

        yield from threads.map(run, kinds)


def rehearse_engine(config: Config, request: Request) -> EngineReport:
    """Return the rehearsal of the ranks of an engine, or the reason why it is not possible."""
    if config.rollout.engine != "vllm":
        return EngineReport(
            "", (), f"`rollout.engine` is {config.rollout.engine}: only vLLM's engines are rehearsed", 0.0
        )
    if importlib.util.find_spec("vllm") is None:
        return EngineReport("", (), "vLLM is not installed", 0.0)
    report = _answer(replace(request, role=ENGINE_ROLE), ENGINE_ROLE)
    kinds = tuple(map(_engine_ranks, report["kinds"]))
    return EngineReport(**report | {"kinds": kinds})


def _run(kind: RankKind, request: Request) -> Rehearsed:
    report = _answer(request, str(kind))
    return Rehearsed(kind, **report | {"phases": tuple(map(_phase, report["phases"]))})


def _answer(request: Request, where: str) -> dict[str, Any]:
    """Return the report of a process."""
    # No GPU is used, even if there is one: the code of a CPU makes tensors that torch can fake without a driver.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "mrl.rehearse.child", json.dumps(asdict(request))]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        what, fix = f"it has not ended after {LIMIT_S:,.0f} s", "rehearse one --role at a time, on an idle machine"
        raise RehearsalError(what, where=where, fix=fix) from None
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RehearsalError(f"the process ended with status {ran.returncode}: {ran.stderr[-500:]}", where=where)
    report: dict[str, Any] = json.loads(lines[-1])
    if "error" in report:
        what = f"{report['error']}\n  at {report['place']}: {report['code']}"
        raise RehearsalError(what, where=where)
    return report


def _engine_ranks(values: dict[str, Any]) -> EngineRanks:
    found = tuple(ParameterDifference(**difference) for difference in values["differences"])
    return EngineRanks(**values | {"ranks": tuple(values["ranks"]), "differences": found})


def _phase(values: dict[str, Any]) -> PhaseMemory:
    holders = tuple((Maker(**maker), size) for maker, size in values["holders"])
    return PhaseMemory(**values | {"holders": holders})
