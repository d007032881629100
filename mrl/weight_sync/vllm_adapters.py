"""Adapters in vLLM's workers: arguments of an engine that applies them, and a check of what its slot holds.

vLLM returns at once if it is asked to activate an adapter that it believes to be active, even if the memory of its slot
was discarded while the engine slept. So the adapter of the version before is removed first. All versions have one
number, so that samples under way continue with the new version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mrl.config.lora import ENGINE_TARGETS, padded_rank

ADAPTER = 1
"""vLLM's number of the adapter."""

_LAYER_OF_A = re.compile(r"\.layers\.(\d+)\..+\.lora_A\.")


def adapter_directory(shared: Path, version: int) -> Path:
    """Return the directory of PEFT's files of one version."""
    return shared / f"adapters-{version}"


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter of that rank, which it pads with zeros; none for rank 0."""
    if rank == 0:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": padded_rank(rank),
        "lora_target_modules": [*ENGINE_TARGETS],  # the others, such as the head, keep their plain form
    }


def adapters_digest(file: Path) -> str:
    """Return the digest of a file of adapters."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def num_pairs(file: Path, layers: range) -> int:
    """Return the number of adapters in a file for these layers, each an A and a B."""
    with safe_open(file, framework="pt") as adapters:
        found = [_LAYER_OF_A.search(name) for name in adapters.keys()]  # noqa: SIM118  # not a dictionary
    return sum(match is not None and int(match[1]) in layers for match in found)


def slot_problem(manager: Any, number: int, expected: int) -> str:
    """Return how a worker's slot differs from the adapter that it loaded; empty if it holds all pairs of it."""
    if number not in manager.lora_index_to_id:
        return f"adapter {number} is in no slot of vLLM, which has {manager.lora_index_to_id}"
    index, adapter, bound = manager.lora_index_to_id.index(number), manager.get_adapter(number), 0
    for name, module in manager.modules.items():
        if not (weights := manager._get_lora_layer_weights(adapter, name)):
            continue
        bound += sum(value is not None for value in _parts(weights.lora_a))
        for kind, stacked in (("lora_a", module.lora_a_stacked), ("lora_b", module.lora_b_stacked)):
            if not all(_is_held(slot[index, 0], value) for slot, value in _pairs(module, kind, stacked, weights)):
                return f"{kind} of {name} in vLLM's slot differs from adapter {number}"
    return "" if bound == expected else f"vLLM bound {bound} of the {expected} pairs of adapter {number}"


def _parts(value: Any) -> list[Tensor | None]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _pairs(module: Any, kind: str, stacked: Any, weights: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each part of a slot with the part of the adapter that it should hold on this tensor rank."""
    value = getattr(weights, kind)
    if module.tp_size > 1:
        value = getattr(module, f"slice_{kind}")(value)
    for slot, part in zip(stacked, _parts(value), strict=True):
        if part is not None:
            yield slot, part


def _is_held(slot: Tensor, value: Tensor) -> bool:
    rows, columns = value.shape
    is_padded = not slot[rows:].any() and not slot[:, columns:].any()
    return is_padded and torch.equal(slot[:rows, :columns], value.to(slot))
