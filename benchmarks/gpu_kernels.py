"""Part of `gpu.py` that compares single kernels with float64: attention, products, the head, digests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_session import DEVICE, ON_GPU, GpuBenchmark, once
from mrl.engine.segments import Segments
from mrl.engine.vocab_head import HeadOptions, Tiles, token_log_probs
from mrl.weight_sync.digest import digest, weighted_sums

ROWS = np.array([1024, 252, 4, 640]) if ON_GPU else np.array([24, 12, 4])
HEADS, KEY_HEADS = 14, 2
"""Seven query heads per key head, as in Qwen2.5-0.5B."""
HEAD_SIZES, WINDOW = (64, 128), 96 if ON_GPU else 5
HIDDEN, COLUMNS, TOKENS = (896, 30_011, 1_001) if ON_GPU else (32, 301, 17)
"""Odd numbers of columns and tokens, because kernels must handle any alignment."""
ROUNDED, EXACT = 0.02, 1e-4
"""Largest relative differences: of values rounded to bfloat16, and of sums in float32."""


def kernels(bench: GpuBenchmark, _: Path) -> None:
    """Compare each kernel with its definition in float64. This part comes first because it takes seconds."""
    for size in HEAD_SIZES:
        for cp in (1, 2):
            for reach in (None, WINDOW):
                what = f"attention, head size {size}, cp {cp}" + (f", window {reach}" if reach else "")
                with bench.attempt(what):
                    attention(bench, what, size, cp, reach)
    for name, check in {"products": products, "the head": head_values, "digests": digests}.items():
        with bench.attempt(name):
            check(bench)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def attention(bench: GpuBenchmark, what: str, size: int, cp: int, reach: int | None) -> None:
    """Compare the attention kernel for packed rows, and its gradients, on the last context rank."""
    from mrl.engine.packed_attention import in_blocks, varlen

    rank = cp - 1
    segments = Segments.of(ROWS, cp, rank, DEVICE)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    torch.manual_seed(size)
    num_keys = int(ROWS.sum())
    shapes = ((num_keys // cp, HEADS, size), (num_keys, KEY_HEADS, size), (num_keys, KEY_HEADS, size))
    narrow = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    attend = varlen if ON_GPU else in_blocks
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(attend((narrow[0], narrow[1], narrow[2]), segments, None, reach))

    first_s, second_s = once(forward), once(forward)
    expected = defined_attention(wide, segments, reach)
    weights = torch.randn_like(outputs[-1])
    backward_s = once(partial(torch.autograd.backward, outputs[-1], weights))
    torch.autograd.backward(expected, weights.double())
    errors = {"forward": relative(outputs[-1], expected)}
    for name, x, y in zip(("query", "key", "value"), narrow, wide, strict=True):
        assert x.grad is not None, f"no gradient reached the {name}"
        assert y.grad is not None, f"no gradient reached the {name}"
        errors[f"d_{name}"] = relative(x.grad, y.grad)
    bench.row(what=what, **errors, first_s=first_s, forward_s=second_s, backward_s=backward_s)
    bench.goal(f"{what}: largest relative difference", max(errors.values()), at_most=ROUNDED if ON_GPU else EXACT)


def defined_attention(qkv: list[Tensor], segments: Segments, reach: int | None) -> Tensor:
    """Return attention segment by segment, with all scores materialized."""
    query, key, value = qkv
    group = query.shape[1] // key.shape[1]
    results = []
    bounds = (segments.query_starts, segments.query_lengths, segments.key_starts, segments.key_lengths)
    for q_at, q_len, k_at, k_len in zip(*(bound.tolist() for bound in bounds), strict=True):
        q = query[q_at : q_at + q_len]
        k, v = (x[k_at : k_at + k_len].repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        own = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        at = torch.arange(k_len, device=q.device)
        hidden = at > own if reach is None else (at > own) | (at < own - reach)
        results.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(results)


def products(bench: GpuBenchmark) -> None:
    """Compare the two products with float32 results. The second one adds in place to a tensor."""
    torch.manual_seed(1)
    hidden_TH, weight_VH = (torch.randn(n, HIDDEN, device=DEVICE).bfloat16() for n in (TOKENS, COLUMNS))
    tiles = Tiles(hidden_TH, weight_VH, torch.zeros(TOKENS, device=DEVICE), HeadOptions(COLUMNS, 1.0, "none"))
    left_TH, right_VH = (x.to(tiles.operand_dtype) for x in (hidden_TH, weight_VH))
    product = tiles.product(left_TH, right_VH.t())
    total = torch.randn(TOKENS, COLUMNS, device=DEVICE)
    before, address = total.double(), total.data_ptr()
    tiles.add_product(total, left_TH, right_VH.t())
    expected = hidden_TH.double() @ weight_VH.double().t()
    errors = {"product": relative(product, expected), "added": relative(total, before + expected)}
    bench.row(what="products", columns=COLUMNS, operands=str(tiles.operand_dtype), result=str(product.dtype), **errors)
    bench.goal("products in float32: largest relative difference", max(errors.values()), at_most=EXACT)
    bench.goal("sums that were made in another tensor", int(total.data_ptr() != address), at_most=0)


def head_values(bench: GpuBenchmark) -> None:
    """Compare log-probs, entropies and gradients of the tiled head with a plain softmax in float64."""
    torch.manual_seed(2)
    hidden_TH = (2 * torch.randn(TOKENS, HIDDEN, device=DEVICE) / HIDDEN**0.5).bfloat16()
    weight_VH = torch.randn(COLUMNS, HIDDEN, device=DEVICE).bfloat16()
    labels_T = torch.randint(0, COLUMNS - 1, (TOKENS,), device=DEVICE)
    for entropy in ("none", "grad"):
        options = HeadOptions(COLUMNS - 1, 0.7, entropy, tile_columns=COLUMNS // 3)
        narrow = [x.clone().requires_grad_() for x in (hidden_TH, weight_VH)]
        wide = [x.double().requires_grad_() for x in (hidden_TH, weight_VH)]
        log_probs_T, entropy_T = token_log_probs(narrow[0], narrow[1], labels_T, options)
        all_TV = torch.log_softmax((wide[0] @ wide[1].t())[:, : options.vocab] / options.temperature, 1)
        expected_T, expected_entropy_T = all_TV.gather(1, labels_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(1)
        errors = {"log_probs": float((log_probs_T - expected_T).abs().max())}
        weights_T = torch.randn(TOKENS, device=DEVICE)
        loss, expected = (weights_T * log_probs_T).sum(), (weights_T.double() * expected_T).sum()
        if entropy_T is not None:
            errors["entropy"] = float((entropy_T - expected_entropy_T).abs().max())
            loss, expected = loss + entropy_T.sum(), expected + expected_entropy_T.sum()
        torch.autograd.backward([loss, expected])
        pairs = [
            (x.grad, y.grad) for x, y in zip(narrow, wide, strict=True) if x.grad is not None and y.grad is not None
        ]
        gradients = [relative(x, y) for x, y in pairs]
        bench.row(what=f"head, entropy {entropy}", **errors, d_hidden=gradients[0], d_weight=gradients[1])
        bench.goal(f"head, entropy {entropy}: largest difference of values", max(errors.values()), at_most=1e-3)
        bench.goal(f"head, entropy {entropy}: gradients, relative", max(gradients), at_most=ROUNDED)


def digests(bench: GpuBenchmark) -> None:
    """Compare the device's sums with the CPU's, and check that a flipped bit of the last element is detected."""
    torch.manual_seed(3)
    sent = torch.randn((3 << 20) + 5 if ON_GPU else 4099, device=DEVICE).bfloat16()
    differ = int((weighted_sums(sent).cpu() != weighted_sums(sent.cpu())).sum())
    changed = sent.clone()
    changed.view(torch.int16)[-1] ^= 1
    unnoticed = int(digest(changed) == digest(sent)) + int(digest(sent.clone()) != digest(sent))
    bench.row(what="digests", chunks=len(weighted_sums(sent)), other_than_on_the_cpu=differ, unnoticed=unnoticed)
    bench.goal("digests: sums other than the CPU's, and flipped bits unnoticed", differ + unnoticed, at_most=0)
