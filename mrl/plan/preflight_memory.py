"""Whether every phase fits into the memory of its devices, as `mrl plan` counts it."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.load import Resolved
from mrl.config.schema import Config
from mrl.errors import ModelError
from mrl.plan.advice import advise
from mrl.plan.memory import gib, plan_memory
from mrl.plan.preflight import Finding
from mrl.plan.subject import make_subject


def check_memory(resolved: Resolved[Config], hardware_name: str) -> Iterator[Finding]:
    """The fullest phase, or those that do not fit and the smallest change that would."""
    about = "memory"
    if resolved.config.cluster.device == "cpu":
        yield Finding("skip", about, "devices are CPU slots; what they take is the machine's to give")
        return
    try:
        subject = make_subject(resolved, hardware_name)
    except ModelError as error:
        yield Finding("skip", about, error.what, error.fix)
        return
    plan = plan_memory(subject)
    device = f"{subject.hardware.name} ({gib(subject.hardware.memory_bytes)}; --hardware for others)"
    if not plan.shortages:
        fullest = max(plan.phases, key=lambda phase: phase.num_bytes)
        what = f"{fullest.name} takes the most: {gib(fullest.num_bytes)} of each {device}"
        yield Finding("ok", about, what)
        return
    advice = next(iter(advise(subject)), None)
    fix = subject.overrides(advice.changes) if advice is not None else "mrl plan --search, or larger devices"
    for shortage in plan.shortages:
        what = f"{shortage.phase.name} {shortage.what} of {device}: {gib(shortage.num_bytes)} too much"
        yield Finding("fail", about, what, fix)
