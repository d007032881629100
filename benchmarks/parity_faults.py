"""Faults to seed into a layout. The parity table must detect each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import engine, optimizer, scores, weights
from mrl.models.table import Head
from mrl.verify.parity import ParityCase, RankResult, measure_one


@dataclass(frozen=True)
class Fault:
    """Place of a fault and its replacement: (object, attribute, replacement created from the original)."""

    family: str
    head: Head
    num_ranks: int
    layout: Layout
    target: Any
    attribute: str
    broken: Callable[[Any], Any]


def measure_with_fault(name: str, case: ParityCase) -> RankResult:
    """Measure one case on this rank, with the fault in place."""
    fault = FAULTS[name]
    original = getattr(fault.target, fault.attribute)
    with mock.patch.object(fault.target, fault.attribute, fault.broken(original)):
        return measure_one(case)


def _divided_again(original: Any) -> Any:
    def forward_backward(self: Any, rows: Any, micro_batches: Any, loss: Any, request: Any) -> Any:
        def divided(batch: Any) -> Any:
            output = loss(batch)
            return dataclasses.replace(output, loss=output.loss / len(micro_batches))

        return original(self, rows, micro_batches, divided, request)

    return forward_backward


def _groups_swapped(original: Any) -> Any:
    def load_shard(reader: Any, shard: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = original(reader, shard, dtype)
        if shard.name == "decoder.layers.0.self_attention.linear_qkv.weight":
            tensor = torch.cat(tensor.chunk(2)[::-1])
        return tensor

    return load_shard


def _expert_skipped(original: Any) -> Any:
    def load_shard(reader: Any, shard: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = original(reader, shard, dtype)
        skipped = shard.name == "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
        return torch.zeros_like(tensor) if skipped else tensor

    return load_shard


def _padding_unmasked(original: Any) -> Any:
    def options(**arguments: Any) -> Any:
        return original(**arguments | {"vocab": arguments["vocab"] + 1})

    return options


def _position_shifted(original: Any) -> Any:
    def pack(*arguments: Any) -> Any:
        batch = original(*arguments)
        ends = batch.ends.clone()
        if len(ends) > 2:
            ends[1] += 1
        return replace(batch, ends=ends, longest=batch.longest + 1)  # the longest row may have grown

    return pack


def _not_reduced(original: Any) -> Any:
    def finalize(*arguments: Any, **options: Any) -> None:
        """Keep the gradients of each rank."""

    return finalize


FAULTS = {
    "the loss divided by the number of micro-batches": Fault(
        "llama", "lm", 2, Layout(), engine.MegatronEngine, "forward_backward", _divided_again
    ),
    "two query groups swapped": Fault("llama", "lm", 2, Layout(pp=2), weights, "load_shard", _groups_swapped),
    "one expert skipped": Fault("mixtral", "lm", 2, Layout(ep=2), weights, "load_shard", _expert_skipped),
    "the vocabulary padding unmasked": Fault("llama", "lm", 2, Layout(tp=2), scores, "HeadOptions", _padding_unmasked),
    "positions shifted by one at a row's end": Fault("llama", "lm", 2, Layout(), engine, "pack", _position_shifted),
    "a critic's gradient not reduced": Fault(
        "llama", "score", 2, Layout(), optimizer, "finalize_model_grads", _not_reduced
    ),
}
