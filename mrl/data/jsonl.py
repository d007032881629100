"""Rows of a JSON Lines file by number, found through one streamed pass that keeps eight bytes per row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mrl import files
from mrl.errors import BadRow, DataError

CHUNK_BYTES = 4 << 20
MAX_ROW_BYTES = 64 << 20
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class JsonlFile:
    """One JSON object a line. Windows line ends and a UTF-8 byte order mark are allowed, empty lines are bad rows."""

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
            self._check_last_line()

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
        """Return where each line begins, and the end of the last."""
        buffer = bytearray(CHUNK_BYTES)
        starts = [np.array([start], dtype=np.int64)]
        position = 0
        self._file.seek(0)
        while count := self._file.readinto(buffer):
            newlines = np.flatnonzero(np.frombuffer(buffer, np.uint8, count) == ord("\n"))
            starts.append(newlines + (position + 1))
            position += count
        found = np.concatenate(starts)
        return found if found[-1] == self._size else np.append(found, self._size)

    def _check_last_line(self) -> None:
        try:
            self.row(len(self) - 1)
        except BadRow as error:
            what = f"the last line is cut off: {error.what}"
            raise DataError(what, where=error.where, fix="copy or write the file again") from error

    def _read(self, begin: int, count: int) -> bytes:
        # Reads at a position do not move the file's own, so threads may share it.
        found = os.pread(self._file.fileno(), count, begin)
        if len(found) < min(count, self._size - begin):
            raise DataError("the file became shorter while it was read", where=str(self._path), fix="restore it")
        return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error).partition(";")[0]
