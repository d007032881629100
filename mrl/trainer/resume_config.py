"""The part of a configuration that decides what is learned: a checkpoint holds it, and a resumed run compares it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mrl.config.sft import AnyConfig
from mrl.redaction import redact

_MAY_CHANGE = ("run", "cluster", "deadlines", "placement", "training", "validation", "sync", "reward", "judge")
"""Sections that a resumed run may have otherwise than before without a word: they do not decide what is learned."""


def resume_config(config: AnyConfig) -> dict[str, Any]:
    """It as JSON knows it; without secrets, which the variables of rewards and environments may hold."""
    sections = {name: value for name, value in dataclasses.asdict(config).items() if name not in _MAY_CHANGE}
    if "agent" in sections:
        del sections["agent"]["environment"]
    found: dict[str, Any] = redact(json.loads(json.dumps(sections)))
    return found


def describe_changes(before: dict[str, Any], config: AnyConfig, step: int) -> dict[str, str]:
    """Return what a run that goes on after this step has otherwise than it had; by key, in words."""
    return {
        key: f"was {then} when this run began, and is {now} from step {step + 1} on"
        for key, (then, now) in _differences(before, resume_config(config)).items()
    }


def _differences(before: Any, now: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **now}:
            found |= _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == now else {key: (before, now)}
