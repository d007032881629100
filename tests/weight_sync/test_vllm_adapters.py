"""The slot of an adapter in vLLM, with stand-ins for its manager and layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.weight_sync.vllm_adapters import adapter_arguments, slot_problem

RANK, WIDTH, ROWS = 8, 6, 10


def loaded() -> Any:
    """Return a manager with an adapter of rank 3 on a fused layer of two modules, one of them a target."""
    a, b = torch.randn(3, WIDTH), torch.randn(ROWS, 3)
    a_stacked, b_stacked = torch.zeros(1, 1, RANK, WIDTH), torch.zeros(1, 1, ROWS, RANK)
    a_stacked[0, 0, :3], b_stacked[0, 0, :, :3] = a, b
    empty = torch.zeros_like(a_stacked), torch.zeros_like(b_stacked)
    layer = SimpleNamespace(tp_size=1, lora_a_stacked=(a_stacked, empty[0]), lora_b_stacked=(b_stacked, empty[1]))
    weights = SimpleNamespace(lora_a=[a, None], lora_b=[b, None])
    return SimpleNamespace(
        lora_index_to_id=[7],
        modules={"gate_up_proj": layer, "o_proj": SimpleNamespace()},
        get_adapter=lambda number: {"gate_up_proj": weights},
        _get_lora_layer_weights=lambda adapter, name: adapter.get(name),
    )


def discard(manager: Any) -> None:
    manager.modules["gate_up_proj"].lora_b_stacked[0][:] = 0.5


def forget_padding(manager: Any) -> None:
    manager.modules["gate_up_proj"].lora_a_stacked[0][0, 0, 5] = 1.0


def rename(manager: Any) -> None:
    manager.modules = {"other": manager.modules["gate_up_proj"]}


def replace(manager: Any) -> None:
    manager.lora_index_to_id = [6]


def test_slot_that_holds_the_adapter_has_no_problem() -> None:
    assert slot_problem(loaded(), 7, 1) == ""


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (discard, "lora_b of gate_up_proj in vLLM's slot differs from adapter 7"),
        (forget_padding, "lora_a of gate_up_proj in vLLM's slot differs from adapter 7"),
        (rename, "vLLM bound 0 of the 1 pairs of adapter 7"),
        (replace, "adapter 7 is in no slot of vLLM, which has [6]"),
    ],
)
def test_slot_that_differs_from_the_adapter_is_a_problem(fault: Callable[[Any], None], problem: str) -> None:
    manager = loaded()
    fault(manager)
    assert slot_problem(manager, 7, 1) == problem


def test_tensor_rank_compares_its_slice() -> None:
    manager = loaded()
    layer = manager.modules["gate_up_proj"]
    layer.tp_size = 2
    layer.slice_lora_a = lambda parts: parts
    layer.slice_lora_b = lambda parts: [None if part is None else part[:5] for part in parts]
    layer.lora_b_stacked = tuple(stacked[:, :, :5].clone() for stacked in layer.lora_b_stacked)
    assert slot_problem(manager, 7, 1) == ""
    layer.lora_b_stacked[0][0, 0, 2, 2] += 1
    assert "lora_b of gate_up_proj" in slot_problem(manager, 7, 1)


def test_rank_of_an_engine_is_the_next_that_vllm_has() -> None:
    assert adapter_arguments(0) == {}
    assert [adapter_arguments(rank)["max_lora_rank"] for rank in (1, 8, 9, 300)] == [8, 8, 16, 320]
