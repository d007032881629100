"""Reads weights from safetensors files, only the requested boxes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl import files
from mrl.dtypes import torch_dtype
from mrl.errors import ModelError, problem_list
from mrl.hub import INDEX_FILE, SINGLE_FILE, check_files
from mrl.models import fp8_blocks, mxfp4, wrapped
from mrl.models.decoder import Family
from mrl.models.families import FAMILIES
from mrl.models.hf_config import HfConfig
from mrl.models.open_model import NOT_WEIGHTS
from mrl.models.parameters import padded_vocab
from mrl.models.regions import Region, Shape, slices
from mrl.models.spec import ModelSpec
from mrl.models.stored import ExpertPart
from mrl.models.table import EMBEDDING, LM_HEAD, SCORE, Head, Shard, file_tensors

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOAT_TYPES = {*_DTYPES}


class HfReader:
    """Tensors of a model directory, by name and box. Names are those of a language model's own files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        check_files(self.path)
        if (self.path / INDEX_FILE).exists():
            files_of_entries = _read_index(self.path)
        elif (self.path / SINGLE_FILE).exists():
            files_of_entries = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise _nothing_to_read(self.path)
        self._entries = {wrapped.own_name(entry): entry for entry in files_of_entries}
        self._file_of = {name: files_of_entries[entry] for name, entry in self._entries.items()}
        self._packed = mxfp4.packed_names(self._file_of.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._packed or self.entry(name) is not None

    def entry(self, name: str) -> tuple[str, wrapped.Place] | None:
        """Return the entry of its file that holds a tensor, and the place in it; None if no single entry does."""
        place = wrapped.Place(name) if name in self._file_of else None
        if place is None and ".experts." in name and self._family and self._family.may_be_stacked:
            place = wrapped.find(name, self._file_of)
        return None if place is None else (self._entries[place.entry], place)

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
        place = self._place(name)
        entry = self._slice(place.entry)
        tensor: torch.Tensor = entry[slices(place.box(box, entry_shape(self, place)))]
        if place.expert is not None:
            return tensor[0]
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
        return self._family.stored(name) if ".experts." in name and name not in self and self._family else None

    @cached_property
    def _family(self) -> Family | None:
        return FAMILIES.get(HfConfig.read(self.path).of_language_model().text("model_type"))

    def shape(self, name: str) -> tuple[int, ...]:
        if part := self._part(name):
            return part.shape(self.shape(part.file))
        if name in self._packed:
            return mxfp4.shape_of(self.shape(name + mxfp4.BLOCKS))
        place = self._place(name)
        return place.shape(entry_shape(self, place))

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
        may_be_stacked = FAMILIES[spec.family].may_be_stacked
        problems = [f"{name} is missing" for name in expected if name not in self and name not in optional]
        left_out, carried = set(predicting_layers(self, spec)), passengers(self, spec)
        problems += _stacked_problems(self, spec, expected) if may_be_stacked else []
        if carried and self.block:
            problems.append(f"{carried[0]} would be exported from FP8 files: use the full-precision model")
        for name in {*self} - left_out - set(carried):
            if name in expected:
                format_problems = [*self._format_problems(name)]
                if not format_problems and (shape := self.shape(name)) != expected[name]:
                    problems.append(f"{name} has shape {list(shape)}, not {list(expected[name])}")
                problems += format_problems
            elif (weight := name.removesuffix(fp8_blocks.SCALES)) in expected and self.block:
                if weight in self and (kind := self._slice(weight).get_dtype()) != fp8_blocks.FILE_TYPE:
                    problems.append(f"{weight} holds {kind}, but has scales for FP8: its numbers may be unscaled")
            elif wrapped.is_stacked(name) and may_be_stacked:
                problems += self._format_problems(name)
            elif name not in ignorable and not name.endswith(NOT_WEIGHTS):
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
        if carried:
            warnings.warn(
                f"{self.path}: {len(carried)} tensors belong to vision or predict more tokens at once "
                f"({_beginnings(carried)}). mrl does not train or use them. An export has them unchanged",
                stacklevel=2,
            )
        if left_out:
            layers = ", ".join(sorted({".".join(name.split(".")[:3]) for name in left_out}))
            warnings.warn(
                f"{self.path}: {len(left_out)} tensors of {layers} predict more tokens at once (MTP). mrl leaves them "
                "out: they are not trained, and an exported model has none unless you ask for them (--keep-mtp)",
                stacklevel=2,
            )

    def _place(self, name: str) -> wrapped.Place:
        if (entry := self.entry(name)) is None:
            raise ModelError(f"the tensor {name} does not exist", where=str(self.path))
        return entry[1]

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

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"the tensor {name} does not exist", where=str(self.path))
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(self._entries[name])
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


def entry_shape(reader: HfReader, place: wrapped.Place) -> tuple[int, ...]:
    return tuple(reader._slice(place.entry).get_shape())


def dtype_in_file(reader: HfReader, name: str) -> torch.dtype | None:
    """Return the dtype of a tensor in the files; None if it is quantized."""
    return _DTYPES.get(reader._slice(reader._place(name).entry).get_dtype())


def passengers(reader: HfReader, spec: ModelSpec) -> list[str]:
    """Return the tensors that exports have unchanged: vision, and layers that predict more tokens."""
    return sorted(name for name in reader if name.startswith(FAMILIES[spec.family].passengers))


def predicting_layers(reader: HfReader, spec: ModelSpec) -> list[str]:
    """Return the tensors of the layers that predict more tokens at once, after the model's own layers."""
    numbers = range(spec.num_layers, spec.num_layers + spec.num_predicting_layers)
    prefixes = tuple(f"model.layers.{number}." for number in numbers)
    return sorted(name for name in reader if name.startswith(prefixes))


def _stacked_problems(reader: HfReader, spec: ModelSpec, expected: Mapping[str, Shape]) -> Iterator[str]:
    """Yield stacked experts of another number or shape."""
    num_experts = spec.moe.num_experts if spec.moe else 0
    for name, shape in expected.items():
        if (found := reader.entry(name)) is None or (place := found[1]).expert is None:
            continue
        entry = entry_shape(reader, place)
        if len(entry) != 3 or entry[0] != num_experts or place.shape(entry) != shape:
            yield f"{place.entry} has shape {list(entry)}, but {name} has {list(shape)} of {num_experts} experts"


def _read_index(path: Path) -> dict[str, str]:
    where = str(path / INDEX_FILE)
    try:
        weight_map = json.loads(files.read_text(path / INDEX_FILE))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"is not an index of weights: {error}", where=where, fix="download the file again") from error
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


def _beginnings(names: Iterable[str]) -> str:
    return ", ".join(sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names}))


def load_shard(reader: HfReader, shard: Shard, model_dtype: torch.dtype) -> torch.Tensor:
    """Return one local tensor of a model of that dtype, with zeros as padding."""
    tensor = torch.empty(shard.shape, dtype=torch_dtype(shard.dtype) if shard.dtype else model_dtype)
    for box in shard.padding:
        tensor[slices(box)] = 0
    for piece in shard.pieces:
        tensor[slices(piece.target)] = reader.read(piece.hf, piece.source)
    return tensor


def output_rows(reader: HfReader, spec: ModelSpec, vocab: int, tp_rank: int, tp: int) -> torch.Tensor:
    """Return a rank's rows of a model's output matrix, for a vocabulary that may be smaller than the model's."""
    num_rows = padded_vocab(vocab, tp) // tp
    first, stop = tp_rank * num_rows, min((tp_rank + 1) * num_rows, vocab)
    rows = reader.read(EMBEDDING if spec.tied else LM_HEAD, ((first, stop), (0, spec.hidden)))
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
