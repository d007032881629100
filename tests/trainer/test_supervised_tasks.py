"""Figures of rows on several ranks, compared with calculations by hand; and models that are rejected in advance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.resolved.load import load_config_of
from mrl.config.schema import TrainedModelConfig
from mrl.config.sft import DpoLossConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.errors import ModelError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import SupervisedClient
from mrl.trainer.supervised_tasks import measure_preferences, measure_scores, supervised_setup
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
