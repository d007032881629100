"""Megatron's settings of data parallelism and the optimizer: accepted, or refused with a reason.

A field is accepted if a test compares it with a plain run (tests/engine/test_megatron_settings.py). All other fields
are refused, including those of a newer Megatron. A refused field may be set to its off value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_UNKNOWN = "no test of mrl compares it with a plain run"
_NOT_FINITE = "mrl already skips, counts and reports updates that are not finite"
_FSDP = "it is for Megatron's FSDP; mrl trains with the distributed optimizer"
LOW_PRECISION = "training in 8 or 4 bits has not been tested"
_FP16 = "it scales the loss for float16; mrl trains in bfloat16 or float32"
ADDRESS = "memory that is moved off the device between phases returns at another address"
_STATE = "gradients and optimizer state are float32: other types have not been tested with offload and checkpoints"
_LATE = "parameters are gathered right after a step, because they are sent to the engines"
_HOST_ADAM = (
    "Megatron copies through CUDA streams, so no test without a GPU shows that updates are equal; between updates mrl "
    "keeps the whole optimizer state on the host (sync.offload)"
)
_ADAM = (
    "Megatron's other optimizers need whole matrices on every rank, but the distributed optimizer divides them among "
    "data-parallel ranks, and its Muon needs the package emerging_optimizers"
)
_ONE_RATE = "a role has one learning rate, which is reported in its metrics"
UNSEEN = "mrl does not read its output"
CUT = "its value would depend on how the batch is split: it is not normalized over the whole batch"
DROPPED = "tokens beyond an expert's capacity would be dropped in training, but not in the engine"
RANDOM = "log-probs would not be those of the policy that the engine samples from"


@dataclass(frozen=True)
class FieldRules:
    """The fields of a library's class that are accepted."""

    taken: Mapping[str, tuple[Any, ...]]
    """Name -> its allowed values; empty if any value is allowed. All other fields are refused."""
    refused: Mapping[str, str]
    """Pattern of names -> reason. The first matching pattern applies."""

    def reason(self, name: str) -> str:
        """Return why a field is refused. Return an empty string if no pattern matches."""
        return next((why for pattern, why in self.refused.items() if fnmatchcase(name, pattern)), "")

    def refusal(self, name: str, value: Any) -> str:
        """Return why a field may not have that value, or an empty string if it may."""
        if name in self.taken:
            values = self.taken[name]
            wrong = values and any(item not in values for item in (value if isinstance(value, list) else [value]))
            reason = f": {_ADAM}" if values == ("adam",) else ""
            return f"it must be {' or '.join(map(str, values))}{reason}" if wrong and value is not None else ""
        return "" if value in (False, None, "", "none") else self.reason(name) or _UNKNOWN


DDP = FieldRules(
    taken={
        "use_distributed_optimizer": (True,),  # offload and checkpoints read its buffers
        "grad_reduce_in_fp32": (True,),
        **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "pad_buckets_for_high_nccl_busbw"), ()),
        **dict.fromkeys(("bucket_size", "num_buckets"), ()),
    },
    refused={
        "align_param_gather": _LATE,
        "num_distributed_optimizer_instances": "groups of several instances are not created",
        "check_for_*": _NOT_FINITE,
        "average_in_collective": "gradients are summed: the loss is normalized over the global batch",
        "delay_wgrad_compute": "both halves of a backward pass are computed together",
        "nccl_ub": ADDRESS,
        "disable_symmetric_registration": ADDRESS,
        "reduce_scatter_with_fp32_accumulation": _STATE,
        "param_name_patterns_for_fp32_local_accumulation": _STATE,
        "*fp8*": LOW_PRECISION,
        "*fp4*": LOW_PRECISION,
        "*fsdp*": _FSDP,
        "*sharding_strategy": _FSDP,
        **dict.fromkeys(
            ("gradient_reduce_div_fusion", "suggested_communication_unit_size", "preserve_fp32_weights"), _FSDP
        ),
    },
)
OPTIMIZER = FieldRules(
    taken={
        "use_distributed_optimizer": (True,),
        "optimizer": ("adam",),
        **dict.fromkeys(("lr", "weight_decay", "decoupled_weight_decay", "clip_grad"), ()),
        **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), ()),
    },
    refused={
        "decoupled_*": _ONE_RATE,
        "apply_wd_to_qk_layernorm": "norms are not decayed",
        "overlap_param_gather": "ddp.overlap_param_gather is the switch",
        "overlap_param_gather_with_optimizer_step": _LATE,
        **dict.fromkeys(("log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"), UNSEEN),
        "grad_norm_skip_threshold": _NOT_FINITE,
        "optimizer_cuda_graph": ADDRESS,
        "*fp8*": LOW_PRECISION,
        **dict.fromkeys(("fp16", "*loss_scale*", "hysteresis"), _FP16),
        **dict.fromkeys(
            ("use_precision_aware_optimizer", "store_param_remainders", "main_*_dtype", "exp_avg*_dtype"), _STATE
        ),
        **dict.fromkeys(("*optimizer_*offload*", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_*"), _HOST_ADAM),
        **dict.fromkeys(
            ("sgd_*", "muon_*", "adaptive_muon_*", "lion_*", "soap_*", "use_layer_wise_distributed_optimizer"),
            _ADAM,
        ),
    },
)
