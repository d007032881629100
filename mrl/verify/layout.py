"""Comparison of a role's layout with one rank and with transformers, on a small model of the same shape.

Everything except the sizes comes from the user: the family, the layout, the dtype, and the settings for Megatron
(model, data parallelism, optimizer). It runs on this machine, one process per rank: over gloo, or over NCCL with one
GPU each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.config.lora import LoraConfig
from mrl.config.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.dtypes import torch_dtype
from mrl.engine.adapter_files import merge_peft, write_peft
from mrl.errors import ModelError
from mrl.models.adapters import adapter_tensors
from mrl.models.families import FAMILIES, read_spec
from mrl.models.small import small_config
from mrl.models.spec import ModelSpec
from mrl.models.table import Head
from mrl.verify.parity import (
    OPTIMIZER,
    Difference,
    Floats,
    ParityCase,
    RankResult,
    measure,
    merge_ranks,
    transformers_scores,
)
from mrl.verify.spawn import Device, run_distributed

BUDGETS = (64, 1000)
"""Tokens per micro-batch in the first step: one run with many micro-batches, one with the whole batch in one."""
_LIMIT_S = 900.0
_ADAPTED_SIZE = 0.01
"""Standard deviation of what random adapters add to a weight: half of the weight's own."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of a correct layout: of its scores, and relative ones of loss and gradient norm."""

    scores: float
    loss: float
    grad_norm: float


FLOAT32 = Tolerance(scores=2e-5, loss=1e-5, grad_norm=1e-5)
_BFLOAT16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to eight binary digits."""


def tolerance(dtype: str, head: Head, spec: ModelSpec, oracle: Floats) -> Tolerance:
    """Return the differences that rounding explains. `oracle` is the result of transformers in float32.

    In bfloat16 every layer rounds its addition to the hidden state. The errors are random, so relative errors grow with
    the square root of the layers: r = 2^-8 sqrt(layers). Each limit is at least about twice the largest value in 112
    runs on the CPU: four families, dense and with experts, in tp, cp, pp, vpp, ep and dp on two and four ranks,
    policies and dense critics. The scores differed by 2.8 r of their spread. A policy's loss differed by 0.017 r,
    because only its entropy depends on the model, and its gradient norm by 0.56 r, with experts by 2.6 r. A critic's
    differed by 4.6 r, but in the first step by 0.6 r: after that, Adam makes steps of equal size for the smallest
    gradients, whose sign may be due to rounding.
    """
    if dtype == "float32":
        return FLOAT32
    rounding = _BFLOAT16_ROUNDING * math.sqrt(spec.num_layers)
    is_dense_policy = head == "lm" and spec.moe is None
    return Tolerance(
        scores=6 * rounding * float(oracle.std()),
        loss=(0.05 if head == "lm" else 10) * rounding,
        grad_norm=(2 if is_dense_policy else 10) * rounding,
    )


def score_difference(dtype: str, spec: ModelSpec, scores: Floats, oracle: Floats) -> float:
    """Return the largest difference; in bfloat16 the root mean square, with experts without the largest tenth.

    Rounding may send a token at a tie to another expert: this happened to up to two of 74 tokens in runs on the CPU.
    """
    differences = np.sort(np.abs(scores - oracle))
    if dtype == "float32":
        return float(differences[-1])
    num_flips = 0 if spec.moe is None else len(differences) // 10
    return float(np.sqrt(np.square(differences[: len(differences) - num_flips]).mean()))


@dataclass(frozen=True)
class Verified:
    """Differences of a layout from the reference, the worse of both budgets, and their limits."""

    num_ranks: int
    transformers: float
    loss: float
    grad_norm: float
    parameters: float
    tolerance: Tolerance

    @property
    def is_right(self) -> bool:
        differences = (self.transformers, self.loss, self.grad_norm)
        return all(value <= limit for value, limit in zip(differences, astuple(self.tolerance), strict=True))


def fewest_ranks(parallel: ParallelConfig, dp: int) -> int:
    """Return the smallest number of ranks that covers the layout, with two data-parallel ranks if there are more."""
    dense, experts = parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp
    return next(size for copies in range(min(dp, 2), dp + 1) if not (size := copies * dense) % experts)


def verify_layout(
    model: Mapping[str, Any],
    head: Head,
    settings: MegatronModelConfig,
    num_ranks: int,
    directory: Path,
    device: Device = "cpu",
) -> Verified:
    """Measure a role. `model` is the content of the model's `config.json`."""
    parallel = settings.parallel
    is_open = model["model_type"] not in FAMILIES
    if is_open and head == "score":
        raise ModelError(f"the family {model['model_type']} has no table, so it cannot have a score head yet")
    # No token is padding: its embedding would be zero, where a norm magnifies rounding a thousand times.
    small = {**small_config(model, parallel), "pad_token_id": None}
    path = make_random(small, head, directory, torch_dtype(settings.dtype))
    spec = read_spec(path)
    ddp, optimizer, lora, whole = {}, {}, None, path
    if isinstance(settings, TrainedModelConfig):
        ddp, optimizer = settings.ddp, settings.optimizer
        if settings.lora is not None:
            lora = _random_adapters(spec, settings.lora, path, torch_dtype(settings.dtype))
            whole = path.with_name("merged")
            merge_peft(str(lora.path), path, torch.float32, whole, head)
    # The update rule (Adam's numbers, clipping) is the user's on both sides, except for a high learning rate.
    optimizer = {**optimizer, "lr": OPTIMIZER["lr"]}
    alone = ParityCase(
        str(path), head, ParallelConfig(), BUDGETS[0], dtype=settings.dtype, optimizer=optimizer, lora=lora
    )
    if is_open:  # Megatron cannot run it
        alone = replace(alone, strategy="fsdp")
    oracle = transformers_scores(whole, alone)
    one = merge_ranks([run_distributed(1, _measure, [alone], timeout_s=_LIMIT_S, device=device)[0][0]])
    size = settings.fsdp.shard_size
    shard_size = size if size is not None and num_ranks % size == 0 else None
    layout_case = replace(alone, parallel=parallel, megatron=settings.megatron, ddp=ddp)
    layout_case = replace(layout_case, strategy=settings.strategy, shard_size=shard_size)
    cases = [replace(layout_case, max_tokens=budget) for budget in BUDGETS]
    by_rank = run_distributed(num_ranks, _measure, cases, timeout_s=_LIMIT_S, device=device)
    results = [merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)]
    differences = [Difference.between(one, result) for result in results]
    return Verified(
        num_ranks=num_ranks,
        transformers=max(score_difference(settings.dtype, spec, result.scores, oracle) for result in results),
        loss=max(difference.loss for difference in differences),
        grad_norm=max(difference.grad_norm for difference in differences),
        parameters=max(difference.parameters for difference in differences),
        tolerance=tolerance(settings.dtype, head, spec, oracle),
    )


def _random_adapters(spec: ModelSpec, lora: LoraConfig, model: Path, dtype: torch.dtype) -> LoraConfig:
    """Write random adapters, since new ones change nothing, and return settings that start from them. The small model
    has no whole blocks for FP8."""
    path, generator = model.with_name("adapters"), torch.Generator().manual_seed(1)
    shapes = adapter_tensors(spec, lora)
    size = math.sqrt(_ADAPTED_SIZE / (lora.scale * math.sqrt(lora.rank)))
    values = {name: (size * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
    write_peft(path, values, lora, str(model))
    return replace(lora, path=str(path), base_quantization=None)


def _measure(cases: list[ParityCase]) -> list[RankResult]:
    """Measure on one rank, without torch's warnings about Megatron's deprecated calls."""
    warnings.simplefilter("ignore", FutureWarning)
    return measure(cases)


def make_random(values: Mapping[str, Any], head: Head, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Create random weights with transformers. Norms and all biases are random, too, so that mix-ups are visible."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    options = {name: value for name, value in values.items() if name not in ("model_type", "architectures", "dtype")}
    config = AutoConfig.for_model(values["model_type"], **options)
    config.num_labels = 1
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.ndim == 1 or name.endswith("_bias"):
                    tensor.add_(0.1 * torch.randn_like(tensor))
            for parameter in model.parameters():
                parameter.data = parameter.to(dtype)  # buffers stay float32, as in published files
    model.save_pretrained(directory)
    return directory
