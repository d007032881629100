"""vLLM's fused shards: names, shapes and every bit as vLLM's own loader makes them; sizes that do not fit."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.regions import Region, slices, tiling_problems
from mrl.models.rollout_table import EngineSizes, Fused, rollout_tensors
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, hf_tensors, shards_of
from tests.models.conftest import Tiny
from tests.models.tiny_models import MOE_FAMILIES, TINY_FAMILIES, make_tiny
from tests.models.torchvision_stand_in import provide

SIZES = [EngineSizes(), EngineSizes(2), EngineSizes(4)]
CASES = [(family, sizes) for family in TINY_FAMILIES for sizes in SIZES]
CASES += [(family, EngineSizes(tp, tp)) for family in MOE_FAMILIES for tp in (2, 4)]


def assembled(reader: HfReader, fused: Fused) -> torch.Tensor:
    """The parameter, from a model's files."""
    tensor = torch.full(fused.shape, torch.nan)
    matrix = tensor.view(fused.place)
    for box in fused.padding:
        matrix[slices(box)] = 0
    for piece in fused.pieces:
        target = matrix[slices(piece.target)]
        target.copy_(reader.read(piece.hf, piece.source).reshape(target.shape))
    return tensor


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=str)
def test_all_ranks_together_hold_every_element_and_none_twice_on_a_rank(
    tiny: Tiny, family: str, sizes: EngineSizes
) -> None:
    spec = read_spec(tiny(family))
    boxes: dict[str, set[Region]] = defaultdict(set)
    for rank in range(sizes.tp):
        for fused in rollout_tensors(spec, sizes, rank):
            targets = [piece.target for piece in fused.pieces]
            assert not list(tiling_problems(fused.place, [*targets, *fused.padding])), fused.name
            for piece in fused.pieces:
                boxes[piece.hf].add(piece.source)
    for name, shape in hf_tensors(spec, "lm").items():
        assert not list(tiling_problems(shape, boxes.pop(name))), name
    assert not boxes


def test_shapes_are_those_of_every_rank(tiny: Tiny) -> None:
    """Buckets are cut alike for all ranks."""
    for family in TINY_FAMILIES:
        spec = read_spec(tiny(family))
        ranks = [{f.name: f.shape for f in rollout_tensors(spec, EngineSizes(4), rank)} for rank in range(4)]
        assert ranks == [ranks[0]] * 4


def test_trainer_and_engine_hold_the_gate_of_a_shared_expert_above_its_up(tiny: Tiny) -> None:
    spec, reader = read_spec(tiny("glm4_moe")), HfReader(tiny("glm4_moe"))
    shared, half = "model.layers.3.mlp.shared_experts.", spec.moe.shared_ffn // 2 if spec.moe else 0
    gate_up = torch.cat([reader.whole(f"{shared}{name}_proj.weight")[half:] for name in ("gate", "up")])
    shards = {shard.name: shard for shard in shards_of(spec, ParallelConfig(tp=2), RankPlace(tp=1), "lm")}
    trained = shards["decoder.layers.3.mlp.shared_experts.linear_fc1.weight"]
    assert torch.equal(load_shard(reader, trained, torch.float32), gate_up)
    tensors = {fused.name: fused for fused in rollout_tensors(spec, EngineSizes(2), 1)}
    assert torch.equal(assembled(reader, tensors[f"{shared}gate_up_proj.weight"]), gate_up)


def test_routers_of_glm_are_float32_in_an_engine_of_any_dtype(tiny: Tiny) -> None:
    spec = read_spec(tiny("glm4_moe"))
    wide = {fused.name for fused in rollout_tensors(spec, EngineSizes(2), 1) if fused.dtype == "float32"}
    kinds = ("weight", "e_score_correction_bias")
    assert wide == {f"model.layers.{layer}.mlp.gate.{kind}" for layer in (1, 2, 3) for kind in kinds}
    assert all(fused.dtype is None for fused in rollout_tensors(read_spec(tiny("qwen3_moe")), EngineSizes(2), 1))


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("qwen3_moe", EngineSizes(4, 2), "ep 2 is not 1 or the engine's tp 4"),
        ("llama", EngineSizes(2, 2), "the model has no experts"),
        ("llama", EngineSizes(3), "tp 3 does not divide 4 attention heads"),
        ("mixtral", EngineSizes(8, 8), "ep 8 does not divide 4 experts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny: Tiny, family: str, sizes: EngineSizes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rollout_tensors(read_spec(tiny(family)), sizes, 0)


def differences(directory: Path) -> list[str]:
    """Where the table and vLLM's own loader differ, over all families, in one process."""
    from tests.models.vllm_parameters import one_process, parameters

    found = []
    provide(directory, pytest.MonkeyPatch())  # the process ends with this function
    with one_process(directory / "store") as group:
        for family in TINY_FAMILIES:
            model = make_tiny(family, directory / family)
            spec, reader = read_spec(model), HfReader(model)
            for sizes in [sizes for name, sizes in CASES if name == family]:
                for rank in range(sizes.tp):
                    held = parameters(model, group, sizes.tp, sizes.ep, rank)
                    for fused in rollout_tensors(spec, sizes, rank):
                        theirs = held.pop(fused.name, None)
                        if theirs is None or not torch.equal(theirs, assembled(reader, fused)):
                            found.append(f"{family} {sizes} rank {rank}: {fused.name}")
                    found += [f"{family} {sizes} rank {rank}: {name} is vLLM's alone" for name in held]
    return found


@pytest.mark.slow
def test_every_parameter_is_the_one_that_vllm_loads_to_the_bit(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        assert process.apply_async(differences, (tmp_path,)).get(300) == []


@pytest.mark.parametrize(
    ("family", "pp", "layers", "ends"),
    [
        ("llama", 3, [1, 2, 1], [{EMBEDDING}, set(), {NORM, LM_HEAD}]),
        ("llama_tied", 2, [2, 2], [{EMBEDDING}, {EMBEDDING, NORM}]),
        ("qwen3_moe", 2, [2, 2], [{EMBEDDING, NORM, LM_HEAD}] * 2),
    ],
)
def test_each_stage_has_its_layers_and_the_ends_that_vllms_model_has(
    tiny: Tiny, family: str, pp: int, layers: list[int], ends: list[set[str]]
) -> None:
    spec, sizes = read_spec(tiny(family)), EngineSizes(2, pp=pp)
    found, last = [], -1
    for stage in range(pp):
        names = {fused.name for fused in rollout_tensors(spec, sizes, 2 * stage + 1)}
        numbers = sorted({int(name.split(".")[2]) for name in names if ".layers." in name})
        assert numbers == [*range(last + 1, numbers[-1] + 1)]
        last = numbers[-1]
        found.append((len(numbers), {name for name in names if ".layers." not in name}))
    assert found == [*zip(layers, ends, strict=True)]
    assert last == spec.num_layers - 1
    assert EngineSizes(2, pp=2).place(7) == (1, 1)
    assert EngineSizes(ep=4, dp=4).place(6) == (0, 2), "the rank decides the experts"
    with pytest.raises(ModelError, match=r"dp 2 needs a mixture with whole experts on each rank, tp 1 and pp 1"):
        EngineSizes(dp=2).check(spec)
    with pytest.raises(ModelError, match=r"an engine with 9 stages has more of them than the model has layers"):
        EngineSizes(pp=9).check(spec)
