"""Files of a checkpoint: safetensors of boxes, and a manifest with their sizes and hashes. None of them contains code.

Reading them and exporting them as a Hugging Face directory works without Megatron and without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl import files
from mrl.dtypes import SAFETENSORS_NAMES, dtype_name
from mrl.errors import EngineError
from mrl.models.families import read_spec
from mrl.models.hf_writer import HfWriter, safetensors_head
from mrl.models.regions import (
    Region,
    Shape,
    extent,
    intersection,
    is_exact_cover,
    moved,
    num_elements,
    relative,
    slices,
    whole,
)
from mrl.models.table import Head, Shard, hf_tensors

MANIFEST, FORMAT = "manifest.json", "mrl-checkpoint-1"
RANDOM = "random/"
_FILE, _SHA256 = re.compile(r"rank-[0-9]{5}\.safetensors"), re.compile("[0-9a-f]{64}")
"""Largest size of one exported weight file."""

State = dict[str, Tensor]
"""Tensors of the same elements, by Megatron's names: weights ("param") and moments."""


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def entry(kind: str, name: str, box: Region) -> str:
    """Return the name of a tensor's box in a file."""
    return f"{kind}/{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write host tensors one after another, flushed to disk. Return the hash of the file."""
    tensors = dict(sorted(tensors.items()))  # equal states give equal files
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in SAFETENSORS_NAMES:
            raise EngineError(f"{name}: {tensor.dtype} cannot be saved", fix="leave optimizer state in float32")
    sha256 = hashlib.sha256()
    with files.named(path), path.open("wb") as file:

        def put(data: Any) -> None:
            sha256.update(data)
            file.write(data)

        put(safetensors_head({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}))
        for tensor in tensors.values():
            put(tensor.flatten().view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


class SavedFiles:
    """Manifest of a checkpoint, and boxes read from its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest: dict[str, Any] = dict(json.loads(files.read_text(path / MANIFEST)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise EngineError(f"is not a checkpoint: {error}", where=str(path / MANIFEST)) from error
        if self.manifest.get("format") != FORMAT:
            raise EngineError(f"does not have the format {FORMAT}", where=str(path / MANIFEST))
        self._open: dict[str, Any] = {}

    def check_manifest(self) -> None:
        """Raise an error if the manifest is inconsistent, even with a valid hash: it decides which data are read."""
        try:
            problem = next(_wrong(self.manifest), "")
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise EngineError(f"is not a valid manifest: {problem}", where=str(self.path / MANIFEST))

    @property
    def lora(self) -> dict[str, Any] | None:
        """Settings of the saved adapters; None for a checkpoint of all weights."""
        lora: dict[str, Any] | None = self.manifest.get("lora")
        return lora

    def check_lora(self, expected: Mapping[str, Any] | None) -> None:
        """Raise an error if the checkpoint has other adapters, or adapters instead of all weights."""
        if self.lora == expected:
            return
        saved, asked = (_described(lora) for lora in (self.lora, expected))
        raise EngineError(
            f"is a checkpoint of {saved}, but this model trains {asked}",
            where=str(self.path),
            fix="restore the section `lora` of the run, or start another run",
        )

    def check_base(self, digest: str, source: str) -> None:
        """Raise an error if the saved adapters belong to other frozen weights. An empty digest means no adapters."""
        base = self.manifest.get("base", {"digest": "", "path": ""})
        if base["digest"] != digest:
            raise EngineError(
                f"holds adapters of the model {base['path']}, whose weights differ from those of {source}",
                where=str(self.path),
                fix="use the model and the dtype that the run began with",
            )

    def check_model(self, shapes: Mapping[str, Shape]) -> None:
        """Raise an error if the checkpoint belongs to another model."""
        saved_shapes = {name: tuple(tensor["shape"]) for name, tensor in self.manifest["tensors"].items()}
        if differences := sorted(set(saved_shapes.items()) ^ set(shapes.items())):
            raise EngineError(f"is a checkpoint of another model: {differences[0][0]} differs", where=str(self.path))

    def check_files(self, rank: int, num_ranks: int) -> None:
        """Raise an error if files are missing or damaged. Each rank checks its share of them."""
        for name in list(self.manifest["files"])[rank::num_ranks]:
            path, expected = self.path / name, self.manifest["files"][name]
            if not path.exists():
                raise EngineError("is missing", where=str(path))
            if path.stat().st_size != expected["bytes"]:
                raise EngineError(f"has {path.stat().st_size} bytes instead of {expected['bytes']}", where=str(path))
            if files.sha256(path) != expected["sha256"]:
                raise EngineError("is damaged: its sha256 is wrong", where=str(path))

    def read(self, name: str, box: Region, views: State) -> None:
        """Fill the views of a box from all saved boxes that overlap it."""
        missing = num_elements(box)
        for rank, raw in self.manifest["tensors"][name]["boxes"]:
            saved = tuple((start, stop) for start, stop in raw)
            if (common := intersection(box, saved)) is not None:
                missing -= num_elements(common)
                for kind, view in views.items():
                    part = self._slice(file_name(rank), entry(kind, name, saved))[slices(relative(common, saved))]
                    view[slices(relative(common, box))] = part
        if missing:
            raise EngineError(f"{missing} elements of {name} {box} are missing", where=str(self.path))

    def random_states(self, rank: int) -> dict[str, Tensor]:
        handle = self._handle(file_name(rank))
        names = [name for name in handle.keys() if name.startswith(RANDOM)]  # noqa: SIM118  # not a dictionary
        return {name.removeprefix(RANDOM): handle.get_tensor(name) for name in names}

    def _slice(self, file: str, name: str) -> Any:
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise EngineError(f"cannot be read: {error}", where=str(self.path / file)) from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                files.check_regular(self.path / file)
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise EngineError(f"cannot be read: {error}", where=str(self.path / file)) from error
        return self._open[file]


def _described(lora: Mapping[str, Any] | None) -> str:
    return "all weights" if lora is None else f"adapters with {', '.join(f'{k}={v}' for k, v in lora.items())}"


def _wrong(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield inconsistencies of a manifest. May raise an error if a value has the wrong type."""
    skipped, in_a_row = manifest["num_skipped"]
    counts = [manifest["num_steps"], skipped, in_a_row, *(file["bytes"] for file in manifest["files"].values())]
    if not all(_is_count(count) for count in counts):
        yield f"steps and sizes must be counts, not {counts[:3]}"
    if not isinstance(manifest["extra"], dict) or not isinstance(manifest["layout"], dict):
        yield "layout and extra must be dictionaries"
    for name, file in manifest["files"].items():
        if not _FILE.fullmatch(name) or not _SHA256.fullmatch(file["sha256"]):
            yield f"{name!r:.80} is not a file of a checkpoint, or has no hash"
    for name, tensor in manifest["tensors"].items():
        boxes = [tuple((start, stop) for start, stop in box) for _, box in tensor["boxes"]]
        ends = [end for box in boxes for sides in box for end in sides]
        if not all(_is_count(count) for count in (*tensor["shape"], *ends)) or any(
            len(box) != len(tensor["shape"]) for box in boxes
        ):
            yield f"{name!r:.80} has boxes whose axes differ from its shape"
        elif not is_exact_cover(tuple(tensor["shape"]), boxes):
            yield f"the boxes of {name!r:.80} have gaps or overlaps"
        if any(file_name(rank) not in manifest["files"] for rank, _ in tensor["boxes"]):
            yield f"a box of {name!r:.80} is not in any file"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def flat_shard_regions(shard: Shard, start: int, state: State) -> Iterator[tuple[str, Region, State]]:
    """Yield the Hugging Face boxes in a range of a parameter's elements, each with views of the range's part of it."""
    length = len(next(iter(state.values())))
    for place, first, last in _rectangles(shard.shape, start, start + length):
        views = {name: flat[first - start : last - start].view(extent(place)) for name, flat in state.items()}
        for piece in shard.pieces:
            if (common := intersection(place, piece.target)) is not None:
                inside = slices(relative(common, place))
                box = moved(common, piece.target, piece.source)
                yield piece.hf, box, {name: view[inside] for name, view in views.items()}


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Region, int, int]]:
    """Split a range of a tensor's elements, in row order, into the end of a row, whole rows and the start of a row."""
    if len(shape) == 1:
        yield ((start, stop),), start, stop
        return
    if (start, stop) == (0, num_elements(whole(shape))):
        yield whole(shape), start, stop
        return
    columns = shape[-1]
    assert set(shape[1:-1]) <= {1}, f"a tensor of shape {list(shape)} has no rows"
    between = ((0, 1),) * (len(shape) - 2)  # a convolution has one input for each channel
    while start < stop:
        row, column = divmod(start, columns)
        rows = (stop - start) // columns if column == 0 else 0
        end = start + rows * columns if rows else min(stop, (row + 1) * columns)
        across = (0, columns) if rows else (column, column + end - start)
        yield ((row, row + max(rows, 1)), *between, across), start, end
        start = end


def export_checkpoint(
    saved: Path, source: Path, head: Head, dtype: torch.dtype, target: Path, *, keeps_mtp: bool = False
) -> int:
    """Write the weights in `saved` as a Hugging Face directory, tensor by tensor. Return the number of tensors.

    The tokenizer and the settings come from the model `source`. The hashes of the files are checked first. The
    directory is published atomically. With `keeps_mtp`, the layers that predict more tokens come from `source`.
    """
    spec = read_spec(source)
    checkpoint = SavedFiles(saved)
    checkpoint.check_manifest()
    shapes = hf_tensors(spec, head)
    checkpoint.check_model(shapes)
    checkpoint.check_files(0, 1)
    with HfWriter(target, spec, source, head, dtype, keeps_mtp=keeps_mtp) as writer:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=torch.float32)  # the dtype of the optimizer's weights
            checkpoint.read(name, whole(shape), {"param": tensor})
            writer.write(name, tensor)  # rounds to the dtype in the file
    return len(shapes)
