"""Read source files of pinned packages from the package index, without installing the packages."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable
from typing import Any

_FOUND = re.compile(r"Found link (\S+/([^/\s#]+)\S*) \(from ")
_FOR_LINUX = r"-(py3-none-any|(py3-none|cp312-cp312|cp38-abi3)-\S*manylinux\S*x86_64)\.whl"
_TIMEOUT_S = 120


class IndexSilent(Exception):
    """The package index does not answer; the message has the reason."""


class _Remote(io.RawIOBase):
    """A file at a URL. Only the parts that are read are transferred."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        num_bytes = min(len(buffer), self._size - self._at)
        if num_bytes > 0:
            with _open(self._url, f"bytes={self._at}-{self._at + num_bytes - 1}") as answer:
                buffer[:num_bytes] = answer.read()
            self._at += num_bytes
        return max(0, num_bytes)


def _open(url: str, part: str) -> Any:
    return _answer(urllib.request.Request(url, headers={"Range": part}))


def _answer(request: str | urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except OSError as error:
        raise IndexSilent(str(error)) from error


def _open_parts(url: str) -> Any:
    """Open a file for reading parts of it; download all of it if the index only sends whole files."""
    with _open(url, "bytes=0-0") as answer:
        size = (answer.headers["Content-Range"] or "").rpartition("/")[2]
        return io.BufferedReader(_Remote(url, int(size)), 1 << 18) if size else io.BytesIO(answer.read())


def url_of(name: str, version: str) -> str:
    """Return the URL of the file that Python 3.12 on Linux installs: a wheel, or the source if no wheel exists."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "-vv", "--python-version=3.12", "--retries=1"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise IndexSilent(f"no answer within {error.timeout:g} s") from error
    if listing.returncode:
        raise IndexSilent(listing.stderr.strip().splitlines()[-1])
    urls = {file: url for url, file in _FOUND.findall(listing.stdout)}
    begin = rf"{name.replace('-', '[-_]')}-{re.escape(version)}"
    patterns = [re.compile(begin + _FOR_LINUX), re.compile(begin + r"\.tar\.gz")]
    matches = [url for pattern in patterns for file, url in urls.items() if pattern.fullmatch(file)]
    assert matches, f"the index has no {name} {version} for Linux among {len(urls)} files"
    return matches[0]


def read_wheel(url: str, members: Iterable[str]) -> dict[str, str]:
    """Return the text of these members of a wheel, or an empty text for a member that does not exist."""
    with zipfile.ZipFile(_open_parts(url)) as wheel:
        present = set(wheel.namelist())
        return {member: wheel.read(member).decode() if member in present else "" for member in members}


def read_archive(url: str) -> dict[str, str]:
    """Return the text files of a small source archive by their path below its top directory."""
    with (
        _answer(url) as answer,
        tarfile.open(fileobj=io.BytesIO(answer.read())) as archive,
    ):
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file and name.endswith((".py", ".txt"))}
