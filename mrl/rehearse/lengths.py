"""Lengths of recorded samples, and the fullest micro-batch that a step of them makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.data.packing import PackingRules, plan_step
from mrl.data.row_files import read_sample_columns
from mrl.errors import DataError, counted
from mrl.rehearse.batches import RowLengths

_COLUMNS = ["prompt_tokens", "response_tokens"]
_FIX = "give the directory of a run with samples/, or a parquet file with the columns " + " and ".join(_COLUMNS)


@dataclass(frozen=True)
class Fullest:
    """The micro-batch with the most tokens, and the file whose samples it is made of."""

    rows: list[RowLengths]
    file: str
    tokens: int

    def __str__(self) -> str:
        rows = counted(len(self.rows), "row")
        return f"{rows} with {self.tokens:,} tokens, the fullest micro-batch of {self.file}"


def fullest(path: Path, num_ranks: int, max_tokens: int, rules: PackingRules) -> Fullest:
    """Pack the samples of every recorded step as a run packs them, and return the fullest micro-batch."""
    return max(
        (_of_step(*step, num_ranks, max_tokens, rules) for step in recorded_steps(path)), key=lambda most: most.tokens
    )


def _of_step(file: str, rows: list[RowLengths], num_ranks: int, max_tokens: int, rules: PackingRules) -> Fullest:
    lengths = np.array([row.prompt + row.response for row in rows])
    micro_batches = [part for rank in plan_step(lengths, num_ranks, max_tokens, rules) for part in rank]
    most = max(micro_batches, key=lambda part: int(lengths[part].sum()))
    return Fullest([rows[number] for number in most], file, int(lengths[most].sum()))


def recorded_steps(path: Path) -> Iterator[tuple[str, list[RowLengths]]]:
    """Yield the name and the samples of each file: of a run's directory, or of one file."""
    files = sorted((path / "samples").glob("step-*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError("there are no recorded samples (samples/step-*.parquet)", where=str(path), fix=_FIX)
    for file in files:
        columns = read_sample_columns(file, _COLUMNS, _FIX)
        yield file.name, [RowLengths(*pair) for pair in zip(*columns, strict=True)]
