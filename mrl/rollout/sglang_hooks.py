"""Hooks that make SGLang sample as mrl's other engines do, and take weights from the trainer.

SGLang ignores seeds unless it runs deterministic kernels, stops at the model's own end tokens, and returns log-probs of
the distribution before top-k and top-p. With these hooks each sample has its own noise, drawn as by vLLM's sampler, so
that equal seeds give equal tokens. SGLang applies hooks in each of its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.weight_sync.sglang_receiver import receive_update

_ROWS = "custom_params"
"""Field of a batch's sampling information that holds its requests. SGLang uses it only for custom logit processors."""
_NOISE = "mrl_noise"


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def unapplied_hooks() -> list[str]:
    """Return the hooks that SGLang did not apply, which it only logs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(HOOKS.keys() - HookRegistry._patched)


def note_rows(original: Callable[..., None], info: Any, batch: Any, vocab: int) -> None:
    original(info, batch, vocab)
    setattr(info, _ROWS, list(batch.reqs))
    info.is_all_greedy = False  # log-probs of a greedy batch would have no temperature


def filter_rows(original: Callable[..., None], info: Any, kept: Sequence[int], on_device: Tensor) -> None:
    original(info, kept, on_device)
    rows = getattr(info, _ROWS)
    setattr(info, _ROWS, [rows[index] for index in kept])


def merge_rows(original: Callable[..., None], info: Any, other: Any) -> None:
    original(info, other)
    setattr(info, _ROWS, getattr(info, _ROWS) + getattr(other, _ROWS))


def draw(
    original: Callable[..., Any], sampler: Any, probs: Tensor, info: Any, positions: Tensor, is_simple: bool
) -> tuple[Tensor, None]:
    """Draw a token of each row. Leave in `probs` the distribution that it was drawn from, which SGLang takes the log
    of."""
    assert probs.dtype == torch.float32, f"probabilities are {probs.dtype}, which is too coarse"
    if not is_simple:
        truncate(probs, info.top_ks, info.top_ps)
    noise = torch.ones_like(probs)
    for row, request in enumerate(getattr(info, _ROWS)):
        if request.inflight_middle_chunks <= 0:  # otherwise more of the prompt follows, and SGLang drops the token
            _draw_noise(request, noise[row])
    return (probs / noise).argmax(-1), None


def truncate(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> None:
    """Keep each row's likeliest tokens: `top_k` of them, then those before whose sum reaches `top_p`."""
    ordered, order = probs.sort(descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.where(ranks < top_ks[:, None], 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered.where(ordered.cumsum(-1) - ordered < top_ps[:, None], 0)
    probs.zero_().scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))


def _draw_noise(request: Any, noise: Tensor) -> None:
    """Fill `noise` from the sample's own generator, which continues if the sample was interrupted."""
    generator, num_drawn = getattr(request, _NOISE, (None, 0))
    if generator is None:
        generator = torch.Generator(noise.device).manual_seed(request.sampling_params.sampling_seed)
    assert num_drawn == len(request.output_ids), f"draw {num_drawn} for token {len(request.output_ids)}"
    noise.exponential_(generator=generator)
    setattr(request, _NOISE, (generator, num_drawn + 1))


def is_stop(original: Callable[..., bool], request: Any, new_tokens: Sequence[int]) -> bool:
    """Stop at the requested tokens only, not at those of the model's files."""
    stops = request.sampling_params.stop_token_ids or ()
    return any(token in stops for token in new_tokens) and original(request, new_tokens)


_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_INFO}.adjusted_from_schedule_batch": note_rows,
    f"{_INFO}.adjusted_filter_batch": filter_rows,
    f"{_INFO}.adjusted_merge_batch": merge_rows,
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": draw,
    "sglang.srt.managers.schedule_batch.Req._check_token_based_finish": is_stop,
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor": (
        receive_update
    ),
}
