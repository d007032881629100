"""Files that survive a crash: written completely or not at all, on disk when a call returns, and identified by hash.

A path may lead to anything: a FIFO never ends and a device has no end, so neither is opened like a file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_TEXT_BYTES = 1 << 30
"""Size limit of a file that is read at once: settings, tokenizers, metrics of a long run."""
_BYTES_AT_ONCE = 1 << 24
_BLOCK_BYTES = 1 << 16
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\xfd7zXZ": "unxz",
    b"BZh": "bunzip2",
    b"PK\3\4": "unzip",
}


def check_regular(path: Path | str, max_bytes: int | None = None) -> None:
    """Raise `OSError` unless the path is a regular file of at most `max_bytes`. Nothing is opened."""
    _check(os.stat(path), str(path), max_bytes)


def open_regular(path: Path | str, max_bytes: int | None = None) -> int:
    """Return the descriptor of a regular file. Raise `OSError` for anything else, because reading it might never
    end."""
    check_regular(path)  # opening a device may have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), str(path), max_bytes)  # the file may have been replaced
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path | str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the contents of a regular file. Raise `OSError` for anything else, and for a larger file."""
    with os.fdopen(open_regular(path, max_bytes), "rb") as file:
        content = file.read(max_bytes + 1)  # a file may grow, or report size 0 like those in /proc
    if len(content) > max_bytes:
        raise _too_large(str(path), len(content), max_bytes)
    return content


def read_text(path: Path | str) -> str:
    """Return the UTF-8 text of a regular file, with Unix line ends."""
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def fingerprint(path: Path | str) -> str:
    """Return a fingerprint of the content without reading all of it: from the size and four blocks."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        starts = sorted({max(0, (size - _BLOCK_BYTES) * part // 3) for part in range(4)})
        blocks = [os.pread(file.fileno(), _BLOCK_BYTES, start) for start in starts]
    return hashlib.sha256(b"".join([f"{size}:".encode(), *blocks])).hexdigest()


def unpacks(path: Path | str) -> str:
    """Return the program that decompresses a file, judged by its content, or an empty string if it is not
    compressed."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        start = file.read(max(map(len, _PACKED)))
    return next((program for mark, program in _PACKED.items() if start.startswith(mark)), "")


def _check(status: os.stat_result, path: str, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file", path)
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)


def _too_large(path: str, size: int, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"has {size} bytes; at most {max_bytes} are read", path)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Make errors of the block name the file. Errors of writing to an open file do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Flush a file's content to disk; for a directory, the list of its files and their names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file with this text, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace a file with this content, which is on disk when this returns, and complete whenever another process reads
    it.

    The mode applies under any umask.
    """
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)  # left by a writer that crashed, perhaps with another mode
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    with named(staged), os.fdopen(descriptor, "wb") as file:
        if mode is not None:
            os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    staged.replace(path)
    sync(path.parent)


def publish_directory(staged: Path, target: Path) -> None:
    """Rename a directory whose files are on disk to its final name, in one step."""
    sync(staged)
    staged.rename(target)
    sync(target.parent)


def append(descriptor: int, data: bytes) -> None:
    """Append all data, or leave the file unchanged: a full disk accepts only a part."""
    if (written := os.write(descriptor, data)) < len(data):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while data := file.read(_BYTES_AT_ONCE):
            digest.update(data)
    return digest.hexdigest()
