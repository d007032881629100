"""TRL's losses of pairs and of distillation on the cases of `benchmarks/preferences.py`. Runs in TRL's own environment.

    python trl_preferences.py CASES.npz RESULTS.npz

The losses are methods of trainers that want a model and a dataset; they are called on trainers that nothing has
initialized, which have just the attributes that they read, and a model that says what the case has.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from answers import Function, answer
from torch.nn.functional import pad
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

Case = dict[str, Any]
IGNORED = -100
REPORTS = {
    "rewards/chosen": "reward/chosen",
    "rewards/rejected": "reward/rejected",
    "rewards/margins": "reward/margin",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "margin": "margin",
    "mean_reward": "score",
}
"""mrl's name for each name of TRL."""


def trainer(kind: type, **attributes: Any) -> Any:
    made = kind.__new__(kind)
    defaults: dict[str, Any] = {
        "accelerator": SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(made).update(defaults | attributes)
    return made


def outputs(loss: torch.Tensor, of: torch.Tensor, metrics: dict[str, Any]) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(loss, of)
    reports = {ours: metrics[name] for name, ours in REPORTS.items() if name in metrics}
    return {"loss": loss, "gradient": gradient, **reports}


def of_whole_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of responses after a prompt of one token."""
    return pad(mask, (1, 0)).long()


def fused_head(log_probs: torch.Tensor) -> Any:
    """A model that answers like one with TRL's fused head: 0 at positions without a label."""

    def model(labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        shown = log_probs.masked_fill(labels[:, 1:] == IGNORED, 0.0)
        unused = torch.zeros_like(shown)
        return SimpleNamespace(log_probs=shown, entropy=unused, mean_logits=unused, is_top1=unused.bool())

    return model


def dpo_part(case: Case, log_probs: torch.Tensor, rows: list[int], losses: dict[str, float]) -> tuple[Any, Any]:
    """Return the loss of these rows, the first half of which was chosen, and the metrics."""
    mask = of_whole_rows(case["mask"][rows])
    made = trainer(
        DPOTrainer,
        ref_model=fused_head(case["ref_log_probs"][rows]),
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        beta=case["beta"],
        label_smoothing=case["smoothing"],
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = made._compute_loss(fused_head(log_probs[rows]), inputs, return_outputs=False)
    return loss, {name: values[0] for name, values in made._metrics["train"].items()}


def dpo(loss_type: str, *, sft: bool = False, reports: bool = True) -> Function:
    def run(case: Case) -> dict[str, Any]:
        log_probs = case["log_probs"].clone().requires_grad_()
        losses = {loss_type: 1.0, **({"sft": case["sft_weight"]} if sft else {})}
        loss, metrics = dpo_part(case, log_probs, list(range(len(log_probs))), losses)
        return outputs(loss, log_probs, metrics if reports else {})

    return run


def kto(case: Case) -> dict[str, Any]:
    """The loss of labeled responses. The tokens of its mismatched pairs are 1, and their log-probs those of the rows,
    last row first."""
    mask, log_probs = of_whole_rows(case["mask"]), case["log_probs"].clone().requires_grad_()

    def model(log_probs: torch.Tensor) -> Any:
        def answer(labels: torch.Tensor, **_: Any) -> Any:
            shown = log_probs.flip(0) if bool((labels == 1).any()) else log_probs
            return fused_head(shown)(labels=labels)

        return answer

    made = trainer(
        KTOTrainer,
        ref_model=model(case["ref_log_probs"]),
        precompute_ref_logps=False,
        calculate_KL=True,
        loss_type="kto",
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        **{name: case[name] for name in ("beta", "desirable_weight", "undesirable_weight")},
    )
    ids = torch.zeros_like(mask)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {f"KL_{name}": column.flip(0) for name, column in inputs.items()}
    inputs |= {"KL_input_ids": ids + 1, "label": case["labels"] > 0}
    loss = made._compute_loss(model(log_probs), inputs, return_outputs=False)
    return {**outputs(loss, log_probs, {}), "kl_baseline": made._metrics["train"]["kl"][0]}


def a_pair_at_a_time(loss_type: str) -> Function:
    def run(case: Case) -> dict[str, Any]:
        log_probs = case["log_probs"].clone().requires_grad_()
        num_pairs = len(log_probs) // 2
        parts = [dpo_part(case, log_probs, [at, num_pairs + at], {loss_type: 1.0})[0] for at in range(num_pairs)]
        return outputs(torch.stack(parts).mean(), log_probs, {})

    return run


def two_tokens(log_probs: torch.Tensor) -> torch.Tensor:
    """Return logits for a vocabulary of two, whose first token has these log-probs. Gradients pass through."""
    logits = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], -1)
    return pad(logits, (0, 0, 0, 1))  # the last token predicts nothing


def batch_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    batch = {}
    for name, rows in zip(("chosen", "rejected"), of_whole_rows(mask).chunk(2), strict=True):
        batch[f"{name}_input_ids"] = torch.zeros_like(rows)
        batch[f"{name}_labels"] = torch.where(rows == 1, 0, IGNORED)
        batch[f"{name}_attention_mask"] = pad(rows[:, 1:], (1, 0), value=1)  # ORPO's likelihood has no other mask
    return batch


def odds(kind: type, reports: tuple[str, ...] = tuple(REPORTS), **settings: Any) -> Function:
    """A loss without a reference. A setting is a name in the case, or the value."""

    def run(case: Case) -> dict[str, Any]:
        log_probs = case["log_probs"].clone().requires_grad_()
        given = {name: case.get(value, value) for name, value in settings.items()}
        own = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "beta": case["beta"]}
        made = trainer(kind, **own, **given)
        logits = two_tokens(log_probs)
        loss, metrics = made.get_batch_loss_metrics(
            lambda *_, **__: SimpleNamespace(logits=logits), batch_of(case["mask"])
        )
        return outputs(loss, log_probs, {name: metrics[name] for name in reports if name in metrics})

    return run


def cpo(loss_type: str, **settings: Any) -> Function:
    plain = {"cpo_alpha": 0.0, "alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0}
    return odds(CPOTrainer, **{**plain, "loss_type": loss_type, **settings})


def ipo_of_sums(case: Case) -> dict[str, Any]:
    log_probs = case["log_probs"].clone().requires_grad_()
    labels = torch.where(of_whole_rows(case["mask"]) == 1, 0, IGNORED)
    sums = CPOTrainer.get_batch_logps(two_tokens(log_probs), labels, average_log_prob=False)
    made = trainer(CPOTrainer, loss_type="ipo", alpha=0.0, beta=case["beta"], label_smoothing=0.0)
    return outputs(made.cpo_loss(*sums.chunk(2))[0].mean(), log_probs, {})


def reward(*, margin: bool = False, centered: bool = False) -> Function:
    def run(case: Case) -> dict[str, Any]:
        scores = case["scores"].clone().requires_grad_()
        coefficient = case["centering"] if centered else None
        made = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=coefficient))
        inputs = {"attention_mask": case["mask"]}
        if margin:
            better, worse = case["labels"].chunk(2)
            inputs["margin"] = better - worse
        loss = made.compute_loss(lambda **_: SimpleNamespace(logits=scores.unsqueeze(1)), inputs)
        return outputs(loss, scores, {name: values[0] for name, values in made._metrics["train"].items()})

    return run


def gkd(beta: float) -> Function:
    def run(case: Case) -> dict[str, Any]:
        logits = case["logits"].clone().requires_grad_()
        labels = torch.where(case["mask"] == 1, 0, IGNORED)
        loss = GKDTrainer.generalized_jsd_loss(
            logits, case["teacher_logits"], labels, beta=beta, temperature=case["temperature"]
        )
        return outputs(loss, logits, {})

    return run


FUNCTIONS = {
    "dpo sigmoid": dpo("sigmoid"),
    "dpo hinge": dpo("hinge"),
    "dpo robust": dpo("robust"),
    "dpo ipo": dpo("ipo", reports=False),
    "dpo sigmoid_norm": dpo("sigmoid_norm", reports=False),
    "dpo sigmoid + sft": dpo("sigmoid", sft=True),
    "dpo ipo + sft": dpo("ipo", sft=True, reports=False),
    "dpo aot, a pair at a time": a_pair_at_a_time("aot"),
    "dpo aot_unpaired, a pair at a time": a_pair_at_a_time("aot_unpaired"),
    "cpo sigmoid": cpo("sigmoid"),
    "cpo sigmoid, smoothed": cpo("sigmoid", label_smoothing="smoothing"),
    "cpo sigmoid + nll": cpo("sigmoid", cpo_alpha="sft_weight"),
    "cpo hinge": cpo("hinge"),
    "cpo ipo": cpo("ipo"),
    "cpo ipo of sums": ipo_of_sums,
    "cpo simpo": cpo("simpo", simpo_gamma="gamma"),
    "cpo simpo, smoothed": cpo("simpo", simpo_gamma="gamma", label_smoothing="smoothing"),
    # TRL computes it in float32, which leaves a small margin below the tolerance.
    "orpo": odds(ORPOTrainer, reports=("rewards/chosen", "rewards/rejected", "rewards/accuracies")),
    "kto": kto,
    "reward": reward(),
    "reward, margin": reward(margin=True),
    "reward, centered": reward(centered=True),
    "reward, margin, centered": reward(margin=True, centered=True),
    **{f"gkd, beta {beta:g}": gkd(beta) for beta in (0.0, 0.1, 0.5, 1.0)},
}


if __name__ == "__main__":
    answer(FUNCTIONS, *sys.argv[1:])
