"""Where raw rows come from: files, known datasets by name, and the user's own."""

from __future__ import annotations

import glob
import hashlib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from mrl import files
from mrl.config.names import is_file
from mrl.config.schema import ColumnsConfig, SourceConfig
from mrl.data.reasoning_gym import ReasoningGymTask
from mrl.data.row_files import JsonlFile, ParquetFile
from mrl.data.rows import Cells
from mrl.data.toy import TOY_TASKS
from mrl.errors import BadRow, DataError, did_you_mean
from mrl.registry import load_attribute

MakeRows = Callable[..., Any]
"""Makes a sequence of rows: what has a length and an index."""


class RawRows(Protocol):
    """Rows by number, as they stand in their source."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """Return the raw row, or `BadRow` where there is nothing to read."""

    def where(self, index: int) -> str:
        """Return which row that is, for messages."""


class MadeRows:
    """Rows that code makes: any sequence of them, the user's included."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name}: row {index}"


class ManyFiles:
    def __init__(self, files: Sequence[RawRows]) -> None:
        self._files = files
        self._starts = list(accumulate((len(file) for file in files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Any:
        file, inner = self._place(index)
        return file.row(inner)

    def where(self, index: int) -> str:
        file, inner = self._place(index)
        return file.where(inner)

    def _place(self, index: int) -> tuple[RawRows, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


def open_source(source: SourceConfig, *, is_ranked: bool = False) -> RawRows:
    """Return the rows of a source. Files are opened and indexed, but no row is read that is not asked for."""
    if is_file(source):
        opened = [_open_file(Path(path), source.columns, is_ranked) for path in _matching(source.dataset)]
        return opened[0] if len(opened) == 1 else ManyFiles(opened)
    rows = _make_rows(source)
    if not len(rows):
        raise DataError("the dataset has no rows", where=source.dataset)
    return MadeRows(rows, source.dataset)


def fingerprint(source: SourceConfig) -> str:
    """Return what tells the files of a source from others of as many rows; nothing for rows that code makes."""
    found = [files.fingerprint(path) for path in _matching(source.dataset)] if is_file(source) else []
    return hashlib.sha256(" ".join(found).encode()).hexdigest() if found else ""


def data_sources(source: SourceConfig, name: str, max_made_rows: int | None) -> set[str]:
    """Return the names under which rewards know the rows of a source; rows that have none are left out.

    All rows are read, but of those that code makes at most `max_made_rows`, at even distances.
    """
    column = source.columns.data_source
    if column is None:
        return {name}
    alone = ColumnsConfig(prompt=column, data_source=column, ability=None, ground_truth=None, extra_info=None)
    rows = open_source(replace(source, columns=alone))
    step = max(1, len(rows) // max_made_rows) if max_made_rows and isinstance(rows, MadeRows) else 1
    found = set()
    for number in range(0, len(rows), step):
        with suppress(BadRow):  # which is reported when it is drawn
            found.add(Cells(rows.row(number), rows.where(number)).text(column, "data_source"))
    return found


def _matching(pattern: str) -> list[str]:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        folder = Path(pattern).parent
        near = did_you_mean(Path(pattern).name, [path.name for path in folder.iterdir()]) if folder.is_dir() else ""
        there = near if folder.is_dir() else f'there is no directory "{folder}"'
        raise DataError("there is no such file", where=pattern, fix=there)
    return paths


def _open_file(path: Path, columns: ColumnsConfig, is_ranked: bool) -> RawRows:
    try:
        if program := files.unpacks(path):
            raise DataError("the file is compressed", where=str(path), fix=f"{program} it, and keep its name")
        if path.suffix == ".jsonl":
            return JsonlFile(path)
        used = [columns.data_source, columns.ability, columns.id]
        if not is_ranked:
            used += [columns.prompt, columns.ground_truth, columns.extra_info]
            return ParquetFile(path, list(filter(None, used)))
        used += [columns.chosen, columns.rejected, columns.label]
        return ParquetFile(path, list(filter(None, used)), optional=columns.prompt)  # conversations hold it themselves
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror}", where=str(path)) from error


def _toy(task: str) -> MakeRows:
    if task not in TOY_TASKS:
        raise DataError(f'there is no toy task "{task}"', fix=did_you_mean(task, TOY_TASKS))
    return TOY_TASKS[task]


DATASETS: dict[str, Callable[[str], MakeRows]] = {
    "toy": _toy,
    "reasoning_gym": lambda task: partial(ReasoningGymTask, task),
}
"""Known datasets: what stands before the colon of `name:task` -> what gives the function that makes a task's rows."""


def _make_rows(source: SourceConfig) -> Any:
    name, _, task = source.dataset.partition(":")
    make = DATASETS[name](task) if name in DATASETS else load_attribute(source.dataset)
    if not callable(make):
        raise DataError("is not a class or function that makes rows", where=source.dataset)
    try:
        inspect.signature(make).bind(**source.options)
    except TypeError as error:
        fix = f"it takes {', '.join(inspect.signature(make).parameters) or 'none'}"
        raise DataError(f"options: {error}", where=source.dataset, fix=fix) from error
    rows = make(**source.options)
    if not isinstance(rows, Sized) or not hasattr(rows, "__getitem__") or isinstance(rows, Mapping | str):
        what = f"must make a sequence of rows, with a length and an index, not {type(rows).__name__}"
        raise DataError(what, where=source.dataset)
    return rows
