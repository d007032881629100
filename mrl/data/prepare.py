"""Published data sets as the parquet files that presets expect: files are verified, and every dropped row is
reported."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.config.data import FILE_KINDS
from mrl.data.published import Exercise, Published
from mrl.data.row_files import JsonlFile, ParquetFile
from mrl.errors import BadRow, DataError
from mrl.files import sha256, sync
from mrl.hub import dataset_file

_ROWS_AT_ONCE = 10_000
_MADE_FROM = b"mrl.made_from"


@dataclass(frozen=True)
class SourceFile:
    """A source file, and whether it is the published one."""

    part: str
    path: Path
    sha256: str
    is_published: bool


@dataclass
class Part:
    """Rows of one part, and the rows that were dropped."""

    exercises: list[Exercise] = field(default_factory=list)
    num_read: int = 0
    num_repeated: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> places of the rows that were refused for it."""


def find_sources(dataset: Published, given: Sequence[Path], hashes: Mapping[Path, str]) -> list[SourceFile]:
    """Return the files to read: the hub's, which must have their published hashes, or the given ones."""
    if unread := [str(path) for path in hashes if path not in given]:
        raise DataError(f"a hash is given for {', '.join(unread)}, which is not read", fix="add it to --from")
    if given:
        files_found = [(_part_of(path, dataset), path, hashes.get(path)) for path in given]
    else:
        repository, revision = dataset.repository, dataset.revision
        files = dataset.files.items()
        files_found = [(part, dataset_file(repository, revision, file.path), file.sha256) for part, file in files]
    if missing := dataset.files.keys() - {part for part, _, _ in files_found}:
        raise DataError(f"no file for {', '.join(sorted(missing))} is given", fix="list all files with --from")
    published = {file.sha256 for file in dataset.files.values()}
    return [
        _hashed(part, path, expected, published) for part, path, expected in sorted(files_found, key=itemgetter(0, 1))
    ]


def prepare(dataset: Published, sources: Sequence[SourceFile], out: Path) -> dict[Path, Part]:
    """Write a file for each part, after all rows have been read."""
    made_from = json.dumps([[source.path.name, source.sha256] for source in sources])
    targets = {part: out / f"{part}.parquet" for part in dataset.parts}
    for target in targets.values():
        _check_old(target, made_from)
    made = {}
    for part in dataset.files:
        made[part] = _read(dataset, part, [source.path for source in sources if source.part == part])
    if dataset.num_test:
        exercises = made["train"].exercises
        made["test"] = Part(exercises[-dataset.num_test :])
        del exercises[-dataset.num_test :]
    try:
        out.mkdir(parents=True, exist_ok=True)
        staged = {part: _write(_rows_of(dataset, part, made[part]), made_from, targets[part]) for part in targets}
        for part, file in staged.items():
            file.replace(targets[part])
        sync(out)
    except OSError as error:
        raise DataError(f"cannot be written: {error.strerror}", where=str(out)) from error
    return {target: made[part] for part, target in targets.items()}


def _part_of(path: Path, dataset: Published) -> str:
    if path.suffix not in FILE_KINDS:
        raise DataError(f"not a {' or '.join(FILE_KINDS)} file", where=str(path), fix="convert it")
    for part in dataset.files:
        if len(dataset.files) == 1 or path.name.startswith(part):
            return part
    raise DataError(
        "the name does not show the part", where=str(path), fix=f"start its name with {' or '.join(dataset.files)}"
    )


def _hashed(part: str, path: Path, expected: str | None, published: AbstractSet[str]) -> SourceFile:
    try:
        actual = sha256(path)
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    if expected is not None and actual != expected:
        fix = "it is damaged or another version: remove it and download it again"
        raise DataError(f"its sha256 is {actual}, not {expected}", where=str(path), fix=fix)
    return SourceFile(part, path, actual, actual in published)


def _read(dataset: Published, part: str, paths: Sequence[Path]) -> Part:
    made = Part()
    kept: dict[Hashable, tuple[str, Exercise]] = {}
    ambiguous = set()
    for where, raw in (row for path in paths for row in _rows(path, dataset.columns)):
        made.num_read += 1
        try:
            if isinstance(raw, BadRow):
                raise raw
            exercise = dataset.read(raw, where)
        except BadRow as error:
            made.refused.setdefault(error.what, []).append(error.where)
            continue
        key = exercise.key if dataset.repeats else made.num_read
        _, first = kept.setdefault(key, (where, exercise))
        made.num_repeated += first is not exercise
        if first.answer != exercise.answer:
            ambiguous.add(key)
    for key in [key for key in kept if key in ambiguous]:
        made.refused.setdefault("another row gives a different answer to the same question", []).append(
            kept.pop(key)[0]
        )
    made.exercises = [exercise for _, exercise in kept.values()]
    expected, where = dataset.files[part].num_rows, f"{dataset.repository}, {part}"
    if made.num_read != expected:
        raise DataError(
            f"{made.num_read} rows, not {expected}",
            where=where,
            fix="check that the file is complete and belongs to this data set",
        )
    if len(made.exercises) <= dataset.num_test:
        reasons = "; ".join(f"{len(rows)}: {reason}" for reason, rows in made.refused.items())
        raise DataError(f"{len(made.exercises)} of {made.num_read} rows remain ({reasons})", where=where)
    return made


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row, with the row or its error."""
    if path.suffix == ".parquet":
        file = ParquetFile(path, list(columns))
        for index, row in enumerate(file):
            yield file.where(index), row
        return
    lines = JsonlFile(path)
    for index in range(len(lines)):
        try:
            row = lines.row(index)
        except BadRow as error:
            row = error
        yield lines.where(index), row


def _check_old(target: Path, made_from: str) -> None:
    """Refuse to replace a file that `mrl data` did not make, or made from other files."""
    if not target.exists():
        return
    try:
        old = (pq.read_schema(target).metadata or {}).get(_MADE_FROM)
    except (pa.ArrowInvalid, OSError):
        old = None
    if old is None:
        raise DataError(
            "already exists, and was not made by `mrl data`", where=str(target), fix="choose another OUT, or remove it"
        )
    if old.decode() != made_from:
        what = f"was made from {old.decode()}, but the new file would be made from {made_from}"
        raise DataError(what, where=str(target), fix="choose another OUT, or remove it")


def _rows_of(dataset: Published, part: str, made: Part) -> Iterator[dict[str, Any]]:
    for index, exercise in enumerate(made.exercises):
        yield {
            "data_source": exercise.data_source or dataset.repository,
            "prompt": [{"role": "user", "content": exercise.question}],
            "ability": exercise.ability,
            "reward_model": {"ground_truth": exercise.answer},
            # An index of the source would start again in each source.
            "extra_info": {"split": part, "index": index, **exercise.extra},
        }


def _write(rows: Iterator[dict[str, Any]], made_from: str, target: Path) -> Path:
    """Write the rows to disk next to their target, and return the path."""
    batches = []
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(batch))
    staged = target.with_name(f".{target.name}.tmp")
    pq.write_table(pa.Table.from_batches(batches).replace_schema_metadata({_MADE_FROM: made_from}), staged)
    sync(staged)
    return staged
