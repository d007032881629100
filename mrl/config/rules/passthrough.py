"""Rules for keys passed on to Megatron and vLLM: `ROLE.megatron`, `ddp`, `optimizer`, and `vllm` of engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.libraries.installed import DDP, ENGINE, OPTIMIZER, SERVER, TRANSFORMER, Target, field_types, wrong_kind
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.config.values import KeyPath
from mrl.errors import Problem, did_you_mean


def check_passthrough(config: AnyConfig) -> tuple[list[Problem], list[str]]:
    """Return the problems with passed-on keys, and the keys that could not be checked because a library is not
    installed."""
    problems: list[Problem] = []
    unchecked: list[str] = []
    for path, target, values in _sections(config):
        if not values:
            continue
        known = field_types(target)
        if known is None:
            reason = f"{target.class_name} of {target.package} is not found on this machine"
            unchecked.append(f"the {len(values)} keys of {'.'.join(path)}: {reason}")
        problems += _check(path, values, target, known)
    return problems, unchecked


def _sections(config: AnyConfig) -> Iterator[tuple[KeyPath, Target, dict[str, Any]]]:
    for role, model in config.model_roles().items():
        if model.strategy == "megatron":  # `rules/fsdp.py` refuses these keys
            yield (role, "megatron"), TRANSFORMER, model.megatron
    for role, trained in config.trained_roles().items():
        if trained.strategy == "megatron":
            yield (role, "ddp"), DDP, trained.ddp
        yield (role, "optimizer"), OPTIMIZER, trained.optimizer
    if isinstance(config, Config):
        if config.rollout.engine != "sglang":  # `rules/sglang.py` refuses these keys
            yield ("rollout", "vllm"), ENGINE, config.rollout.vllm
        if config.judge is not None:
            yield ("judge", "vllm"), SERVER, config.judge.vllm


def _check(path: KeyPath, values: dict[str, Any], target: Target, known: Mapping[str, str] | None) -> Iterator[Problem]:
    for name, value in values.items():
        key = ".".join((*path, name))
        if name in target.owned:
            yield problem(key, f"set by {target.owned[name].format(role=path[0])}", "remove this key")
        elif known is not None and name not in known:
            suggestion = did_you_mean(name, known.keys() - target.owned.keys())
            # listing the names of a whole library would not help
            fix = "" if suggestion.startswith("known:") else suggestion
            yield problem(key, f"{target.class_name} of the installed {target.package} has no such field", fix)
        elif expected := wrong_kind(target, known, name, value):
            yield problem(key, f"must be {expected}, not {json.dumps(value, default=str)}")
        elif reason := target.rules.refusal(name, value):
            yield problem(key, f"{value} is refused: {reason}", "remove this key")
