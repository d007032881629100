"""Sources of raw rows: files, known datasets by name, and the user's own."""

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
from mrl.config.data import ColumnsConfig, SourceConfig, is_file
from mrl.data.reasoning_gym import ReasoningGymTask
from mrl.data.row_files import JsonlFile, ParquetFile
from mrl.data.rows import Cells
from mrl.data.toy import TOY_TASKS
from mrl.errors import BadRow, DataError, did_you_mean
from mrl.registry import load_attribute

MakeRows = Callable[..., Any]
"""Creates a sequence of rows, with a length and an index."""


class RawRows(Protocol):
    """Raw rows of a source by number."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """Return the raw row, or raise `BadRow` if it cannot be read."""

    def where(self, index: int) -> str:
        """Return the place of that row, for messages."""


class MadeRows:
    """Rows created by code, including the user's: any sequence."""

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
    """Return the rows of a source. Files are opened and indexed, but rows are read only on demand."""
    if is_file(source):
        opened = [_open_file(Path(path), source.columns, is_ranked) for path in _matching(source.dataset)]
        return opened[0] if len(opened) == 1 else ManyFiles(opened)
    rows = _make_rows(source)
    if not len(rows):
        raise DataError("the dataset has no rows", where=source.dataset)
    return MadeRows(rows, source.dataset)


def fingerprint(source: SourceConfig) -> str:
    """Return a fingerprint that distinguishes the files of a source from others with the same number of rows. Empty for
    rows created by code."""
    prints = [files.fingerprint(path) for path in _matching(source.dataset)] if is_file(source) else []
    return hashlib.sha256(" ".join(prints).encode()).hexdigest() if prints else ""


def data_sources(source: SourceConfig, name: str, max_made_rows: int | None) -> set[str]:
    """Return the data sources of the rows, as rewards know them. Rows without one are left out.

    All rows are read, except that of rows created by code at most `max_made_rows` are read, at equal distances.
    """
    column = source.columns.data_source
    if column is None:
        return {name}
    key_columns = ColumnsConfig(prompt=column, data_source=column, ability=None, ground_truth=None, extra_info=None)
    rows = open_source(replace(source, columns=key_columns))
    step = max(1, len(rows) // max_made_rows) if max_made_rows and isinstance(rows, MadeRows) else 1
    names = set()
    for number in range(0, len(rows), step):
        with suppress(BadRow):  # reported when the row is drawn
            names.add(Cells(rows.row(number), rows.where(number)).text(column, "data_source"))
    return names


def _matching(pattern: str) -> list[str]:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        folder = Path(pattern).parent
        suggestion = (
            did_you_mean(Path(pattern).name, [path.name for path in folder.iterdir()]) if folder.is_dir() else ""
        )
        hint = suggestion if folder.is_dir() else f'the directory "{folder}" does not exist'
        raise DataError("the file does not exist", where=pattern, fix=hint)
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
        # conversations contain the prompt themselves
        return ParquetFile(path, list(filter(None, used)), optional=columns.prompt)
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror}", where=str(path)) from error


def _toy(task: str) -> MakeRows:
    if task not in TOY_TASKS:
        raise DataError(f'unknown toy task "{task}"', fix=did_you_mean(task, TOY_TASKS))
    return TOY_TASKS[task]


DATASETS: dict[str, Callable[[str], MakeRows]] = {
    "toy": _toy,
    "reasoning_gym": lambda task: partial(ReasoningGymTask, task),
}
"""Known datasets: the name before the colon of `name:task` -> a function that returns the maker of a task's rows."""


def _make_rows(source: SourceConfig) -> Any:
    name, _, task = source.dataset.partition(":")
    make = DATASETS[name](task) if name in DATASETS else load_attribute(source.dataset)
    if not callable(make):
        raise DataError("is not a class or function that returns rows", where=source.dataset)
    try:
        inspect.signature(make).bind(**source.options)
    except TypeError as error:
        fix = f"it takes {', '.join(inspect.signature(make).parameters) or 'none'}"
        raise DataError(f"options: {error}", where=source.dataset, fix=fix) from error
    rows = make(**source.options)
    if not isinstance(rows, Sized) or not hasattr(rows, "__getitem__") or isinstance(rows, Mapping | str):
        what = f"must return a sequence of rows, with a length and an index, not {type(rows).__name__}"
        raise DataError(what, where=source.dataset)
    return rows
