"""The actor's loss, its reports and its requests to the engine, compared with formulas in float64, for every option."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mrl.algos.aggregate import AGGREGATIONS
from mrl.algos.kl import KL_ESTIMATORS
from mrl.algos.losses import POLICY_LOSSES
from mrl.algos.rollout_correction import RATIO_LEVELS
from mrl.config.algorithm import (
    CHOOSING_LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    LossConfig,
    RejectionConfig,
)
from mrl.config.step_calls import TEACHER_COLUMNS
from mrl.controller.worker import registered_methods
from mrl.engine.scores import ScoreRequest, Scores
from mrl.engine.vocab_head import EntropyUse
from mrl.errors import BatchError
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.messages import UpdateReport
from tests.workers.by_hand import Row, actor_loss, correction_reports, mismatch_of
from tests.workers.stubs import OUTCOME, SETUP, OfShards, Shards, StubEngine, batch_of, cut, make_place, make_rows

TEMPERATURE, HORIZON = 0.7, 50
ALL = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
LOSS = LossConfig(clip_low=0.15, clip_high=0.35, dual_clip=1.5, cov_share=0.2, cov_low=0.01, cov_kl_coef=0.7)
KL = KlConfig(where="none", coef=0.2, in_reward="abs", in_loss="k2")


class ActorOfShards(OfShards, ActorRolloutRefWorker):
    """An actor on one of several shards of this process."""


def config_of(loss: LossConfig = LOSS, **changes: Any) -> AlgorithmConfig:
    """Return a configuration in which all numbers differ."""
    return replace(AlgorithmConfig(advantage="grpo", kl=KL, loss=loss), **changes)


def scores_of(rows: list[Row]) -> dict[str, list[Tensor]]:
    """Return random model outputs for each row's tokens."""
    chance = torch.Generator().manual_seed(11)
    found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in rows:
        near = row.columns.get("old_log_probs", torch.zeros(len(row.response), dtype=torch.float64) - 1)
        noise = 0.5 * torch.randn(len(row.response), generator=chance, dtype=torch.float64)
        written = torch.tensor(row.mask, dtype=torch.bool)
        found["log_probs"].append(torch.where(written, near + noise, -33.0).requires_grad_())
        found["entropy"].append(torch.rand(len(row.response), generator=chance, dtype=torch.float64).requires_grad_())
    return found


def worker_of(config: AlgorithmConfig, scores: Scores | None, shards: Shards, shard: int = 0) -> ActorOfShards:
    """Return a worker of that shard with an engine that returns these scores."""
    worker = ActorOfShards(make_place(), SETUP, config, TEMPERATURE, HORIZON)
    worker.engine = StubEngine(scores)  # type: ignore[assignment]
    worker.shards, worker.shard = shards, shard
    return worker


def update(
    rows: list[Row], config: AlgorithmConfig, given: dict[str, list[Tensor]], num_shards: int
) -> tuple[dict[str, float], list[tuple[UpdateReport, ActorOfShards]]]:
    """Return the reports of an update, summed over shards, each in micro-batches of two rows.

    Gradients go to `given`.
    """
    shards, places = Shards(num_shards), cut(rows, num_shards)

    def work(shard: int) -> tuple[UpdateReport, ActorOfShards]:
        log_probs, entropy = (torch.cat([given[name][at] for at in places[shard]]) for name in ("log_probs", "entropy"))
        worker = worker_of(config, Scores(log_probs_T=log_probs, entropy_T=entropy), shards, shard)
        num_rows = len(places[shard])
        sizes = [[2] * (num_rows // 2) + [1] * (num_rows % 2)]
        return worker.update_actor(batch_of([rows[at] for at in places[shard]], row_ids=places[shard]), sizes), worker

    answers = shards.run(work)
    reports: dict[str, float] = {}
    for report, _ in answers:
        for name, value in report.parts.items():
            reports[name] = reports.get(name, 0.0) + value
    return reports, answers


def check(
    config: AlgorithmConfig, *, rows: list[Row] | None = None, num_shards: int = 1, horizon: int = HORIZON
) -> dict[str, float]:
    """Compare an update's reports and gradients with those of the formulas. Return the reports."""
    rows = make_rows(*ALL) if rows is None else rows
    ours, theirs = scores_of(rows), scores_of(rows)
    reports, _ = update(rows, config, ours, num_shards)
    loss, expected = actor_loss(rows, config, horizon, theirs)
    loss.backward()  # type: ignore[no-untyped-call]
    assert reports == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name in ours:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (mine, other)]
            assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12), name
    assert any(bool(x.grad.abs().sum()) for x in ours["log_probs"] if x.grad is not None), "something is learnt"
    return reports


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("policy", sorted(POLICY_LOSSES))
def test_every_policy_loss_in_every_aggregation(policy: str, aggregation: str) -> None:
    num_shards = 1 + 2 * (len(policy + aggregation) % 2)
    reports = check(config_of(replace(LOSS, policy=policy, aggregation=aggregation)), num_shards=num_shards)
    never = policy in ("gpg", "sapo", "kl_cov", "dro", "vespo", "m2po")
    assert 0 < reports.get("cov_selected", reports.get("m2_masked", 0.5)) < 1
    assert never or 0 < reports["pg_clipfrac"] < 1, "some tokens are clipped, and some are not"
    assert reports.get("pg_clipfrac_lower", 0.5) > 0


@pytest.mark.parametrize(
    ("low", "high", "dual_clip"),
    [(0.0, 0.5, None), (0.5, 0.0, 1.1), (0.1, 0.28, 3.0), (0.1, 0.28, 1.1), (1.0, 1.0, 3.0)],
)
def test_the_bounds_of_ppo_are_those_of_the_configuration(low: float, high: float, dual_clip: float | None) -> None:
    check(config_of(LossConfig(clip_low=low, clip_high=high, dual_clip=dual_clip)), num_shards=2)


@pytest.mark.parametrize(
    ("where", "estimator"),
    [("none", "k1"), ("reward", "k2"), ("both", "k3"), *(("loss", name) for name in sorted(KL_ESTIMATORS))],
)
def test_the_loss_charges_the_kl_where_it_is_asked_to(where: str, estimator: str) -> None:
    kl = KlConfig(where=where, coef=0.2, in_reward="abs", in_loss=estimator)  # type: ignore[arg-type]
    reports = check(config_of(kl=kl), num_shards=2)
    assert ("kl_loss" in reports) == (where in ("loss", "both"))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize(("policy", "entropy_coef"), [("ppo", 0.03), ("gspo", 0.0)])
def test_all_terms_together(policy: str, aggregation: str, entropy_coef: float) -> None:
    loss = replace(LOSS, policy=policy, aggregation=aggregation, entropy_coef=entropy_coef)
    correction = CorrectionConfig(level="sequence", beyond="truncate", upper=1.4, lower=0.6)
    reports = check(config_of(loss, kl=replace(KL, where="both"), correction=correction), num_shards=2)
    assert ("entropy" in reports) == bool(entropy_coef)


@pytest.mark.parametrize("level", sorted(RATIO_LEVELS))
@pytest.mark.parametrize(
    ("beyond", "lower", "upper"),
    [("truncate", 0.0, 2.0), ("mask", 0.8, 1.2), ("truncate", 0.8, 1.2), ("mask", 0.0, 1.0), ("truncate", 0.5, 1.6)],
)
def test_the_correction_weighs_the_policy_loss(level: str, beyond: str, lower: float, upper: float) -> None:
    correction = CorrectionConfig(level=level, beyond=beyond, upper=upper, lower=lower)  # type: ignore[arg-type]
    check(config_of(correction=correction), num_shards=2)


def test_rejected_tokens_have_no_loss() -> None:
    rules = [RejectionConfig(statistic="token_k1", upper=1.3), RejectionConfig(statistic="seq_max_k3", upper=0.2)]
    reports, plain = (
        check(config_of(correction=CorrectionConfig(reject=reject)), num_shards=2) for reject in (rules, [])
    )
    assert reports["pg_loss"] != plain["pg_loss"]


def test_the_correction_weighs_the_kl_and_not_the_entropy() -> None:
    correction = CorrectionConfig(level="token", beyond="mask", upper=1.3, lower=0.7)
    loss = replace(LOSS, entropy_coef=0.03)
    reports = check(config_of(loss, kl=replace(KL, where="loss"), correction=correction))
    plain = check(config_of(loss, kl=replace(KL, where="loss")))
    assert reports["pg_loss"] != plain["pg_loss"]
    assert reports["kl_loss"] != plain["kl_loss"]
    assert reports["entropy"] == plain["entropy"]


@pytest.mark.parametrize("policy", sorted({*POLICY_LOSSES} - {*CHOOSING_LOSSES}))
@pytest.mark.parametrize("with_correction", [False, True])
def test_without_old_log_probs_the_policys_own_are_meant(policy: str, with_correction: bool) -> None:
    rows = make_rows("advantages", "rollout_log_probs")
    correction = CorrectionConfig(upper=1.2, lower=0.5) if with_correction else None
    reports = check(config_of(replace(LOSS, policy=policy), correction=correction), rows=rows, num_shards=2)
    assert reports["ppo_kl"] == 0
    assert reports["pg_clipfrac"] == 0


@pytest.mark.parametrize("source", ["engine", "interpolated"])
def test_old_log_probs_may_come_from_the_engine(source: Literal["engine", "interpolated"]) -> None:
    """Even if the trainer's are there."""
    rows = make_rows("advantages", "old_log_probs", "rollout_log_probs")
    for row in rows:
        row.columns["staleness"] = torch.arange(len(row.response)) % 4
    reports = check(config_of(old_log_probs=source), rows=rows, num_shards=2)
    assert reports["ppo_kl"] != check(config_of(), rows=rows, num_shards=2)["ppo_kl"]


@pytest.mark.parametrize("policy", CHOOSING_LOSSES)
def test_losses_by_covariance_need_old_log_probs(policy: str) -> None:
    with pytest.raises(BatchError, match=f"{policy} needs the column `old_log_probs`"):
        check(config_of(replace(LOSS, policy=policy)), rows=make_rows("advantages"))


def test_without_log_probs_of_the_engine_nothing_is_said_of_them() -> None:
    assert "rollout_diff" not in check(config_of(), rows=make_rows("advantages", "old_log_probs"))


@pytest.mark.parametrize("policy", sorted(POLICY_LOSSES))
def test_without_a_mask_every_token_is_learnt_from(policy: str) -> None:
    rows = make_rows(*ALL, with_holes=False)
    reports = check(config_of(replace(LOSS, policy=policy), kl=replace(KL, where="both")), rows=rows, num_shards=2)
    assert reports["tokens"] == sum(len(row.response) for row in rows)


def test_the_horizon_is_that_of_the_configuration_or_the_longest_response() -> None:
    loss = replace(LOSS, aggregation="seq-mean-token-sum-norm")
    check(config_of(replace(loss, horizon_tokens=17)), horizon=17, num_shards=2)
    check(config_of(loss), horizon=HORIZON, num_shards=2)


@pytest.mark.parametrize(
    ("entropy_coef", "is_logged", "use"),
    [(0.0, True, "value"), (0.01, True, "grad"), (0.01, False, "grad"), (0.0, False, "none")],
)
def test_an_update_asks_for_the_temperature_and_for_the_entropy_that_it_needs(
    entropy_coef: float, is_logged: bool, use: EntropyUse
) -> None:
    rows = make_rows(*ALL)
    config = config_of(replace(LOSS, entropy_coef=entropy_coef, log_entropy=is_logged))
    _, ((report, worker),) = update(rows, config, scores_of(rows), 1)
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest(TEMPERATURE, use)
    assert call.micro_batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert call.rows.columns.keys() == {"response_mask", *ALL}
    assert call.rows.before
    assert (report.grad_norm, report.learning_rate, report.applied) == (
        OUTCOME.grad_norm,
        OUTCOME.learning_rate,
        OUTCOME.applied,
    )


@pytest.mark.parametrize(
    ("method", "column"), [("compute_log_prob", "old_log_probs"), ("compute_ref_log_prob", "ref_log_probs")]
)
def test_log_probs_are_asked_for_at_the_temperature_of_the_rollout(method: str, column: str) -> None:
    rows = make_rows()
    batch, log_probs_T = batch_of(rows, first_id=3), torch.cat(scores_of(rows)["log_probs"]).detach().float()
    worker = worker_of(config_of(), Scores(log_probs_T=log_probs_T), Shards(1))
    worker.reference = reference = object()  # type: ignore[assignment]
    answer = getattr(worker, method)(batch, [[3, 5]])
    assert answer.columns().keys() == {column}
    assert torch.equal(answer.values(column), log_probs_T)
    assert answer.lengths(column).tolist() == [len(row.response) for row in rows]
    assert answer.row_ids.tolist() == batch.row_ids.tolist()
    assert answer.meta_info == {}, "without log-probs of the engine there is nothing to compare with"
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest(TEMPERATURE)
    assert call.micro_batches == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert call.weights is (reference if column == "ref_log_probs" else "own")
    assert worker.engine.memory.weights == "own"  # type: ignore[comparison-overlap]


def test_reference_of_a_policy_with_adapters_is_the_policy_with_its_adapters_off() -> None:
    rows = make_rows()
    worker = worker_of(config_of(), Scores(log_probs_T=torch.cat(scores_of(rows)["log_probs"]).detach()), Shards(1))
    memory = worker.engine.memory
    worker.engine.adapters = SimpleNamespace(off=lambda: memory.weights_of("off"))  # type: ignore[assignment, arg-type]
    worker.compute_ref_log_prob(batch_of(rows), [[8]])
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.weights == "off"


def test_ranks_without_scores_give_no_column() -> None:
    worker = worker_of(config_of(), None, Shards(1))
    worker.reference = object()  # type: ignore[assignment]
    batch = batch_of(make_rows("rollout_log_probs"))
    assert worker.compute_log_prob(batch, [[8]]) is None
    assert worker.compute_ref_log_prob(batch, [[8]]) is None


@pytest.mark.parametrize("with_holes", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_mismatch_is_that_of_all_shards(num_shards: int, with_holes: bool) -> None:
    rows, shards = make_rows("rollout_log_probs", with_holes=with_holes), Shards(num_shards)
    given = [x.detach() for x in scores_of(rows)["log_probs"]]
    places = cut(rows, num_shards)

    def work(shard: int) -> dict[str, float]:
        log_probs_T = torch.cat([given[at] for at in places[shard]])
        worker = worker_of(config_of(), Scores(log_probs_T=log_probs_T), shards, shard)
        answer = worker.compute_log_prob(batch_of([rows[at] for at in places[shard]]), [[len(places[shard])]])
        assert answer is not None, "this rank has the scores"
        return answer.meta_info

    expected = mismatch_of(rows, given)
    for found in shards.run(work):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(("level", "beyond"), [("token", "truncate"), ("sequence", "mask"), ("geometric", "mask")])
def test_what_the_correction_does_is_reported_over_all_shards(
    level: str, beyond: Literal["truncate", "mask"], num_shards: int
) -> None:
    rows, shards = make_rows("rollout_log_probs", with_holes=True), Shards(num_shards)
    given = [x.detach() for x in scores_of(rows)["log_probs"]]
    config = CorrectionConfig(level=level, beyond=beyond, upper=1.3, lower=0.7)
    places = cut(rows, num_shards)

    def work(shard: int) -> dict[str, float]:
        log_probs_T = torch.cat([given[at] for at in places[shard]])
        worker = worker_of(config_of(correction=config), Scores(log_probs_T=log_probs_T), shards, shard)
        answer = worker.compute_log_prob(batch_of([rows[at] for at in places[shard]]), [[len(places[shard])]])
        assert answer is not None, "this rank has the scores"
        return answer.meta_info

    expected = correction_reports(rows, given, config)
    assert 0 < expected["rollout_is_eff_sample_size"] < 1
    assert expected["rollout_is_ratio_fraction_high"] > 0
    assert expected["rollout_is_ratio_fraction_low"] > 0
    for found in shards.run(work):
        assert found == pytest.approx(mismatch_of(rows, given) | expected, rel=1e-9)


@pytest.mark.parametrize("with_holes", [True, False])
def test_norms_of_scores_are_those_of_the_corrected_loss(with_holes: bool) -> None:
    rows = make_rows("rollout_log_probs", with_holes=with_holes)
    given = [x.detach() for x in scores_of(rows)["log_probs"]]
    norms_T = torch.linspace(0, 2, sum(map(len, given)))
    config = CorrectionConfig(level="token", upper=1.4, lower=0.2)
    for correction in (None, config):
        scores = Scores(log_probs_T=torch.cat(given), norms_T=norms_T)
        worker = worker_of(config_of(correction=correction), scores, Shards(1))
        answer = worker.compute_log_prob_with_norms(batch_of(rows), [[len(rows)]])
        assert answer is not None, "this rank has the scores"
        ratio_T = torch.cat([x - row.columns["rollout_log_probs"] for x, row in zip(given, rows, strict=True)]).exp()
        expected_T = norms_T * (1 if correction is None else ratio_T.clamp(0.2, 1.4).square())
        written_T = torch.tensor([is_written for row in rows for is_written in row.mask])
        found_T = answer.values("score_norms")
        assert torch.allclose(found_T[written_T], expected_T[written_T].float(), rtol=1e-5)
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest(TEMPERATURE, norms=True)


def test_an_update_with_router_replay_needs_routes() -> None:
    rows = make_rows("advantages")
    worker = worker_of(config_of(router_replay="R3"), None, Shards(1))
    worker.setup = replace(SETUP, replays_routes=True)
    with pytest.raises(BatchError, match="router replay needs the column `routes`, which nothing has written"):
        worker.update_actor(batch_of(rows), [[len(rows)]])


def test_an_update_over_sampling_masks_needs_them() -> None:
    rows = make_rows("advantages")
    worker = worker_of(config_of(keep_sampling_mask=True), None, Shards(1))
    with pytest.raises(BatchError, match="need the column `sampling_mask`, which nothing has written"):
        worker.update_actor(batch_of(rows), [[len(rows)]])


def test_weights_are_sent_from_the_device_in_the_version_and_to_the_workers_that_were_named() -> None:
    worker = worker_of(config_of(), None, Shards(1))
    sent: list[Any] = []

    class Notes:
        def send(self, version: int, workers: list[int]) -> str:
            sent.append((version, workers, list(worker.engine.memory.asked)))  # type: ignore[attr-defined]
            return "report"

    worker._resharder = Notes()  # type: ignore[assignment]
    assert worker.send_weights(7, [2, 0]) == "report"  # type: ignore[comparison-overlap]
    assert sent == [(7, [2, 0], [("need", ("parameters",))])]


def test_what_is_declared_to_be_read_and_written() -> None:
    specs = registered_methods(ActorRolloutRefWorker)
    declared = {name: (set(spec.reads), set(spec.writes), set(spec.optional)) for name, spec in specs.items()}
    rows = {"prompts", "responses"}
    assert declared["compute_log_prob"] == (
        rows,
        {"old_log_probs"},
        {"response_mask", "rollout_log_probs", "staleness", "sampling_mask", "routes"},
    )
    assert declared["compute_log_prob_with_norms"][1] == {"old_log_probs", "score_norms"}
    assert declared["compute_log_prob_with_routes"][1] == {"old_log_probs", "routes"}
    assert declared["compute_ref_log_prob"] == (rows, {"ref_log_probs"}, {"sampling_mask"})
    assert declared["compute_advantages"][1] == {"advantages"}
    optional = {"response_mask", "routes", "sampling_mask", "staleness", "teacher_spans", *ALL, *TEACHER_COLUMNS} - {
        "advantages"
    }
    assert declared["update_actor"] == (rows | {"advantages"}, set(), optional)
