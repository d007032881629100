"""The keys in a YAML file of NeMo-RL and in the files that its `defaults` name, next to it. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mrl.config.peer_values import product
from mrl.config.values import KeyPath, leaves_of
from mrl.config.verl_script import from_environment, overrides_of
from mrl.errors import ConfigError, Problem
from mrl.files import read_text

_CALL = re.compile(r"\$\{(mul|\.?[\w.]+)(?::([^${}]*))?\}")
_CONFIG = re.compile(r"--config[= ](\S+)")


def read_nemo_rl(text: str, name: str) -> dict[KeyPath, Any]:
    """Return the keys of a YAML file, or of a command with `--config FILE` and overrides."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        values = _with_parents(text, path, ())
        words = ""
    elif config := _CONFIG.search(text):
        path, words = Path(config[1]), text
        values = _with_parents(read_text(path), path, ())
    else:
        raise ConfigError(
            [Problem(name, "", "has no keys of NeMo-RL", "give a YAML file, or a command with --config FILE")]
        )
    leaves = {**dict(leaves_of(values)), **dict(overrides_of(words))}
    return {
        key: from_environment(_resolved(value, key, leaves)) for key, value in leaves.items() if key[0] != "defaults"
    }


def _with_parents(text: str, path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a file over those of the files that it extends. A parent that is missing is an error."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read as YAML: {error}")]) from error
    if not isinstance(values, dict):
        raise ConfigError([Problem(str(path), "", "has no keys of NeMo-RL", "give a YAML file with sections")])
    if "ppo" in values:
        fix = "its GRPO recipes are read; for PPO, begin with `mrl show configs/ppo-llama3.1-70b-8n8g.yaml`"
        raise ConfigError([Problem(str(path), "ppo", "PPO runs of NeMo-RL are not read yet", fix)])
    parents = values.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        file = path.parent / parent
        if not file.is_file() or file in seen:
            fix = "copy it there: its keys are part of this file's"
            raise ConfigError([Problem(str(path), "defaults", f"{file} is missing, or extends itself", fix)])
        merged = _merge(merged, _with_parents(read_text(file), file, (*seen, file)))
    return _merge(merged, values)


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), dict)
    }
    return {**under, **over, **both}


def _resolved(value: Any, key: KeyPath, leaves: Mapping[KeyPath, Any], depth: int = 0) -> Any:
    """Return the value with references to other keys, and with products, computed."""
    if not isinstance(value, str) or "${" not in value or depth > 8:
        return value

    def one(match: re.Match[str]) -> str:
        if match[1] == "mul" and match[2]:
            factors = [part.strip() for part in match[2].split(",")]
            numbers = [int(factor) for factor in factors if factor.isdigit()]
            return str(product(*numbers)) if len(numbers) == len(factors) else match[0]
        name = match[1].lstrip(".")
        path = (*key[:-1], name) if match[1].startswith(".") else tuple(name.split("."))
        return str(leaves[path]) if match[2] is None and path in leaves and leaves[path] is not None else match[0]

    alone = _CALL.fullmatch(value)
    text = _CALL.sub(one, value)
    if text == value:
        return value
    return _resolved(yaml.safe_load(text) if alone or text.isdigit() else text, key, leaves, depth + 1)
