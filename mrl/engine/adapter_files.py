"""Export of saved adapters: as PEFT's files, or merged into the model. Neither needs Megatron."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl import files
from mrl.config.lora import LoraConfig
from mrl.config.peft_settings import SETTINGS_FILE, TENSORS_FILE
from mrl.config.schema import TrainedModelConfig
from mrl.dtypes import torch_dtype
from mrl.engine.base_digest import digest_of_sums, weighted_sum
from mrl.engine.checkpoint_files import SavedFiles
from mrl.engine.merging import RoundingLoss
from mrl.errors import EngineError
from mrl.models.adapters import adapter_names, adapter_tensors, target_of
from mrl.models.families import read_spec
from mrl.models.fp8_base import fp8_tensors
from mrl.models.fp8_exact import rounded_to_fp8
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import HfWriter
from mrl.models.peft_reader import PeftReader
from mrl.models.regions import Shape, whole
from mrl.models.table import SCORE, Head, float32_tensors, hf_tensors

_PREFIX = "base_model.model."


def export_adapters(
    saved: Path, source: Path, base_name: str, model: TrainedModelConfig, dtype: torch.dtype, target: Path
) -> int:
    """Write the adapters in `saved` as a PEFT directory for the model `base_name`. Return the number of tensors."""
    lora, checkpoint, shapes = _checked(saved, source, model)
    tensors = {name: _saved_tensor(checkpoint, name, shape).to(dtype) for name, shape in shapes.items()}
    if SCORE in tensors:
        tensors[_PREFIX + SCORE] = tensors.pop(SCORE)
    if target.exists():
        raise EngineError("already exists", where=str(target), fix="choose a new directory, or remove it")
    write_peft(target, tensors, lora, base_name)
    return len(tensors)


def write_peft(target: Path, tensors: dict[str, Tensor], lora: LoraConfig, base_name: str) -> None:
    """Write PEFT's files. The directory appears when it is complete."""
    staged = target.with_name(f".{target.name}.partial")
    staged.mkdir(parents=True, exist_ok=True)
    save_file(tensors, staged / TENSORS_FILE, metadata={"format": "pt"})
    text = json.dumps(peft_settings(lora, base_name, tensors), indent=2)
    files.write_text(staged / SETTINGS_FILE, text + "\n")
    files.publish_directory(staged, target)


def peft_settings(lora: LoraConfig, base_name: str, tensors: Collection[str]) -> dict[str, Any]:
    """Return the content of PEFT's `adapter_config.json` for adapters with these names."""
    scores = _PREFIX + SCORE in tensors
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "modules_to_save": ["score"] if scores else None,
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({target_of(name) for name in tensors if ".lora_" in name}),
        "bias": "none",
        "use_rslora": lora.rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def export_merged(
    saved: Path,
    source: Path,
    model: TrainedModelConfig,
    dtype: torch.dtype,
    target: Path,
    *,
    keeps_mtp: bool = False,
) -> tuple[int, RoundingLoss]:
    """Write the model `source` with the adapters in `saved` added in float32. Return the number of tensors and the loss
    of rounding to `dtype`.

    The files of `source` must be the model that was trained.
    """
    lora, checkpoint, adapters = _checked(saved, source, model)
    head: Head = "score" if SCORE in adapters else "lm"
    merged = _Merged(source, head, lora, lambda name: _saved_tensor(checkpoint, name, adapters[name]))
    sums = []
    with HfWriter(target, merged.spec, source, head, dtype, keeps_mtp=keeps_mtp) as writer:
        for name, base, tensor in merged.tensors(torch_dtype(model.dtype), dtype):
            sums.append(int(weighted_sum(base, whole(tuple(base.shape)))))
            writer.write(name, tensor)  # rounds to the dtype in the file
        if head == "score":
            writer.write(SCORE, _saved_tensor(checkpoint, SCORE, adapters[SCORE]))
        checkpoint.check_base(digest_of_sums(list(merged.shapes), sums), str(source))
    return len(sums) + (head == "score"), merged.loss


def merge_peft(
    path: str,
    source: Path,
    dtype: torch.dtype,
    target: Path,
    head: Head = "lm",
    base_quantization: Literal["fp8_per_block"] | None = None,
) -> RoundingLoss:
    """Write the model `source` with the adapters of PEFT's files added in float32. Return the loss of rounding.

    The files do not say whether the adapters belong to a quantized model.
    """
    reader = PeftReader(path)
    lora = replace(reader.lora, base_quantization=base_quantization)
    merged = _Merged(source, head, lora, lambda name: reader.read(name, whole(shapes[name])).float())
    reader.check(merged.spec, reader.lora)
    shapes = adapter_tensors(merged.spec, reader.lora)
    with HfWriter(target, merged.spec, source, head, dtype) as writer:
        for name, _, tensor in merged.tensors(dtype, dtype):
            writer.write(name, tensor)
        if head == "score":
            writer.write(SCORE, HfReader(source).whole(SCORE))
    return merged.loss


class _Merged:
    """A model with its adapters added, without a score head."""

    def __init__(self, source: Path, head: Head, lora: LoraConfig, read: Callable[[str], Tensor]) -> None:
        self.spec, self.loss = read_spec(source), RoundingLoss()
        self.shapes = {name: shape for name, shape in hf_tensors(self.spec, head).items() if name != SCORE}
        self._source, self._lora, self._read = source, lora, read

    def tensors(self, trained: torch.dtype, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, frozen value as trained, and merged value in float32 of each tensor."""
        reader, wide, scale = HfReader(self._source), float32_tensors(self.spec), self._lora.scale
        adapters = adapter_tensors(self.spec, self._lora)
        in_fp8 = fp8_tensors(self.spec) if self._lora.base_quantization else ()
        for name, shape in self.shapes.items():
            base = reader.read(name, whole(shape)).to(torch.float32 if name in wide else trained)
            base = rounded_to_fp8(base) if name in in_fp8 else base
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
    checkpoint, spec = SavedFiles(saved), read_spec(source)
    checkpoint.check_manifest()
    shapes = adapter_tensors(spec, lora)
    if SCORE in checkpoint.manifest["tensors"]:  # of a critic or a reward model
        shapes = shapes | {SCORE: (1, spec.hidden)}
    checkpoint.check_lora(lora.identity)
    checkpoint.check_model(shapes)
    checkpoint.check_files(0, 1)
    return lora, checkpoint, shapes


def _saved_tensor(checkpoint: SavedFiles, name: str, shape: Shape) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float32)  # the dtype of the optimizer's weights
    checkpoint.read(name, whole(shape), {"param": tensor})
    return tensor
