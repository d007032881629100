"""Transformer Engine's layers under adapters, in specs with stand-ins: the kernels need a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.engine.separate_norms import check_separate_norms, separate_norms
from mrl.errors import EngineError


class TELayerNormColumnParallelLinear:
    """Has the name of Transformer Engine's fused layer."""


def layer(fc1: Any) -> Any:
    attention = SimpleNamespace(linear_qkv=TELayerNormColumnParallelLinear, linear_proj="row")
    mlp = SimpleNamespace(submodules=SimpleNamespace(linear_fc1=fc1, linear_fc2="row"))
    parts = SimpleNamespace(
        self_attention=SimpleNamespace(submodules=attention), mlp=mlp, input_layernorm="none", pre_mlp_layernorm="none"
    )
    return SimpleNamespace(submodules=parts)


def test_fused_layers_become_a_norm_and_a_linear_layer() -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    dense, experts = layer(TELayerNormColumnParallelLinear), layer("grouped")
    newer = layer(TELayerNormColumnParallelLinear)
    newer.submodules.mlp = partial(print, submodules=newer.submodules.mlp.submodules)
    separate_norms(SimpleNamespace(layer_specs=[dense, experts, newer]))
    assert newer.submodules.mlp.keywords["submodules"].linear_fc1 is TEColumnParallelLinear
    for each in (dense, experts):
        assert each.submodules.self_attention.submodules.linear_qkv is TEColumnParallelLinear
        assert each.submodules.input_layernorm is TENorm
    assert dense.submodules.mlp.submodules.linear_fc1 is TEColumnParallelLinear
    assert dense.submodules.pre_mlp_layernorm is TENorm
    assert experts.submodules.mlp.submodules.linear_fc1 == "grouped"
    assert experts.submodules.pre_mlp_layernorm == "none", "a layer of experts has a separate norm already"


def test_adapter_of_a_layer_that_holds_its_norm_is_refused() -> None:
    model = torch.nn.Module()
    model.linear_fc1 = torch.nn.Linear(2, 2)
    check_separate_norms(model)
    model.linear_fc1.layer_norm_weight = torch.nn.Parameter(torch.ones(2))
    check_separate_norms(model)
    model.linear_fc1.lora_a = torch.nn.Parameter(torch.ones(1, 2))
    with pytest.raises(EngineError, match="linear_fc1 holds a norm inside"):
        check_separate_norms(model)
