"""Random cases for `preferences.py`, and mrl's result for each of TRL's functions.

A case has P pairs in TRL's format: padded arrays with 2P rows, first the chosen responses, then the rejected ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.algorithm_cases import Function, Outputs, Packed
from mrl.algos.aggregate import LossNormalizer
from mrl.algos.kl import divergence
from mrl.algos.kto import LabeledTokens, LabelTotals, kto_baseline, kto_objective
from mrl.algos.objectives import Objective
from mrl.algos.preference import Pairs, RankedTokens, RankingTotals, preference_objective, reward_objective
from mrl.config.sft import DpoLossConfig, RewardLossConfig

VOCABULARY = 7


def make_case(seed: int) -> dict[str, Any]:
    """Create responses of 1 to 9 tokens, some of them from others, some with extreme log-ratios; noise under masks."""
    rng = np.random.default_rng(seed)
    num_pairs, width = int(rng.integers(1, 6)), 9
    shape = (2 * num_pairs, width)
    lengths = rng.integers(1, width + 1, shape[0])
    mask = (np.arange(width) < lengths[:, None]) & (rng.random(shape) < 0.8)
    mask[:, 0] = True
    log_probs = -0.001 - np.abs(rng.normal(size=shape))
    log_ratios = rng.normal(size=shape) * np.where(rng.random(shape) < 0.1, 8.0, 0.5)
    settings = {
        "beta": (0.05, 0.1, 0.5, 2.0),
        "smoothing": (0.05, 0.1, 0.3),
        "gamma": (0.3, 1.0),
        "sft_weight": (0.1, 1.0),
        "centering": (0.01, 0.5),
        "temperature": (0.7, 1.0, 2.0),
        "desirable_weight": (0.5, 1.0, 1.33),
        "undesirable_weight": (0.7, 1.0, 2.0),
    }
    return {
        "lengths": lengths,
        "mask": mask.astype(np.float64),
        "log_probs": log_probs,
        "ref_log_probs": log_probs + log_ratios,
        "scores": rng.normal(size=shape[0]) * 3,
        "labels": rng.normal(size=shape[0]),
        "logits": rng.normal(size=(*shape, VOCABULARY)) * 3,
        "teacher_logits": rng.normal(size=(*shape, VOCABULARY)) * 3,
        **{name: float(rng.choice(values)) for name, values in settings.items()},
    }


def pairs_of(case: Packed) -> tuple[Pairs, RankingTotals]:
    """Return the pairs of a case, each with the responses to a separate prompt."""
    group_B, rank_B = torch.arange(case.rows.num_rows) % _num_pairs(case), _rank(case)
    return Pairs.of(group_B, rank_B), RankingTotals.of(group_B)


def _num_pairs(case: Packed) -> int:
    return case.rows.num_rows // 2


def _rank(case: Packed) -> Tensor:
    return (torch.arange(case.rows.num_rows) >= _num_pairs(case)).long()


def _outputs(objective: Objective, variable: Tensor) -> Outputs:
    (gradient,) = torch.autograd.grad(objective.loss, variable)
    return {**objective.reports, "loss": objective.loss, "gradient": gradient}


def preference(loss: str, *read: str, reference: bool = True, **fixed: Any) -> Function:
    """Return a function for a loss of pairs that reads beta and these settings of the case."""

    def run(case: Packed) -> Outputs:
        pairs, totals = pairs_of(case)
        is_best_T = case.rows.expand(_rank(case) == 0)
        log_probs_T = case.column("log_probs").requires_grad_()
        ref_T = case.column("ref_log_probs") if reference else None
        tokens = RankedTokens(case.rows, case.mask_T, log_probs_T, ref_T, pairs, is_best_T)
        norm = LossNormalizer.of("token-mean", case.rows, case.mask_T & is_best_T)
        config = DpoLossConfig(loss=loss, **{name: case.case[name] for name in ("beta", *read)}, **fixed)
        return _outputs(preference_objective(tokens, config, norm, totals), log_probs_T)

    return run


def kto(case: Packed) -> Outputs:
    """Return KTO's loss of responses with random labels. The mismatched pairs have the log-probs of the rows."""
    log_probs_T, refs_T = case.column("log_probs").requires_grad_(), case.column("ref_log_probs")
    ratio_B = case.rows.sum(torch.where(case.mask_T, log_probs_T.detach() - refs_T, 0.0))
    baseline_B = torch.full_like(ratio_B, kto_baseline(ratio_B))
    is_desirable_B = case.per_row("labels") > 0
    names = ("beta", "desirable_weight", "undesirable_weight")
    config = DpoLossConfig(loss="kto", **{name: case.case[name] for name in names})
    tokens = LabeledTokens(case.rows, case.mask_T, log_probs_T, refs_T, is_desirable_B, baseline_B)
    return _outputs(kto_objective(tokens, config, LabelTotals.of(is_desirable_B)), log_probs_T)


def reward(*read: str, margin: bool = False) -> Function:
    """Return a function for the loss of a reward model."""

    def run(case: Packed) -> Outputs:
        pairs, totals = pairs_of(case)
        score_B = case.per_row("scores").requires_grad_()
        config = RewardLossConfig(margin=margin, **{name: case.case[name] for name in read})
        return _outputs(reward_objective(score_B, pairs, case.per_row("labels"), config, totals), score_B)

    return run


def distillation(beta: float) -> Function:
    """Return a function for a divergence from a teacher and its gradient with respect to the logits."""

    def run(case: Packed) -> Outputs:
        temperature = case.case["temperature"]
        student_TV, teacher_TV = (
            (case.column(name) / temperature).log_softmax(1) for name in ("logits", "teacher_logits")
        )
        parts_TV, slopes_TV = divergence(student_TV, teacher_TV, beta)
        norm = LossNormalizer.of("token-mean", case.rows, case.mask_T)
        weights_T1 = norm.weights(case.rows, case.mask_T)[:, None] / temperature
        gradient_TV = weights_T1 * (slopes_TV - student_TV.exp() * slopes_TV.sum(1, keepdim=True))
        return {"loss": norm.aggregate(parts_TV.sum(1), case.rows, case.mask_T), "gradient": gradient_TV}

    return run


OURS: dict[str, Function] = {
    "dpo sigmoid": preference("sigmoid"),
    "dpo hinge": preference("hinge"),
    "dpo robust": preference("robust", "smoothing"),
    "dpo ipo": preference("ipo_mean"),
    "dpo sigmoid_norm": preference("sigmoid", average=True),
    "dpo sigmoid + sft": preference("sigmoid", "sft_weight"),
    "dpo ipo + sft": preference("ipo_mean", "sft_weight"),
    "dpo aot, a pair at a time": preference("conservative", "smoothing"),
    "dpo aot_unpaired, a pair at a time": preference("conservative", "smoothing"),
    "cpo sigmoid": preference("sigmoid", reference=False),
    "cpo sigmoid, smoothed": preference("conservative", "smoothing", reference=False),
    "cpo sigmoid + nll": preference("sigmoid", "sft_weight", reference=False),
    "cpo hinge": preference("hinge", reference=False),
    "cpo ipo": preference("ipo_mean", reference=False),
    "cpo ipo of sums": preference("ipo_sum", reference=False),
    "cpo simpo": preference("simpo", "gamma", reference=False),
    "cpo simpo, smoothed": preference("simpo", "gamma", "smoothing", reference=False),
    "orpo": preference("orpo", reference=False, sft_weight=1.0),
    "kto": kto,
    "reward": reward(),
    "reward, margin": reward(margin=True),
    "reward, centered": reward("centering"),
    "reward, margin, centered": reward("centering", margin=True),
    **{f"gkd, beta {beta:g}": distillation(beta) for beta in (0.0, 0.1, 0.5, 1.0)},
}
"""Functions by the names in `peers/trl_preferences.py`."""
