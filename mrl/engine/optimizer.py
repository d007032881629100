"""Optimizer step: Megatron's data parallelism, distributed optimizer and schedule, with a check for non-finite
gradients.

Megatron in bf16 applies non-finite gradients. Here all ranks skip and count such a step. After three in a row the run
stops with the names of the tensors.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mrl.config.schema import ScheduleConfig, TrainedModelConfig
from mrl.dtypes import torch_dtype
from mrl.engine.model import TokenModel
from mrl.engine.steps import MAX_CONSECUTIVE_SKIPPED_UPDATES, OwnedState, StepOutcome
from mrl.errors import EngineError

__all__ = ["MAX_CONSECUTIVE_SKIPPED_UPDATES", "Optimizer", "OwnedState", "StepOutcome"]


class Optimizer:
    """Gradient buffers, optimizer state and learning rate of one model."""

    def __init__(self, chunks: Sequence[TokenModel], settings: TrainedModelConfig) -> None:
        dtype = torch_dtype(settings.dtype)
        ddp_config = DistributedDataParallelConfig(
            **{"use_distributed_optimizer": True, "grad_reduce_in_fp32": True} | settings.ddp
        )
        self.chunks = [
            DistributedDataParallel(
                chunk.config,
                ddp_config,
                chunk,
                disable_bucketing=number > 0,  # as Megatron's own trainer does
            )
            for number, chunk in enumerate(chunks)
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.config = OptimizerConfig(
            **{
                "params_dtype": dtype,
                "bf16": dtype is torch.bfloat16,
                "use_distributed_optimizer": True,
            }
            | settings.optimizer
        )
        if self.config.lr is None:
            raise EngineError("the optimizer has no learning rate", fix="set optimizer.lr")
        # Megatron's schedule reads this from the optimizer's groups, where None is not a default.
        self.config.min_lr = self.config.lr * settings.schedule.min_lr_ratio
        self.optimizer = get_megatron_optimizer(self.config, self.chunks, use_gloo_process_groups=False)
        for part in self._parts:
            _number_as_stored(part)
        self.schedule = _schedule(self.optimizer, self.config, settings.schedule)
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.select()
        self._gathers_late = ddp_config.overlap_param_gather

    def select(self) -> None:
        """Make Megatron's schedule sum the gradients of these chunks."""
        config = self.chunks[0].config
        config.finalize_model_grads_func = _finalize_gradients
        # Without it, gradients are sent after as many micro-batches as the first step had, even if more follow.
        no_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    @property
    def _parts(self) -> list[Any]:
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in parts if not part.is_stub_optimizer]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return max((float(group["lr"]) for group in self.optimizer.param_groups), default=0.0)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> StepOutcome:
        """Apply the gradients and advance the schedule, or skip both if a gradient is not finite."""
        learning_rate = self.learning_rate
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return StepOutcome(grad_norm, learning_rate, applied=False)
        self.num_skipped_in_a_row = 0
        for part in self._parts:
            if self.config.clip_grad > 0 and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()
        if self._gathers_late:  # before weights are sent or saved; Megatron gathers in the next forward pass
            self._gather_parameters()
        self.schedule.step(1)
        return StepOutcome(grad_norm, learning_rate, applied=True)

    # --- state for offload and checkpoints -------------------------------------------------------------------------

    @property
    def buffers(self) -> list[Any]:
        """Megatron's flat buffers: `param_data` and `grad_data` of all parameters of this rank."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors that only the optimizer holds: moments, and float32 weights of 16-bit parameters."""
        weights = [
            tensor
            for part in self._parts
            for group in part.shard_fp32_from_float16_groups
            for tensor in group
            if tensor is not None
        ]
        states = [state for part in self._parts for state in part.optimizer.state.values()]
        return weights + [tensor for state in states for tensor in state.values() if _is_elementwise(tensor)]

    @property
    def num_steps(self) -> int:
        return int(self.schedule.num_steps)

    def owned(self, parameter: Tensor) -> OwnedState | None:
        """Return the part of a model parameter that this rank owns. Moments exist after the first step."""
        for part in self._parts:
            if parameter in part.model_param_gbuf_map:
                tensors = part._get_main_param_and_optimizer_states(parameter)
                start = part._get_model_param_range_map(parameter)["param"].start
                return OwnedState(start, {name: x for name, x in tensors.items() if _is_elementwise(x)})
        return None

    @torch.no_grad()
    def set_owned(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Restore a state returned by `owned`."""
        (part,) = (part for part in self._parts if parameter in part.model_param_gbuf_map)
        present = part._get_main_param_and_optimizer_states(parameter)
        part._set_main_param_and_optimizer_states(parameter, present | state)

    def begin_at(self, num_steps: int) -> None:
        """Allocate the moments of a run that has applied this many steps, and set the schedule accordingly."""
        for part in self._parts:
            if num_steps == 0:
                part.optimizer.state.clear()
                continue
            groups = part.optimizer.state_dict()["param_groups"]
            part.load_state_dict({"optimizer": {"param_groups": [group | {"step": num_steps} for group in groups]}})
            for state in part.optimizer.state.values():
                if "step" in state:  # in Megatron, all states of torch's Adam share one counter
                    state["step"] = state["step"].clone()
        self.schedule.num_steps = 0
        self.schedule.step(num_steps)

    @torch.no_grad()
    def weights_from_owned(self) -> None:
        """Compute the model's parameters from the float32 weights that the ranks own, as after a step."""
        for part in self._parts:
            part._copy_main_params_to_model_params()
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Gather the parts of the parameters that each rank has updated on all ranks."""
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def _skip(self, grad_norm: float) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= MAX_CONSECUTIVE_SKIPPED_UPDATES:
            names = [
                name
                for chunk in self.chunks
                for name, parameter in chunk.module.named_parameters()
                if parameter.requires_grad and not bool(parameter.main_grad.isfinite().all())
            ]
            raise EngineError(
                f"{self.num_skipped_in_a_row} updates in a row had no finite gradient norm (the last: {grad_norm}); "
                f"on this rank {len(names)} gradients are not finite: {', '.join(names[:8]) or 'none'}",
                fix="check the loss and its inputs; a smaller learning rate or a smaller clip_grad may help",
            )


def _number_as_stored(part: Any) -> None:
    """Number the parameters of each group as Megatron stores them: float32 parameters first.

    Megatron numbers them in the order of its buffers. If a 16-bit model has float32 parameters, it then finds the state
    of another parameter.
    """
    groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    for index, (wide, narrow) in enumerate(groups):
        for order, parameter in enumerate([*wide, *narrow]):
            part.model_param_group_index_map[parameter] = index, order


def _is_elementwise(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim > 0  # torch's Adam counts its steps in a tensor without axes


def _finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Run Megatron's sums over ranks without its division by the number of tokens: the loss is already normalized."""
    finalize_model_grads(chunks, None, **options)


def _schedule(optimizer: Any, config: OptimizerConfig, schedule: ScheduleConfig) -> OptimizerParamScheduler:
    # Megatron always requires a number of decay steps; a constant rate does not use it.
    decay_steps = schedule.decay_steps or schedule.warmup_steps + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * schedule.min_lr_ratio,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
