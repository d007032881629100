"""Rows of a JSON Lines or parquet file by number, read only on demand.

One streamed pass finds the lines of JSON and keeps eight bytes per row. A row group of parquet is decoded once, when
one of its rows is first needed, into an unlinked temporary file that is mapped into memory: shuffled reading then needs
no further decoding, and the system can reclaim the memory. Samples of a step are also written as parquet, so that users
can read what the model wrote.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mrl import files
from mrl.errors import BadRow, DataError, did_you_mean

CHUNK_BYTES = 4 << 20
MAX_ROW_BYTES = 64 << 20
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class JsonlFile:
    """One JSON object per line. Windows line ends and a UTF-8 byte order mark are allowed; empty lines are bad rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(files.open_regular(path), "rb", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        start = self._read(0, len(UTF8_MARK))
        if start in (b"", UTF8_MARK) and self._size == len(start):
            raise DataError("the file is empty", where=str(path))
        if start.startswith(UTF16_MARKS):
            raise DataError("the file is UTF-16 text", where=str(path), fix="save it as UTF-8")
        self._starts = self._find_lines(len(UTF8_MARK) if start == UTF8_MARK else 0)
        if self._read(self._size - 1, 1) != b"\n":
            try:
                self.row(len(self) - 1)
            except BadRow as error:
                what = f"the last line is cut off: {error.what}"
                raise DataError(what, where=error.where, fix="copy or write the file again") from error

    def __len__(self) -> int:
        return len(self._starts) - 1

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def row(self, index: int) -> Any:
        begin, end = int(self._starts[index]), int(self._starts[index + 1])
        if end - begin > MAX_ROW_BYTES:
            raise BadRow(f"the line has {end - begin} bytes; at most {MAX_ROW_BYTES}", where=self.where(index))
        line = self._read(begin, end - begin).rstrip(b"\r\n")
        if not line.strip():
            raise BadRow("the line is empty", where=self.where(index), fix="remove it")
        try:
            return json.loads(line.decode(), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            what = f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8"
            raise BadRow(what, where=self.where(index), fix="save the file as UTF-8") from error
        except RecursionError as error:
            raise BadRow("nested too deeply", where=self.where(index)) from error
        except ValueError as error:
            raise BadRow(f"not a JSON object: {_reason(error)}", where=self.where(index)) from error

    def _find_lines(self, start: int) -> npt.NDArray[np.int64]:
        """Return the start of each line, and the end of the last."""
        buffer = bytearray(CHUNK_BYTES)
        starts = [np.array([start], dtype=np.int64)]
        position = 0
        self._file.seek(0)
        while count := self._file.readinto(buffer):
            newlines = np.flatnonzero(np.frombuffer(buffer, np.uint8, count) == ord("\n"))
            starts.append(newlines + (position + 1))
            position += count
        offsets = np.concatenate(starts)
        return offsets if offsets[-1] == self._size else np.append(offsets, self._size)

    def _read(self, begin: int, count: int) -> bytes:
        # Reads at a position do not move the file's own position, so threads may share the file.
        content = os.pread(self._file.fileno(), count, begin)
        if len(content) < min(count, self._size - begin):
            raise DataError("the file became shorter while it was read", where=str(self._path), fix="restore it")
        return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error).partition(";")[0]


BATCH_ROWS = 4096
_BUFFER_BYTES = 1 << 20
_DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)  # errors in pages, footers, or names of columns


class ParquetFile:
    """A parquet file, of which only the given columns are read."""

    def __init__(self, path: Path, columns: list[str], optional: str = "") -> None:
        """Open the file. The column `optional` is read if it exists."""
        self._path = path
        try:
            files.check_regular(path)
            # Not mapped: if a mapped file became shorter, the process would end without a message.
            self._file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES)
        except _DAMAGED as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"not a readable parquet file: {reason}", where=str(path)) from error
        known = _dotted_names(self._file.schema_arrow)
        for column in columns:
            if column not in known:
                fix = f"set it in the source's columns, or set it to null ({did_you_mean(column, known)})"
                raise DataError(f"the column `{column}` does not exist", where=str(path), fix=fix)
        read = [*columns, optional] if optional in known else columns
        self._columns = list(dict.fromkeys(column.partition(".")[0] for column in read))
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if negative := [size for size in sizes if size < 0]:
            raise DataError(f"not a readable parquet file: a group of {negative[0]} rows", where=str(path))
        self._starts = np.cumsum([0, *sizes]).tolist()
        if not len(self):
            raise DataError("the file has no rows", where=str(path))
        self._groups: dict[int, pa.Table] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[Any]:
        """Yield every row once. Unlike `row`, this keeps no decoded data."""
        try:
            for batch in self._file.iter_batches(BATCH_ROWS, columns=self._columns):
                yield from batch.to_pylist()
        except _DAMAGED as error:
            raise DataError(f"cannot be read: {str(error).splitlines()[0]}", where=str(self._path)) from error

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"

    def row(self, index: int) -> Any:
        group = bisect_right(self._starts, index) - 1
        if group not in self._groups:
            self._groups[group] = self._decode(group)
        try:
            return self._groups[group].slice(index - self._starts[group], 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise BadRow(f"text that is not UTF-8: {error.reason}", where=self.where(index)) from error

    def _decode(self, group: int) -> pa.Table:
        try:
            batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._columns)
            return _mapped(batches, self._starts[group + 1] - self._starts[group])
        except _DAMAGED as error:
            reason = str(error).splitlines()[0]
            rows = f"rows {self._starts[group]} to {self._starts[group + 1] - 1}"
            raise DataError(f"{rows} cannot be read: {reason}", where=str(self._path)) from error


def _mapped(batches: Iterable[pa.RecordBatch], num_rows: int) -> pa.Table:
    """Return decoded rows from an unnamed file that is mapped into memory."""
    with tempfile.NamedTemporaryFile(prefix="mrl-rows-") as file:
        writer, num_written = None, 0
        for batch in batches:
            writer = writer or pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
            num_written += batch.num_rows
        if writer is None or num_written != num_rows:
            raise pa.ArrowInvalid(f"{num_written} rows found, not {num_rows}")
        writer.close()
        file.flush()
        table = pa.ipc.open_file(pa.memory_map(file.name)).read_all()
    pa.default_memory_pool().release_unused()  # memory for decoding, which Arrow would keep
    return table


def _dotted_names(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Return the columns of a schema, including nested ones."""
    names = []
    for field in fields:
        names.append(f"{prefix}{field.name}")
        if pa.types.is_struct(field.type):
            names += _dotted_names(field.type, f"{prefix}{field.name}.")
    return names


def write_samples(directory: Path, step: int, columns: Mapping[str, Sequence[Any]], kind: str = "step") -> Path:
    """Write one row per sample to `step-000012.parquet`, atomically. A value may be a list."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{kind}-{step:06d}.parquet"
    staged = path.with_suffix(".tmp")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        pq.write_table(pa.table({name: list(column) for name, column in columns.items()}), file)
    staged.replace(path)
    return path


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a parquet file with a row for each mapping, readable only by its owner."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)


def read_sample_columns(path: Path, names: Sequence[str], fix: str) -> list[list[Any]]:
    """Return columns of a samples file. `fix` says which file is needed."""
    try:
        files.check_regular(path)
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"the samples cannot be read: {error}", where=str(path), fix=fix) from error
    if missing := [name for name in names if name not in table.column_names]:
        raise DataError(f"there is no column {' or '.join(missing)}", where=str(path), fix=fix)
    return [table.column(name).to_pylist() for name in names]


def read_newest_samples(directory: Path, num_rows: int, kind: str = "step") -> list[dict[str, Any]]:
    """Return the first rows of the newest file of a kind, or none if there is no file."""
    paths = sorted(directory.glob(f"{kind}-*.parquet"))
    if not paths:
        return []
    try:
        files.check_regular(paths[-1])
        rows: list[dict[str, Any]] = pq.read_table(paths[-1]).slice(0, num_rows).to_pylist()
    except (pa.ArrowException, OSError) as error:
        fix = "move it away; the report then shows the earlier samples"
        raise DataError(f"the samples cannot be read: {error}", where=str(paths[-1]), fix=fix) from error
    return rows
