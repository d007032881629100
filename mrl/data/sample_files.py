"""Samples of a step with their text, as a parquet file for whoever wants to read what the model wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mrl import files
from mrl.errors import DataError


def write_samples(directory: Path, step: int, columns: Mapping[str, Sequence[Any]], kind: str = "step") -> Path:
    """Write one row per sample into `step-000012.parquet`, complete or not there. A value may be a list."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{kind}-{step:06d}.parquet"
    staged = path.with_suffix(".tmp")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        pq.write_table(pa.table({name: list(column) for name, column in columns.items()}), file)
    staged.replace(path)
    return path


def read_newest_samples(directory: Path, num_rows: int, kind: str = "step") -> list[dict[str, Any]]:
    """Return the first rows of the newest file of a kind; none where there is no file."""
    found = sorted(directory.glob(f"{kind}-*.parquet"))
    if not found:
        return []
    try:
        files.check_regular(found[-1])
        rows: list[dict[str, Any]] = pq.read_table(found[-1]).slice(0, num_rows).to_pylist()
    except (pa.ArrowException, OSError) as error:
        fix = "move it away: the report then shows the samples before"
        raise DataError(f"the samples cannot be read: {error}", where=str(found[-1]), fix=fix) from error
    return rows
