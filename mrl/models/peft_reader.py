"""Reads the tensors of an adapter that PEFT or `mrl export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.config.lora import TARGETS, LoraConfig
from mrl.config.peft_settings import TENSORS_FILE, PeftSettings, read_peft_settings
from mrl.errors import ModelError, problem_list
from mrl.models.adapters import adapter_tensors, target_of
from mrl.models.regions import Region, slices
from mrl.models.spec import ModelSpec


class PeftReader:
    """The adapters in one directory."""

    def __init__(self, path: str) -> None:
        self.settings: PeftSettings = read_peft_settings(path)
        self.file: Path = self.settings.path / TENSORS_FILE
        try:
            self._open: Any = safe_open(self.file, framework="pt")
        except (OSError, SafetensorError) as error:
            fix = "copy the file again: it may be incomplete"
            raise ModelError(f"cannot be read: {error}", where=str(self.file), fix=fix) from error
        self.names = frozenset(self._open.keys())  # type: ignore[no-untyped-call]

    @property
    def lora(self) -> LoraConfig:
        """Return the section `lora` that describes these adapters."""
        modules = {target_of(name) for name in self.names}
        targets = [name for name in TARGETS if modules & LoraConfig(rank=1, alpha=1, targets=[name]).modules]
        held = self.settings
        return LoraConfig(rank=held.rank, alpha=held.alpha, rslora=held.rslora, targets=targets)

    def check(self, spec: ModelSpec, lora: LoraConfig) -> None:
        """Raise an error unless the file has exactly the adapters of these targets of the model, in their shapes."""
        shapes = adapter_tensors(spec, lora)
        problems = [f"{name} is missing" for name in sorted(shapes.keys() - self.names)]
        problems += [f"{name} belongs to no target" for name in sorted(self.names - shapes.keys())]
        found = {name: tuple(self._open.get_slice(name).get_shape()) for name in sorted(self.names & shapes.keys())}
        problems += [f"{name} is {found[name]}, not {shapes[name]}" for name in found if found[name] != shapes[name]]
        if problems:
            what = f"has other adapters than the model of family {spec.family} with rank {lora.rank} and its targets:"
            fix = "use the model that the adapters were trained on, and set lora.rank and lora.targets as in the file"
            raise ModelError(f"{what}{problem_list(problems)}", where=str(self.file), fix=fix)

    def read(self, name: str, box: Region) -> Tensor:
        """Return a box of an adapter."""
        part: Tensor = self._open.get_slice(name)[slices(box)]
        return part
