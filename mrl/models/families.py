"""The families that mrl knows, and the way from a model directory to its spec."""

from __future__ import annotations

from pathlib import Path

from mrl.errors import ModelError, did_you_mean
from mrl.models.hf_config import HfConfig
from mrl.models.llama import LLAMA
from mrl.models.mistral import MISTRAL
from mrl.models.mixtral import MIXTRAL
from mrl.models.qwen2 import QWEN2
from mrl.models.qwen3 import QWEN3
from mrl.models.qwen3_moe import QWEN3_MOE
from mrl.models.spec import ModelSpec

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def read_spec(path: str | Path) -> ModelSpec:
    """Return what the `config.json` in a model directory describes."""
    return spec_of(HfConfig.read(path))


def spec_of(config: HfConfig) -> ModelSpec:
    """Return what a `config.json` describes; a typed error where mrl cannot train such a model exactly."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise config.error("model_type", f'"{model_type}" is not supported', did_you_mean(model_type, FAMILIES))
    family = FAMILIES[model_type]
    known = {family.architecture("lm"), family.architecture("score")}
    named = config.defaulting(architectures=[]).items("architectures", str)
    if not known.issuperset(named):
        raise config.error("architectures", f"{', '.join(named)}: only {' and '.join(sorted(known))} are supported")
    if "quantization_config" in config:
        raise config.error("quantization_config", "quantized weights cannot be trained", "use the full-precision model")
    try:
        return family.read(config)
    except ModelError as error:
        error.where = error.where or config.where  # the spec does not know which file it came from
        raise
