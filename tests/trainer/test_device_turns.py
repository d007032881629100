"""Roles that share devices give back cached memory once each time another role's turn begins, and when all end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import PlacementConfig
from mrl.trainer.device_turns import DeviceTurns
from tests.trainer.fakes import make_config

ROLES = {"actor": "a", "critic": "a", "reward_model": "b", "rollout": "c"}


class Group:
    """Workers of a role that note when they give memory back."""

    def __init__(self, role: str, journal: list[str]) -> None:
        self.role, self._journal = role, journal

    def give_back(self) -> None:
        self._journal.append(self.role)


def turns_of(directory: Path, device: Any, roles: dict[str, str]) -> DeviceTurns:
    config = make_config(directory, placement=PlacementConfig(pools={"a": 2, "b": 2, "c": 2}, roles=roles))
    return DeviceTurns(replace(config, cluster=replace(config.cluster, device=device)))


def test_a_step_empties_allocators_once_per_turn_and_not_per_pass(tmp_path: Path) -> None:
    journal: list[str] = []
    turns = turns_of(tmp_path, "gpu", ROLES)
    actor, critic = Group("actor", journal), Group("critic", journal)
    for group in (actor, actor, critic, *[critic] * 8, *[actor] * 8):  # log-probs, reference, values, updates
        turns.begin(group)  # type: ignore[arg-type]
    assert journal == ["actor", "critic"]
    turns.end()
    turns.end()
    assert journal == ["actor", "critic", "actor"]
    turns.begin(critic)  # type: ignore[arg-type]
    assert len(journal) == 3, "no other role has computed since"


def test_a_role_with_devices_of_its_own_keeps_what_its_allocator_has(tmp_path: Path) -> None:
    journal: list[str] = []
    turns = turns_of(tmp_path, "gpu", ROLES)
    for role in ("reward_model", "actor", "reward_model"):
        turns.begin(Group(role, journal))  # type: ignore[arg-type]
    turns.end()
    assert journal == ["actor"]


@pytest.mark.parametrize(
    ("device", "rollout", "shared"),
    [
        ("cpu", "c", {*ROLES}),
        ("gpu", "c", {"actor", "critic"}),
        ("gpu", "b", {"actor", "critic", "reward_model", "rollout"}),
    ],
)
def test_devices_are_shared_within_a_pool_and_on_cpus_by_everybody(
    device: str, rollout: str, shared: set[str], tmp_path: Path
) -> None:
    turns = turns_of(tmp_path, device, ROLES | {"rollout": rollout})
    assert {role for role in ROLES if turns.shares(role)} == shared
