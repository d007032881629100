"""Adapters after several updates, in layouts and in peft, with the losses of GRPO and DPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.losses import PolicyTokens
from mrl.algos.objectives import ActorColumns, actor_objective
from mrl.algos.preference import PREFERENCE_LOSSES, PairLogProbs
from mrl.algos.rows import Rows
from mrl.config.algorithm import LossConfig
from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.config.sft import DpoLossConfig
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.models.regions import Region, is_exact_cover, slices
from mrl.verify.spawn import run_distributed
from tests.engine.adapter_training import Case, Floats, engine_of, peft_log_probs, with_peft
from tests.engine.tiny_training import LENGTHS, share
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
TOLERANCE = 2e-5
NUM_UPDATES, BETA = 5, 0.1
OPTIMIZER = {"lr": 5e-3, "weight_decay": 0.01, "adam_eps": 1e-3}
"""With a tiny epsilon, Adam would make a full step of each gradient that is only rounding."""
LORA = {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}
CASES = [
    (Layout(tp=2, sequence_parallel=True), "grpo"),
    (Layout(tp=2, sequence_parallel=True), "dpo"),
    (Layout(pp=2), "dpo"),
    (Layout(cp=2), "grpo"),
]
NUMBERS = torch.from_numpy(LENGTHS - 2)
ADVANTAGES_T = torch.linspace(-1, 1, len(LENGTHS)).repeat_interleave(NUMBERS)
OLD_T = -4.8 + 0.3 * torch.randn(int(NUMBERS.sum()), generator=torch.Generator().manual_seed(2))
"""Log-probs of another policy, near those of a random model with 131 tokens: some ratios are clipped."""


def grpo(log_probs_T: Tensor) -> Tensor:
    """mrl's clipped loss."""
    mask_T, rows = torch.ones_like(log_probs_T, dtype=torch.bool), Rows.of(NUMBERS)
    tokens = PolicyTokens(rows, mask_T, log_probs_T, OLD_T, ADVANTAGES_T)
    norm = LossNormalizer.of("token-mean", rows, mask_T, 1)
    return actor_objective(tokens, LossConfig(dual_clip=None), norm, ActorColumns()).loss


def plain_grpo(log_probs_T: Tensor) -> Tensor:
    ratio_T = (log_probs_T - OLD_T).exp()
    return torch.maximum(-ADVANTAGES_T * ratio_T, -ADVANTAGES_T * ratio_T.clamp(0.8, 1.2)).mean()


def differences(log_probs_T: Tensor) -> Tensor:
    """Return each response's log-prob minus the reference's."""
    return torch.stack([part.sum() for part in (log_probs_T - OLD_T).split(NUMBERS.tolist())])


def dpo(log_probs_T: Tensor) -> Tensor:
    """mrl's loss of four pairs, the better response first."""
    better, worse = differences(log_probs_T).chunk(2)
    pairs = PairLogProbs(better, worse, *NUMBERS.chunk(2))
    return PREFERENCE_LOSSES.resolve("sigmoid")(pairs, DpoLossConfig(beta=BETA)).mean()


def plain_dpo(log_probs_T: Tensor) -> Tensor:
    better, worse = differences(log_probs_T).chunk(2)
    return -logsigmoid(BETA * (better - worse)).mean()


LOSSES: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "grpo": (grpo, plain_grpo),
    "dpo": (dpo, plain_dpo),
}


def train(cases: list[tuple[Case, str]]) -> list[list[tuple[str, Region, Floats]]]:
    return [_train(case, loss) for case, loss in cases]


def _train(case: Case, loss: str) -> list[tuple[str, Region, Floats]]:
    """Return this rank's parts of the adapters after the updates. One micro-batch has all rows."""

    def output(batch: LossInput) -> LossOutput:
        assert batch.scores.log_probs_T is not None
        sizes = batch.response_lengths.tolist()
        parts, numbers = batch.scores.log_probs_T.split(sizes), batch.columns["number"].split(sizes)
        order = sorted(range(len(parts)), key=lambda place: int(numbers[place][0]))  # an engine may sort the rows
        value = LOSSES[loss][0](torch.cat([parts[place] for place in order]))
        return LossOutput(value, {"loss": value.detach()})

    with model_parallel(case.layout, seed=1) as groups:
        engine = engine_of(case, groups, **OPTIMIZER)
        assert engine.adapters is not None
        rows = replace(share(engine)[0], columns={"number": torch.arange(len(LENGTHS)).repeat_interleave(NUMBERS)})
        for _ in range(NUM_UPDATES):
            engine.update(rows, [np.arange(len(LENGTHS))], output, ScoreRequest())
        held = engine.adapters.held()
        return [(x.hf, x.source, p.detach()[slices(x.target)].numpy().copy()) for s, p in held for x in s.pieces]


def train_with_peft(model: str, adapters: Path, loss: str) -> dict[str, Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, adapters, is_trainable=True)
    trained = {name: x for name, x in adapted.named_parameters() if x.requires_grad}
    settings = {"lr": OPTIMIZER["lr"], "weight_decay": OPTIMIZER["weight_decay"], "eps": OPTIMIZER["adam_eps"]}
    optimizer = torch.optim.AdamW(trained.values(), **settings)
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        LOSSES[loss][1](torch.cat(peft_log_probs(adapted))).backward()
        optimizer.step()
    return {name.replace(".default.", "."): x.detach() for name, x in trained.items()}


def test_adapters_after_five_updates_equal_those_of_peft(tmp_path: Path) -> None:
    model, adapters = str(make_tiny("qwen3", tmp_path / "model")), tmp_path / "adapters"
    with_peft(model, adapters, LoraConfig(**LORA))
    cases = [(Case(model, str(adapters), layout, LORA), loss) for layout, loss in CASES]
    by_rank = run_distributed(2, train, cases, timeout_s=LIMIT_S)
    expected = {loss: train_with_peft(model, adapters, loss) for loss in LOSSES}
    first = load_file(adapters / "adapter_model.safetensors")
    for (case, loss), ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        boxes: dict[str, list[Region]] = {name: [] for name in expected[loss]}
        for name, box, part in (x for rank in ranks for x in rank):
            difference = float(np.abs(expected[loss][name][slices(box)].numpy() - part).max())
            assert difference < TOLERANCE, (case.layout, loss, name, difference)
            boxes[name].append(box)
        for name, found in boxes.items():
            assert is_exact_cover(tuple(expected[loss][name].shape), list(dict.fromkeys(found))), name
    moved = {loss: max(float((x - first[name]).abs().max()) for name, x in expected[loss].items()) for loss in LOSSES}
    assert min(moved.values()) > 100 * TOLERANCE, f"nothing was learned: {moved}"
