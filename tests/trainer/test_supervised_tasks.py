"""Figures of rows and pairs, compared with calculations by hand; and models that are rejected in advance."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.kto import LabeledTokens, LabelTotals, kto_objective
from mrl.algos.preference import Pairs, RankedTokens, RankingTotals, preference_objective
from mrl.algos.rows import Rows
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import load_config_of
from mrl.config.schema import TrainedModelConfig
from mrl.config.sft import DpoLossConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.errors import DataError, ModelError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer import sft
from mrl.trainer.role_client import SupervisedClient
from mrl.trainer.supervised_tasks import (
    calibration_error,
    measure_labeled,
    measure_preferences,
    measure_scores,
    mismatched,
    pair_metrics,
    supervised_setup,
    warnings_of,
    with_baseline,
)
from mrl.workers.messages import ModelFacts

CONFIGS = Path(__file__).parents[2] / "configs"
PAIRS = [((9, 3), (4, 1)), ((2, 2), (5, 4)), ((7, 1), (7, 5)), ((8, 4), (1, 2)), ((3, 2), (6, 1)), ((6, 6), (5, 3))]
PAIRS.append(((5, 2), (2, 7)))
"""Log-probs and token counts of the chosen and the rejected responses of seven pairs."""


class Group:
    """Four shards that say of a response what its first token says."""

    def __init__(self) -> None:
        self.mesh = Mesh(4)
        self.num_rows: list[int] = []

    def init_model(self) -> list[ModelFacts]:
        return [ModelFacts(PackingRules(RowCost(1.0, 0.0)), 1, 1.0, "cpu")] * 4

    def score_rm(self, shards: Any, sizes: Any) -> DataProto:
        batch = DataProto.concat(shards)
        self.num_rows.append(len(batch))
        return DataProto.from_dict({"scores": first_tokens(batch)}, row_ids=batch.row_ids)

    def score_dpo(self, shards: Any, sizes: Any) -> DataProto:
        """The policy says a quarter of it and less, the reference a half."""
        batch = DataProto.concat(shards)
        said, nums = first_tokens(batch).double(), torch.from_numpy(batch.lengths("responses").astype("int64"))
        columns = {"sum_log_probs": -said / 4 - nums, "sum_ref_log_probs": -said / 2, "num_tokens": nums}
        return DataProto.from_dict(columns, row_ids=batch.row_ids)


def first_tokens(batch: DataProto) -> torch.Tensor:
    return torch.stack([row[0] for row in batch["responses"].rows()]).float()


def batches() -> list[DataProto]:
    """Three pairs, and four: six rows on four ranks, some of which are given rows again."""
    found = []
    for first, pairs in ((0, PAIRS[:3]), (6, PAIRS[3:])):
        rows = [[said] * num for pair in pairs for said, num in pair]
        columns = {"prompts": from_rows([[1, 2]] * len(rows)), "responses": from_rows(rows)}
        ranked = columns | {"rank": torch.tensor([0, 1] * len(pairs))}
        row_ids = first + np.arange(len(rows))
        found.append(DataProto.from_dict(ranked, {"data_source": ["a"] * len(rows)}, row_ids=row_ids))
    return found


def client(group: Any) -> SupervisedClient:
    return SupervisedClient(group, TrainedModelConfig(max_tokens_per_device=16))


def test_each_pair_counts_once_however_many_ranks_there_are() -> None:
    """Not the rows that a rank is given again, and not the last batch alone."""
    group = Group()
    found = measure_scores(client(group), batches())
    gaps = np.array([chosen[0] - rejected[0] for chosen, rejected in PAIRS])
    assert group.num_rows == [8, 8]
    assert found["val/pairs"] == 7
    assert found["val/accuracy"] == pytest.approx(float(np.mean(0.5 * (np.sign(gaps) + 1))))
    assert found["val/margin"] == pytest.approx(float(gaps.mean()))


def test_where_scores_stand_is_shown() -> None:
    """Differences alone leave open where, and a mean that drifts is how one sees it."""
    found = measure_scores(client(Group()), batches())
    scores = [said for pair in PAIRS for said, _ in pair]
    assert found["val/score/mean"] == pytest.approx(np.mean(scores))
    assert found["val/score/std"] == pytest.approx(np.std(scores))


def test_how_likely_responses_are_and_have_become_is_of_their_tokens() -> None:
    found = measure_preferences(client(Group()), batches(), DpoLossConfig())
    for half, name in enumerate(("chosen", "rejected")):
        said, num = (sum(pair[half][part] for pair in PAIRS) for part in (0, 1))
        assert found[f"val/log_prob/{name}"] == pytest.approx((-said / 4 - num) / num)
        if name == "chosen":
            assert found["val/log_prob/chosen_moved"] == pytest.approx((said / 4 - num) / num)


@pytest.mark.parametrize("padding", [2, None])
def test_a_score_is_learned_only_where_padding_is_no_end(padding: int | None, tmp_path: Path) -> None:
    """transformers would read it at the token before the end; a policy has no score."""
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": padding, "eos_token_id": 2}))
    rm, dpo = (
        load_config_of(verb, str(CONFIGS / f"laptop-{verb}.yaml"), [f"model.path={tmp_path}"]).config
        for verb in ("rm", "dpo")
    )
    with pytest.raises(ModelError, match="the model has no separate padding token") as caught:
        supervised_setup(rm)
    assert caught.value.where == str(tmp_path)
    assert supervised_setup(dpo).head == "lm"


# --- figures of pairs ---


Ranked = tuple[str, list[tuple[float, int]]]
"""A source, and of each response, the best first, score and length."""


def figures_of(*groups: Ranked, losses: list[float] | None = None, in_batches: int = 1) -> dict[str, float]:
    batches, scores = [], []
    for part in np.array_split(np.arange(len(groups)), in_batches):
        chosen = [groups[number] for number in part]
        rows = [response for _, responses in chosen for response in responses]
        scores += [score for score, _ in rows]
        ids = from_rows([torch.ones(length, dtype=torch.int32) for _, length in rows])
        ranks = torch.tensor([rank for _, responses in chosen for rank in range(len(responses))])
        sources = [source for source, responses in chosen for _ in responses]
        batches.append(
            DataProto.from_dict(
                {"responses": ids, "rank": ranks},
                {"data_source": sources},
                row_ids=range(len(scores) - len(rows), len(scores)),
            )
        )
    return pair_metrics(DataProto.concat(batches), np.asarray(scores), None if losses is None else np.asarray(losses))


def test_ties_count_half() -> None:
    found = figures_of(("a", [(1.0, 3), (0.0, 3)]), ("a", [(2.0, 3), (2.0, 3)]), ("a", [(0.0, 3), (3.0, 3)]))
    assert found["val/accuracy"] == 0.5
    assert found["val/margin"] == pytest.approx(-2 / 3)
    assert found["val/loss"] == pytest.approx(np.mean(np.log1p(np.exp([-1.0, 0.0, 3.0]))))
    assert found["val/longer_wins"] == 0.5
    assert found["val/pairs"] == 3


@pytest.mark.parametrize(
    "loss",
    [
        *(DpoLossConfig(loss=name) for name in ("sigmoid", "ipo_sum", "ipo_mean", "simpo", "orpo")),
        DpoLossConfig(average=True),
    ],
    ids=lambda loss: f"{loss.loss}-{loss.average}",
)
def test_validation_of_a_policy_says_what_its_training_says(loss: DpoLossConfig) -> None:
    lengths, ranks = [3, 1, 2, 5, 1, 4], torch.tensor([0, 1] * 3)
    chance, rows = torch.Generator().manual_seed(3), Rows.of(lengths)
    log_probs_T = -torch.rand(rows.num_tokens, dtype=torch.float64, generator=chance)
    mask_T, group_B = torch.ones(rows.num_tokens, dtype=torch.bool), (ranks == 0).cumsum(0)
    tokens = RankedTokens(
        rows, mask_T, log_probs_T, torch.zeros_like(log_probs_T), Pairs.of(group_B, ranks), rows.expand(ranks == 0)
    )
    norm = LossNormalizer.of("token-mean", rows, mask_T)
    trained = preference_objective(tokens, loss, norm, RankingTotals(3, 6)).reports
    columns = {"responses": from_rows([torch.ones(length, dtype=torch.int32) for length in lengths]), "rank": ranks}
    sums = {"sum_log_probs": rows.sum(log_probs_T), "sum_ref_log_probs": torch.zeros(6, dtype=torch.float64)}
    scored = DataProto.from_dict(
        {**columns, **sums, "num_tokens": torch.tensor(lengths)}, {"data_source": ["a"] * len(lengths)}
    )
    client = cast(Any, SimpleNamespace(score=lambda _, batch: batch))
    validated = measure_preferences(client, [scored], loss)
    for ours, name in (("loss", "loss"), ("accuracy", "accuracy"), ("reward/margin", "margin")):
        assert float(trained[ours]) == pytest.approx(validated[f"val/{name}"]), name


def test_scores_of_a_new_head_are_ties() -> None:
    found = figures_of(*[("a", [(0.0, 2), (0.0, 5)])] * 4)
    assert (found["val/accuracy"], found["val/margin"], found["val/calibration_error"]) == (0.5, 0, 0)
    assert found["val/loss"] == pytest.approx(np.log(2))
    assert "val/score_length_correlation" not in found, "equal scores have no correlation"


def test_by_which_half_is_longer() -> None:
    found = figures_of(
        *[("a", [(1.0, 9), (0.0, 2)])] * 3,
        ("a", [(0.0, 9), (1.0, 2)]),
        ("a", [(0.0, 2), (1.0, 9)]),
        ("a", [(1.0, 4), (0.0, 4)]),
    )
    assert found["val/accuracy/chosen_longer"] == 0.75
    assert found["val/accuracy/chosen_shorter"] == 0
    assert found["val/accuracy/same_length"] == 1
    assert found["val/longer_wins"] == pytest.approx((4 + 0.5) / 6)
    assert "val/accuracy/chosen_shorter" not in figures_of(("a", [(1.0, 9), (0.0, 2)]))


def test_the_pairs_of_a_prompt_are_no_independent_answers() -> None:
    """Two prompts of six pairs each are as uncertain as two prompts of one pair with the same accuracy."""
    whole: Ranked = ("a", [(3.0, 9), (2.0, 5), (1.0, 1), (0.0, 1)])
    lists, pairs = figures_of(whole, whole), figures_of(*[("a", [(1.0, 2), (0.0, 2)])] * 2)
    assert lists["val/pairs"] == 6 * pairs["val/pairs"]
    for bound in ("low", "high"):
        assert lists[f"val/accuracy/{bound}"] == pytest.approx(pairs[f"val/accuracy/{bound}"])
    assert lists["val/accuracy/low"] < 0.1
    assert {f"val/{name}/low" for name in ("loss", "margin", "best_of_n")} < set(lists)


def test_by_source_and_however_the_rows_are_cut() -> None:
    groups: list[Ranked] = [("a", [(1.0, 3), (0.0, 4)]), ("b", [(0.0, 3), (2.0, 5)]), ("a", [(0.0, 1), (1.0, 2)])]
    found = figures_of(*groups)
    assert (found["val/a/accuracy"], found["val/b/accuracy"], found["val/accuracy"]) == (0.5, 0, 1 / 3)
    assert (found["val/a/margin"], found["val/b/margin"]) == (0, -2)
    assert figures_of(*groups, in_batches=3) == found


def test_the_pairs_of_a_list_weigh_one_together() -> None:
    ranked: Ranked = ("a", [(3.0, 9), (2.0, 5), (1.0, 1)])
    wrong: Ranked = ("a", [(0.0, 1), (1.0, 2)])
    found = figures_of(ranked, wrong)
    assert found["val/pairs"] == 4
    assert found["val/accuracy"] == 0.5
    assert found["val/longer_wins"] == 0.5
    assert found["val/margin"] == pytest.approx(((1 + 2 + 1) / 3 - 1) / 2)


@pytest.mark.parametrize(("scale", "error"), [(1.0, 0.0), (4.0, 0.157), (0.0, 0.285)], ids=["right", "over", "unsure"])
def test_calibration_of_a_scorer(scale: float, error: float) -> None:
    """Labels are drawn by the probabilities that gaps stand for; a scorer of larger gaps is surer than it is right."""
    chance = np.random.default_rng(0)
    gaps = chance.uniform(0, 3, 200_000)
    agrees = chance.random(len(gaps)) < 1 / (1 + np.exp(-gaps))
    signed = np.where(agrees, 1, -1) * np.maximum(scale * gaps, 1e-9)
    assert calibration_error(signed, np.ones_like(signed)) == pytest.approx(error, abs=0.005)


def test_calibration_by_hand() -> None:
    gaps = np.log(np.array([4.0, 4.0, 4.0, 0.25]))  # four times as sure of 0.8, of which one is wrong
    assert calibration_error(gaps, np.ones(4)) == pytest.approx(0.05)
    assert calibration_error(gaps, np.array([1.0, 1.0, 0.0, 1.0])) == pytest.approx(0.8 - 2 / 3)


def about(**figures: float) -> list[str]:
    plain = {"pairs": 100.0, "accuracy": 0.7, "longer_wins": 0.5, "score_length_correlation": 0.1}
    return [name for name, _ in warnings_of({f"val/{name}": value for name, value in (plain | figures).items()})]


def test_a_model_that_says_no_more_than_length_is_warned_of() -> None:
    assert about() == []
    assert about(longer_wins=0.7) == ["length wins"]
    assert about(longer_wins=0.69) == []
    assert about(accuracy=0.5) == [], "with equal lengths there is no length effect"
    assert about(longer_wins=0.9, pairs=29) == []
    assert about(score_length_correlation=0.91) == about(score_length_correlation=-0.91) == ["length and score"]
    assert about(score_length_correlation=0.9) == []
    assert about(score_length_correlation=1.0, pairs=2) == []


def test_what_was_preferred_has_become_less_likely() -> None:
    assert about(**{"log_prob/chosen_moved": -0.5}) == []
    assert about(**{"log_prob/chosen_moved": -0.62}) == ["preferred responses"]
    ((_, message),) = warnings_of({"val/log_prob/chosen_moved": -0.62})
    assert "less likely, by 0.62 nats per token" in message
    assert "preference.sft_weight=" in message
    assert list(warnings_of({"val/loss": 1.0})) == [], "other tasks have other figures"


def test_a_validation_warns_but_not_before_training() -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(warn_once=lambda about, message: said.append(about))
    figures = {"val/pairs": 50.0, "val/accuracy": 0.5, "val/longer_wins": 0.6}
    task = SimpleNamespace(measure=lambda client, rows: figures)
    components: Any = SimpleNamespace(sample=dict, task=task, client=None, validation=[])
    assert sft._validated(run, cast(Any, components), 0) == figures
    assert said == []
    assert sft._validated(run, cast(Any, components), 10) == figures
    assert said == ["length wins"]


def test_the_best_of_a_prompts_responses() -> None:
    """Of three, four and two responses: the first has the highest score, shares it, has it not."""
    won = ("a", [(3.0, 2), (1.0, 2), (2.0, 2)])
    tied = ("a", [(2.0, 2), (2.0, 2), (0.0, 2), (1.0, 2)])
    lost = ("b", [(0.0, 2), (1.0, 2)])
    assert figures_of(won)["val/best_of_n"] == 1.0
    assert figures_of(won, tied, lost)["val/best_of_n"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert figures_of(won, tied, lost, in_batches=2)["val/best_of_n"] == pytest.approx(0.5)
    assert "val/best_of_n" not in figures_of(lost), "of pairs it would be the accuracy"


def labeled(prompts: list[list[int]], said: list[int], labels: list[float], first: int = 0) -> DataProto:
    columns = {"prompts": from_rows(prompts), "responses": from_rows([[each] * 2 for each in said])}
    columns |= {"response_mask": from_rows([[True, True]] * len(said))}
    rest = {"rank": torch.zeros(len(said), dtype=torch.int64), "label": torch.tensor(labels)}
    return DataProto.from_dict(columns | rest, {"data_source": ["a"] * len(said)}, row_ids=first + np.arange(len(said)))


class OfPrompts(Group):
    """The policy says of a response its token times that of the prompt, the reference only the prompt's."""

    def score_dpo(self, shards: Any, sizes: Any) -> DataProto:
        batch = DataProto.concat(shards)
        prompts = torch.stack([row.sum() for row in batch["prompts"].rows()]).double()
        sums, nums = prompts * first_tokens(batch).double(), torch.full((len(batch),), 2)
        columns = {"sum_log_probs": sums, "sum_ref_log_probs": prompts, "num_tokens": nums}
        return DataProto.from_dict(columns, row_ids=batch.row_ids)


def test_a_mismatched_response_answers_the_next_other_prompt() -> None:
    rows = labeled([[1], [1], [2], [3], [3], [1]], [10, 11, 12, 13, 14, 15], [1.0] * 6)
    found = mismatched(rows)
    assert [row.tolist() for row in found["prompts"].rows()] == [[1], [1], [2], [3], [3], [1]]
    assert [int(row[0]) for row in found["responses"].rows()] == [12, 12, 13, 15, 15, 12]
    with pytest.raises(DataError, match="all 2 responses answer the same prompt"):
        mismatched(labeled([[1], [1]], [1, 2], [1.0, 0.0]))


def test_the_baseline_is_that_of_the_mismatched_pairs_of_the_whole_update() -> None:
    """Three rows on four ranks: the row that one rank is given again does not count."""
    rows = labeled([[1], [2], [3]], [-1, 5, 7], [1.0, 0.0, 1.0])
    found = with_baseline(client(OfPrompts()), rows)
    assert found["kl_baseline"].tolist() == [pytest.approx((1 * 4 + 2 * 6 + 3 * -2) / 3)] * 3
    assert [row.tolist() for row in found["responses"].rows()] == [[-1, -1], [5, 5], [7, 7]]
    below = labeled([[1], [2]], [-10, -20], [1.0, 1.0])
    assert with_baseline(client(OfPrompts()), below)["kl_baseline"].tolist() == [0, 0]


def test_validation_of_labeled_responses_says_what_their_training_says() -> None:
    config = DpoLossConfig(loss="kto", beta=0.2, desirable_weight=1.2, undesirable_weight=0.8)
    batches = [labeled([[1], [2]], [3, 2], [1.0, 0.0]), labeled([[3]], [-1], [1.0], 2)]
    found = measure_labeled(client(OfPrompts()), batches, config)
    baseline, ratio_B = (1 * 1 + 2 * -2 + 3 * 2) / 3, torch.tensor([2.0, 2.0, -6.0], dtype=torch.float64)
    tokens = LabeledTokens(
        Rows.of([1, 1, 1]),
        torch.ones(3, dtype=torch.bool),
        ratio_B,
        torch.zeros(3),
        torch.tensor([True, False, True]),
        torch.full((3,), baseline),
    )
    trained = kto_objective(tokens, config, LabelTotals(2, 1)).reports
    assert found["val/kl_baseline"] == pytest.approx(baseline)
    for name in ("loss", "accuracy"):
        assert found[f"val/{name}"] == pytest.approx(float(trained[name])), name
    assert found["val/accuracy"] == pytest.approx(1 / 3)
    assert (found["val/log_prob/desirable"], found["val/log_prob/desirable_moved"]) == (0, -1)
    assert (found["val/log_prob/undesirable"], found["val/log_prob/undesirable_moved"]) == (2, 1)
