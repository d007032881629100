"""AdamW over the shards of a rank, with Megatron's rules: clip by the norm over all ranks, no decay of vectors, the
same schedule, and no step with a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.config.fsdp import OPTIMIZER_DEFAULTS
from mrl.config.schema import ScheduleConfig, TrainedModelConfig
from mrl.engine.steps import MAX_CONSECUTIVE_SKIPPED_UPDATES, StepOutcome
from mrl.errors import EngineError

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardOptimizer:
    """Optimizer state of the shards of a rank, and the learning rate."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        decayed: Collection[str],
        settings: TrainedModelConfig,
        group: dist.ProcessGroup,
    ) -> None:
        values = OPTIMIZER_DEFAULTS | settings.optimizer
        if "lr" not in values:
            raise EngineError("the optimizer has no learning rate", fix="set optimizer.lr")
        self._parameters, self._group = dict(parameters), group
        self._peak, self._schedule = float(values["lr"]), settings.schedule
        self._max_norm = float(values["clip_grad"])
        self.locals = {name: torch.nn.Parameter(_local(parameter)) for name, parameter in parameters.items()}
        groups = [
            {"params": [x for name, x in self.locals.items() if (name in decayed) == is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, values["weight_decay"]), (False, 0.0))
        ]
        betas = (values["adam_beta1"], values["adam_beta2"])
        self._adam = torch.optim.AdamW(groups, lr=self._peak, betas=betas, eps=values["adam_eps"])
        self.num_steps = self.num_skipped = self.num_skipped_in_a_row = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return rate_at(self.num_steps, self._peak, self._schedule)

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> StepOutcome:
        """Apply the gradients and advance the schedule, or skip both if a gradient is not finite."""
        rate = self.learning_rate
        for name, parameter in self._parameters.items():
            own = self.locals[name]
            own.grad = torch.zeros_like(own) if parameter.grad is None else _local(parameter.grad)
        norm = self._norm()
        if not math.isfinite(norm):
            self._skip(norm)
            return StepOutcome(norm, rate, applied=False)
        self.num_skipped_in_a_row = 0
        factor = self._max_norm / (norm + 1e-6)
        if self._max_norm > 0 and factor < 1:
            torch._foreach_mul_(self._gradients(), factor)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._drop_gradients()
        self.num_steps += 1
        return StepOutcome(norm, rate, applied=True)

    def _norm(self) -> float:
        """Return the norm of the gradients of all ranks that share a copy of the model."""
        gradients = self._gradients()
        device = next(iter(self.locals.values())).device
        total = torch.zeros((), dtype=torch.float32, device=device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(total, group=self._group)
        return float(total.sqrt())

    def _gradients(self) -> list[Tensor]:
        return [local.grad for local in self.locals.values() if local.grad is not None and local.grad.numel()]

    def _drop_gradients(self) -> None:
        self.zero_grad()
        for local in self.locals.values():
            local.grad = None

    def _skip(self, norm: float) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        names = [
            name
            for name, local in self.locals.items()
            if local.grad is not None and not bool(local.grad.isfinite().all())
        ]
        self._drop_gradients()
        if self.num_skipped_in_a_row >= MAX_CONSECUTIVE_SKIPPED_UPDATES:
            raise EngineError(
                f"{self.num_skipped_in_a_row} updates in a row had no finite gradient norm (the last: {norm}); "
                f"on this rank {len(names)} gradients are not finite: {', '.join(names[:8]) or 'none'}",
                fix="check the loss and its inputs; a smaller learning rate or a smaller clip_grad may help",
            )

    # --- state for offload and checkpoints -------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Return the moments. They exist after the first step."""
        return [state[name] for state in self._adam.state.values() for name in MOMENTS]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return this rank's share of a parameter and of its moments, by Megatron's names."""
        local = self.locals[name]
        state = self._adam.state.get(local, {})
        return {"param": local.data} | {moment: state[moment] for moment in MOMENTS if moment in state}

    def begin_at(self, num_steps: int) -> None:
        """Allocate the moments of a run that has applied this many steps, and set the schedule accordingly."""
        self._adam.state.clear()
        self.num_steps = num_steps
        for local in self.locals.values() if num_steps else ():
            moments = {name: torch.zeros_like(local.data) for name in MOMENTS}
            self._adam.state[local] = {"step": torch.tensor(float(num_steps)), **moments}

    def weights_from_owned(self) -> None:
        """Do nothing: the shards that the optimizer updates are the model's own."""


def rate_at(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate after that many steps, as Megatron computes it."""
    lowest = peak * schedule.min_lr_ratio
    warmup = schedule.warmup_steps
    if warmup and step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    last = schedule.decay_steps or warmup + 1
    if step > last:
        return lowest
    done = (step - warmup) / (last - warmup)
    share = 1 - done if schedule.decay == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
    return lowest + share * (peak - lowest)


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor.detach()).to_local()
