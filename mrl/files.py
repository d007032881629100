"""Files that survive a crash: written whole or not at all, on disk when a call returns, and known by their hash."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

_BYTES_AT_ONCE = 1 << 24


def sync(path: Path) -> None:
    """Put a file's content on disk; of a directory, which files are in it under which names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file by one with this text, which others see whole or not at all; a mode is kept to under any umask."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)  # of a writer that crashed, perhaps with another mode
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if mode is not None:
            os.fchmod(descriptor, mode)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    staged.replace(path)


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
    """Return the hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_BYTES_AT_ONCE):
            digest.update(data)
    return digest.hexdigest()
