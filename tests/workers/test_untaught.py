"""Rows without a teacher in an update: what their columns hold, and which tokens count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.rows import Rows
from mrl.config.algorithm import AlgorithmConfig, DistillationConfig, LossConfig
from mrl.engine.scores import LossInput, Scores
from mrl.errors import BatchError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows, jagged
from mrl.workers.actor import policy_loss
from mrl.workers.frozen import teacher_values
from mrl.workers.model_worker import token_rows

LENGTHS = [2, 0, 3, 1]
"""Response tokens. The teacher has read the first and the last row."""


def batch_of(**columns: Any) -> DataProto:
    prompts = from_rows([[1]] * 4)
    responses = jagged(torch.arange(sum(LENGTHS)), LENGTHS)
    return DataProto.from_dict({"prompts": prompts, "responses": responses, **columns}, row_ids=np.arange(4))


def test_rows_without_a_teacher_get_finite_values_of_distinct_tokens() -> None:
    read = [2, 0, 0, 1]
    ids = torch.tensor([[5, 3], [4, 9], [7, 1]], dtype=torch.int32)
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    batch = batch_of(teacher_log_probs=jagged(log_probs, read), teacher_top_ids=jagged(ids, read))
    columns = teacher_values(batch, only_some=True)
    assert columns["taught"].tolist() == [True, True, False, False, False, True]
    assert columns["teacher_log_probs"].tolist() == [-1, -2, 0, 0, 0, -3]
    assert columns["teacher_top_ids"].tolist() == [[5, 3], [4, 9], [0, 1], [0, 1], [0, 1], [7, 1]]
    assert columns["teacher_top_ids"].dtype == torch.int32


def test_a_teacher_that_reads_every_sample_has_to() -> None:
    batch = batch_of(teacher_log_probs=jagged(torch.zeros(3), [2, 0, 0, 1]))
    with pytest.raises(BatchError, match="`teacher_log_probs` has 3 values for 6 response tokens"):
        token_rows(batch, teacher_values(batch, only_some=False))
    assert teacher_values(batch_of(), only_some=True) == {}


def test_spans_mark_the_tokens_that_a_teacher_with_another_tokenizer_has_read() -> None:
    spans, log_probs = torch.tensor([2, 1, 0, 0, 0, 2]), torch.tensor([-1.0, -2.0, 0, 0, 0, -3.0])
    batch = batch_of(teacher_log_probs=jagged(log_probs, LENGTHS), teacher_spans=jagged(spans, LENGTHS))
    columns = teacher_values(batch, only_some=False)
    assert columns["taught"].tolist() == [True, True, False, False, False, True]
    assert columns["teacher_log_probs"].tolist() == log_probs.tolist()
    assert columns["teacher_spans"].tolist() == spans.tolist()


def test_an_update_learns_the_differences_of_spans() -> None:
    own = torch.tensor([-1.0, -2.0, -3.0]).requires_grad_()
    mask = torch.ones(3, dtype=torch.bool)
    columns = {"response_mask": mask, "advantages": torch.zeros(3), "taught": torch.tensor([True, True, False])}
    columns |= {"teacher_log_probs": torch.tensor([-4.0, -4.0, -3.0]), "teacher_spans": torch.tensor([2, 1, 0])}
    config = AlgorithmConfig(advantage="grpo", distillation=DistillationConfig(form="advantage", coef=0.5))
    norm = LossNormalizer.of("token-sum", Rows.of([3]), mask)
    scores = Scores(own, entropy_T=torch.zeros(3))
    (slopes,) = torch.autograd.grad(policy_loss(config, norm, LossInput(scores, np.array([3]), columns)).loss, own)
    assert slopes.tolist() == pytest.approx([0.5 * (8 - 3), 0.5 * (8 - 3), 0.5 * 3])


def test_metrics_of_the_teacher_count_only_tokens_that_have_one() -> None:
    own, of_teacher = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, 0.0, 0.0])
    distillation = DistillationConfig(form="top_k", coef=0.5, context="{prompt} {success}", reward_coef=0.25)
    mask, advantages = torch.ones(3, dtype=torch.bool), torch.tensor([2.0, -4.0, 0.0])
    columns = {"response_mask": mask, "advantages": advantages, "teacher_log_probs": of_teacher}
    columns["taught"] = torch.tensor([True, False, False])
    scores = Scores(own, divergence_T=torch.tensor([0.6, 5.0, 7.0]), teacher_mass_T=torch.tensor([0.9, 0.1, 0.1]))
    config = AlgorithmConfig(advantage="grpo", distillation=distillation, loss=LossConfig(log_entropy=False))
    norm = LossNormalizer.of("token-mean", Rows.of([1, 2]), mask)
    batch = LossInput(scores, np.array([1, 2]), columns)
    reports = {name: float(value) for name, value in policy_loss(config, norm, batch).reports.items()}
    wanted = {"teacher_kl": 1.0, "taught_abs": 0.5, "taught_tokens": 1 / 3, "teacher_mass": 0.3, "distill_loss": 0.2}
    wanted["advantages_abs"] = 0.5
    assert {name: reports[name] for name in wanted} == pytest.approx(wanted)
    spans = columns | {"teacher_spans": torch.tensor([2, 1, 0]), "taught": torch.tensor([True, True, False])}
    of_spans = policy_loss(config, norm, replace(batch, columns=spans)).reports
    assert float(of_spans["teacher_kl"]) == pytest.approx((3 - 2) / 3)
    assert float(of_spans["taught_abs"]) == pytest.approx(0.5 * (1 + 1) / 3), "each token gets its span's difference"
    del columns["taught"]
    assert "taught_tokens" not in policy_loss(config, norm, replace(batch, columns=columns)).reports
