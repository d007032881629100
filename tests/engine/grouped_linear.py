"""Megatron's experts that are multiplied together, with products of torch instead of Transformer Engine's kernel."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.engine import layer_spec
from tests.engine.adapter_training import Case, Found, measure


class GroupedLinear(torch.nn.Module):
    """The weights, names and arguments of `TEGroupedLinear`. Ranks of `etp` split rows or columns."""

    split = 0

    def __init__(self, num: int, inputs: int, outputs: int, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        shape = [outputs, inputs]
        shape[self.split] //= pg_collection.expt_tp.size()
        for number in range(num):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(shape)))
        self.num = num

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{number}") for number in range(self.num)]
        return torch.cat([part @ weight.T for part, weight in zip(x.split(m_splits), weights, strict=True)]), None


class GroupedColumns(GroupedLinear):
    split = 1


def measure_together(cases: list[Case]) -> list[Found]:
    """Measure cases in which the experts of a layer are one module."""
    local = layer_spec._local_layer

    def grouped(config: Any, routed: bool) -> ModuleSpec:
        layer = local(config, routed)
        if routed:
            mlp = layer.submodules.mlp
            parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
            parts.experts = ModuleSpec(
                TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedColumns)
            )
        return layer

    with patch.object(layer_spec, "_local_layer", grouped):
        return measure(cases)
