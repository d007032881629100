"""`training.profile`: records a trace of the chosen steps over all processes, and writes its summary."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mrl.config.schema import Config
from mrl.controller.traced import TracedProcess, TracedProcesses
from mrl.events import Saved
from mrl.observe.trace import read_rows, steps_of, summary, write_trace
from mrl.spans import SPANS
from mrl.trainer.role_client import RoleClient
from mrl.trainer.run import Run

DIRECTORY = "profile"


class Profiler:
    """Records consecutive steps together. Errors of a disk end the trace, not the run."""

    def __init__(self, run: Run[Config], traced: TracedProcesses, roles: Sequence[RoleClient]) -> None:
        self._run, self._traced = run, traced
        self._settings = run.config.training.profile
        self._roles = [role for role in roles if hasattr(role.group, "begin_profile")]
        if self._settings.torch_ranks and (others := [role.group.role for role in roles if role not in self._roles]):
            run.warn("training.profile", f"no operations of {', '.join(others)}: its worker is no `ModelWorker` of mrl")
        self._steps: list[int] = []
        """Steps of the trace under way."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block if it is a step to profile, and write the trace after the last one in a row."""
        if step not in self._settings.steps:
            yield
            return
        if not self._steps:
            self._begin(step)
        self._steps.append(step)
        with SPANS(f"step {step}"):
            yield
        if step + 1 not in self._settings.steps:
            self.finish()

    def _begin(self, step: int) -> None:
        directory = self._directory(step)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role in self._roles:
            role.group.begin_profile(self._settings, str(directory))
        self._traced.begin(directory)

    def finish(self) -> None:
        """Write the trace of the steps so far, if any."""
        if not self._steps:
            return
        began, run, directory = time.monotonic(), self._run, self._directory(self._steps[0])
        processes = self._traced.end(os.getpid())
        files = [file for role in self._roles for written in role.group.end_profile() for file in written]
        rows, path = read_rows(processes), directory / "trace.json"
        steps = steps_of(rows, _pools(run.config))
        lines = [*summary(steps), *_about(processes, steps[0].window, steps[-1].window, files)]
        with run.may_be_lost("profile"):
            write_trace(path, steps, {"processes": [_facts(process) for process in processes], "files": files})
            (directory / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            run.events.write(
                Saved("profile", self._steps[-1], str(path), path.stat().st_size, time.monotonic() - began)
            )
            covered = " to ".join(map(str, dict.fromkeys([self._steps[0], self._steps[-1]])))
            run.console.print(f"trace of step {covered}: {path}, with summary.txt next to it")
        self._steps = []

    def _directory(self, step: int) -> Path:
        return self._run.directory / DIRECTORY / f"step-{step:06d}"


def _pools(config: Config) -> dict[str, str]:
    """Return the pool of each role and of the engines."""
    pools = {str(role): pool for role, pool in config.placement.roles.items()}
    return {"rollout": pools["actor"], "reference": pools["actor"], **pools}


def _facts(process: TracedProcess) -> dict[str, str | int]:
    clock = process.clock
    clocks = {"clock_offset_ns": clock.offset_ns, "clock_uncertainty_ns": clock.uncertainty_ns}
    return {"name": process.name, "pid": process.pid, "node": process.node, **clocks, "problem": process.problem}


def _about(
    processes: Sequence[TracedProcess], first: tuple[int, int], last: tuple[int, int], files: Sequence[str]
) -> Iterator[str]:
    """Yield the cost of recording, the precision of the clocks, the missing processes, and further files."""
    costs = {process.name: process.cost_ns for process in processes}
    most, length = max(costs, key=costs.__getitem__), last[1] - first[0]
    share = 100 * costs[most] / length
    yield f"recording took at most {costs[most] / 1e6:.1f} ms of a process, {share:.2f} % of the time ({most})"
    if off := max(process.clock.uncertainty_ns for process in processes):
        yield f"clocks of other hosts are known within {off / 1e6:.3f} ms"
    yield from (f"{process.name}: {process.problem}" for process in processes if process.problem)
    yield from (f"also written: {file}" for file in files)
