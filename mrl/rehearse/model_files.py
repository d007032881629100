"""A model directory without weights: the model's config.json, and a reader that knows every tensor's shape."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mrl.errors import ModelError
from mrl.models.families import FAMILIES, read_spec
from mrl.models.open_model import OpenSpec
from mrl.models.regions import Region
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard, hf_tensors
from mrl.plan.known_models import model_spec, model_values


def write_config(model: str, directory: Path) -> Path:
    """Write the config.json of a model, from its files or of a published model, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    values = model_values(model)
    architecture = FAMILIES[values["model_type"]].architecture("lm")  # sizes of published models come without it
    text = json.dumps({"architectures": [architecture], **values})
    (directory / "config.json").write_text(text, encoding="utf-8")
    if isinstance(spec := model_spec(model), OpenSpec):
        _write_header(directory / "model.safetensors", spec)
    return directory


def _write_header(file: Path, spec: OpenSpec) -> None:
    """Write the names and shapes of the tensors, which a model without a table is read by."""
    entries = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in spec.weights}
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


class TableReader:
    """Replaces the reader of safetensors files. Every tensor that the family has exists, and none has contents."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        spec = read_spec(path)
        self._shapes = hf_tensors(spec, "lm")
        if FAMILIES[spec.family].has_score_head:
            self._shapes |= hf_tensors(spec, "score")

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def check(self, spec: ModelSpec, head: Head, new_head: bool = False) -> None:
        """A model without files has no file that could be wrong."""

    def read(self, name: str, box: Region) -> Tensor:
        """Return a box of a tensor, without contents. A real one is on the host, so this one counts nothing."""
        return torch.empty(()).expand([stop - start for start, stop in box])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def load_shard(reader: TableReader, shard: Shard, dtype: torch.dtype) -> Tensor:
    """Check that every slice of the table lies inside its tensor. Return a tensor of the parameter's shape.

    The real function reads into the host's memory, so this one makes nothing that counts on the device.
    """
    for piece in shard.pieces:
        shape = reader.shape(piece.hf)
        if len(shape) != len(piece.source) or any(
            stop > size for (_, stop), size in zip(piece.source, shape, strict=True)
        ):
            raise ModelError(f"`{shard.name}` needs {piece.source} of {piece.hf}, which is {list(shape)}")
    return torch.empty(1, dtype=dtype).expand(shard.shape)
