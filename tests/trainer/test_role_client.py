"""A role's rows: cut into shards and micro-batches by their whole lengths, updated as one, and put together again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.schema import TrainedModelConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import (
    ActorClient,
    RewardModelClient,
    mean_of,
)
from mrl.workers.messages import ModelFacts, UpdateReport, WholeBatch

LENGTHS = {20: (3, 2), 21: (1, 7), 22: (4, 4), 23: (2, 1), 24: (1, 1)}
"""Row id -> tokens of its prompt and of its response; 26 in all."""
SHARDS = 2


class Group:
    """Two shards that keep what they are given."""

    def __init__(self, answer: Any = None, row_multiple: int = 1) -> None:
        self.mesh = Mesh(4, tp=2)
        self.answer, self.row_multiple = answer, row_multiple
        self.calls: list[tuple[Any, ...]] = []

    def init_model(self) -> list[ModelFacts]:
        rules = PackingRules(RowCost(1.0, 0.0), self.row_multiple)
        return [ModelFacts(rules, 77, 3.5, "NVIDIA H100 80GB HBM3")] * 4

    def _work(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.answer

    compute_log_prob = compute_ref_log_prob = compute_advantages = update_actor = _work


def role_of(group: Any, max_tokens: int = 8) -> ActorClient:
    return ActorClient(group, TrainedModelConfig(max_tokens_per_device=max_tokens))


def batch_of(*row_ids: int) -> DataProto:
    lengths = [LENGTHS[row_id] for row_id in row_ids]
    columns = {
        "prompts": from_rows([[row_id] * prompt for row_id, (prompt, _) in zip(row_ids, lengths, strict=True)]),
        "responses": from_rows([[row_id] * response for row_id, (_, response) in zip(row_ids, lengths, strict=True)]),
    }
    return DataProto.from_dict(columns, row_ids=row_ids)


def written(**said: Any) -> DataProto:
    """Return answers like a group, by shard."""
    return DataProto.from_dict({"scores": torch.tensor([1.0])}, meta_info=said)


def test_rows_go_into_micro_batches_that_hold_prompt_and_response() -> None:
    group = Group(written())
    role_of(group).compute_ref_log_prob(batch_of(*LENGTHS))
    ((shards, sizes),) = group.calls
    assert len(shards) == len(sizes) == SHARDS
    assert sorted(row for shard in shards for row in shard.row_ids) == [20, 21, 22, 23, 24]
    micro_batches = []
    for shard, of_shard in zip(shards, sizes, strict=True):
        assert sum(of_shard) == len(shard)
        assert len(of_shard) == len(sizes[0]), "every shard has as many"
        micro_batches += [part.row_ids.tolist() for part in shard.split(of_shard)]
        assert shard.lengths("responses").tolist() == [LENGTHS[row][1] for row in shard.row_ids]
        assert shard.values("responses").tolist() == [row for row in shard.row_ids for _ in range(LENGTHS[row][1])]
    tokens = {tuple(rows): sum(sum(LENGTHS[row]) for row in rows) for rows in micro_batches}
    assert max(tokens.values()) <= 8, tokens
    assert Counter(len(rows) for rows in micro_batches) == {1: 3, 2: 1}, "26 tokens fill 4 of 8, two on each shard"


def test_rows_are_stored_as_the_layout_of_the_model_wants_it() -> None:
    group = Group(written(), row_multiple=8)
    role_of(group).compute_ref_log_prob(batch_of(20, 21, 23, 24))
    ((_, sizes),) = group.calls
    assert sizes == [[1, 1], [1, 1]], "each row takes up 8 tokens"


def test_what_all_shards_say_alike_is_said_once() -> None:
    found, metrics = role_of(Group(written(kl=[0.5, 0.5], other=[2.0, 2.0]))).compute_log_prob(batch_of(*LENGTHS))
    assert metrics == {"mismatch/kl": 0.5, "mismatch/other": 2.0}
    assert found["scores"].tolist() == [1.0]
    assert not found.meta_info


def test_a_method_without_a_model_is_given_the_batch_as_it_is() -> None:
    group = Group(written(**{"reward/kl": [0.25, 0.25]}))
    batch, whole = batch_of(*LENGTHS), WholeBatch(["a"], 0.5, [0])
    _, metrics = role_of(group).compute_advantages(batch, whole)
    assert group.calls == [(batch, whole)]
    assert metrics == {"reward/kl": 0.25}


def test_the_shards_parts_of_an_update_are_added() -> None:
    parts: list[dict[str, float]] = [{"loss": 0.5, "tokens": 9.0}, {"loss": 0.25, "tokens": 4.0, "masked": 2.0}]
    group = Group([UpdateReport(part, 1.5, 1e-3, applied=True) for part in parts])
    role = role_of(group)
    assert role.update_actor(batch_of(*LENGTHS)) == {
        "loss": 0.75,
        "tokens": 13.0,
        "masked": 2.0,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "skipped": 0.0,  # which all ranks know alike
    }
    ((shards, sizes),) = group.calls
    assert [len(shard) for shard in shards] == [sum(of_shard) for of_shard in sizes]
    group.answer = [UpdateReport(part, float("nan"), 1e-3, applied=False) for part in parts]
    assert role.update_actor(batch_of(*LENGTHS))["skipped"] == 1.0


def test_updates_are_averaged_and_skipped_ones_counted() -> None:
    updates = [{"loss": 1.0, "lr": 0.5, "skipped": 1.0}, {"loss": 4.0, "lr": 0.5, "skipped": 1.0}]
    updates.append({"loss": 1.0, "lr": 0.2, "skipped": 0.0})
    assert mean_of(updates, "actor") == pytest.approx({"actor/loss": 2.0, "actor/lr": 0.4, "actor/skipped": 2.0})
    assert mean_of([], "actor") == {}


class Turns:
    """Notes whose turn begins."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin(self, group: Any) -> None:
        self.begun.append(group)

    def shares(self, role: str) -> bool:
        return role == "reward_model"


def test_what_computes_takes_its_turn_and_what_only_counts_does_not() -> None:
    group, turns = Group(), Turns()
    actor = ActorClient(group, TrainedModelConfig(max_tokens_per_device=8), turns)  # type: ignore[arg-type]
    group.answer = batch_of(20, 21)
    actor.compute_log_prob(batch_of(20, 21))
    assert turns.begun == [group]
    actor.compute_advantages(batch_of(20, 21), WholeBatch([], 0.0, []))
    assert turns.begun == [group]
    group.answer = [UpdateReport({}, 0.0, 0.0, True)]
    actor.update_actor(batch_of(20, 21))
    assert turns.begun == [group, group]


def test_a_reward_model_gives_memory_back_at_once_for_its_thread_may_be_another() -> None:
    group, turns = Group(batch_of(20, 21)), Turns()
    group.role = "reward_model"  # type: ignore[attr-defined]
    given_back: list[bool] = []
    group.give_back = lambda: given_back.append(True)  # type: ignore[attr-defined]
    client = RewardModelClient(group, TrainedModelConfig(max_tokens_per_device=8), turns)  # type: ignore[arg-type]
    scored = batch_of(20, 21).with_column("rm_scores", torch.zeros(2)).select("rm_scores")
    group.compute_rm_score = lambda *_: scored  # type: ignore[attr-defined]
    client.compute_rm_score(batch_of(20, 21).select("prompts", "responses"))
    assert given_back == [True]
    assert turns.begun == []
