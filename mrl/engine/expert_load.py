"""How evenly a training pass spreads its tokens over the experts of each layer."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mrl.engine.model import TokenModel
from mrl.engine.parallel import ParallelGroups
from mrl.models.spec import ModelSpec


class ExpertLoad:
    """Counts the tokens that routers send to each expert while gradients are computed."""

    def __init__(self, chunks: Sequence[TokenModel], spec: ModelSpec, groups: ParallelGroups) -> None:
        assert spec.moe is not None, "only a mixture has experts"
        self._tokens = torch.zeros(spec.num_layers, spec.moe.num_experts, dtype=torch.int64, device=groups.device)
        """Tokens of each layer and expert on this rank. Layers of other stages stay at zero."""
        self._ep = groups.parallel.ep
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(partial(self._count, module.layer_number - 1))

    @torch.no_grad()
    def _count(self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        # Recomputation runs a layer twice, and only once for gradients.
        if router.training and output[0].requires_grad:
            self._tokens[layer] += output[1].sum(0)

    def take(self) -> dict[str, float]:
        """Return the load of the busiest expert relative to the mean, in the worst layer and on average, and that of
        the busiest rank of ep; then start again. Call this on all ranks."""
        tokens = self._tokens.clone()
        self._tokens.zero_()
        torch.distributed.all_reduce(tokens)
        routed = tokens[tokens.sum(1) > 0].double()
        if not len(routed):
            return {}
        busiest = routed.max(1).values / routed.mean(1)
        by_rank = routed.view(len(routed), self._ep, -1).sum(2)
        return {
            "experts/busiest": float(busiest.max()),
            "experts/busiest_mean": float(busiest.mean()),
            "experts/busiest_rank": float((by_rank.max(1).values / by_rank.mean(1)).max()),
        }
