"""The form of a model's files, which an export keeps: names, stacked experts, and tensors that mrl does not train.

An export with another head has a language model's own form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrl.errors import ModelError
from mrl.models import fp8_blocks
from mrl.models.hf_config import HfConfig
from mrl.models.hf_reader import HfReader, dtype_in_file, entry_shape, passengers, predicting_layers
from mrl.models.regions import Shape, slices, whole
from mrl.models.spec import ModelSpec
from mrl.models.table import Head
from mrl.models.wrapped import Place

Kinds = Mapping[str, tuple[torch.dtype, Shape]]


@dataclass(frozen=True)
class SourceForm:
    """Where the files that a model came from have its tensors."""

    places: Mapping[str, tuple[str, Place, Shape]]
    """Tensors in another place than that of a language model's own files: entry, place in it, shape of the entry."""
    carried: Mapping[str, str]
    """Entry -> name in the source of each tensor that mrl does not train."""
    predicts: bool
    """Whether layers that predict more tokens at once are among them, after the model's own layers."""
    reader: HfReader | None
    wraps: bool
    """Whether `config.json` describes a model with vision."""

    @classmethod
    def of(
        cls, source: Path, spec: ModelSpec, head: Head, shapes: Mapping[str, Shape], *, keeps_mtp: bool = False
    ) -> SourceForm:
        if keeps_mtp and not (spec.num_predicting_layers and head == "lm"):
            what = "a model with a score head" if spec.num_predicting_layers else "this model"
            raise ModelError(f"{what} has no layers that predict more tokens (MTP)", fix="leave --keep-mtp out")
        if keeps_mtp and not _has_weights(source):
            raise ModelError("its weights are not on this machine, but --keep-mtp copies some", where=str(source))
        if head != "lm" or not _has_weights(source):
            return cls({}, {}, predicts=False, reader=None, wraps=False)
        reader = HfReader(source)
        found = [(name, entry) for name in shapes if (entry := reader.entry(name)) and entry[0] != name]
        places = {name: (entry, place, entry_shape(reader, place)) for name, (entry, place) in found}
        kept = passengers(reader, spec)
        if keeps_mtp:
            kept += [name for name in predicting_layers(reader, spec) if not name.endswith(fp8_blocks.SCALES)]
        carried = {entry[0]: name for name in kept if (entry := reader.entry(name))}
        config = HfConfig.read(source)
        wraps = config.of_language_model() is not config
        return cls(places, carried, predicts=keeps_mtp, reader=reader, wraps=wraps)

    def entries(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], dtype: torch.dtype) -> Kinds:
        """Return the entries of an export's files, with their dtypes and shapes. `dtype` is that of tensors that were
        quantized in the source."""
        entries = {}
        for name, shape in shapes.items():
            entry, place, entry_shape = self.places.get(name, (name, Place(name), shape))
            entries[entry] = dtypes[name], shape if place.expert is None else entry_shape
        for entry, name in self.carried.items():
            assert self.reader is not None, "only a source with files has such tensors"
            entries[entry] = dtype_in_file(self.reader, name) or dtype, self.reader.shape(name)
        return entries

    def views(self, entries: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of its entry, and the tensors that mrl does not train."""
        views = {entry: entries[entry] for entry in self.carried}
        for name, shape in shapes.items():
            entry, place, entry_shape = self.places.get(name, (name, Place(name), shape))
            view = entries[entry][slices(place.box(whole(shape), entry_shape))]
            views[name] = view if place.expert is None else view[0]
        return views

    def read(self, entry: str) -> torch.Tensor:
        """Return a tensor that mrl does not train."""
        assert self.reader is not None, "only a source with files has such tensors"
        return self.reader.whole(self.carried[entry])

    def adapted(self, config: dict[str, Any], architecture: str) -> dict[str, Any]:
        """Return the configuration of an export. A model with vision stays one, unless it gets another head."""
        if self.wraps:
            return config
        text = dict(HfConfig(config, "config.json").of_language_model().values)
        return {**(text if "text_config" in config else config), "architectures": [architecture]}


def _has_weights(source: Path) -> bool:
    return any(source.glob("*.safetensors"))
