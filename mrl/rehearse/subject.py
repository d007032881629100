"""The request to a process that rehearses, and the configuration that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.resolved.load import load_any_config
from mrl.plan.plan_input import Planned, make_plan_input

HALF = "train, half the tokens"
"""The phase that shows how much memory each further token takes."""
_ONLY_ITS_OWN = ("moe_grouped_gemm", "moe_permute_fusion")
"""Switches that only Transformer Engine's own modules accept. Megatron's modules run instead; `kernels.py` replaces
their experts."""


@dataclass(frozen=True)
class Request:
    """One rank of a role of a configuration, and the variant of the rehearsal."""

    config: str
    overrides: Sequence[str]
    role: str = "actor"
    rank: int = 0
    model: str | None = None
    """Model whose sizes are used if the configuration's own are not known."""
    lengths: str | None = None
    """Run or file with lengths of samples; otherwise all are as long as the configuration allows."""
    routing: float | None = None
    """Tokens of this rank's experts, relative to the mean; otherwise as many as the plan assumes."""
    headroom: bool = False
    """Whether a second update, of half the tokens, is measured."""

    def subject(self) -> Planned[Any]:
        """Return the configuration as the plan reads it."""
        return make_plan_input(load_any_config(self.config, list(self.overrides)), None, self.model)


def without_unknown_kernels(subject: Planned[Any]) -> Planned[Any]:
    """Return the subject without switches that need Transformer Engine itself."""
    roles = subject.config.model_roles().items()
    changes = {
        f"{role}.megatron": {name: value for name, value in model.megatron.items() if name not in _ONLY_ITS_OWN}
        for role, model in roles
    }
    return subject.with_changes_unchecked(changes)
