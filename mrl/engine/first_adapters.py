"""Values of new adapters, before any training: drawn by name, or read from PEFT's files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from mrl.config.lora import LoraConfig
from mrl.models.adapters import adapter_tensors
from mrl.models.peft_reader import PeftReader
from mrl.models.regions import Region, Shape, slices
from mrl.models.spec import ModelSpec

ReadBox = Callable[[str, Region], Tensor]
"""Returns a box of an adapter, by PEFT's name."""


def first_adapters(spec: ModelSpec, lora: LoraConfig, seed: int) -> ReadBox:
    """Return a reader of the first adapters of a role."""
    if lora.path is None:
        return drawn_adapters(adapter_tensors(spec, lora), lora, seed)
    files = PeftReader(lora.path)
    files.check(spec, lora)
    return files.read


def drawn_adapters(shapes: Mapping[str, Shape], lora: LoraConfig, seed: int) -> ReadBox:
    """Return a reader that draws each A by its name, so that its values do not depend on the layout. Each B is zero."""

    @lru_cache(maxsize=8)
    def drawn(name: str) -> Tensor:
        return initial_value(name, shapes[name], lora, seed)

    return lambda name, box: drawn(name)[slices(box)]


def initial_value(name: str, shape: Shape, lora: LoraConfig, seed: int) -> Tensor:
    """Return the first value of an adapter, with peft's distributions."""
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(number)
    if lora.init == "gaussian":
        return torch.randn(shape, generator=generator) / lora.rank
    return torch.empty(shape).uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
