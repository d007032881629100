"""Reads weights from safetensors files, only the requested boxes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl import files
from mrl.dtypes import torch_dtype
from mrl.errors import ModelError, problem_list
from mrl.hub import INDEX_FILE, SINGLE_FILE, check_files
from mrl.models import fp8_blocks, mxfp4
from mrl.models.families import FAMILIES
from mrl.models.hf_config import HfConfig
from mrl.models.regions import Region, slices
from mrl.models.spec import ModelSpec
from mrl.models.stored import ExpertPart
from mrl.models.table import LM_HEAD, SCORE, Head, Shard, file_tensors

_FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}


class HfReader:
    """Tensors of a model directory, by name and box."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        check_files(self.path)
        if (self.path / INDEX_FILE).exists():
            self._file_of = self._read_index()
        elif (self.path / SINGLE_FILE).exists():
            self._file_of = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise _nothing_to_read(self.path)
        self._packed = mxfp4.packed_names(self._file_of.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._packed

    def read(self, name: str, box: Region) -> torch.Tensor:
        """Return a box of one tensor, of a quantized one in float32. Nothing else of the tensor is read.

        Experts that alternate in one tensor of the files are read together.
        """
        if part := self._part(name):
            return part.view(self.read(part.file, part.box(box)))
        if name in self._packed:
            groups = slices(mxfp4.covering(box))
            blocks, scales = (self._slice(name + end)[groups] for end in (mxfp4.BLOCKS, mxfp4.SCALES))
            return mxfp4.dequantized(blocks, scales, box)
        entry = self._slice(name)
        tensor: torch.Tensor = entry[slices(box)]
        if entry.get_dtype() != fp8_blocks.FILE_TYPE:
            return tensor
        assert self.block, "`check` refuses FP8 without blocks"
        scales = self._slice(fp8_blocks.scale_of(name))[slices(fp8_blocks.covering(box, self.block))]
        return fp8_blocks.dequantized(tensor, scales, box, self.block)

    @cached_property
    def block(self) -> fp8_blocks.Block | None:
        """Rows and columns of the blocks with one scale, or None if the weights are not quantized."""
        return fp8_blocks.read_block(HfConfig.read(self.path))

    def __iter__(self) -> Iterator[str]:
        parts = {name + end for name in self._packed for end in (mxfp4.BLOCKS, mxfp4.SCALES)}
        yield from (name for name in self._file_of if name not in parts)
        yield from self._packed

    def _part(self, name: str) -> ExpertPart | None:
        """Return the place of a tensor that is a part of one in the files; None if it has its own."""
        return FAMILIES[self._model_type].stored(name) if name not in self and ".experts." in name else None

    @cached_property
    def _model_type(self) -> str:
        return HfConfig.read(self.path).text("model_type")

    def shape(self, name: str) -> tuple[int, ...]:
        if part := self._part(name):
            return part.shape(self.shape(part.file))
        if name in self._packed:
            return mxfp4.shape_of(self.shape(name + mxfp4.BLOCKS))
        return tuple(self._slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        return self.read(name, tuple((0, size) for size in self.shape(name)))

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return a range of rows of a matrix."""
        return self.read(name, ((begin, end), (0, self.shape(name)[1])))

    def check(self, spec: ModelSpec, head: Head, new_head: bool = False) -> None:
        """Raise an error if the files are not this model. `new_head` allows a language model without a score head."""
        expected = file_tensors(spec, head)
        ignorable = {LM_HEAD} if spec.tied or (new_head and head == "score") else set()
        optional = {SCORE} if new_head else set()
        problems = [f"{name} is missing" for name in expected if name not in self and name not in optional]
        left_out = self._predicting_layers(spec)
        for name in {*self} - left_out:
            if name in expected:
                format_problems = [*self._format_problems(name)]
                if not format_problems and (shape := self.shape(name)) != expected[name]:
                    problems.append(f"{name} has shape {list(shape)}, not {list(expected[name])}")
                problems += format_problems
            elif (weight := name.removesuffix(fp8_blocks.SCALES)) in expected and self.block:
                if weight in self and (kind := self._slice(weight).get_dtype()) != fp8_blocks.FILE_TYPE:
                    problems.append(f"{weight} holds {kind}, but has scales for FP8: its numbers may be unscaled")
            elif name not in ignorable and not name.endswith(".rotary_emb.inv_freq"):
                problems.append(f"{name} is unexpected")
        if problems:
            stacked = any(name.endswith(".experts.gate_up_proj") for name in self._file_of)
            raise ModelError(
                f"{len(problems)} tensors are not those of a {spec.family} with a {head} head:{problem_list(problems)}",
                where=str(self.path),
                fix="save the model again with one tensor per expert, the default of `save_pretrained`"
                if stacked
                else "check that config.json and the weights belong together, and that the head is right",
            )
        if left_out:
            layers = ", ".join(sorted({".".join(name.split(".")[:3]) for name in left_out}))
            warnings.warn(
                f"{self.path}: {len(left_out)} tensors of {layers} predict more tokens at once (MTP). mrl leaves them "
                "out: they are not trained, and an exported model has none",
                stacklevel=2,
            )

    def _format_problems(self, name: str) -> Iterator[str]:
        if name in self._packed:
            entries = (self._slice(name + end) for end in (mxfp4.BLOCKS, mxfp4.SCALES))
            yield from mxfp4.problems(name, *((tuple(entry.get_shape()), entry.get_dtype()) for entry in entries))
            return
        entry = self._slice(name)
        shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if dtype != fp8_blocks.FILE_TYPE:
            if dtype not in _FLOAT_TYPES:
                yield f"{name} holds {dtype}, not one of {', '.join(sorted(_FLOAT_TYPES))}"
            return
        scales = fp8_blocks.scale_of(name)
        if self.block is None or len(shape) != 2:
            yield f"{name} holds {dtype}, but config.json has no blocks for it: without scales its numbers are wrong"
        elif scales not in self:
            yield f"{scales} is missing: without scales the numbers of {name} are wrong"
        elif self.shape(scales) != (expected := fp8_blocks.scales_shape(shape, self.block)):
            yield f"{scales} has shape {list(self.shape(scales))}, not {list(expected)}"
        elif (kind := self._slice(scales).get_dtype()) != "F32":
            yield f"{scales} holds {kind}, not F32"

    def _predicting_layers(self, spec: ModelSpec) -> set[str]:
        """Return the tensors of the layers that predict more tokens at once, after the model's own layers."""
        numbers = range(spec.num_layers, spec.num_layers + spec.num_predicting_layers)
        prefixes = tuple(f"model.layers.{number}." for number in numbers)
        return {name for name in self._file_of if name.startswith(prefixes)}

    def _slice(self, name: str) -> Any:
        if name not in self:
            raise ModelError(f"the tensor {name} does not exist", where=str(self.path))
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{name} cannot be read: {error}", where=str(self.path / file)) from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                files.check_regular(self.path / file)
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"cannot be read: {error}", where=str(self.path / file), fix="download the file again"
                ) from error
        return self._open[file]

    def _read_index(self) -> dict[str, str]:
        where = str(self.path / INDEX_FILE)
        try:
            weight_map = json.loads(files.read_text(self.path / INDEX_FILE))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"is not an index of weights: {error}", where=where, fix="download the file again"
            ) from error
        if not isinstance(weight_map, dict):
            raise ModelError("is not an index of weights", where=where)
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{file!r} is not the name of a file in this directory", where=where)
        return weight_map


def _nothing_to_read(path: Path) -> ModelError:
    pickled = sorted(file.name for file in path.glob("*.bin")) if path.is_dir() else []
    if pickled:
        return ModelError(
            f"{pickled[0]} is a pickle, which may run code when loaded",
            where=str(path),
            fix="if you trust it, load the model with transformers and `save_pretrained` it as safetensors",
        )
    return ModelError(
        f"found no {SINGLE_FILE} or {INDEX_FILE}",
        where=str(path),
        fix="use a model directory with safetensors weights",
    )


def load_shard(reader: HfReader, shard: Shard, model_dtype: torch.dtype) -> torch.Tensor:
    """Return one local tensor of a model of that dtype, with zeros as padding."""
    tensor = torch.empty(shard.shape, dtype=torch_dtype(shard.dtype) if shard.dtype else model_dtype)
    for box in shard.padding:
        tensor[slices(box)] = 0
    for piece in shard.pieces:
        tensor[slices(piece.target)] = reader.read(piece.hf, piece.source)
    return tensor
