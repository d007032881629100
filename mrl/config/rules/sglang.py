"""Rules for `rollout.engine: sglang`: unproven combinations, and settings that the engines would not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.config.sglang import PROVEN_FAMILIES, SglangConfig
from mrl.errors import Problem

_VLLM = "rollout.engine=vllm"


def check_sglang(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine != "sglang":
        for field in dataclasses.fields(SglangConfig):
            if getattr(rollout.sglang, field.name) != field.default:
                key = f"rollout.sglang.{field.name}"
                yield problem(key, "only the engine sglang reads it", "rollout.engine=sglang, or remove this key")
        return
    for name, value in rollout.vllm.items():
        if value is not None:  # null removes a key of a file that this one extends
            key = f"rollout.vllm.{name}"
            yield problem(key, "the engine sglang does not read it", f"{key}=null, or {_VLLM}")
    if config.asynchrony.replay:
        what = "SGLang generates without steps that a replay could count"
        yield problem("asynchrony.replay", what, f"asynchrony.replay=null, or {_VLLM}")


def check_sglang_family(config: Config, family: str | None) -> Iterator[Problem]:
    """Refuse families whose weights have not been compared with the trainer's."""
    if config.rollout.engine == "sglang" and family is not None and family not in PROVEN_FAMILIES:
        what = f"sglang, but its weights have been compared with the trainer's only for {', '.join(PROVEN_FAMILIES)}"
        yield problem("rollout.engine", f"{what}, not for {family}", _VLLM)
