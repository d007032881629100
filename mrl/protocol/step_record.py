"""A recorded step on disk: what was generated, what went into the update, and prints of tensors before and after it.

`RUN/record/step-000012/` holds three batch files (`DataProto.load_from_disk`): `samples.mrl` with the samples as they
were scored, `batch.mrl` with the rows and columns of the update and the facts of the step as its `meta_info`, and
`prints.mrl` with a row per tensor, rank and moment. It contains no code. A step is published by one rename.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mrl import files
from mrl.errors import SetupError
from mrl.protocol.data_proto import DataProto

DIRECTORY = "record"
_FORMAT = "mrl-record-1"
_DIGITS = re.compile(r"^step-([0-9]{6,18})$")
_SAMPLES, _BATCH, _PRINTS = "samples.mrl", "batch.mrl", "prints.mrl"


@dataclass(frozen=True)
class TensorPrint:
    """Small facts about the part of a tensor that a rank holds, which add up over parts."""

    kind: str
    """weight | main_weight | exp_avg | exp_avg_sq | gradient | input | output."""
    name: str
    """A tensor of Hugging Face's files, or a module of the model."""
    count: int
    digest: int
    """Sum of all bits, each times an odd number that depends on its place; modulo 2^64."""
    squares: float
    sketch: tuple[float, ...]
    """Sums with random signs. The mean square of their difference estimates that of two tensors."""
    is_first_copy: bool
    """Whether no other rank counts the same part."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's place and host, and its prints: after a moment, or of each update."""

    place: dict[str, int]
    host: str
    state: list[TensorPrint]
    updates: list[list[TensorPrint]]


@dataclass(frozen=True, order=True)
class Moment:
    """The time of a print in a step: before its updates, in one of them, or after them."""

    order: int
    update: int = 0

    def __str__(self) -> str:
        return ("before the update", f"update {self.update + 1}", "after the update")[self.order]


BEFORE, AFTER = Moment(0), Moment(2)
Placed = tuple[str, Moment, int, TensorPrint]
"""Role, moment, rank and print."""


def prints_to_batch(prints: Sequence[Placed]) -> DataProto:
    parts = [placed[3] for placed in prints]
    numbers = {
        "order": [moment.order for _, moment, *_ in prints],
        "update": [moment.update for _, moment, *_ in prints],
        "rank": [rank for _, _, rank, _ in prints],
        **{name: [getattr(part, name) for part in parts] for name in ("count", "digest", "is_first_copy")},
    }
    tensors = {name: torch.tensor(values) for name, values in numbers.items()}
    tensors["squares"] = torch.tensor([part.squares for part in parts], dtype=torch.float64)
    tensors["sketch"] = torch.tensor([part.sketch for part in parts], dtype=torch.float64)
    names = {name: [getattr(part, name) for part in parts] for name in ("kind", "name")}
    return DataProto.from_dict(tensors, {"role": [role for role, *_ in prints], **names})


def _prints_of(batch: DataProto) -> list[Placed]:
    moments = zip(batch["order"].tolist(), batch["update"].tolist(), strict=True)
    columns = [batch[name].tolist() for name in ("kind", "name", "count", "digest", "squares")]
    sketches = map(tuple, batch["sketch"].tolist())
    rows = zip(*columns, sketches, map(bool, batch["is_first_copy"].tolist()), strict=True)
    placed = zip(batch["role"].tolist(), moments, batch["rank"].tolist(), rows, strict=True)
    return [(role, Moment(*moment), rank, TensorPrint(*row)) for role, moment, rank, row in placed]


def record_of(run: Path, step: int) -> Path:
    return run / DIRECTORY / f"step-{step:06d}"


def recorded_steps(run: Path) -> list[int]:
    """Return the recorded steps of a run, in order."""
    names = (_DIGITS.match(path.name) for path in (run / DIRECTORY).glob("step-*"))
    return sorted(int(digits[1]) for digits in names if digits)


def recorded_bytes(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / DIRECTORY).rglob("*") if file.is_file())


@dataclass(frozen=True)
class StepRecord:
    """A recorded step, read from its files."""

    path: Path
    samples: DataProto
    batch: DataProto
    facts: dict[str, Any]

    @classmethod
    def read(cls, run: Path, step: int) -> StepRecord:
        """Read a step of a run. Raise an error that lists the recorded steps if it was not recorded."""
        path = record_of(run, step)
        if not path.is_dir():
            known = ", ".join(map(str, recorded_steps(run))) or "none"
            fix = f"choose one of them, or train with training.record.steps=[{step}]"
            raise SetupError(f"step {step} was not recorded; recorded steps: {known}", where=str(run), fix=fix)
        batch = DataProto.load_from_disk(path / _BATCH)
        facts = batch.meta_info
        if facts.get("format") != _FORMAT:
            problem = f"this record has the format {facts.get('format')!r}, not {_FORMAT!r}"
            raise SetupError(problem, where=str(path), fix="read it with the version of mrl that wrote it")
        return cls(path, DataProto.load_from_disk(path / _SAMPLES), batch, facts)

    @cached_property
    def prints(self) -> list[Placed]:
        return _prints_of(DataProto.load_from_disk(self.path / _PRINTS))


def write_record(
    run: Path, step: int, samples: DataProto, batch: DataProto, prints: Sequence[Placed], max_bytes: int
) -> int:
    """Write a step whose facts are `batch.meta_info`, and publish it. Return 0 if the records would get too large."""
    target = record_of(run, step)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    staged = target.with_name(f".{target.name}")
    for leftover in target.parent.glob(".step-*"):
        shutil.rmtree(leftover)
    staged.mkdir(mode=0o700)
    batch.meta_info["format"] = _FORMAT
    for name, part in ((_SAMPLES, samples), (_BATCH, batch), (_PRINTS, prints_to_batch(prints))):
        part.save_to_disk(staged / name)
    if target.exists():  # a resumed run repeated this step
        shutil.rmtree(target)
    size = sum(file.stat().st_size for file in staged.iterdir())
    if recorded_bytes(run) > max_bytes:  # of the other steps and this one
        shutil.rmtree(staged)
        return 0
    files.publish_directory(staged, target)
    return size


def finite(value: Any) -> Any:
    """Return a JSON value with text for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def host_name() -> str:
    return os.uname().nodename
