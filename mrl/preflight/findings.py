"""What can be known before a run starts, one finding per line.

The cheap part needs neither torch nor a cluster nor the data. `data` and `cluster` look at the
real rows and the real machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mrl.config.arithmetic import role_batch, role_mesh, samples_per_step, updates_per_step
from mrl.config.load import Resolved
from mrl.config.schema import Config
from mrl.config.step_calls import step_calls
from mrl.errors import ConfigError, MrlError, Problem
from mrl.preflight.columns import column_problems

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: what was looked at, what was found, and what would mend it."""

    verdict: Verdict
    about: str
    what: str
    fix: str = ""


def guarded(about: str, findings: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """The findings of a check; an error that it meets is one of them."""
    try:
        yield from findings
    except MrlError as error:
        yield CheckResult("fail", about, f"{error.where}: {error.what}" if error.where else error.what, error.fix)


def refuse(path: str, findings: Iterable[CheckResult]) -> list[CheckResult]:
    """The findings that warn; any that fail are an error."""
    seen = list(findings)
    if failed := [finding for finding in seen if finding.verdict == "fail"]:
        raise ConfigError([Problem(path, finding.about, finding.what, finding.fix) for finding in failed])
    return [finding for finding in seen if finding.verdict == "warn"]


def check_configuration(resolved: Resolved[Config]) -> Iterator[CheckResult]:
    """What loading has shown: it would have stopped at anything wrong."""
    num_keys = _num_values(dataclasses.asdict(resolved.config))
    yield CheckResult("ok", "configuration", f"{num_keys} values in range, and every rule between them holds")
    for warning in resolved.warnings:
        yield CheckResult(
            "skip", "configuration", warning, "run this where it is" if "on this machine" in warning else ""
        )


def check_batch(config: Config) -> Iterator[CheckResult]:
    """The arithmetic of a step, and what of it makes for slow work."""
    batch = config.batch
    what = (
        f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} = {samples_per_step(batch)} samples per step, "
        f"{updates_per_step(batch)} optimizer steps of {batch.samples_per_update}"
    )
    yield CheckResult("ok", "batch", what)
    for role in config.trained_roles():
        share, mesh = role_batch(config, role), role_mesh(config, role)
        what = (
            f"{share.samples_per_rank} samples per update on each of {mesh.dp} data-parallel ranks, in at most "
            f"{share.most_micro_batches} micro-batches of {share.tokens_per_micro_batch} tokens"
        )
        yield CheckResult("ok", f"batch of the {role}", what)
        if mesh.pp > 1 and share.samples_per_rank < mesh.pp:
            yield CheckResult(
                "warn",
                f"batch of the {role}",
                f"{share.samples_per_rank} samples cannot fill a pipeline of {mesh.pp} stages: most devices will wait",
                f"a larger batch.samples_per_update, or a smaller {role}.parallel.pp",
            )


def check_columns(config: Config) -> Iterator[CheckResult]:
    """That every column that a worker reads has been written by then."""
    if problems := column_problems(config):
        for problem in problems:
            yield CheckResult(
                "fail", "columns", problem, "this is a defect of mrl, or of your own algorithm's settings"
            )
        return
    calls = [call.method for call in step_calls(config)]
    yield CheckResult("ok", "columns", f"{', '.join(calls)}: every column is written before it is read")


def _num_values(value: object) -> int:
    return sum(map(_num_values, value.values())) if isinstance(value, dict) and value else 1
