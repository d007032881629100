"""Files that survive a crash: written whole or not at all, on disk when a call returns, and known by their hash.

What is read may be anything: a FIFO never ends, a device has no end, and neither is opened as if it were a file.
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
"""Of a file that is read at once: settings, tokenizers, figures of a long run."""
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
    """Raise `OSError` where there is no regular file of at most so many bytes; nothing is opened."""
    _check(os.stat(path), str(path), max_bytes)


def open_regular(path: Path | str, max_bytes: int | None = None) -> int:
    """Return the descriptor of a regular file; `OSError` for anything else, which may never end or never answer."""
    check_regular(path)  # opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), str(path), max_bytes)  # it may have been changed for another
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path | str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return what a regular file holds; `OSError` for anything else, and for a larger one."""
    with os.fdopen(open_regular(path, max_bytes), "rb") as file:
        found = file.read(max_bytes + 1)  # one that grows, or says that it is empty, as those of /proc do
    if len(found) > max_bytes:
        raise _too_large(str(path), len(found), max_bytes)
    return found


def read_text(path: Path | str) -> str:
    """Return the UTF-8 text of a regular file, with the line ends of Unix."""
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def fingerprint(path: Path | str) -> str:
    """Return what tells this content from another without reading it all: its size, and four blocks of it."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        starts = sorted({max(0, (size - _BLOCK_BYTES) * part // 3) for part in range(4)})
        blocks = [os.pread(file.fileno(), _BLOCK_BYTES, start) for start in starts]
    return hashlib.sha256(b"".join([f"{size}:".encode(), *blocks])).hexdigest()


def unpacks(path: Path | str) -> str:
    """Return the program that unpacks a file which is compressed, whatever its name; empty where it is not."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        start = file.read(max(map(len, _PACKED)))
    return next((program for mark, program in _PACKED.items() if start.startswith(mark)), "")


def _check(found: os.stat_result, path: str, max_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file", path)
    if max_bytes is not None and found.st_size > max_bytes:
        raise _too_large(path, found.st_size, max_bytes)


def _too_large(path: str, size: int, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"has {size} bytes; at most {max_bytes} are read", path)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have errors of the block say which file they are about: those of writing to an open one do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Put a file's content on disk; of a directory, which files are in it under which names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file by one with this text, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace a file by one with this content, which is on disk when this returns, and whole whenever others look.

    A mode is kept to under any umask.
    """
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)  # of a writer that crashed, perhaps with another mode
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
    """Make a directory whose files are on disk visible under its name, in one step."""
    sync(staged)
    staged.rename(target)
    sync(target.parent)


def append(descriptor: int, data: bytes) -> None:
    """Append all of it, or leave the file as it was: a full disk takes a part."""
    if (written := os.write(descriptor, data)) < len(data):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while data := file.read(_BYTES_AT_ONCE):
            digest.update(data)
    return digest.hexdigest()
