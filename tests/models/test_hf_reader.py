"""The reader reads boxes, and refuses directories that are not the model."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.table import shards_of
from tests.models.conftest import Tiny
from tests.models.tiny_models import make_tiny

Tensors = dict[str, torch.Tensor]


def changed(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """Return a copy of a model with changed tensors."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def refusal(path: Path, head: str = "lm", new_head: bool = False) -> str:
    with pytest.raises(ModelError) as caught:
        HfReader(path).check(read_spec(path), head, new_head)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_box_is_that_slice(tiny: Tiny) -> None:
    path = tiny("llama")
    name = "model.layers.2.self_attn.o_proj.weight"
    box = HfReader(path).read(name, ((3, 9), (16, 40)))
    assert torch.equal(box, load_file(path / "model.safetensors")[name][3:9, 16:40])


def test_many_files_read_like_one(tmp_path: Path, tiny: Tiny) -> None:
    path = make_tiny("llama", tmp_path / "many", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    spec = read_spec(path)
    many, one = HfReader(path), HfReader(tiny("llama"))
    many.check(spec, "lm")
    for shard in shards_of(spec, Layout(tp=2), RankPlace(tp=1), "lm"):
        assert torch.equal(load_shard(many, shard, torch.float32), load_shard(one, shard, torch.float32))


def test_weights_are_cast_to_the_type_that_is_asked_for(tiny: Tiny) -> None:
    path = tiny("llama")
    shard = shards_of(read_spec(path), Layout(), RankPlace(), "lm")[0]
    saved = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_shard(HfReader(path), shard, torch.bfloat16), saved.bfloat16())


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    message = refusal(changed(tiny("llama"), tmp_path / "changed", change))
    assert "4 tensors are not those of a llama with a lm head" in message
    assert "model.norm.weight is missing" in message
    assert "model.layers.9.mlp.up_proj.weight is unexpected" in message
    assert "model.layers.0.self_attn.q_proj.weight has shape [64, 32], not [64, 64]" in message
    assert "lm_head.weight holds I8" in message


def test_what_old_files_hold_beside_the_weights_is_ignored(tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied, and saved all the same
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    path = changed(tiny("llama_tied"), tmp_path / "old", change)
    HfReader(path).check(read_spec(path), "lm")


def test_layers_that_predict_more_tokens_are_left_out_and_named(tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.4.mlp.gate.e_score_correction_bias"] = torch.zeros(8)

    path = changed(tiny("glm4_moe"), tmp_path / "mtp", change)
    with pytest.warns(UserWarning, match=r"2 tensors of model\.layers\.4 predict more tokens at once \(MTP\)"):
        HfReader(path).check(read_spec(path), "lm")

    def beyond(tensors: Tensors) -> None:
        tensors["model.layers.5.eh_proj.weight"] = torch.zeros(64, 128)

    assert "model.layers.5.eh_proj.weight is unexpected" in refusal(
        changed(tiny("glm4_moe"), tmp_path / "more", beyond)
    )


def test_a_score_head_must_be_there_unless_it_is_to_be_new(tiny: Tiny) -> None:
    assert "score.weight is missing" in refusal(tiny("llama"), "score")
    assert "score.weight is unexpected" in refusal(tiny("llama", "score"), "lm")
    spec = read_spec(tiny("llama"))
    HfReader(tiny("llama")).check(spec, "score", new_head=True)
    HfReader(tiny("llama", "score")).check(spec, "score", new_head=True)
    assert "score.weight" not in HfReader(tiny("llama"))


def test_stacked_experts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    message = refusal(make_tiny("qwen3_moe", tmp_path / "stacked", save_original_format=False))
    assert "model.layers.0.mlp.experts.0.gate_proj.weight is missing" in message
    assert "fix: save the model again with one tensor per expert" in message


def test_pickled_weights_are_never_read(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copy(tiny("llama") / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*\n.*save_pretrained"):
        HfReader(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found no model\.safetensors or model\.safetensors\.index\.json"):
        HfReader(tmp_path)


def test_a_cut_file_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    whole = (tiny("llama") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        HfReader(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not an index of weights"),
        ("[]", "is not an index of weights"),
        ('{"weight_map": []}', "is not an index of weights"),
        ('{"weight_map": {"a": []}}', "is not the name of a file in this directory"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "is not the name of a file in this directory"),
        ('{"weight_map": {"a": "a.safetensors"}}', r"a\.safetensors: cannot be read"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        HfReader(tmp_path).read("a", ((0, 1),))


def test_an_index_that_names_the_wrong_file_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copy(tiny("llama") / "model.safetensors", tmp_path / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "other": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    reader = HfReader(tmp_path)
    assert reader.read("model.norm.weight", ((0, 64),)).shape == (64,)
    with pytest.raises(ModelError, match="other cannot be read"):
        reader.read("other", ((0, 1),))
    with pytest.raises(ModelError, match="the tensor nothing does not exist"):
        reader.read("nothing", ((0, 1),))


def tensors_file(header: bytes, body: bytes = b"\0" * 16, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + body


def entry(begin: object, end: object, shape: str = "[2]") -> str:
    return f'{{"dtype": "F32", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'


HOSTILE_TENSORS = {
    "overlapping": tensors_file(f'{{"a": {entry(0, 8)}, "b": {entry(4, 12)}}}'.encode()),
    "behind the end": tensors_file(f'{{"a": {entry(0, 8)}, "b": {entry(8, 1 << 40, f"[{1 << 38}]")}}}'.encode()),
    "overflowing": tensors_file(f'{{"a": {entry(0, 8)}, "b": {entry(8, (1 << 64) + 16)}}}'.encode()),
    "a shape that overflows": tensors_file(f'{{"a": {entry(0, 16, f"[{1 << 62}, {1 << 62}]")}}}'.encode()),
    "negative": tensors_file(f'{{"a": {entry(-8, 0)}}}'.encode()),
    "backwards": tensors_file(f'{{"a": {entry(16, 0)}}}'.encode()),
    "a hole": tensors_file(f'{{"a": {entry(0, 4, "[1]")}, "b": {entry(12, 16, "[1]")}}}'.encode()),
    "one name twice": tensors_file(f'{{"a": {entry(0, 8)}, "a": {entry(8, 16)}}}'.encode()),
    "a header of 2^63 bytes": tensors_file(b"{}", size=1 << 63),
    "a header of a gigabyte": tensors_file(b"{}", size=1 << 30),
    "a header that is no JSON": tensors_file(b"{" * 9),
    "a header that is deep": tensors_file(b'{"a":' * 100_000),
    "cut off": tensors_file(f'{{"a": {entry(0, 16, "[4]")}}}'.encode())[:-4],
    "nothing": b"",
}


def read_all(path: Path) -> None:
    reader = HfReader(path)
    for name in ("a", "b"):
        reader.read(name, ((0, 2),))


@pytest.mark.parametrize("case", HOSTILE_TENSORS)
def test_a_hostile_file_of_tensors_is_an_error_with_its_name(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_TENSORS[case])
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        read_all(tmp_path)
