"""Export of saved adapters: as PEFT's files, or merged into the model. Neither needs Megatron."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl import files
from mrl.config.lora import LoraConfig
from mrl.config.schema import TrainedModelConfig
from mrl.dtypes import torch_dtype
from mrl.engine.base_digest import digest_of_sums, weighted_sum
from mrl.engine.checkpoint_files import SavedFiles
from mrl.engine.merging import RoundingLoss
from mrl.errors import EngineError
from mrl.models.adapters import adapter_names, adapter_tensors, target_of
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import HfWriter
from mrl.models.peft_reader import PeftReader
from mrl.models.regions import Shape, whole
from mrl.models.table import float32_tensors, hf_tensors


def export_adapters(
    saved: Path, source: Path, base_name: str, model: TrainedModelConfig, dtype: torch.dtype, target: Path
) -> int:
    """Write the adapters in `saved` as a PEFT directory for the model `base_name`. Return the number of tensors."""
    lora, checkpoint, shapes = _checked(saved, source, model)
    tensors = {name: _saved_tensor(checkpoint, name, shape).to(dtype) for name, shape in shapes.items()}
    if target.exists():
        raise EngineError("already exists", where=str(target), fix="choose a new directory, or remove it")
    write_peft(target, tensors, lora, base_name)
    return len(tensors)


def write_peft(target: Path, tensors: dict[str, Tensor], lora: LoraConfig, base_name: str) -> None:
    """Write PEFT's files. The directory appears when it is complete."""
    staged = target.with_name(f".{target.name}.partial")
    staged.mkdir(parents=True, exist_ok=True)
    save_file(tensors, staged / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(peft_settings(lora, base_name, tensors), indent=2)
    files.write_text(staged / "adapter_config.json", text + "\n")
    files.publish_directory(staged, target)


def peft_settings(lora: LoraConfig, base_name: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Return the content of PEFT's `adapter_config.json` for adapters with these names."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({target_of(name) for name in tensors}),
        "bias": "none",
        "use_rslora": lora.rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def export_merged(
    saved: Path, source: Path, model: TrainedModelConfig, dtype: torch.dtype, target: Path
) -> tuple[int, RoundingLoss]:
    """Write the model `source` with the adapters in `saved` added in float32. Return the number of tensors and the loss
    of rounding to `dtype`.

    The files of `source` must be the model that was trained.
    """
    lora, checkpoint, adapters = _checked(saved, source, model)
    merged = _Merged(source, lora, lambda name: _saved_tensor(checkpoint, name, adapters[name]))
    sums = []
    with HfWriter(target, merged.spec, source, "lm", dtype) as writer:
        for name, base, tensor in merged.tensors(torch_dtype(model.dtype), dtype):
            sums.append(int(weighted_sum(base, whole(tuple(base.shape)))))
            writer.write(name, tensor)  # rounds to the dtype in the file
        checkpoint.check_base(digest_of_sums(list(merged.shapes), sums), str(source))
    return len(sums), merged.loss


def merge_peft(path: str, source: Path, dtype: torch.dtype, target: Path) -> RoundingLoss:
    """Write the model `source` with the adapters of PEFT's files added in float32. Return the loss of rounding."""
    reader = PeftReader(path)
    merged = _Merged(source, reader.lora, lambda name: reader.read(name, whole(shapes[name])).float())
    reader.check(merged.spec, reader.lora)
    shapes = adapter_tensors(merged.spec, reader.lora)
    with HfWriter(target, merged.spec, source, "lm", dtype) as writer:
        for name, _, tensor in merged.tensors(dtype, dtype):
            writer.write(name, tensor)
    return merged.loss


class _Merged:
    """A model with its adapters added."""

    def __init__(self, source: Path, lora: LoraConfig, read: Callable[[str], Tensor]) -> None:
        self.spec, self.loss = read_spec(source), RoundingLoss()
        self.shapes = hf_tensors(self.spec, "lm")
        self._source, self._lora, self._read = source, lora, read

    def tensors(self, trained: torch.dtype, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, frozen value as trained, and merged value in float32 of each tensor."""
        reader, wide, scale = HfReader(self._source), float32_tensors(self.spec), self._lora.scale
        adapters = adapter_tensors(self.spec, self._lora)
        for name, shape in self.shapes.items():
            base = reader.read(name, whole(shape)).to(torch.float32 if name in wide else trained)
            a, b = adapter_names(name)
            merged = base.float()
            if a in adapters:
                update = scale * (self._read(b) @ self._read(a))
                merged = merged + update
                self.loss.add(update, base.to(dtype), merged.to(dtype))
            yield name, base, merged


def _checked(saved: Path, source: Path, model: TrainedModelConfig) -> tuple[LoraConfig, SavedFiles, dict[str, Shape]]:
    lora = model.lora
    assert lora is not None, "only a model with adapters has them in its checkpoints"
    checkpoint, shapes = SavedFiles(saved), adapter_tensors(read_spec(source), lora)
    checkpoint.check_manifest()
    checkpoint.check_lora(lora.identity)
    checkpoint.check_model(shapes)
    checkpoint.check_files(0, 1)
    return lora, checkpoint, shapes


def _saved_tensor(checkpoint: SavedFiles, name: str, shape: Shape) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float32)  # the dtype of the optimizer's weights
    checkpoint.read(name, whole(shape), {"param": tensor})
    return tensor
