"""A checkpoint's files without a model: boxes are read back for any partition, and errors name the damage."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mrl.engine.checkpoint_files import (
    FORMAT,
    MANIFEST,
    RANDOM,
    SavedFiles,
    entry,
    export_checkpoint,
    file_name,
    flat_shard_regions,
    write_safetensors,
)
from mrl.errors import EngineError, ModelError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.parameters import Piece
from mrl.models.regions import Region, slices
from mrl.models.table import Shard, hf_tensors
from tests.models.tiny_models import make_tiny

WHOLE = torch.arange(24, dtype=torch.float32).view(6, 4)
MOMENTS = WHOLE * -2
BOXES: list[tuple[int, Region]] = [
    (0, ((0, 2), (0, 4))),
    (1, ((2, 3), (0, 1))),
    (1, ((2, 3), (1, 4))),
    (0, ((3, 6), (0, 4))),
]


def write(directory: Path, **changes: Any) -> Path:
    """Return two ranks' boxes of one matrix, its moments, and their random states."""
    directory.mkdir(exist_ok=True)
    files = {}
    for rank in (0, 1):
        tensors = {RANDOM + "cpu": torch.full((5,), rank, dtype=torch.uint8)}
        for owner, box in BOXES:
            if owner == rank:
                tensors[entry("param", "w", box)] = WHOLE[slices(box)]
                tensors[entry("exp_avg", "w", box)] = MOMENTS[slices(box)]
        path = directory / file_name(rank)
        sha256 = write_safetensors(path, tensors)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    manifest = {"format": FORMAT, "files": files, "tensors": {"w": {"shape": (6, 4), "boxes": BOXES}}, **changes}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory


def test_a_file_is_what_safetensors_reads_and_its_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).t(),
        "a": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
        "c": torch.randn(2, 3).half(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "part": torch.randn(6, 6)[1:4, 2:5],
    }
    sha256 = write_safetensors(tmp_path / "x", tensors)
    assert sha256 == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert list(tensors) == ["b", "a", "empty", "c", "bytes", "part"]
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    backwards = dict(reversed(tensors.items()))
    assert write_safetensors(tmp_path / "y", backwards) == sha256
    header_bytes = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    assert header_bytes % 8 == 0  # so that data is aligned
    assert tensors["b"].untyped_storage().resizable()  # numpy has not seen it


def test_what_has_no_place_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"step: torch\.float64 cannot be saved"):
        write_safetensors(tmp_path / "x", {"step": torch.zeros(1, dtype=torch.float64)})


def test_names_say_which_box_of_which_tensor() -> None:
    assert entry("exp_avg", "model.norm.weight", ((3, 9),)) == "exp_avg/model.norm.weight[3:9]"
    assert entry("param", "w", ((0, 2), (1, 4))) == "param/w[0:2,1:4]"
    assert [file_name(0), file_name(12)] == ["rank-00000.safetensors", "rank-00012.safetensors"]


WANTED: list[Region] = [
    ((0, 6), (0, 4)),
    ((1, 4), (0, 4)),
    ((2, 3), (0, 4)),
    ((2, 3), (1, 3)),
    ((1, 5), (2, 3)),
    ((5, 6), (3, 4)),
]


@pytest.mark.parametrize("box", WANTED, ids=str)
def test_a_box_is_read_from_however_many_it_was_saved_as(tmp_path: Path, box: Region) -> None:
    saved = SavedFiles(write(tmp_path))
    shape = [stop - start for start, stop in box]
    views = {"param": torch.full(shape, torch.nan), "exp_avg": torch.full(shape, torch.nan)}
    saved.read("w", box, views)
    assert torch.equal(views["param"], WHOLE[slices(box)])
    assert torch.equal(views["exp_avg"], MOMENTS[slices(box)])


def test_a_box_that_was_saved_in_part_only_is_an_error(tmp_path: Path) -> None:
    tensors = {"w": {"shape": (6, 4), "boxes": BOXES[:2] + BOXES[3:]}}
    saved = SavedFiles(write(tmp_path, tensors=tensors))
    with pytest.raises(EngineError, match=r"3 elements of w .* are missing"):
        saved.read("w", ((0, 6), (0, 4)), {"param": torch.zeros(6, 4)})
    saved.read("w", ((3, 6), (0, 4)), {"param": torch.zeros(3, 4)})


def test_each_rank_has_its_own_random_states(tmp_path: Path) -> None:
    saved = SavedFiles(write(tmp_path))
    for rank in (0, 1):
        states = saved.random_states(rank)
        assert states.keys() == {"cpu"}
        assert states["cpu"].tolist() == [rank] * 5


def test_each_rank_looks_at_its_share_of_the_files(tmp_path: Path) -> None:
    saved = SavedFiles(write(tmp_path))
    damaged = tmp_path / file_name(1)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    saved.check_files(0, 2)
    saved.check_files(2, 3)  # more ranks than files
    for rank, num_ranks in ((1, 2), (0, 1), (1, 3)):
        with pytest.raises(EngineError, match=r"rank-00001.*is damaged: its sha256 is wrong"):
            saved.check_files(rank, num_ranks)
    damaged.write_bytes(content[:-2])
    with pytest.raises(EngineError, match=f"has {len(content) - 2} bytes instead of {len(content)}"):
        saved.check_files(1, 2)
    damaged.unlink()
    with pytest.raises(EngineError, match=r"rank-00001\.safetensors: is missing"):
        saved.check_files(1, 2)


@pytest.mark.parametrize(
    ("shapes", "other"),
    [
        ({"w": (6, 4)}, None),
        ({"w": (4, 6)}, "w"),
        ({"w": (6, 4), "bias": (6,)}, "bias"),
        ({}, "w"),
        ({"v": (6, 4)}, "v"),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_model_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], other: str | None
) -> None:
    saved = SavedFiles(write(tmp_path))
    if other is None:
        saved.check_model(shapes)
        return
    with pytest.raises(EngineError, match=f"is a checkpoint of another model: {other}"):
        saved.check_model(shapes)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"manifest\.json: is not a checkpoint: "):
        SavedFiles(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(EngineError, match="is not a checkpoint: "):
        SavedFiles(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "mrl-checkpoint-0"}')
    with pytest.raises(EngineError, match=f"does not have the format {FORMAT}"):
        SavedFiles(tmp_path)


def test_a_file_that_lacks_what_the_manifest_promises_is_named(tmp_path: Path) -> None:
    saved = SavedFiles(write(tmp_path))
    with pytest.raises(EngineError, match=r"rank-00000\.safetensors: cannot be read: "):
        saved.read("w", ((0, 6), (0, 4)), {"exp_avg_sq": torch.zeros(6, 4)})
    (tmp_path / file_name(0)).write_bytes(b"no safetensors")
    with pytest.raises(EngineError, match=r"rank-00000\.safetensors: cannot be read: "):
        SavedFiles(tmp_path).read("w", ((0, 6), (0, 4)), {"param": torch.zeros(6, 4)})


HOSTILE: list[Any] = [None, True, -1, 1.5, 10**30, "", "../x", "\u0000", "rank-00009.safetensors"]
HOSTILE += [[], {}, [[]], [None], {"a": 1}]
FACTS = {"num_steps": 3, "num_skipped": [0, 0], "layout": {"tp": 1}, "extra": {}}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a manifest."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def test_a_hostile_manifest_is_refused_or_harmless(tmp_path: Path) -> None:
    good = json.loads((write(tmp_path, **FACTS) / MANIFEST).read_text())
    SavedFiles(tmp_path).check_manifest()
    num_refused = num_tried = 0
    for path, value in itertools.product(places(good), HOSTILE):
        text = copy.deepcopy(good)
        place = text
        for key in path[:-1]:
            place = place[key]
        if path:
            place[path[-1]] = value
        (tmp_path / MANIFEST).write_text(json.dumps(text if path else value))
        num_tried += 1
        try:
            saved = SavedFiles(tmp_path)
            saved.check_manifest()
            saved.check_model({"w": (6, 4)})
            saved.check_files(0, 1)
            view = torch.zeros(6, 4)
            saved.read("w", ((0, 6), (0, 4)), {"param": view})
            assert torch.equal(view, WHOLE), (path, value)
        except EngineError:
            num_refused += 1
    assert num_tried > 800
    assert num_refused > 0.9 * num_tried


# --- as a Hugging Face directory --------------------------------------------------------------------------------------


def save_model(model: Path, directory: Path) -> None:
    """Write a checkpoint of one rank as float32, with moments that differ from the weights."""
    directory.mkdir()
    reader, spec = HfReader(model), read_spec(model)
    tensors, entries = {}, {}
    for number, (name, shape) in enumerate(hf_tensors(spec, "lm").items()):
        whole = reader.read(name, tuple((0, size) for size in shape)).float() + 1 / (3 + number)
        middle = shape[0] // 2
        rest = tuple((0, size) for size in shape[1:])
        boxes: list[Region] = [((0, middle), *rest), ((middle, shape[0]), *rest)]
        for box in boxes:
            tensors[entry("param", name, box)] = whole[slices(box)]
            tensors[entry("exp_avg", name, box)] = torch.full_like(whole[slices(box)], 9.0)
        entries[name] = {"shape": shape, "boxes": [(0, box) for box in boxes]}
    path = directory / file_name(0)
    sha256 = write_safetensors(path, tensors)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256}}
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files, "tensors": entries} | FACTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_checkpoint_is_its_float32_weights_in_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_tiny("llama_tied", tmp_path / "model")
    save_model(model, tmp_path / "saved")
    spec = read_spec(model)
    num = export_checkpoint(tmp_path / "saved", model, "lm", dtype, tmp_path / "out")
    expected = load_file(tmp_path / "saved" / file_name(0))
    shapes = hf_tensors(spec, "lm")
    assert num == len(shapes)
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            written |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no dictionary
    assert written.keys() == shapes.keys()
    for name, shape in shapes.items():
        rest = tuple((0, size) for size in shape[1:])
        middle = shape[0] // 2
        halves = [expected[entry("param", name, ((a, b), *rest))] for a, b in ((0, middle), (middle, shape[0]))]
        assert written[name].dtype == dtype
        np.testing.assert_array_equal(written[name].float().numpy(), torch.cat(halves).to(dtype).float().numpy())


def test_nothing_is_exported_from_damaged_files(tmp_path: Path) -> None:
    model = make_tiny("llama_tied", tmp_path / "model")
    save_model(model, tmp_path / "saved")
    path = tmp_path / "saved" / file_name(0)
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with pytest.raises((EngineError, ModelError), match="is damaged"):
        export_checkpoint(tmp_path / "saved", model, "lm", torch.float32, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_bytes_of_a_file_are_with_the_system_when_it_is_told_to_put_them_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes in Python's own buffer are not on disk, even after `fsync`."""
    path, sizes = tmp_path / "file", []
    monkeypatch.setattr("os.fsync", lambda descriptor: sizes.append(path.stat().st_size))
    write_safetensors(path, {"a": torch.arange(5, dtype=torch.uint8)})
    assert sizes == [path.stat().st_size]


HF = {"q": torch.arange(1, 61).view(10, 6), "k": torch.arange(101, 161).view(10, 6)}
"""Tensors in which no number occurs twice."""
QKV = Shard(
    chunk=0,
    name="linear_qkv.weight",
    shape=(7, 4),
    pieces=(
        Piece("q", ((5, 8), (1, 5)), ((0, 3), (0, 4))),
        Piece("k", ((2, 5), (1, 5)), ((3, 6), (0, 4))),
    ),
    padding=(((6, 7), (0, 4)),),
    expert=False,
    split=True,
)
NORM = Shard(0, "norm.weight", (6,), (Piece("v", ((4, 10),), ((0, 6),)),), (), False, False)


def local() -> torch.Tensor:
    made = torch.zeros(QKV.shape, dtype=torch.int64)
    for piece in QKV.pieces:
        made[slices(piece.target)] = HF[piece.hf][slices(piece.source)]
    return made


def test_each_element_of_a_run_is_in_one_box_at_its_place() -> None:
    for start, stop in itertools.combinations(range(29), 2):
        flat = local().flatten()[start:stop].clone()
        state = {"param": flat, "exp_avg": -flat}
        seen: list[int] = []
        for name, box, views in flat_shard_regions(QKV, start, state):
            assert torch.equal(views["param"], HF[name][slices(box)])
            assert torch.equal(views["exp_avg"], -views["param"])
            seen += views["param"].flatten().tolist()
        assert sorted(seen) == sorted(flat[flat > 0].tolist()), (start, stop)


def test_a_long_run_is_an_end_whole_rows_and_a_beginning() -> None:
    boxes = [(name, box) for name, box, _ in flat_shard_regions(QKV, 2, {"param": local().flatten()[2:23]})]
    assert boxes == [
        ("q", ((5, 6), (3, 5))),
        ("q", ((6, 8), (1, 5))),
        ("k", ((2, 4), (1, 5))),
        ("k", ((4, 5), (1, 4))),
    ]


def test_a_run_of_a_convolution_has_its_rows_and_its_channel() -> None:
    pieces = (Piece("conv", ((4, 7), (0, 1), (0, 4)), ((0, 3), (0, 1), (0, 4))),)
    shard = Shard(0, "conv1d.weight", (3, 1, 4), pieces, (), expert=False, split=True)
    runs = [
        (box, views["w"].flatten().tolist()) for _, box, views in flat_shard_regions(shard, 2, {"w": torch.arange(7)})
    ]
    assert runs == [
        (((4, 5), (0, 1), (2, 4)), [0, 1]),
        (((5, 6), (0, 1), (0, 4)), [2, 3, 4, 5]),
        (((6, 7), (0, 1), (0, 1)), [6]),
    ]


def test_a_run_of_a_vector() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    ((name, box, views),) = flat_shard_regions(NORM, 2, {"param": values})
    assert (name, box) == ("v", ((6, 9),))
    assert torch.equal(views["param"], values)


def test_what_is_written_to_a_view_is_in_the_run() -> None:
    state = {"param": torch.zeros(21)}
    for _, _, views in flat_shard_regions(QKV, 2, state):
        views["param"].fill_(1)
    assert state["param"].tolist() == [1.0] * 21
