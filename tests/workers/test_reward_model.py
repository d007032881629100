"""The reward model's workers return the scores of transformers' sequence classification, in any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig, RewardModelConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.data.packing import plan_step
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.verify.layout import make_random
from mrl.verify.spawn import run_distributed
from mrl.workers.frozen import RewardModelWorker
from mrl.workers.messages import ModelSetup
from tests.workers.stubs import LocalWorld

LAYOUTS = [ParallelConfig(tp=2, pp=2, sequence_parallel=True), ParallelConfig(cp=2)]
NUM_RANKS, VOCAB = 4, 100
LENGTHS = [(3, 9), (1, 1), (7, 2), (5, 14), (2, 6), (9, 1), (4, 4), (6, 11)]
"""Tokens of prompt and response of each row."""


class LocalRewardModel(LocalWorld, RewardModelWorker):
    """A worker of the reward model."""


def make_batch() -> DataProto:
    chance = torch.Generator().manual_seed(3)
    prompts, responses = (
        from_rows([torch.randint(1, VOCAB, (pair[part],), generator=chance) for pair in LENGTHS]) for part in (0, 1)
    )
    return DataProto.from_dict({"prompts": prompts, "responses": responses}, row_ids=np.arange(len(LENGTHS)) * 10)


def scores_of(path: str, layouts: list[ParallelConfig]) -> list[dict[int, float]]:
    """Map row id to score for this rank's rows, in each layout, and once more after an offload to the host."""
    rank, batch, found = torch.distributed.get_rank(), make_batch(), []
    lengths = batch.lengths("prompts") + batch.lengths("responses")
    for parallel in layouts:
        mesh = Mesh(NUM_RANKS, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp)
        settings = RewardModelConfig(path=path, dtype="float32", parallel=parallel, max_tokens_per_device=32)
        place = RankInfo("reward_model", rank, rank, mesh, Rendezvous("", 0, NUM_RANKS, None))
        worker = LocalRewardModel(place, ModelSetup(path, "score", settings, seed=1, timeout_s=60))
        with worker._groups:
            plan = plan_step(lengths, mesh.dp, settings.max_tokens_per_device, worker.init_model().packing)
            sizes = [[len(rows) for rows in batches] for batches in plan]
            shard = batch.take(np.concatenate(plan[place.coordinates.dp]))
            answers = []
            for _ in range(2):
                written = worker.compute_rm_score(shard, sizes)
                if written is not None and mesh.is_output_rank(rank):
                    answers.append(dict(zip(written.row_ids.tolist(), written["rm_scores"].tolist(), strict=True)))
                worker.offload("parameters", "gradients", "optimizer")
                worker.onload("parameters", "gradients", "optimizer")
            assert len(answers) in (0, 2)
            assert all(answer == answers[0] for answer in answers)
            found.append(answers[0] if answers else {})
    return found


@pytest.mark.slow
def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    values = small_config(model_values("Qwen3-8B"), LAYOUTS[0])
    path = make_random(values, "score", tmp_path / "model")
    oracle = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    batch = make_batch()
    rows = zip(batch.row_ids.tolist(), batch["prompts"].rows(), batch["responses"].rows(), strict=True)
    with torch.no_grad():
        expected = {
            row_id: float(oracle(torch.cat([prompt, response])[None].long()).logits)
            for row_id, prompt, response in rows
        }
    by_rank = run_distributed(NUM_RANKS, scores_of, str(path), LAYOUTS, timeout_s=300)
    for number, layout in enumerate(LAYOUTS):
        found = {row_id: score for rank in by_rank for row_id, score in rank[number].items()}
        assert found.keys() == expected.keys(), layout
        assert max(abs(found[row_id] - expected[row_id]) for row_id in expected) < 1e-4, layout
    assert len({round(score, 3) for score in expected.values()}) == len(expected), "the rows differ"
