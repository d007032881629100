"""Whether every phase fits into the memory of its devices, or of a machine, as `mrl plan` counts it."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.load import Resolved
from mrl.config.schema import Config
from mrl.errors import ModelError, PlacementError
from mrl.plan.advice import advise
from mrl.plan.machine_memory import advise_machine, machine_plan_input, plan_machine
from mrl.plan.memory import gib, plan_memory
from mrl.plan.plan_input import make_plan_input
from mrl.preflight.findings import CheckResult


def check_memory(resolved: Resolved[Config], hardware_name: str) -> Iterator[CheckResult]:
    """The fullest phase, or those that do not fit and the smallest change that would."""
    about = "memory"
    if resolved.config.cluster.device == "cpu":
        yield CheckResult("skip", about, "devices are CPU slots: it is each machine's memory that counts")
        return
    try:
        subject = make_plan_input(resolved, hardware_name)
    except ModelError as error:
        yield CheckResult("skip", about, error.what, error.fix)
        return
    plan = plan_memory(subject)
    device = f"{subject.hardware.name} ({gib(subject.hardware.memory_bytes)}; --hardware for others)"
    if not plan.shortages:
        fullest = max(plan.phases, key=lambda phase: phase.num_bytes)
        what = f"{fullest.name} takes the most: {gib(fullest.num_bytes)} of each {device}"
        yield CheckResult("ok", about, what)
        return
    advice = next(iter(advise(subject)), None)
    fix = subject.overrides(advice.changes) if advice is not None else "mrl plan --search, or larger devices"
    for shortage in plan.shortages:
        what = f"{shortage.phase.name} {shortage.what} of {device}: {gib(shortage.num_bytes)} too much"
        yield CheckResult("fail", about, what, fix)


def check_machine(config: Config, usable_bytes: int, taken_bytes: int) -> CheckResult:
    """A machine of CPU slots: it fails where it surely does not hold a run, and warns where it may not."""
    about = "memory"
    try:
        subject = machine_plan_input(config, usable_bytes)
        plan = plan_machine(subject)
    except (ModelError, PlacementError) as error:
        return CheckResult("skip", about, error.what, error.fix)
    left = max(0, usable_bytes - taken_bytes)
    range_of = f"{gib(plan.least_bytes)} to {gib(plan.most_bytes)}"
    what = f"a run takes {range_of} of a machine's {gib(usable_bytes)}, most in the phase of the {plan.fullest}"
    if plan.most_bytes <= left:
        return CheckResult("ok", about, what)
    changes = advise_machine(subject, left)
    fix = subject.overrides(changes) if changes else "a smaller model, a larger machine, or fewer other programs"
    what += f"; others hold {gib(taken_bytes)}. {'; '.join(plan.lines())}"
    return CheckResult("fail" if plan.least_bytes > usable_bytes else "warn", about, what, fix)
