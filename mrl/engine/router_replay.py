"""Router replay: a mixture of experts sends each token to the experts that were chosen for it in another pass.

A router weights these experts by its own scores, so that it learns as usual. A token without
routes gets the router's own choice: padding, and the last token of a row, after which nothing is predicted.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mrl.engine.model import TokenModel
from mrl.engine.packed_rows import MicroBatch, TokenRows, concat
from mrl.engine.parallel import ParallelGroups
from mrl.errors import EngineError
from mrl.models.spec import ModelSpec

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedRouter:
    """One router's routes. Megatron calls `get_replay_topk` instead of choosing experts itself.

    A layer that is recomputed runs twice in each micro-batch: without gradients at first, then with gradients. Megatron
    recomputes micro-batches in the order in which they ran.
    """

    def __init__(self, counts_2: Tensor) -> None:
        self._counts_2 = counts_2
        """Number of tokens with routes, and of those for which the router would have chosen other experts."""
        self._replays = self._trains = False
        self._next_TK: Tensor | None = None
        self._recomputed: deque[Tensor] = deque()
        self.recorded: list[Tensor] | None = None
        """The router's own choice in each micro-batch, while it is recorded."""

    @property
    def num_left(self) -> int:
        """Number of micro-batches whose routes were not used."""
        return len(self._recomputed) + (self._next_TK is not None)

    def begin(self, *, replays: bool, trains: bool) -> None:
        self._replays, self._trains, self._next_TK = replays, trains, None
        self._recomputed.clear()

    def tell(self, routes_TK: Tensor) -> None:
        """Set the routes of the micro-batch that runs next."""
        self._next_TK = routes_TK

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the chosen experts of each token."""
        own_scores_TK, own_TK = default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if self.recorded is not None:
            self.recorded.append(own_TK.to(torch.int16))
        if not self._replays:
            return own_scores_TK, own_TK
        routes_TK = self._routes(own_TK)
        chosen_TK = torch.where(routes_TK < 0, own_TK, routes_TK)
        return scores_TE.gather(1, chosen_TK), chosen_TK

    def _routes(self, own_TK: Tensor) -> Tensor:
        if self._next_TK is None:
            if not self._recomputed:
                raise EngineError("a router ran more often than it was given routes for")
            return self._recomputed.popleft().to(own_TK.dtype)
        routes_TK, kept_TK, self._next_TK = self._next_TK.to(own_TK.dtype), self._next_TK, None
        if routes_TK.shape != own_TK.shape:
            raise EngineError(f"routes have the shape {[*routes_TK.shape]}, but the router chose {[*own_TK.shape]}")
        has_routes_T = routes_TK[:, 0] >= 0
        differs_T = (routes_TK.sort(1).values != own_TK.sort(1).values).any(1)
        self._counts_2 += torch.stack([has_routes_T.sum(), (differs_T & has_routes_T).sum()])
        if self._trains and not torch.is_grad_enabled():
            self._recomputed.append(kept_TK)
        return routes_TK


def routes_dtype(spec: ModelSpec) -> torch.dtype:
    """Return the smallest type that holds the number of any expert."""
    assert spec.moe is not None, "only a mixture has routes"
    return torch.uint8 if spec.moe.num_experts <= 256 else torch.int16


class RouterReplay:
    """Gives the routes of each micro-batch to the routers of this rank, and verifies that all of them were used."""

    def __init__(self, chunks: Sequence[TokenModel], spec: ModelSpec, groups: ParallelGroups) -> None:
        assert spec.moe is not None, "only a mixture has routers"
        self._groups, self._records = groups, False
        self._layers = layers = [layer for layer in range(spec.num_layers) if spec.has_experts(layer)]
        self._counts_L2 = torch.zeros(len(layers), 2, dtype=torch.int64, device=groups.device)
        self._num_chosen, self._dtype = spec.moe.experts_per_token, routes_dtype(spec)
        self._recorded: list[MicroBatch] = []
        self._routers: dict[TokenModel, list[tuple[int, ReplayedRouter]]] = {}
        """The routers of each chunk, and the positions of their layers among the layers with experts."""
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            positions = [layers.index(router.layer_number - 1) for router in routers]
            self._routers[chunk] = []
            for position, router in zip(positions, routers, strict=True):
                router.router_replay = ReplayedRouter(self._counts_L2[position])
                self._routers[chunk].append((position, router.router_replay))

    def begin(self, *, replays: bool, trains: bool) -> None:
        """Begin a pass over micro-batches, with their routes or with the routers' own choice."""
        for router in self._all():
            router.begin(replays=replays, trains=trains)

    def tell(self, chunk: TokenModel, batch: MicroBatch) -> None:
        """Give the routes of the micro-batch that runs next to the routers of a chunk."""
        routers = self._routers[chunk]
        if self._records and chunk is next(iter(self._routers)):
            self._recorded.append(batch)
        if batch.routes_TLK is None or not routers:
            return
        parts, at = self._groups.sequence_sharding.sequence_parts, self._groups.at.tp
        routes_TLK = batch.routes_TLK.chunk(parts)[at] if parts > 1 else batch.routes_TLK
        positions = [position for position, _ in routers]
        routes_LTK = routes_TLK[:, positions].transpose(0, 1).contiguous().to(self._groups.device)
        for (_, router), routes_TK in zip(routers, routes_LTK, strict=True):
            router.tell(routes_TK)

    def end(self) -> None:
        """Verify that the pass used all routes."""
        if num_left := sum(router.num_left for router in self._all()):
            raise EngineError(f"after a pass with router replay, {num_left} routes of micro-batches were not used")
        self.begin(replays=False, trains=False)

    def record(self) -> None:
        """Record what the routers choose in the next pass."""
        self._records = True
        self._recorded.clear()
        for router in self._all():
            router.recorded = []

    def take_recorded(self, rows: TokenRows, micro_batches: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        """Return the routes of these rows in the recorded pass, from the routers of all ranks that share them."""
        parts = [self._whole(number, batch)[batch.routed_places] for number, batch in enumerate(self._recorded)]
        self._records = False
        self._recorded.clear()
        for router in self._all():
            router.recorded = None
        routes = concat([part.to("cpu", self._dtype) for part in parts], micro_batches, rows.lengths - 1)
        return routes

    def _whole(self, number: int, batch: MicroBatch) -> Tensor:
        """Return the recorded routes of a micro-batch on all context, tensor and pipeline ranks."""
        groups = self._groups
        shape = (batch.num_stored, len(self._counts_L2), self._num_chosen)
        routes_TLK = torch.full(shape, -1, dtype=torch.int32, device=groups.device)  # NCCL has no smaller signed type
        parts = groups.sequence_sharding.sequence_parts
        places = np.array_split(batch.places, parts)[groups.at.tp if parts > 1 else 0]
        for routers in self._routers.values():
            for position, router in routers:
                assert router.recorded is not None, "the pass was recorded"
                routes_TLK[places, position] = router.recorded[number].int()
        for group in (groups.tp, groups.cp, groups.pp):
            torch.distributed.all_reduce(routes_TLK, torch.distributed.ReduceOp.MAX, group=group)
        if bool((routes_TLK[batch.routed_places] < 0).any()):
            raise EngineError("no rank has recorded the routes of some tokens and layers")
        return routes_TLK

    def take_difference(self) -> dict[str, float]:
        """Return the share of tokens and layers for which the routers would have chosen other experts, that of the
        worst layer, and that of each layer; then start again. Call this on all ranks."""
        counts_L2 = self._counts_L2.clone()
        self._counts_L2.zero_()
        torch.distributed.all_reduce(counts_L2)
        num_routed, num_others = counts_L2.double().T.tolist()
        if not sum(num_routed):
            return {}
        layers = zip(self._layers, num_routed, num_others, strict=True)
        by_layer = {f"other_experts/layer_{layer}": others / routed for layer, routed, others in layers}
        worst = max(by_layer.values())
        return {"other_experts": sum(num_others) / sum(num_routed), "other_experts_worst": worst, **by_layer}

    def _all(self) -> list[ReplayedRouter]:
        return [router for routers in self._routers.values() for _, router in routers]
