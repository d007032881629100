"""What can be known before a run starts, one finding per line.

The cheap part needs neither torch nor a cluster nor the data. `data` and `cluster` look at the
real rows and the real machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from mrl.config.arithmetic import role_batch, role_mesh, samples_per_step, updates_per_step
from mrl.config.load import Resolved
from mrl.config.names import missing_modules
from mrl.config.schema import ClusterConfig, Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.config.step_calls import SAMPLE_COLUMNS, step_calls
from mrl.config.values import leaves_of
from mrl.errors import ConfigError, ModelError, MrlError, PlacementError, Problem
from mrl.plan.known_models import model_spec
from mrl.plan.machine_memory import advise_machine, machine_plan_input, plan_machine
from mrl.plan.memory import gib, plan_memory, update_phase
from mrl.plan.plan_input import make_plan_input
from mrl.plan.search import advise

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: what was looked at, what was found, and what would mend it."""

    verdict: Verdict
    about: str
    what: str
    fix: str = ""


SFT_ADVICE = "a smaller actor.max_tokens_per_device, or a larger actor.parallel.tp or pp"

ok, warn, fail, skip = (partial(CheckResult, verdict) for verdict in get_args(Verdict))


def guarded(about: str, findings: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yield the findings of a check; an error that it meets is one of them."""
    try:
        yield from findings
    except MrlError as error:
        yield fail(about, f"{error.where}: {error.what}" if error.where else error.what, error.fix)


def refuse(path: str, findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the findings that warn; any that fail are an error."""
    seen = list(findings)
    if failed := [finding for finding in seen if finding.verdict == "fail"]:
        raise ConfigError([Problem(path, finding.about, finding.what, finding.fix) for finding in failed])
    return [finding for finding in seen if finding.verdict == "warn"]


def check_offline(resolved: Resolved[Any], hardware_name: str | None) -> Iterator[CheckResult]:
    """Yield what the configuration alone says, and what loading has shown: it would have stopped at anything wrong."""
    num_keys = len(list(leaves_of(dataclasses.asdict(resolved.config))))
    yield ok("configuration", f"{num_keys} values in range, and every rule between them holds")
    for warning in resolved.warnings:
        yield skip("configuration", warning, "run this where it is" if "on this machine" in warning else "")
    yield from check_batch(resolved.config)
    yield from check_columns(resolved.config)
    yield from check_experts(resolved.config)
    yield from guarded("memory", check_memory(resolved, hardware_name))


def check_own_parts(config: AnyConfig) -> Iterator[CheckResult]:
    """Yield the modules of the user's own that a run would not find: loading only warns, it may be another machine."""
    for missing in missing_modules(config):
        yield fail(missing.key, missing.what, missing.fix)


def check_batch(config: AnyConfig) -> Iterator[CheckResult]:
    """Yield the arithmetic of a step, and what of it makes for slow work."""
    if isinstance(config, SftConfig):
        key, what = "rows_per_update", f"{config.batch.rows_per_update} rows per update"
    else:
        key, batch = "samples_per_update", config.batch
        what = (
            f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} = {samples_per_step(batch)} samples per "
            f"step, {updates_per_step(batch)} optimizer steps of {batch.samples_per_update}"
        )
    yield ok("batch", what)
    for role in config.trained_roles():
        share, mesh = role_batch(config, role), role_mesh(config, role)
        what = (
            f"{share.samples_per_rank} samples per update on each of {mesh.dp} data-parallel ranks, in at most "
            f"{share.max_micro_batches} micro-batches of {share.tokens_per_micro_batch} tokens"
        )
        yield ok(f"batch of the {role}", what)
        if mesh.pp > 1 and share.samples_per_rank < mesh.pp:
            yield warn(
                f"batch of the {role}",
                f"{share.samples_per_rank} samples cannot fill a pipeline of {mesh.pp} stages: most devices will wait",
                f"a larger batch.{key}, or a smaller {role}.parallel.pp",
            )


_TOKEN_RATIOS = ("ppo", "vanilla", "cispo")


def check_experts(config: AnyConfig) -> Iterator[CheckResult]:
    """Yield a warning for mixtures of experts that are trained as runs have collapsed: several updates of a batch by
    ratios of single tokens, though engine and trainer choose other experts for some of them."""
    if isinstance(config, SftConfig):
        return
    try:
        is_mixture = model_spec(config.model.path).moe is not None
    except ModelError:  # the check of memory says that its sizes are not known
        return
    num_updates, algorithm = updates_per_step(config.batch), config.algorithm
    if is_mixture and num_updates > 1 and algorithm.loss.policy in _TOKEN_RATIOS and algorithm.correction is None:
        what = f"{num_updates} updates a step by ratios of single tokens, without a correction: a mixture of experts "
        what += "may collapse, because engine and trainer route some tokens to other experts"
        fix = f"batch.samples_per_update={samples_per_step(config.batch)}, algorithm.correction={{}}, "
        yield warn("experts", what, f"{fix}or algorithm.loss.policy=gspo")


def check_columns(config: AnyConfig) -> Iterator[CheckResult]:
    """Check that every column that a worker reads has been written by then; SFT has one call alone."""
    if isinstance(config, SftConfig):
        return
    if problems := column_problems(config):
        for problem in problems:
            yield fail("columns", problem, "this is a defect of mrl, or of your own algorithm's settings")
        return
    calls = [call.method for call in step_calls(config)]
    yield ok("columns", f"{', '.join(calls)}: every column is written before it is read")


def column_problems(config: Config) -> list[str]:
    """Return what a call of a step would miss: every column must be written before it is read."""
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


def check_memory(resolved: Resolved[Any], hardware_name: str | None = None) -> Iterator[CheckResult]:
    """Yield the fullest phase, or those that do not fit and the smallest change that would."""
    about, config = "memory", resolved.config
    if config.cluster.device == "cpu":
        yield skip(about, "devices are CPU slots: it is each machine's memory that counts")
        return
    try:
        subject = make_plan_input(resolved, hardware_name)
    except ModelError as error:
        yield skip(about, error.what, error.fix)
        return
    name, size = subject.hardware.name, subject.hardware.memory_bytes
    if isinstance(config, SftConfig):
        taken = update_phase(subject).num_bytes
        what = f"an update takes {gib(taken)} of each {name} ({gib(size)})"
        yield ok(about, what) if taken <= size else _overfull(config.cluster, what, SFT_ADVICE)
        return
    plan, device = plan_memory(subject), f"{name} ({gib(size)}; --hardware for others)"
    if not plan.shortages:
        yield ok(about, f"{plan.fullest.name} takes the most: {gib(plan.fullest.num_bytes)} of each {device}")
        return
    advice = advise(subject, max_found=1)
    fix = subject.overrides(advice[0][0]) if advice else "mrl plan --search, or larger devices"
    for shortage in plan.shortages:
        what = f"{shortage.phase.name} {shortage.what} of {device}: {gib(shortage.num_bytes)} too much"
        yield _overfull(config.cluster, what, fix)


def _overfull(cluster: ClusterConfig, what: str, fix: str) -> CheckResult:
    return (fail if cluster.overfull == "refuse" else warn)("memory", what, fix)


def check_planned_memory(resolved: Resolved[Any]) -> Iterator[CheckResult]:
    """Yield what does not fit into the memory of the devices that the configuration names, where it names any."""
    if resolved.config.cluster.hardware is not None:
        for finding in guarded("memory", check_memory(resolved)):
            may_start = f"{finding.fix}; or cluster.overfull=warn to start all the same"
            yield dataclasses.replace(finding, fix=may_start) if finding.verdict == "fail" else finding


def check_machine(config: AnyConfig, usable_bytes: int, taken_bytes: int) -> CheckResult:
    """Check a machine of CPU slots: fail where it surely does not hold a run, and warn where it may not."""
    about = "memory"
    try:
        subject = machine_plan_input(config, usable_bytes)
        plan = plan_machine(subject)
    except (ModelError, PlacementError) as error:
        return skip(about, error.what, error.fix)
    range_of = f"{gib(plan.min_bytes)} to {gib(plan.max_bytes)}"
    what = f"a run takes {range_of} of a machine's {gib(usable_bytes)}, most in the phase of the {plan.fullest}"
    if plan.max_bytes <= (left := max(0, usable_bytes - taken_bytes)):
        return ok(about, what)
    changes = None if isinstance(config, SftConfig) else advise_machine(subject, left)
    fix = subject.overrides(changes) if changes else "a smaller model, a larger machine, or fewer other programs"
    what += f"; others hold {gib(taken_bytes)}. {'; '.join(plan.lines())}"
    return CheckResult("fail" if plan.min_bytes > usable_bytes else "warn", about, what, fix)
