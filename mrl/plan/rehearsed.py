"""Which configurations `mrl rehearse` has run on this account: a small file for each, by a digest of what counts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from datetime import datetime
from pathlib import Path

from mrl import files
from mrl.config.sft import AnyConfig

_DOES_NOT_COUNT = ("run", "data", "training", "validation", "reward", "judge", "deadlines")
"""Sections that change no tensor of a model."""


def remember(config: AnyConfig) -> None:
    """Note that every kind of rank of this configuration was rehearsed."""
    path = _path(config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_text(path, "")


def rehearsed_on(config: AnyConfig) -> str | None:
    """Return the day of the last rehearsal of this configuration, or None if it was never rehearsed."""
    try:
        return datetime.fromtimestamp(_path(config).stat().st_mtime).strftime("%Y-%m-%d")
    except FileNotFoundError:
        return None


def _path(config: AnyConfig) -> Path:
    counted = {name: value for name, value in dataclasses.asdict(config).items() if name not in _DOES_NOT_COUNT}
    digest = hashlib.sha256(json.dumps(counted, sort_keys=True, default=str).encode()).hexdigest()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "mrl" / "rehearsed" / digest
