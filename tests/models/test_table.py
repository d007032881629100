"""Tables: what a rank holds is what Megatron holds, and all ranks together hold the model to the bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.complete import check_complete
from mrl.models.families import FAMILIES, read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace, layers_of_chunk
from mrl.models.parameters import padded_vocab
from mrl.models.regions import slices
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard, local_name, shards_of
from tests.models import published
from tests.models.conftest import Tiny
from tests.models.tiny_models import MOE_FAMILIES, TINY_FAMILIES

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=4, pp=2, vpp=2),
    Layout(tp=2, pp=3, first_stage_layers=1, last_stage_layers=1),
]
EXPERT_LAYOUTS = [Layout(ep=2), Layout(tp=2, etp=2), Layout(tp=4, pp=2, ep=2, etp=2), Layout(pp=2, vpp=2, ep=4)]
CASES = [(family, layout) for family in TINY_FAMILIES for layout in LAYOUTS]
CASES += [(family, layout) for family in MOE_FAMILIES for layout in EXPERT_LAYOUTS]
CASES = [(family, layout) for family, layout in CASES if family != "gpt_oss" or layout.etp == 1]


def places(layout: Layout) -> list[RankPlace]:
    """Return every combination of coordinates, including combinations that no rank has: more to check, not less."""
    return [
        RankPlace(tp, pp, ep, etp)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
        for ep in range(layout.ep)
        for etp in range(layout.etp)
    ]


def scatter(path: Path, spec: ModelSpec, layout: Layout, head: Head) -> dict[RankPlace, dict[Shard, torch.Tensor]]:
    reader = HfReader(path)
    reader.check(spec, head)
    return {
        place: {shard: load_shard(reader, shard, torch.float32) for shard in shards_of(spec, layout, place, head)}
        for place in places(layout)
    }


def assert_gathers_to(
    saved: dict[str, torch.Tensor], ranks: dict[RankPlace, dict[Shard, torch.Tensor]], family: str = "llama"
) -> None:
    gathered = {name: torch.full_like(tensor, torch.nan) for name, tensor in saved.items()}
    stored = FAMILIES[family].stored
    for shards in ranks.values():
        for shard, tensor in shards.items():
            for piece in shard.pieces:
                part = stored(piece.hf)
                whole = part.view(gathered[part.file]) if part else gathered[piece.hf]
                whole[slices(piece.source)] = tensor[slices(piece.target)]
            assert all(not tensor[slices(box)].any() for box in shard.padding)
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_scattered_and_gathered_is_the_same_to_the_bit(tiny: Tiny, family: str, layout: Layout) -> None:
    path = tiny(family)
    spec = read_spec(path)
    check_complete(spec, layout, "lm")
    assert_gathers_to(load_file(path / "model.safetensors"), scatter(path, spec, layout, "lm"), spec.family)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
def test_a_score_head_sits_whole_on_the_last_stage(tiny: Tiny, family: str) -> None:
    path, layout = tiny(family, "score"), Layout(tp=2, pp=2)
    spec = read_spec(path)
    check_complete(spec, layout, "score")
    ranks = scatter(path, spec, layout, "score")
    assert_gathers_to(load_file(path / "model.safetensors"), ranks)
    holding = {place.pp for place, shards in ranks.items() for shard in shards if shard.name == "score.weight"}
    assert holding == {1}
    names = {shard.name for shards in ranks.values() for shard in shards}
    assert "output_layer.weight" not in names


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("llama_tied", 4), ("qwen3", 2), ("qwen3", 4)])
def test_queries_keys_and_values_are_interleaved_by_group(tiny: Tiny, family: str, tp: int) -> None:
    """Against the view that Megatron's attention takes of the whole, also where a group spans ranks."""
    path = tiny(family)
    spec, saved = read_spec(path), load_file(path / "model.safetensors")
    ranks = scatter(path, spec, Layout(tp=tp), "lm").values()
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    whole = torch.cat([tensor for shards in ranks for shard, tensor in shards.items() if shard.name == name])
    groups = whole.view(spec.num_kv_heads, -1, spec.head_dim, spec.hidden)
    q, k, v = (saved[f"model.layers.1.self_attn.{kind}_proj.weight"] for kind in "qkv")
    assert torch.equal(groups[:, :-2].reshape(q.shape), q)
    assert torch.equal(groups[:, -2].reshape(k.shape), k)
    assert torch.equal(groups[:, -1].reshape(v.shape), v)


def test_a_rank_holds_its_share_of_gate_above_its_share_of_up(tiny: Tiny) -> None:
    path = tiny("mixtral")
    spec, saved = read_spec(path), load_file(path / "model.safetensors")
    shards = scatter(path, spec, Layout(tp=2, pp=2, ep=2, etp=2), "lm")[RankPlace(tp=0, pp=1, ep=1, etp=1)]
    by_name = {shard.name: tensor for shard, tensor in shards.items()}
    experts = "model.layers.3.block_sparse_moe.experts.2"  # the first expert of the second rank, in its second layer
    half = spec.ffn // 2
    gate_up = torch.cat([saved[f"{experts}.w1.weight"][half:], saved[f"{experts}.w3.weight"][half:]])
    local = "decoder.layers.1.mlp.experts.local_experts.0"
    assert torch.equal(by_name[f"{local}.linear_fc1.weight"], gate_up)
    assert torch.equal(by_name[f"{local}.linear_fc2.weight"], saved[f"{experts}.w2.weight"][:, half:])


def test_tied_embeddings_are_copied_to_the_last_of_several_stages(tiny: Tiny) -> None:
    spec = read_spec(tiny("llama_tied"))

    def names(layout: Layout, pp: int) -> set[str]:
        return {shard.name for shard in shards_of(spec, layout, RankPlace(pp=pp), "lm")}

    assert "output_layer.weight" not in names(Layout(), 0)
    assert "output_layer.weight" not in names(Layout(pp=2), 0)
    assert {"output_layer.weight", "decoder.final_layernorm.weight"} <= names(Layout(pp=2), 1)


def test_only_the_rows_of_the_vocabulary_are_padded(tiny: Tiny) -> None:
    spec = read_spec(tiny("llama"))
    assert [padded_vocab(131, tp) for tp in (1, 2, 4)] == [131, 132, 132]
    padded = {s.name: s.padding for s in shards_of(spec, Layout(tp=4), RankPlace(tp=3), "lm") if s.padding}
    assert padded == dict.fromkeys(
        ["embedding.word_embeddings.weight", "output_layer.weight"], (((32, 33), (0, spec.hidden)),)
    )


def test_chunks_and_stages_hold_layers_in_megatrons_order() -> None:
    layout = Layout(pp=2, vpp=2)
    held = [[list(layers_of_chunk(layout, 8, pp, chunk)) for chunk in range(2)] for pp in range(2)]
    assert held == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = Layout(pp=4, vpp=2, first_stage_layers=2, last_stage_layers=4)
    held = [[list(layers_of_chunk(uneven, 14, pp, chunk)) for chunk in range(2)] for pp in range(4)]
    assert held == [[[0], [7]], [[1, 2], [8, 9]], [[3, 4], [10, 11]], [[5, 6], [12, 13]]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "tp 3 does not divide 4 attention heads"),
        (Layout(pp=3), "4 of 4 layers do not split over 3 stages"),
        (Layout(pp=2, vpp=4), r"stages of \[2, 2\] layers do not split into 4 chunks"),
        (Layout(vpp=2), "vpp 2 needs more than one pipeline stage"),
        (Layout(ep=3), "ep 3 does not divide 4 experts"),
        (Layout(etp=5), "etp 5 does not divide 48 rows of an expert"),
        (Layout(pp=2, first_stage_layers=1, last_stage_layers=1), "2 of 4 layers do not split over 0 stages"),
        (Layout(pp=3, first_stage_layers=4), "0 of 4 layers do not split over 2 stages"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tiny: Tiny, layout: Layout, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shards_of(read_spec(tiny("qwen3_moe")), layout, RankPlace(), "lm")


def test_experts_cannot_be_split_where_there_are_none(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="the model has no experts"):
        shards_of(read_spec(tiny("llama")), Layout(ep=2), RankPlace(), "lm")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_local_names_stay_as_they_are(tiny: Tiny, family: str) -> None:
    names = [shard.name for shard in shards_of(read_spec(tiny(family)), Layout(), RankPlace(), "lm")]
    assert [local_name(name) for name in names] == names


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),  # before experts it stays on its own
        ("mlp.experts.linear_fc2.weight12", "mlp.experts.local_experts.12.linear_fc2.weight"),
    ],
)
def test_names_of_transformer_engine(name: str, local: str) -> None:
    assert local_name(f"decoder.layers.3.{name}") == f"decoder.layers.3.{local}"


def test_a_rank_of_a_model_with_many_experts_has_its_table_at_once() -> None:
    spec = spec_of(HfConfig(published.QWEN3_235B, "config.json"))
    start = time.process_time()
    shards = shards_of(spec, Layout(tp=8, pp=2, ep=8), RankPlace(tp=3, pp=1, ep=2), "lm")
    assert time.process_time() - start < 1
    assert sum(shard.expert for shard in shards) == 47 * 16 * 2
