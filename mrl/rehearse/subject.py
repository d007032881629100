"""The configuration that a rehearsal runs: the kernels of a GPU where a stand-in exists, and models without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.resolved.load import load_any_config
from mrl.plan.plan_input import Planned, make_plan_input

_NO_STAND_IN = ("moe_grouped_gemm", "moe_permute_fusion")
"""Kernels of Transformer Engine without a stand-in: the same tensors are made in several calls."""


def rehearsal_subject(path: str, overrides: Sequence[str], model: str | None) -> Planned[Any]:
    """Return the configuration as the plan reads it."""
    return make_plan_input(load_any_config(path, list(overrides)), None, model)


def without_unknown_kernels(subject: Planned[Any]) -> Planned[Any]:
    """Return the subject without fused kernels that have no stand-in."""
    roles = subject.config.model_roles().items()
    changes = {
        f"{role}.megatron": {name: value for name, value in model.megatron.items() if name not in _NO_STAND_IN}
        for role, model in roles
    }
    return subject.with_changes_unchecked(changes)
