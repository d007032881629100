"""Proof that a table is complete: every element of every tensor is held exactly once on both sides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError, problem_list
from mrl.models.adapters import adapter_pairs, adapter_tensors
from mrl.models.layout import RankPlace, check_layout
from mrl.models.regions import Region, Shape, extent, tiling_problems
from mrl.models.spec import ModelSpec
from mrl.models.table import EMBEDDING, Head, Shard, dense_shards, expert_shards, hf_tensors

Placed = list[tuple[RankPlace, Shard]]


def check_complete(spec: ModelSpec, layout: ParallelConfig, head: Head) -> None:
    """Raise an error, with a list of problems, if a table leaves out, duplicates or invents anything."""
    check_layout(layout, spec)
    shards = _everything(spec, layout, head)
    twice = EMBEDDING if spec.tied and head == "lm" and layout.pp > 1 else ""
    if problems := [*_local_problems(shards), *_hf_problems(hf_tensors(spec, head), layout, shards, twice)]:
        raise ModelError(f"the table of {spec.family} is not complete for {layout}:{problem_list(problems)}")


def check_adapters_complete(spec: ModelSpec, layout: ParallelConfig, lora: LoraConfig) -> None:
    """Raise an error, with a list of problems, unless each element of each target's A and B is held exactly once."""
    pairs = []
    for tp, pp, ep, etp in product(*map(range, (layout.tp, layout.pp, layout.ep, layout.etp))):
        place = RankPlace(tp=tp, pp=pp, ep=ep, etp=etp)
        held = adapter_pairs(spec, lora, layout, place)
        pairs += [(place, pair) for pair in held if (tp if pair.weight.expert else ep + etp) == 0]
    shards = [(place, shard) for place, pair in pairs for shard in (pair.a, pair.b)]
    if problems := [*_local_problems(shards), *_hf_problems(adapter_tensors(spec, lora), layout, shards)]:
        raise ModelError(f"the adapters of {spec.family} are not complete for {layout}:{problem_list(problems)}")


def _everything(spec: ModelSpec, layout: ParallelConfig, head: Head) -> Placed:
    """Return every shard of every rank: tp ranks for the dense parameters, ep and etp ranks for the experts."""
    placed: Placed = []
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            place = RankPlace(tp=tp, pp=pp)
            placed += [(place, shard) for shard in dense_shards(spec, layout, place, head)]
        for ep, etp in product(range(layout.ep), range(layout.etp)):
            place = RankPlace(pp=pp, ep=ep, etp=etp)
            placed += [(place, shard) for shard in expert_shards(spec, layout, place)]
    return placed


def _local_problems(shards: Placed) -> Iterator[str]:
    for place, shard in shards:
        boxes = [*(piece.target for piece in shard.pieces), *shard.padding]
        for problem in tiling_problems(shard.shape, boxes):
            yield f"{shard.name} on {place}: {problem}"
        for piece in shard.pieces:
            if extent(piece.source) != extent(piece.target):
                yield f"{shard.name} on {place}: {piece.source} of {piece.hf} does not fit into {piece.target}"


def _hf_problems(tensors: dict[str, Shape], layout: ParallelConfig, shards: Placed, twice: str = "") -> Iterator[str]:
    """Yield wrong holders of each tensor. One tensor, `twice`, is held by two stages."""
    holders: dict[str, dict[Region, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    num_copies: dict[str, int] = {}
    for place, shard in shards:
        holder = f"{shard.name} in chunk {shard.chunk} of stage {place.pp}, ep {place.ep}"
        num_copies[holder] = 1 if shard.split else (layout.etp if shard.expert else layout.tp)
        for piece in shard.pieces:
            holders[piece.hf][piece.source][holder] += 1
    yield from (f"{name} is not a tensor of this family" for name in holders.keys() - tensors)
    for name, shape in tensors.items():
        boxes = holders.get(name, {})
        yield from (f"{name}: {problem}" for problem in tiling_problems(shape, boxes))
        for box, holder_counts in boxes.items():
            if len(holder_counts) != (2 if name == twice else 1) or any(
                count != num_copies[holder] for holder, count in holder_counts.items()
            ):
                copies = ", ".join(f"{count} x {holder}" for holder, count in holder_counts.items())
                yield f"{name} {box} is held by the wrong ranks: {copies}"
