"""Parallel layouts: the layers of each pipeline stage, and the layouts that a model supports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.spec import ModelSpec


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of a rank on the axes that split a model."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


def layers_of_chunk(layout: ParallelConfig, num_layers: int, pp: int, chunk: int) -> range:
    """Return the layers of one chunk. With two stages of two chunks, stage 0 holds the first and third quarter."""
    stages = [num_stage // layout.vpp for num_stage in layers_per_stage(layout, num_layers)]
    start = chunk * sum(stages) + sum(stages[:pp])
    return range(start, start + stages[pp])


def layers_per_stage(layout: ParallelConfig, num_layers: int) -> list[int]:
    """Return the number of layers of each stage: equal, except for a first or last stage with its own number."""
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    num_open = layout.pp - sum(end is not None for end in ends)
    rest = num_layers - sum(end for end in ends if end is not None)
    if num_open < 0 or rest < num_open or (rest % num_open if num_open else rest):
        raise ModelError(f"{rest} of {num_layers} layers do not split over {num_open} stages of equal size")
    stages = [rest // num_open if num_open else 0] * layout.pp
    for stage, end in zip((0, -1), ends, strict=True):
        if end is not None:
            stages[stage] = end
    return stages


def check_layout(layout: ParallelConfig, spec: ModelSpec, *, of_engine: bool = False) -> None:
    """Raise an error, listing all problems, if the model does not fit the layout of a trainer or of an engine."""
    if problems := [*_problems(layout, spec, of_engine), *_bias_problems(layout, spec, of_engine)]:
        raise ModelError(f"the model does not fit the layout: {'; '.join(problems)}", fix="choose another layout")


def _problems(layout: ParallelConfig, spec: ModelSpec, engine: bool) -> Iterator[str]:
    moe = spec.moe
    if spec.gdn and layout.cp > 1:
        yield f"cp {layout.cp} with linear attention: mrl's gated delta rule reads the tokens of a row in order"
    divisions = [
        ("tp", layout.tp, "attention heads", spec.num_heads),
        ("tp", layout.tp, "rows of queries, keys and values", spec.qkv_rows),
    ]
    if moe is None or moe.dense_layers:
        divisions.append(("tp", layout.tp, "rows of the MLP", spec.ffn))
    if gdn := spec.gdn:
        divisions.append(("tp", layout.tp, "key heads of linear attention", gdn.key_heads))
    if spec.output_gate and not engine:  # Megatron would give a rank's heads the gates of their whole group
        divisions.append(("tp", layout.tp, "key-value heads of gated attention", spec.num_kv_heads))
    if moe:
        divisions.append(("ep", layout.ep, "experts", moe.num_experts))
        divisions.append(("etp", layout.etp, "rows of an expert", moe.expert_ffn))
        divisions.append(("tp", layout.tp, "rows of the shared expert", moe.shared_ffn))
    elif layout.ep > 1 or layout.etp > 1:
        yield f"ep {layout.ep} and etp {layout.etp}, but the model has no experts"
    for axis, size, dimension, amount in divisions:
        if amount % size:
            yield f"{axis} {size} does not divide {amount} {dimension}"
    if spec.num_kv_heads % layout.tp and layout.tp % spec.num_kv_heads:
        yield f"tp {layout.tp} is not a divisor or a multiple of {spec.num_kv_heads} key-value heads"
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp {layout.vpp} needs more than one pipeline stage"
    try:
        stages = layers_per_stage(layout, spec.num_layers)
    except ModelError as error:
        yield error.what
    else:
        if any(stage % layout.vpp for stage in stages):
            yield f"stages of {stages} layers do not split into {layout.vpp} chunks each"


def _bias_problems(layout: ParallelConfig, spec: ModelSpec, of_engine: bool) -> Iterator[str]:
    if spec.moe is None or spec.moe.clamp is None:
        return
    if layout.etp > 1 and not of_engine:
        yield f"etp {layout.etp}, but Megatron does not split experts with biases, only etp 1 is possible"
    if layout.tp > spec.num_kv_heads:
        yield f"tp {layout.tp} is more than {spec.num_kv_heads} key-value heads, which vLLM does not copy here"
