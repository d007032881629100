"""The gated delta rule by the kernels of flash-linear-attention (`fla`), on CUDA devices.

They multiply in the dtype of the values and sum in float32. So they serve layers in 16 bits, and float32 layers keep
the rule in torch. Before a process uses them, it compares outputs and gradients of its first tokens with that rule.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.errors import EngineError

MAX_DIFFERENCE = 0.05
"""Norm of a difference from the rule in torch, relative to the norm of the value. In bfloat16 it is about 0.005."""
NUM_COMPARED = 256
"""Number of tokens of the first row that are compared."""
Rule = Callable[[Sequence[Tensor]], Tensor]
_NAMES = ("outputs", "gradients of the queries", "of the keys", "of the values", "of the decays", "of the strengths")
_compared = False


def usable(values: Tensor) -> bool:
    """Return whether the kernels can compute a layer with these values."""
    return values.is_cuda and values.dtype in (torch.bfloat16, torch.float16) and installed()


@functools.cache
def installed() -> bool:
    """Return whether the package exists. Warn once per process if it does not."""
    if importlib.util.find_spec("fla") is not None:
        return True
    what = "flash-linear-attention is not installed, so linear attention runs in torch, which is slower"
    warnings.warn(f"{what}. fix: pip install fla-core", stacklevel=2)
    return False


def gated_delta_rule(inputs: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return the outputs of packed rows that end at `ends`, as `mrl.engine.delta_rule` defines them."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, log_decay, beta = (x.contiguous()[None] for x in inputs)
    outputs, _state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=log_decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends.to(v.device),
        cu_seqlens_cpu=ends,
    )
    return outputs[0]  # type: ignore[no-any-return]


def compare_once(inputs: Sequence[Tensor], ends: Tensor, rule: Rule) -> None:
    """Raise an error unless the kernels agree with the rule in torch on the first tokens. Later calls do nothing."""
    global _compared  # one comparison per process, over all layers
    if _compared:
        return
    num = min(int(ends[1]), NUM_COMPARED)
    first = [x[:num].detach().clone() for x in inputs]
    own = _with_gradients(rule, first)
    kernels = _with_gradients(lambda tensors: gated_delta_rule(tensors, torch.tensor([0, num])), first)
    for name, expected, value in zip(_NAMES, own, kernels, strict=True):
        difference = float((value.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
        if not difference <= MAX_DIFFERENCE:
            what = (
                f"the kernels of flash-linear-attention differ from mrl's gated delta rule: {name}, over {num} tokens, "
                f"by {difference:.3g} of their norm, where at most {MAX_DIFFERENCE} is accepted"
            )
            raise EngineError(what, fix="install the version of requirements-cuda.txt, or uninstall fla-core")
    _compared = True


def _with_gradients(rule: Rule, tensors: Sequence[Tensor]) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in tensors]
    with torch.enable_grad():
        outputs = rule(inputs)
    weights = torch.linspace(-1, 1, outputs.numel(), device=outputs.device).view_as(outputs).to(outputs.dtype)
    return [outputs.detach(), *torch.autograd.grad(outputs, inputs, weights)]
