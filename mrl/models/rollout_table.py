"""The slices of Hugging Face tensors that make up each fused, sharded parameter of vLLM, for one rank of an engine.

The same `Parameter`s describe Megatron's tensors and these: queries, keys and values are three parts, each split
separately; the gate and the up of every expert are split in the same way. Stacked experts are described as one matrix,
one below another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from mrl.config.lora import ENGINE_TARGETS, padded_rank
from mrl.config.schema import ParallelConfig, RolloutConfig
from mrl.dtypes import ITEM_BYTES
from mrl.errors import ModelError
from mrl.models import gdn, gpt_oss, gqa, mla
from mrl.models.decoder import attention_prefix
from mrl.models.families import FAMILIES
from mrl.models.fp8_scales import FP8, SCALE, Fp8Form, scale_pieces, scale_shape
from mrl.models.layout import check_layout
from mrl.models.open_model import OpenSpec
from mrl.models.parameters import OwnDtype, Parameter, Piece, RowRange, columns_of, padded_vocab, whole_tensor
from mrl.models.regions import Region, Shape, whole
from mrl.models.spec import ModelSpec, MoeSpec
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, float32_tensors

_VOCAB_MULTIPLE = 64


EnginePart: TypeAlias = Literal["embedding", "head"] | int
"""A layer, or the tensors before or after the layers."""


class EnginePlace(NamedTuple):
    """Place of a worker in its engine, which decides what it holds."""

    stage: int
    """Pipeline stage, which decides the layers."""
    rank: int
    """Rank in the stage, which decides the part of each layer."""


@dataclass(frozen=True)
class EngineSizes:
    """Split of a vLLM engine over tensor ranks and stages. If `ep` is the number of tensor ranks, each holds whole
    experts."""

    tp: int = 1
    ep: int = 1
    whole: bool = False
    """Every rank takes whole Hugging Face tensors instead, for modules that only vLLM's own loaders can fill."""
    fp8: Fp8Form | None = None
    """Form of the scales, if linear layers and experts arrive in FP8."""
    unaligned: frozenset[str] = frozenset()
    """Modules of layers that get the engine's dtype nevertheless, because their slices are not made of whole blocks."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Ranks with the same attention for different samples, which share the experts."""

    @classmethod
    def of(cls, rollout: RolloutConfig, spec: ModelSpec, *, whole: bool = False) -> EngineSizes:
        """Return the split of the engines of a configuration."""
        if whole and rollout.engine == "vllm" and spec.family == "gpt_oss":
            raise ModelError(
                "vLLM cannot take whole tensors of gpt-oss while it runs: its loader would not notice a missing part",
                fix="remove the setting of rollout.vllm that makes it necessary, such as quantization",
            )
        if isinstance(spec, OpenSpec):
            return cls(rollout.tp, whole=True, pp=rollout.pp)
        whole_experts = spec.moe and rollout.vllm.get("enable_expert_parallel", False)
        ep = rollout.tp * rollout.dp if whole_experts else 1
        return cls(rollout.tp, ep=ep, whole=whole, pp=rollout.pp, dp=rollout.dp)

    @property
    def num_workers(self) -> int:
        """Workers of an engine."""
        return self.tp * self.pp * self.dp

    def place(self, worker: int) -> EnginePlace:
        """Return the place of a worker, by its number among the workers of all engines, in vLLM's order of ranks."""
        replica, position = divmod(worker % self.num_workers, self.tp * self.pp)
        stage, tp_rank = divmod(position, self.tp)
        return EnginePlace(stage, replica * self.tp + tp_rank)

    def stages_with(self, spec: ModelSpec, part: EnginePart) -> tuple[int, ...]:
        """Return the stages that hold a part of the model.

        The last stage has the embedding if it is also the head. Whole tensors go to every stage, whose loaders take
        their part.
        """
        if self.whole or (isinstance(part, str) and FAMILIES[spec.family].engine_repeats_ends):
            return tuple(range(self.pp))
        last = self.pp - 1
        if part == "embedding":
            return (0, last) if spec.tied and last else (0,)
        if part == "head":
            return (last,)
        return tuple(stage for stage in range(self.pp) if part in stage_layers(spec.num_layers, self.pp, stage))

    def check(self, spec: ModelSpec) -> None:
        if self.pp > spec.num_layers:
            what = f"an engine with {self.pp} stages has more of them than the model has layers, {spec.num_layers}"
            raise ModelError(what, fix=f"rollout.pp={spec.num_layers} or less")
        if self.pp > 1 and isinstance(spec, OpenSpec):
            what = f"engines with {self.pp} stages have not been compared for family {spec.family}, which has no table"
            raise ModelError(what, fix="rollout.pp=1")
        if self.dp > 1 and (spec.moe is None or self.ep == 1 or self.whole or self.tp * self.pp > 1):
            what = f"an engine with dp {self.dp} needs a mixture with whole experts on each rank, tp 1 and pp 1"
            raise ModelError(what, fix="rollout.dp=1, or rollout.vllm.enable_expert_parallel=true")
        if self.ep not in (1, self.tp * self.dp):
            raise ModelError(
                f"ep {self.ep} is not 1 or the engine's tp {self.tp}" + (f" x dp {self.dp}" if self.dp > 1 else ""),
                fix="vLLM spreads experts over all ranks of an engine, or splits each over all of them",
            )
        if isinstance(spec, OpenSpec):  # vLLM itself refuses a split that it cannot do
            return
        etp = 1 if self.ep > 1 or not spec.moe else self.tp
        check_layout(ParallelConfig(tp=self.tp, ep=self.ep, etp=etp), spec, of_engine=True)
        if (rows := _padded(spec.vocab)) % self.tp:
            raise ModelError(f"tp {self.tp} does not divide the {rows} rows of vLLM's vocabulary")


@dataclass(frozen=True, slots=True)
class Fused:
    """One parameter of a rank of an engine."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]  # their targets lie in `place`
    padding: tuple[Region, ...]  # zeros, such as vocabulary rows without a token
    dtype: OwnDtype = None
    columns: int | None = None  # of the matrix in which the targets lie, if not those of the shape

    @property
    def place(self) -> Shape:
        """The shape of the view of the tensor in which the targets lie.

        It is the tensor's own, or a matrix: with given columns, or of stacked experts, one below another.
        """
        dimensions = len(self.pieces[0].target) if self.pieces else len(self.shape)
        if self.columns is None and dimensions == len(self.shape):
            return self.shape
        columns = self.columns or self.shape[-1]
        return math.prod(self.shape) // columns, columns


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """Return the layers that vLLM gives a stage. If some remain, the stages just before the last get one more
    each."""
    each, remaining = divmod(num_layers, pp)
    first_longer = pp - 1 - remaining
    start = stage * each + max(0, stage - first_longer)
    return range(start, start + each + (first_longer <= stage < pp - 1))


def rollout_tensors(spec: ModelSpec, sizes: EngineSizes, worker: int) -> list[Fused]:
    """Return every parameter of that worker of an engine, by vLLM's names."""
    sizes.check(spec)
    stage, rank = sizes.place(worker)
    tensors: list[Fused] = []
    if stage in sizes.stages_with(spec, "embedding"):
        tensors += embedding_tensors(spec, sizes, rank)
    for layer in range(spec.num_layers):
        if stage in sizes.stages_with(spec, layer):
            tensors += layer_tensors(spec, sizes, rank, layer)
    if stage in sizes.stages_with(spec, "head"):
        tensors += head_tensors(spec, sizes, rank)
    return tensors


def largest_stage(spec: ModelSpec, sizes: EngineSizes, num_bytes: Callable[[Fused], int]) -> tuple[int, int]:
    """Return the bytes of the first worker of the stage with the most, and of the largest tensor."""

    def measured(tensors: Iterable[Fused]) -> tuple[int, int]:
        each = [num_bytes(tensor) for tensor in tensors]
        return sum(each), max(each, default=0)

    parts: dict[EnginePart, tuple[int, int]] = {
        "embedding": measured(embedding_tensors(spec, sizes, 0)),
        "head": measured(head_tensors(spec, sizes, 0)),
    }
    for layers in spec.layers_by_kind().values():
        parts |= dict.fromkeys(layers, measured(layer_tensors(spec, sizes, 0, layers[0])))
    sums = [0] * sizes.pp
    for part, (size, _) in parts.items():
        for stage in sizes.stages_with(spec, part):
            sums[stage] += size
    return max(sums), max(largest for _, largest in parts.values())


@cache
def engine_bytes(
    spec: ModelSpec, tp: int, dtype: str, linear_bytes: int | None = None, pp: int = 1, dp: int = 1
) -> tuple[int, int]:
    """Return the bytes of the fused tensors of an engine's fullest worker in that dtype, and of the largest tensor.

    `linear_bytes` are those of an element of linear layers and experts, if the engine quantizes them.
    """

    def num_bytes(tensor: Fused) -> int:
        item = linear_bytes if linear_bytes and is_linear(tensor) else ITEM_BYTES[tensor.dtype or dtype]
        return math.prod(tensor.shape) * item

    return largest_stage(spec, EngineSizes(tp, ep=dp if dp > 1 else 1, pp=pp, dp=dp), num_bytes)


def is_linear(tensor: Fused) -> bool:
    """Return whether a tensor is the matrix of a linear layer or of experts, and no gate."""
    name = tensor.name.removesuffix(".weight")
    return ".layers." in name and len(tensor.shape) > 1 and not name.endswith(("gate", "router", "conv1d"))


@cache
def adapter_slot_bytes(spec: ModelSpec, tp: int, rank: int, dtype: str, pp: int = 1) -> int:
    """Return the bytes of the slot for adapters of the first worker in the stage with the largest slot: an A and a B
    for each module of the files, also if it is not a target."""
    if rank == 0:
        return 0
    elements = [0] * pp
    for layers in spec.layers_by_kind().values():
        for tensor in layer_tensors(spec, EngineSizes(tp), 0, layers[0]):
            module = tensor.name.removesuffix(".weight").rpartition(".")[2]
            if num_parts := ENGINE_TARGETS.get(module):
                rows, columns = tensor.shape
                of_layer = padded_rank(rank) * (num_parts * columns + rows)
                for stage in range(pp):
                    elements[stage] += of_layer * len({*layers} & {*stage_layers(spec.num_layers, pp, stage)})
    return max(elements) * ITEM_BYTES[dtype]


def embedding_tensors(spec: ModelSpec, sizes: EngineSizes, rank: int) -> Iterator[Fused]:
    """Yield the tensors before the layers. With tied embeddings they are also the head."""
    if isinstance(spec, OpenSpec):
        yield from _unfused(spec, spec.outer_tensors())
    elif sizes.whole:
        yield from _unfused(spec, {EMBEDDING: (spec.vocab, spec.hidden)})
    else:
        embedding = _vocabulary(EMBEDDING, spec, sizes, rank)
        yield replace(embedding, name=FAMILIES[spec.family].engine_embedding)


def head_tensors(spec: ModelSpec, sizes: EngineSizes, rank: int) -> Iterator[Fused]:
    """Yield the tensors after the layers. Without a table, all tensors outside the layers come first."""
    if isinstance(spec, OpenSpec):
        return
    if sizes.whole:
        tensors: dict[str, Shape] = {NORM: (spec.hidden,)}
        if not spec.tied:
            tensors[LM_HEAD] = (spec.vocab, spec.hidden)
        yield from _unfused(spec, tensors)
        return
    yield _fused(Parameter(NORM, ((RowRange(NORM, 0, spec.hidden),),)), sizes, rank)
    if not spec.tied:
        yield _vocabulary(LM_HEAD, spec, sizes, rank)


def layer_tensors(spec: ModelSpec, sizes: EngineSizes, rank: int, layer: int) -> Iterator[Fused]:
    """Yield the tensors of a layer, each in FP8 followed by its scales."""
    for fused in _layer_tensors(spec, sizes, rank, layer):
        if sizes.fp8 is None or not is_linear(fused) or module_in_layer(fused.name) in sizes.unaligned:
            yield fused
            continue
        yield replace(fused, dtype=FP8)
        pieces = scale_pieces(fused.pieces, sizes.fp8)
        yield Fused(fused.name + SCALE, scale_shape(fused.shape, sizes.fp8), pieces, (), "float32")


def module_in_layer(name: str) -> str:
    """Return the name, in its layer, of the module of a tensor: `mlp.down_proj`."""
    return name.partition(".layers.")[2].partition(".")[2].rpartition(".")[0]


def _layer_tensors(spec: ModelSpec, sizes: EngineSizes, rank: int, layer: int) -> Iterator[Fused]:
    if sizes.whole or isinstance(spec, OpenSpec):
        yield from _unfused(spec, FAMILIES[spec.family].tensors(spec, layer))
        return
    prefix = f"model.layers.{layer}."
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield _fused(whole_tensor(prefix + name, prefix + name, spec.hidden), sizes, rank)
    if spec.family == "gpt_oss":
        yield from _gpt_oss_tensors(spec, sizes, rank, layer)
        return
    hf = prefix + attention_prefix(spec, layer)
    if spec.gdn and spec.is_linear(layer):
        attention = gdn.engine_parameters(spec, spec.gdn, hf)
    else:
        attention = mla.engine_parameters(spec, spec.mla, hf) if spec.mla else gqa.engine_parameters(spec, hf, sizes.tp)
    yield from (_fused(parameter, sizes, rank) for parameter in attention)
    if spec.moe and spec.has_experts(layer):
        yield from _expert_tensors(spec, spec.moe, sizes, rank, layer)
    else:
        parts = tuple((RowRange(f"{prefix}mlp.{name}_proj.weight", 0, spec.ffn),) for name in ("gate", "up"))
        yield _fused(Parameter(f"{prefix}mlp.gate_up_proj.weight", parts, spec.hidden, "rows"), sizes, rank)
        down = f"{prefix}mlp.down_proj.weight"
        yield _fused(columns_of(down, down, spec.hidden, spec.ffn), sizes, rank)


def _gpt_oss_tensors(spec: ModelSpec, sizes: EngineSizes, rank: int, layer: int) -> Iterator[Fused]:
    assert spec.moe is not None, "gpt-oss always has experts"
    yield from (_fused(parameter, sizes, rank) for parameter in gpt_oss.engine_parameters(spec, layer, sizes.tp))
    num_local = spec.moe.num_experts // sizes.ep
    first, part = (0, (rank, sizes.tp)) if sizes.ep == 1 else (rank * num_local, (0, 1))
    for name, shape, pieces, zeros, columns in gpt_oss.engine_experts(
        spec, layer, range(first, first + num_local), part
    ):
        yield Fused(name, shape, pieces, zeros, columns=columns)


def _unfused(spec: ModelSpec, tensors: dict[str, Shape]) -> Iterator[Fused]:
    for name, shape in tensors.items():
        dtype: OwnDtype = "float32" if name in float32_tensors(spec) else None
        yield Fused(name, shape, (Piece(name, whole(shape), whole(shape)),), (), dtype)


def _expert_tensors(spec: ModelSpec, moe: MoeSpec, sizes: EngineSizes, rank: int, layer: int) -> Iterator[Fused]:
    names, prefix, split = FAMILIES[spec.family].names, f"model.layers.{layer}.", sizes.ep == 1
    yield from (_fused(parameter, sizes, rank) for parameter in _router_and_shared(spec, moe, prefix))
    num_local = moe.num_experts // sizes.ep
    first = 0 if split else rank * num_local
    experts = range(first, first + num_local)
    stacked = prefix + names.router.removesuffix("gate.weight") + "experts.routed_experts."
    gates_and_ups = tuple(
        (RowRange(prefix + name.format(expert), 0, moe.expert_ffn),)
        for expert in experts
        for name in (names.gate, names.up)
    )
    downs = tuple((RowRange(prefix + names.down.format(expert), 0, spec.hidden),) for expert in experts)
    w13 = Parameter(f"{stacked}w13_weight", gates_and_ups, spec.hidden, "rows" if split else None)
    w2 = Parameter(f"{stacked}w2_weight", downs, moe.expert_ffn, "columns" if split else None)
    yield from (_fused(parameter, sizes, rank, num_local) for parameter in (w13, w2))


def _router_and_shared(spec: ModelSpec, moe: MoeSpec, prefix: str) -> Iterator[Parameter]:
    """Yield the parts of an expert layer that ep does not split. The shared expert is split over tp in any case."""
    family = FAMILIES[spec.family]
    names = family.names
    dtype: OwnDtype = "float32" if family.float32_router else None
    router, bias = prefix + names.router, prefix + names.bias
    yield whole_tensor(router, router, moe.num_experts, spec.hidden, dtype)
    if moe.correction_bias:
        yield whole_tensor(bias, bias, moe.num_experts, dtype="float32")
    if moe.shared_ffn:
        parts = tuple((RowRange(prefix + names.shared.format(name), 0, moe.shared_ffn),) for name in ("gate", "up"))
        yield Parameter(prefix + names.shared.format("gate_up"), parts, spec.hidden, "rows")
        down = prefix + names.shared.format("down")
        yield columns_of(down, down, spec.hidden, moe.shared_ffn)
    if moe.shared_gate:
        gate = prefix + names.shared_gate
        yield whole_tensor(gate, gate, 1, spec.hidden)


def _fused(parameter: Parameter, sizes: EngineSizes, rank: int, num_stacked: int | None = None) -> Fused:
    shape, pieces, padding = parameter.share(rank % sizes.tp, sizes.tp)
    if num_stacked is not None:
        shape = (num_stacked, shape[0] // num_stacked, shape[1])
    return Fused(parameter.name, shape, pieces, padding, parameter.dtype)


def _vocabulary(name: str, spec: ModelSpec, sizes: EngineSizes, rank: int) -> Fused:
    num_rows = _padded(spec.vocab) // sizes.tp
    start = min(rank % sizes.tp * num_rows, spec.vocab)
    held, columns = min(start + num_rows, spec.vocab) - start, (0, spec.hidden)
    pieces = (Piece(name, ((start, start + held), columns), ((0, held), columns)),) if held else ()
    padding = (((held, num_rows), columns),) if held < num_rows else ()
    return Fused(name, (num_rows, spec.hidden), pieces, padding)


def _padded(vocab: int) -> int:
    """Return vLLM's rows of the vocabulary over all ranks."""
    return padded_vocab(vocab, _VOCAB_MULTIPLE)
