"""The configuration that a rehearsal runs: the kernels of a GPU where a stand-in exists, and models without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.resolved.load import load_any_config
from mrl.plan.plan_input import Planned, make_plan_input

_ONLY_ITS_OWN = ("moe_grouped_gemm", "moe_permute_fusion")
"""Switches that only Transformer Engine's own modules accept. Megatron's modules run instead; `kernels.py` replaces
their experts."""


def rehearsal_subject(path: str, overrides: Sequence[str], model: str | None) -> Planned[Any]:
    """Return the configuration as the plan reads it."""
    return make_plan_input(load_any_config(path, list(overrides)), None, model)


def without_unknown_kernels(subject: Planned[Any]) -> Planned[Any]:
    """Return the subject without switches that need Transformer Engine itself."""
    roles = subject.config.model_roles().items()
    changes = {
        f"{role}.megatron": {name: value for name, value in model.megatron.items() if name not in _ONLY_ITS_OWN}
        for role, model in roles
    }
    return subject.with_changes_unchecked(changes)
