"""Runs the rehearsals of several ranks in processes side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from mrl.errors import MrlError
from mrl.rehearse.rank_kinds import RankKind
from mrl.rehearse.subject import Request
from mrl.rehearse.timeline import Maker, PhaseMemory

LIMIT_S = 900.0


class RehearsalError(MrlError):
    """The rehearsed code failed on a rank."""


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


def _run(kind: RankKind, request: Request) -> Rehearsed:
    # No GPU is used, even if there is one: the code of a CPU makes tensors that torch can fake without a driver.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "mrl.rehearse.child", json.dumps(asdict(request))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RehearsalError(f"the process ended with status {ran.returncode}: {ran.stderr[-500:]}", where=str(kind))
    report: dict[str, Any] = json.loads(lines[-1])
    if "error" in report:
        what = f"{report['error']}\n  at {report['place']}: {report['code']}"
        raise RehearsalError(what, where=str(kind))
    return Rehearsed(kind, **report | {"phases": tuple(map(_phase, report["phases"]))})


def _phase(values: dict[str, Any]) -> PhaseMemory:
    holders = tuple((Maker(**maker), size) for maker, size in values["holders"])
    return PhaseMemory(**values | {"holders": holders})
