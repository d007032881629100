"""A model directory for transformers, written box by box in any order.

All sizes are known before the first weight arrives, so the files get their headers and full length at once, and every
box is written directly to its place through a memory map: no tensor is gathered, and memory holds only what arrives.
The directory appears under its name when it is complete and on disk, or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch

from mrl import files
from mrl.dtypes import SAFETENSORS_NAMES, dtype_name
from mrl.errors import ModelError, problem_list
from mrl.hub import INDEX_FILE, SINGLE_FILE
from mrl.models.decoder import Family
from mrl.models.families import FAMILIES
from mrl.models.open_model import OpenSpec
from mrl.models.regions import Region, Shape, slices, tiling_problems, whole
from mrl.models.source_form import SourceForm
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, file_tensors, float32_tensors, hf_tensors

MAX_FILE_BYTES = 5 * 10**9
"""Limit of a file's size."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tokenizer, chat template and generation settings have too many names to list. Weights and code have other suffixes.
_COPIED_SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_MORE_TEMPLATES = "additional_chat_templates"
TensorKinds: TypeAlias = Mapping[str, tuple[torch.dtype, Shape]]


class HfWriter:
    """Takes the boxes of a model's tensors. Leaving the `with` block creates the directory; after an error it creates
    none."""

    def __init__(
        self,
        directory: str | Path,
        spec: ModelSpec,
        source_path: str | Path,
        head: Head,
        dtype: torch.dtype,
        *,
        keeps_mtp: bool = False,
    ) -> None:
        """With `keeps_mtp`, copy the layers that predict more tokens from the source."""
        self._directory = Path(directory).absolute()
        self._refuse_existing()
        if dtype not in _DTYPES:
            raise ModelError(f"weights cannot be written as {dtype}", fix=f"use one of {', '.join(map(str, _DTYPES))}")
        self._shapes = hf_tensors(spec, head)
        wide = float32_tensors(spec)
        self._in_files = file_tensors(spec, head)
        self._dtypes = {name: torch.float32 if name in wide else dtype for name in self._in_files}
        self._dtype = dtype
        self._source = SourceForm.of(Path(source_path), spec, head, self._in_files, keeps_mtp=keeps_mtp)
        self._boxes: dict[str, list[Region]] = defaultdict(list)
        self._staged = self._directory.with_name(f".{self._directory.name}.partial-{secrets.token_hex(4)}")
        self._staged.mkdir(parents=True)
        with ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, self._staged, ignore_errors=True)  # after publishing, it no longer exists
            self._copy_settings(Path(source_path))
            self._adapt_config(spec, head, dtype)
            self._tensors = self._views(FAMILIES[spec.family], self._make_files())
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._cleanup:
            if kind is None:
                self._publish()

    def write(self, name: str, tensor: torch.Tensor, box: Region | None = None) -> None:
        """Write one box of a tensor, or all of it. Each element of each tensor must be written exactly once."""
        if name not in self._shapes:
            raise ModelError(f"{name} is not a tensor of this model", where=str(self._directory))
        box = box or whole(self._shapes[name])
        target = self._tensors[name][slices(box)]
        if tensor.shape != target.shape:
            raise ModelError(
                f"{name} {box}: received a tensor of shape {list(tensor.shape)}", where=str(self._directory)
            )
        target.copy_(tensor)
        self._boxes[name].append(box)

    def _publish(self) -> None:
        problems = [
            f"{name}: {problem}"
            for name, shape in self._shapes.items()
            for problem in tiling_problems(shape, self._boxes[name])
        ]
        if problems:
            raise ModelError(
                f"not every weight was written exactly once:{problem_list(problems)}", where=str(self._directory)
            )
        self._refuse_existing()
        for entry in self._source.carried:
            self._tensors[entry].copy_(self._source.read(entry))
        self._tensors.clear()
        for path in self._staged.rglob("*"):
            files.sync(path)
        files.publish_directory(self._staged, self._directory)

    def _refuse_existing(self) -> None:
        if self._directory.exists():
            raise ModelError("already exists", where=str(self._directory), fix="choose a new directory, or remove it")

    def _copy_settings(self, source: Path) -> None:
        """Copy everything except the weights that transformers reads."""
        for path in source.iterdir():
            if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                files.check_regular(path)
                shutil.copyfile(path, self._staged / path.name)
        if (source / _MORE_TEMPLATES).is_dir():
            shutil.copytree(source / _MORE_TEMPLATES, self._staged / _MORE_TEMPLATES)

    def _adapt_config(self, spec: ModelSpec, head: Head, dtype: torch.dtype) -> None:
        """Write the source's configuration with another head and data type, and only with the layers written."""
        config = json.loads((self._staged / "config.json").read_text(encoding="utf-8"))
        config = self._source.adapted(config, _architecture(spec, head))
        if spec.num_predicting_layers and not self._source.predicts:
            config["num_nextn_predict_layers"] = 0
        config.pop("quantization_config", None)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(dtype)
        if head == "score":
            # how transformers represents a single label
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            if (padding := padding_token(self._staged)) is not None:
                config["pad_token_id"] = padding
        self._write_json("config.json", config)

    def _make_files(self) -> dict[str, torch.Tensor]:
        """Create the files at their full length. Return every tensor in them as a view of its place."""
        entries = self._source.entries(self._in_files, self._dtypes, self._dtype)
        return self._source.views(self._entry_files(entries), self._in_files)

    def _entry_files(self, entries: TensorKinds) -> dict[str, torch.Tensor]:
        groups = _grouped(entries)
        if len(groups) == 1:
            return _mapped_file(self._staged / SINGLE_FILE, groups[0])
        tensors: dict[str, torch.Tensor] = {}
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, start=1):
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            tensors |= _mapped_file(self._staged / file, group)
            weight_map |= dict.fromkeys(group, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        self._write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        return tensors

    def _views(self, family: Family, files: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every tensor as a view of its place in the files' tensors, also of tensors that are not trained."""
        parts = {name: family.stored(name) for name in self._shapes}
        views = {entry: files[entry] for entry in self._source.carried}
        return views | {name: part.view(files[part.file]) if part else files[name] for name, part in parts.items()}

    def _write_json(self, name: str, values: Any) -> None:
        (self._staged / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _architecture(spec: ModelSpec, head: Head) -> str:
    """Return the class of transformers in the configuration."""
    return spec.architecture if isinstance(spec, OpenSpec) else FAMILIES[spec.family].architecture(head)


def padding_token(model: Path) -> int | None:
    """Return a token of a model directory that is used only for padding, or None.

    transformers reads a score at the last token that is not padding. If the end token of a response also pads, it would
    read the score one token earlier.
    """
    config, generation, settings, tokenizer = (
        _read_json(model / name)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    )
    added = {int(number): entry.get("content") for number, entry in settings.get("added_tokens_decoder", {}).items()}
    added |= {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])}
    taken = {
        added_id for added_id, text in added.items() if text in (settings.get("eos_token"), settings.get("bos_token"))
    }
    for ends in (config.get("eos_token_id"), generation.get("eos_token_id"), config.get("bos_token_id")):
        taken.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    pad_tokens = [number for number, text in added.items() if text == settings.get("pad_token")]
    similar = [number for number, text in added.items() if text is not None and "pad" in text.lower()]
    candidates = [config.get("pad_token_id"), *pad_tokens, *similar]
    return next((token for token in candidates if isinstance(token, int) and token not in taken), None)


def _read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(files.read_text(path)) if path.is_file() else {}
    return values


def _grouped(tensors: TensorKinds) -> list[dict[str, tuple[torch.dtype, Shape]]]:
    """Group tensors in order into files of at most `MAX_FILE_BYTES`, except for single larger tensors."""
    groups: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
    file_bytes = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and file_bytes + num_bytes > MAX_FILE_BYTES:
            groups.append({})
            file_bytes = 0
        groups[-1][name] = dtype, shape
        file_bytes += num_bytes
    return groups


def _mapped_file(path: Path, tensors: TensorKinds) -> dict[str, torch.Tensor]:
    """Create a safetensors file for these tensors. Return them as views to be filled."""
    head = safetensors_head(tensors, {"format": "pt"})
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.values()]
    num_bytes = len(head) + sum(sizes)
    with path.open("wb") as file:
        file.write(head)
        file.flush()
        # a full disk raises an error here, instead of crashing in the map
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    parts = torch.split(mapped[len(head) :], sizes)
    return {
        name: part.view(dtype).view(shape) for part, (name, (dtype, shape)) in zip(parts, tensors.items(), strict=True)
    }


def safetensors_head(tensors: TensorKinds, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a safetensors file with these tensors. Their data follow in the same order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        kind = SAFETENSORS_NAMES[dtype_name(dtype)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the following tensors
    return len(text).to_bytes(8, "little") + text
