"""Settings in the directory of an adapter that PEFT or `mrl export` wrote, compared with section `lora`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl import files
from mrl.config.lora import ALL_LINEAR, LoraConfig
from mrl.errors import ModelError

SETTINGS_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_REFUSED = {
    "use_dora": "weights are also scaled by columns (DoRA)",
    "rank_pattern": "modules have different ranks",
    "alpha_pattern": "modules have different scales",
    "modules_to_save": "whole modules were trained, too",
    "layers_to_transform": "only some layers have adapters",
    "target_parameters": "adapters belong to stacked parameters, not to modules",
}
"""Keys that must be empty -> what they mean."""


@dataclass(frozen=True)
class PeftSettings:
    """The settings that decide what the adapters mean."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    targets: frozenset[str]
    """Names of the modules; empty for a pattern, which only the tensors can answer."""
    base: str
    """Name or directory of the model that the adapters belong to; empty if the file does not say."""

    def differences(self, role: str, lora: LoraConfig, model: str) -> Iterator[tuple[str, str, str]]:
        """Yield key, problem and fix of each setting of a role that differs from the file."""
        for name, held, asked in (
            ("rank", self.rank, lora.rank),
            ("alpha", self.alpha, lora.alpha),
            ("rslora", self.rslora, lora.rslora),
        ):
            if held != asked:
                what = f"is {_shown(asked)}, but {self.path} has {_shown(held)}"
                yield f"{role}.lora.{name}", what, f"{role}.lora.{name}={_shown(held)}"
        extra = self.targets - lora.modules
        missing = set() if ALL_LINEAR in lora.targets or not self.targets else {*lora.targets} - self.targets
        if extra or missing:
            what = f"are {', '.join(lora.targets)}, but {self.path} has adapters of {', '.join(sorted(self.targets))}"
            yield f"{role}.lora.targets", what, f"{role}.lora.targets=[{', '.join(sorted(self.targets))}]"
        yield from self.base_differences(role, model)

    def base_differences(self, role: str, model: str) -> Iterator[tuple[str, str, str]]:
        """Yield key, problem and fix if the adapters belong to a model with another name."""
        names = [os.path.basename(name.rstrip("/").partition("@")[0]) for name in (self.base, model)]
        if self.base and names[0].lower() != names[1].lower():
            what = f"{self.path} belongs to the model {self.base}, not to {model}"
            fix = f"use {self.base}; if it is the same model, correct base_model_name_or_path in {SETTINGS_FILE}"
            yield f"{role}.lora.path", what, fix


def _shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def read_peft_settings(path: str) -> PeftSettings:
    """Read the settings. Raise an error if they cannot be those of plain low-rank adapters."""
    directory = Path(os.path.expanduser(path))
    file = directory / SETTINGS_FILE
    fix = "give the directory that peft's save_pretrained or mrl export wrote"
    missing = [name for name in (SETTINGS_FILE, TENSORS_FILE) if not (directory / name).is_file()]
    if missing:
        what = f"has no {' and no '.join(missing)}, so it is no adapter of PEFT"
        raise ModelError(what, where=str(directory), fix=fix)
    try:
        values: Any = json.loads(files.read_text(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(file), fix=fix) from error
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise ModelError(f"peft_type is {kind}, not LORA", where=str(file), fix="use an adapter of the type LORA")
    wrong = [f"{name}={values[name]}: {meaning}" for name, meaning in _REFUSED.items() if values.get(name)]
    if values.get("bias", "none") != "none":
        wrong.append(f"bias={values['bias']}: biases were trained, too")
    if wrong:
        what = f"only plain low-rank adapters can be used, but {'; '.join(wrong)}"
        raise ModelError(what, where=str(file), fix="merge the adapters into the model with peft, and use that model")
    rank, alpha, targets = (values.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        raise ModelError(f"r is {rank} and lora_alpha is {alpha}, not two positive numbers", where=str(file), fix=fix)
    return PeftSettings(
        path=directory,
        rank=rank,
        alpha=float(alpha),
        rslora=bool(values.get("use_rslora")),
        targets=frozenset(targets) if isinstance(targets, list) else frozenset(),
        base=str(values.get("base_model_name_or_path") or ""),
    )
