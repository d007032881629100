"""Checks before a run starts, with one result per line.

The checks here work without torch, a cluster or the data. `data` and `machine` check the real rows and the real
machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from mrl.config.algorithm import BASELINE_ADVANTAGES
from mrl.config.arithmetic import corrects_engines, role_batch, role_mesh, samples_per_step, updates_per_step
from mrl.config.resolved.load import Resolved
from mrl.config.rules.components import missing_modules
from mrl.config.schema import ClusterConfig, Config
from mrl.config.sft import AnyConfig, DpoConfig, RmConfig, SftConfig
from mrl.config.step_calls import SAMPLE_COLUMNS, step_calls
from mrl.config.values import leaves_of
from mrl.errors import ConfigError, ModelError, MrlError, PlacementError, Problem
from mrl.plan.known_models import model_spec
from mrl.plan.machine_memory import advise_machine, machine_plan_input, plan_machine
from mrl.plan.memory import gib, plan_memory, update_phase
from mrl.plan.plan_input import make_plan_input
from mrl.plan.record_size import record_size, recorded_in
from mrl.plan.rehearsed import rehearsed_on
from mrl.plan.search import advise

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: the subject, what was found, and the fix."""

    verdict: Verdict
    about: str
    what: str
    fix: str = ""


SFT_ADVICE = "a smaller actor.max_tokens_per_device, or a larger actor.parallel.tp or pp"

ok, warn, fail, skip = (partial(CheckResult, verdict) for verdict in get_args(Verdict))


def guarded(about: str, findings: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yield the results of a check. An error in the check becomes a failed result."""
    try:
        yield from findings
    except MrlError as error:
        yield fail(about, f"{error.where}: {error.what}" if error.where else error.what, error.fix)


def refuse(path: str, findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the results that warn. Raise an error if any result failed."""
    listed = list(findings)
    if failed := [finding for finding in listed if finding.verdict == "fail"]:
        raise ConfigError([Problem(path, finding.about, finding.what, finding.fix) for finding in failed])
    return [finding for finding in listed if finding.verdict == "warn"]


def check_offline(resolved: Resolved[Any], hardware_name: str | None) -> Iterator[CheckResult]:
    """Yield results from the configuration alone, including the warnings of loading it."""
    num_keys = len(list(leaves_of(dataclasses.asdict(resolved.config))))
    yield ok("configuration", f"{num_keys} values are valid, and all rules between them hold")
    for warning in resolved.warnings:
        yield skip(
            "configuration", warning, "run this on a machine that has it" if "on this machine" in warning else ""
        )
    yield from check_batch(resolved.config)
    yield from check_columns(resolved.config)
    yield from check_experts(resolved.config)
    yield from check_adapters(resolved.config)
    yield from guarded("record", check_record(resolved.config))
    yield from guarded("memory", check_memory(resolved, hardware_name))
    if resolved.config.cluster.device == "gpu":
        yield check_rehearsed(resolved)


def check_rehearsed(resolved: Resolved[Any]) -> CheckResult:
    """Say whether the code of every rank has run at full size with this configuration."""
    if (day := rehearsed_on(resolved.config)) is not None:
        return ok("rehearsal", f"the code of every kind of rank ran at full size on {day}")
    what = "this configuration was never rehearsed: whether every rank builds at full size is not known"
    return skip("rehearsal", what, f"mrl rehearse {resolved.path}")


def check_own_parts(config: AnyConfig) -> Iterator[CheckResult]:
    """Fail for each missing module of the user's own code. Loading a configuration only warns, because it may run
    elsewhere."""
    for missing in missing_modules(config):
        yield fail(missing.key, missing.what, missing.fix)


def check_batch(config: AnyConfig) -> Iterator[CheckResult]:
    """Yield the arithmetic of a step, with warnings about settings that make it slow."""
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
                f"{share.samples_per_rank} samples cannot fill a pipeline of {mesh.pp} stages: most devices wait",
                f"a larger batch.{key}, or a smaller {role}.parallel.pp",
            )


def check_record(config: AnyConfig) -> Iterator[CheckResult]:
    """Report the largest size of the recorded steps, and warn if the limit would end the recording."""
    about, record, steps = "record", config.training.record, recorded_in(config)
    is_open = bool(config.training.record_when) or (bool(record.every) and config.training.steps is None)
    if not steps and not is_open:
        return
    try:
        size = record_size(config)
    except ModelError as error:
        yield skip(about, f"the size of a record is not known: {error.what}", error.fix)
        return
    limit = f"training.record.max_bytes={record.max_bytes}"
    what = f"a recorded step has at most {gib(size)}, {len(steps)} steps {gib(size * len(steps))}"
    if is_open:
        what += f", and the limit allows {record.max_bytes // size} steps in all"
    if size * max(1, len(steps)) > record.max_bytes:
        yield warn(about, f"{what}: more than {limit}", f"training.record.max_bytes={size * max(1, len(steps))}")
    else:
        yield ok(about, what)


_TOKEN_RATIOS = ("ppo", "vanilla", "cispo")


def check_experts(config: AnyConfig) -> Iterator[CheckResult]:
    """Warn about mixtures of experts trained with settings under which runs have collapsed: several updates of a batch
    by ratios of single tokens, while engine and trainer route some tokens to different experts."""
    if isinstance(config, SftConfig):
        return
    try:
        is_mixture = model_spec(config.model.path).moe is not None
    except ModelError:  # the memory check reports the unknown sizes
        return
    num_updates, algorithm = updates_per_step(config.batch), config.algorithm
    if is_mixture and num_updates > 1 and algorithm.loss.policy in _TOKEN_RATIOS and not corrects_engines(config):
        what = f"{num_updates} updates per step with ratios of single tokens, but no correction: a mixture of experts "
        what += "may collapse, because engine and trainer route some tokens to different experts"
        fix = f"batch.samples_per_update={samples_per_step(config.batch)}, algorithm.correction={{}}, "
        yield warn("experts", what, f"{fix}or algorithm.loss.policy=gspo")


_USUAL_RATE = {DpoConfig: 5e-7, RmConfig: 2e-6, SftConfig: 1e-5, Config: 1e-6}
"""Learning rate of all weights in the presets."""
_CRITIC_RATE = 5e-6
_ADAPTERS_RATE = 10.0
"""Usual learning rate of adapters, relative to that of all weights."""


def check_adapters(config: AnyConfig) -> Iterator[CheckResult]:
    """Warn about adapters with a learning rate for all weights: below a third of what adapters usually need."""
    whole = next(rate for kind, rate in _USUAL_RATE.items() if isinstance(config, kind))
    for role, model in config.trained_roles().items():
        rate, usual = model.optimizer.get("lr"), _ADAPTERS_RATE * (_CRITIC_RATE if role == "critic" else whole)
        if model.lora is not None and rate is not None and rate < usual / 3:
            key = f"{role}.optimizer.lr"
            what = f"{rate:g} is usual for all weights; adapters usually need about ten times as much, here {usual:g}"
            yield warn(key, what, f"{key}={usual:g}, unless you have tried this one")


def check_columns(config: AnyConfig) -> Iterator[CheckResult]:
    """Check that every column that a worker reads has been written before. SFT has only one call."""
    if isinstance(config, SftConfig):
        return
    if problems := column_problems(config):
        for problem in problems:
            yield fail("columns", problem, "this is a bug in mrl, or in the settings of your own algorithm")
        return
    calls = [call.method for call in step_calls(config)]
    yield ok("columns", f"{', '.join(calls)}: every column is written before it is read")


def column_problems(config: Config) -> list[str]:
    """Return the columns that calls of a step would miss. Every column must be written before it is read."""
    # `position` is part of the call itself; baselines, routes, masks and ages arrive with the samples.
    written = {*SAMPLE_COLUMNS, "position"}
    written |= {"baseline_scores"} if config.algorithm.advantage in BASELINE_ADVANTAGES else set()
    written |= {"routes"} if config.algorithm.router_replay == "R3" else set()
    written |= {"sampling_mask"} if config.algorithm.keep_sampling_mask else set()
    written |= {"staleness"} if config.asynchrony.ahead else set()
    problems = []
    for call in step_calls(config):
        for column in dict.fromkeys(call.reads + call.needs(config)):
            if column not in written:
                now = ", ".join(sorted(written))
                problems.append(
                    f"{call.method} needs `{column}`, but no earlier call writes it; columns available: {now}"
                )
            elif column not in call.reads + call.optional:
                problems.append(f"{call.method} needs `{column}`, but does not declare it as read")
        written |= set(call.writes)
    return problems


def check_memory(resolved: Resolved[Any], hardware_name: str | None = None) -> Iterator[CheckResult]:
    """Yield the phase with the highest memory, or the phases that do not fit and the smallest change that makes them
    fit."""
    about, config = "memory", resolved.config
    if config.cluster.device == "cpu":
        yield skip(about, "devices are CPU slots: the memory of each machine counts")
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
    plan, device = plan_memory(subject), f"{name} ({gib(size)}; --hardware to change)"
    if not plan.shortages:
        yield ok(about, f"{plan.fullest.name} has the highest memory: {gib(plan.fullest.num_bytes)} of each {device}")
        return
    advice = advise(subject, max_found=1)
    fix = subject.overrides(advice[0][0]) if advice else "use mrl plan --search, or larger devices"
    for shortage in plan.shortages:
        what = f"{shortage.phase.name} {shortage.what} of {device}: {gib(shortage.num_bytes)} too much"
        yield _overfull(config.cluster, what, fix)


def _overfull(cluster: ClusterConfig, what: str, fix: str) -> CheckResult:
    return (fail if cluster.overfull == "refuse" else warn)("memory", what, fix)


def check_planned_memory(resolved: Resolved[Any]) -> Iterator[CheckResult]:
    """Yield problems with the memory of the devices that the configuration specifies, if any."""
    if resolved.config.cluster.hardware is not None:
        for finding in guarded("memory", check_memory(resolved)):
            may_start = f"{finding.fix}; or set cluster.overfull=warn to start anyway"
            yield dataclasses.replace(finding, fix=may_start) if finding.verdict == "fail" else finding


def check_machine(config: AnyConfig, usable_bytes: int, taken_bytes: int) -> CheckResult:
    """Check a machine with CPU slots. Fail if a run certainly does not fit, and warn if it may not fit."""
    about = "memory"
    try:
        subject = machine_plan_input(config, usable_bytes)
        plan = plan_machine(subject)
    except (ModelError, PlacementError) as error:
        return skip(about, error.what, error.fix)
    range_of = f"{gib(plan.min_bytes)} to {gib(plan.max_bytes)}"
    what = f"a run takes {range_of} of a machine's {gib(usable_bytes)}, highest in the phase of the {plan.fullest}"
    if plan.max_bytes <= (left := max(0, usable_bytes - taken_bytes)):
        return ok(about, what)
    changes = None if isinstance(config, SftConfig) else advise_machine(subject, left)
    fix = subject.overrides(changes) if changes else "a smaller model, a larger machine, or fewer other programs"
    what += f"; other programs use {gib(taken_bytes)}. {'; '.join(plan.lines())}"
    return CheckResult("fail" if plan.min_bytes > usable_bytes else "warn", about, what, fix)
