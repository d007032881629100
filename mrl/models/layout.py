"""Parallel layouts: which layers a pipeline stage holds, and which layouts a model fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.spec import ModelSpec


@dataclass(frozen=True)
class RankPlace:
    """A rank's coordinates on the axes that split a model."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that split a model; data and context parallel ranks hold copies."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @classmethod
    def of(cls, sizes: ParallelConfig) -> Layout:
        """Return the layout of a role."""
        return cls(
            tp=sizes.tp,
            pp=sizes.pp,
            vpp=sizes.vpp,
            ep=sizes.ep,
            etp=sizes.etp,
            first_stage_layers=sizes.first_stage_layers,
            last_stage_layers=sizes.last_stage_layers,
        )

    def layers_of_chunk(self, num_layers: int, pp: int, chunk: int) -> range:
        """Return the layers of one chunk: with two stages of two chunks, stage 0 holds the first and third quarter."""
        stages = [num_stage // self.vpp for num_stage in self.layers_per_stage(num_layers)]
        start = chunk * sum(stages) + sum(stages[:pp])
        return range(start, start + stages[pp])

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Layers of each stage: equal, but for a first or last stage that was given its own number."""
        ends = (self.first_stage_layers, self.last_stage_layers)
        num_open = self.pp - sum(end is not None for end in ends)
        rest = num_layers - sum(end for end in ends if end is not None)
        if num_open < 0 or rest < num_open or (rest % num_open if num_open else rest):
            raise ModelError(f"{rest} of {num_layers} layers do not split over {num_open} stages of equal size")
        stages = [rest // num_open if num_open else 0] * self.pp
        for stage, end in zip((0, -1), ends, strict=True):
            if end is not None:
                stages[stage] = end
        return stages

    def check(self, spec: ModelSpec) -> None:
        """Refuse a layout that the model does not fit, with everything that does not."""
        if problems := list(self._problems(spec)):
            raise ModelError(f"the model does not fit the layout: {'; '.join(problems)}", fix="choose another layout")

    def _problems(self, spec: ModelSpec) -> Iterator[str]:
        moe = spec.moe
        divisions = [
            ("tp", self.tp, "attention heads", spec.num_heads),
            ("tp", self.tp, "rows of queries, keys and values", spec.qkv_rows),
        ]
        if moe is None or moe.dense_layers:
            divisions.append(("tp", self.tp, "rows of the MLP", spec.ffn))
        if moe:
            divisions.append(("ep", self.ep, "experts", moe.num_experts))
            divisions.append(("etp", self.etp, "rows of an expert", moe.expert_ffn))
        elif self.ep > 1 or self.etp > 1:
            yield f"ep {self.ep} and etp {self.etp}, but the model has no experts"
        for axis, size, what, amount in divisions:
            if amount % size:
                yield f"{axis} {size} does not divide {amount} {what}"
        if spec.num_kv_heads % self.tp and self.tp % spec.num_kv_heads:
            yield f"tp {self.tp} is neither a divisor nor a multiple of {spec.num_kv_heads} key-value heads"
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp {self.vpp} needs more than one pipeline stage"
        try:
            stages = self.layers_per_stage(spec.num_layers)
        except ModelError as error:
            yield error.what
        else:
            if any(stage % self.vpp for stage in stages):
                yield f"stages of {stages} layers do not split into {self.vpp} chunks each"
