"""Fields of the library classes that receive sections: each is accepted, set by mrl, or refused, in one list only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from mrl.config.libraries import installed
from mrl.config.libraries.installed import Target

TARGETS = {
    # The class for multi-latent attention, which has the fields of TransformerConfig, too.
    "actor.megatron": replace(installed.TRANSFORMER, class_name="MLATransformerConfig"),
    "actor.ddp": installed.DDP,
    "actor.optimizer": installed.OPTIMIZER,
    "rollout.vllm": installed.ENGINE,
    "judge.vllm": installed.SERVER,
}
FEWEST_FIELDS = {
    "actor.megatron": 255,
    "actor.ddp": 27,
    "actor.optimizer": 50,
    "rollout.vllm": 250,
    "judge.vllm": 250,
}


def undecided(target: Target, fields: Iterable[str]) -> list[str]:
    """Return the fields that are not set by mrl, not accepted, and not refused with a reason."""
    rules = target.rules
    return [name for name in fields if not (name in target.owned or name in rules.taken or rules.reason(name))]


@pytest.mark.needs
@pytest.mark.parametrize("section", TARGETS)
def test_every_field_is_taken_set_or_refused(section: str) -> None:
    target = TARGETS[section]
    fields = installed.field_types(target) or {}
    assert len(fields) >= FEWEST_FIELDS[section]
    assert not undecided(target, fields)


@pytest.mark.parametrize("section", TARGETS)
def test_no_field_is_in_two_lists(section: str) -> None:
    target = TARGETS[section]
    assert not set(target.owned) & set(target.rules.taken)
    assert not [name for name in target.rules.taken if name in target.rules.refused]


def test_a_field_that_nobody_has_decided_about_is_found() -> None:
    assert undecided(installed.TRANSFORMER, ["a_new_switch", "fp8", "num_layers"]) == ["a_new_switch"]
    assert installed.TRANSFORMER.rules.refusal("a_new_switch", True) == "no test of mrl compares it with a plain run"
