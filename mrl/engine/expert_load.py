"""How evenly a training pass spreads its tokens over the experts of each layer, and the biases that even it out.

Routers of DeepSeek-V3's kind choose experts by their score plus a bias, which has no gradient. After an update, the
bias of an expert with more tokens than the mean falls by a constant rate, and that of an expert with fewer rises (Wang
et al. 2024, arXiv 2408.15664).
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mrl.engine.model import TokenModel
from mrl.engine.packed_rows import MicroBatch
from mrl.engine.parallel import ParallelGroups
from mrl.errors import EngineError
from mrl.models.spec import ModelSpec


class ExpertLoad:
    """Counts the tokens that routers send to each expert while gradients are computed, without padding."""

    def __init__(
        self, chunks: Sequence[TokenModel], spec: ModelSpec, groups: ParallelGroups, bias_rate: float = 0.0
    ) -> None:
        assert spec.moe is not None, "only a mixture has experts"
        if bias_rate and not spec.moe.correction_bias:
            raise EngineError(
                f"the update rate is {bias_rate:g}, but routers of family {spec.family} have no bias",
                fix="set router_bias_update_rate=0",
            )
        self._tokens = torch.zeros(spec.num_layers, spec.moe.num_experts, dtype=torch.int64, device=groups.device)
        """Tokens of each layer and expert on this rank. Layers of other stages stay at zero."""
        self._groups, self._bias_rate = groups, bias_rate
        self._routers: dict[TokenModel, dict[int, TopKRouter]] = {chunk: {} for chunk in chunks}
        """The routers of each chunk, by their layers."""
        self._padding: dict[int, deque[Tensor]] = defaultdict(deque)
        """For each layer, the padding of micro-batches that wait to be counted."""
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self._routers[chunk][module.layer_number - 1] = module
                    module.register_forward_hook(partial(self._count, module.layer_number - 1))

    def tell(self, chunk: TokenModel, batch: MicroBatch) -> None:
        """Give the micro-batch that runs next through a chunk for gradients."""
        parts = self._groups.sequence_sharding.sequence_parts
        padding = batch.is_padding.chunk(parts)[self._groups.at.tp if parts > 1 else 0]
        for layer in self._routers[chunk]:
            self._padding[layer].append(padding)

    @torch.no_grad()
    def _count(self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        # Recomputation runs a layer twice, and only once for gradients, in the order of the micro-batches.
        if router.training and output[0].requires_grad:
            padding = self._padding[layer].popleft()
            self._tokens[layer] += (output[1] & ~padding[:, None]).sum(0)

    def take(self, *, was_applied: bool) -> dict[str, float]:
        """Return the load of the busiest expert relative to the mean, in the worst layer and on average, and that of
        the busiest rank of ep; then start again. Call this on all ranks after an update.

        A skipped update moves no biases.
        """
        if num_left := sum(map(len, self._padding.values())):
            raise EngineError(f"after an update, the tokens of {num_left} micro-batches and layers were not counted")
        tokens = self._tokens.clone()
        self._tokens.zero_()
        torch.distributed.all_reduce(tokens)
        if was_applied and self._bias_rate:
            self._move_biases(tokens)
        routed = tokens[tokens.sum(1) > 0].double()
        if not len(routed):
            return {}
        busiest = routed.max(1).values / routed.mean(1)
        by_rank = routed.view(len(routed), self._groups.parallel.ep, -1).sum(2)
        return {
            "experts/busiest": float(busiest.max()),
            "experts/busiest_mean": float(busiest.mean()),
            "experts/busiest_rank": float((by_rank.max(1).values / by_rank.mean(1)).max()),
        }

    @torch.no_grad()
    def _move_biases(self, tokens: Tensor) -> None:
        for layer, router in (item for routers in self._routers.values() for item in routers.items()):
            of_layer = tokens[layer].double()
            router.expert_bias += self._bias_rate * torch.sign(of_layer.mean() - of_layer).to(router.expert_bias)
