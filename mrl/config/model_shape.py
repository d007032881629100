"""The few numbers of a model that layouts must divide, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mrl.errors import Problem
from mrl.hub import HubName, local_files, neither

_NAMES = {
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; None where its `config.json` does not say."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None


def read_model_shape(key: str, path: str) -> ModelShape | Problem | None:
    """The shape of a model whose config.json is here, None for one on the hub, or what is wrong under this key."""
    directory = local_files(path)
    if directory is None and HubName.parse(path) is None:
        return Problem("", key, neither(path))
    if directory is None:
        return None
    file = directory / "config.json"
    try:
        sizes = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return Problem("", key, f'"{file}" cannot be read: {error.strerror}', "is it a Hugging Face model directory?")
    except (ValueError, RecursionError):
        return Problem("", key, f'"{file}" is not JSON')
    if not isinstance(sizes, dict):
        return Problem("", key, f'"{file}" holds no keys and values')
    found = {field: next((sizes[name] for name in names if name in sizes), None) for field, names in _NAMES.items()}
    return ModelShape(**{field: size if isinstance(size, int) and size > 0 else None for field, size in found.items()})
