"""Advantages of shards compared with the papers' formulas, for every estimator and every use of the KL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.algos.advantages import ADVANTAGES
from mrl.algos.kl import KL_ESTIMATORS
from mrl.config.algorithm import AlgorithmConfig, KlConfig
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.advantages import shard_advantages
from mrl.workers.critic import CriticWorker
from mrl.workers.messages import WholeBatch
from tests.workers.by_hand import Row, advantages_of, rewards_of
from tests.workers.stubs import SETUP, UIDS, OfShards, Shards, batch_of, cut, make_place, make_rows

ESTIMATORS = sorted(ADVANTAGES)
COLUMNS = ("values", "old_log_probs", "ref_log_probs", "score_norms")
WHERES = ("none", "reward", "loss", "both")
KL_COEF = 0.3
"""Of this step; the configuration's own has been steered away from."""
WHOLE = WholeBatch(UIDS, KL_COEF, range(len(UIDS)))


class ActorOfShards(OfShards, ActorRolloutRefWorker):
    """An actor on one of several shards of this process."""


class CriticOfShards(OfShards, CriticWorker):
    """A critic on one of several shards of this process."""


def config_of(advantage: str, where: str = "both", **changes: object) -> AlgorithmConfig:
    """Return a configuration in which all numbers differ."""
    kl = KlConfig(where=where, coef=0.05, in_reward="k1", in_loss="k2")  # type: ignore[arg-type]
    return replace(AlgorithmConfig(advantage=advantage, gamma=0.9, lam=0.8, kl=kl), **changes)


def rows_for(name: str, *, with_holes: bool = True) -> list[Row]:
    """Return rows with scores that the estimator accepts."""
    rows = make_rows(*COLUMNS, with_holes=with_holes)
    for row in rows if name == "maxrl" else ():
        row.score += 10  # still positive after the KL is subtracted
    return rows


def shards_of(rows: list[Row], num_shards: int) -> list[DataProto]:
    """Return the shards' batches, with the rows' positions in the whole batch."""
    batches = []
    for positions in cut(rows, num_shards):
        batch = batch_of([rows[at] for at in positions])
        batches.append(batch.union(DataProto.from_dict({"position": torch.tensor(positions)}, row_ids=batch.row_ids)))
    return batches


def advantages_by_worker(
    rows: list[Row],
    config: AlgorithmConfig,
    num_shards: int,
    worker_class: type = ActorOfShards,
    whole: WholeBatch = WHOLE,
) -> tuple[list[DataProto], dict[str, list[list[float]]], list[float]]:
    """Return the shards' results, their columns in the order of all rows, and each shard's mean KL."""
    shards, batches = Shards(num_shards), shards_of(rows, num_shards)
    if config.advantage == "gdpo":
        columns_of = zip(*map(rewards_of, rows), strict=True)
        whole = replace(whole, rewards=[(reward[0][0], [score for _, score in reward]) for reward in columns_of])

    def work(shard: int) -> DataProto:
        arguments = (0.7, 50) if worker_class is ActorOfShards else (50,)
        worker = worker_class(make_place(), SETUP, config, *arguments)
        worker.shards, worker.shard = shards, shard
        answer: DataProto = worker.compute_advantages(batches[shard], whole)
        return answer

    answers = shards.run(work)
    columns: dict[str, list[list[float]]] = {}
    for name in answers[0].columns():
        found: list[list[float]] = [[]] * len(rows)
        for positions, answer in zip(cut(rows, num_shards), answers, strict=True):
            for position, values in zip(positions, answer[name].rows(), strict=True):
                found[position] = values.tolist()
        columns[name] = found
    for batch, answer in zip(batches, answers, strict=True):
        assert answer.row_ids.tolist() == batch.row_ids.tolist(), "each result has the id of its row"
    return answers, columns, [float(answer.meta_info["reward/kl"]) for answer in answers]


def check(rows: list[Row], config: AlgorithmConfig, num_shards: int, worker_class: type = ActorOfShards) -> None:
    """Compare all results of a worker with the formulas."""
    advantages, returns, kl = advantages_of(rows, config, KL_COEF)
    answers, columns, kls = advantages_by_worker(rows, config, num_shards, worker_class)
    expected = {"advantages": advantages}
    if worker_class is CriticOfShards:
        assert returns is not None, "a critic's estimator has returns"
        expected["returns"] = returns
    assert columns.keys() == expected.keys()
    for name, of_rows in expected.items():
        for row, found, values in zip(rows, columns[name], of_rows, strict=True):
            assert found == pytest.approx(row.whole(values), rel=1e-5, abs=1e-5), (name, row)
        assert all(answer.values(name).dtype == torch.float32 for answer in answers)
    assert kls == pytest.approx([kl] * num_shards, rel=1e-9, abs=1e-12), "every shard knows the mean of all"
    assert (kl != 0) == (config.kl.where in ("reward", "both"))
    for name, of_rows in expected.items():
        written = [float(value) for of_row in of_rows for value in of_row]
        of_all = {"mean": np.mean(written), "max": max(written), "min": min(written)}
        for answer in answers:
            figures = {of: answer.meta_info[f"critic/{name}/{of}"] for of in of_all}
            assert figures == pytest.approx(of_all, rel=1e-5, abs=1e-6), (
                "figures cover the written tokens of all shards"
            )
    if worker_class is CriticOfShards:
        values = [float(value) for row in rows for value in row.written("values")]
        share = 1 - np.var(np.subtract(written, values)) / (np.var(written) + 1e-8)
        assert answers[0].meta_info["critic/vf_explained_var"] == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_the_formulas(name: str, where: str, num_shards: int) -> None:
    check(rows_for(name), config_of(name, where), num_shards)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_a_mask_every_token_counts(name: str) -> None:
    check(rows_for(name, with_holes=False), config_of(name), 2)


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_the_reward_is_charged_by_its_own_estimator(estimator: str) -> None:
    name = "gae" if estimator.endswith("+") else "rloo"
    kl = KlConfig(where="reward", coef=0.05, in_reward=estimator, in_loss="abs")
    check(make_rows(*COLUMNS), config_of(name, kl=kl, whiten=False), 2)


@pytest.mark.parametrize(
    ("gamma", "lam", "whiten"),
    [(1.0, 1.0, True), (1.0, 0.6, False), (0.7, 0.6, True), (0.7, 1.0, False), (0.7, 0.0, True)],
)
def test_the_critic_learns_the_returns_whatever_the_discounts(gamma: float, lam: float, whiten: bool) -> None:
    check(make_rows(*COLUMNS), config_of("gae", gamma=gamma, lam=lam, whiten=whiten), 2, CriticOfShards)


def test_group_estimators_feel_the_coefficient_of_this_step() -> None:
    rows, config = make_rows(*COLUMNS), config_of("grpo", "reward")
    batch = shards_of(rows, 1)[0]
    found = [
        shard_advantages(batch, WholeBatch(UIDS, coef, range(len(UIDS))), config, _same, _same).values("advantages")
        for coef in (0.0, 0.3)
    ]
    assert not torch.allclose(*found)
    assert torch.equal(
        found[0],
        shard_advantages(
            batch, WholeBatch(UIDS, 0.3, range(len(UIDS))), config_of("grpo", "loss"), _same, _same
        ).values("advantages"),
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_sample_of_several_rows_counts_once_in_its_group(num_shards: int) -> None:
    rows = make_rows(with_holes=False)
    for row, score in zip(rows, (1.0, 0.0, 1.0), strict=False):
        row.score = score
    whole = WholeBatch(["a", "a", *"bcdef"], 0.0, [0, 1, 0, 2, 3, 4, 5, 6])  # rows 0 and 2 belong to one conversation
    found = {}
    for name in ("dr_grpo", "opo"):
        _, columns, _ = advantages_by_worker(rows, config_of(name, "none"), num_shards, whole=whole)
        found[name] = [values[0] for values in columns["advantages"]]
        assert all(len(set(values)) == 1 for values in columns["advantages"])
    assert found["dr_grpo"] == [0.5, -0.5, 0.5, *[0.0] * 5]
    mean = 6 / 9  # by tokens: 5 + 1 of the first sample, 3 of the second
    assert found["opo"] == pytest.approx([1 - mean, -mean, 1 - mean, *[0.0] * 5])


def test_scores_keep_their_precision_on_the_way_between_shards() -> None:
    rows = make_rows(with_holes=False)
    for number, row in enumerate(rows):
        row.score = 1e6 + number * 1e-3  # float32 knows no such differences
    check(rows, config_of("dr_grpo", "none"), 2)


def test_a_score_per_token_is_refused() -> None:
    (batch,) = shards_of(make_rows(), 1)
    wrong = batch.select("responses", "position")
    column = jagged(torch.zeros(int(batch.lengths("responses").sum())), batch.lengths("responses"))
    wrong = wrong.union(DataProto.from_dict({"scores": column}, row_ids=batch.row_ids))
    with pytest.raises(AssertionError, match="`scores` has one number per row"):
        shard_advantages(wrong, WholeBatch(UIDS, 0.0, range(len(UIDS))), config_of("grpo", "none"), _same, _same)


def _same(x: Tensor) -> Tensor:
    return x
