"""A test double of the hub: its cache layout on disk, and a service on loopback with the same answers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_SUFFIX = ".safetensors"
"""Suffix of files that the hub stores separately and serves by a redirect."""


def commit_of(name: str, model: Path) -> str:
    """Return the commit of a model's files, which follows from the name and their contents."""
    digest = hashlib.sha1(name.encode())
    for file in files_of(model):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def files_of(model: Path) -> list[Path]:
    """Return the files of a model directory in order."""
    return sorted(path for path in model.iterdir() if path.is_file())


def make_hub_cache(cache: Path, name: str, model: Path, revision: str = "main") -> Path:
    """Lay out a model like the hub's library: blobs by content, a snapshot of links, and a ref. Return the snapshot."""
    commit = commit_of(name, model)
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for directory in (snapshot, folder / "blobs", (folder / "refs" / revision).parent):
        directory.mkdir(parents=True, exist_ok=True)
    for file in files_of(model):
        blob = folder / "blobs" / _etag(file)
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs" / revision).write_text(commit)
    return snapshot


@dataclass
class Hub:
    """Content of the service and the requests it received, as `METHOD path`."""

    models: dict[str, Path]
    """Directory of each model or data set by `name`, for its branch `main`, or by `name@revision`."""
    gated: set[str] = field(default_factory=set)
    is_down: bool = False
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def hub_service(models: dict[str, Path], **options: Any) -> Iterator[Hub]:
    """Run a service for these models by name."""
    hub = Hub(models, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of `snapshot_download`: commit of a revision, list of files, then HEAD and GET of each file.

    For a data set, only single files are requested, which may be in folders.
    """

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def _answer(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("datasets/").split("/")
        if self.hub.is_down:
            self._error(503, "")
        elif parts[0] == "blobs":
            self._blob(parts[1])
        elif parts[:2] == ["api", "models"]:
            self._metadata("/".join(parts[2:4]), parts[4], "/".join(parts[5:]))
        elif parts[0] == "api":  # the hub's library also sends requests that are unrelated to a model
            self._error(404, "")
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _metadata(self, name: str, kind: str, revision: str) -> None:
        model = self._model(name, revision)
        if model is None:
            return
        if kind == "revision":
            self._send(200, _json({"id": name, "sha": commit_of(name, model), "siblings": []}))
        else:
            self._send(200, _json([_entry(file) for file in files_of(model)]))

    def _file(self, name: str, revision: str, file: str) -> None:
        if (model := self._model(name, revision)) is None:
            return
        if name in self.hub.gated:  # the hub lists the files of a gated model, but does not serve them
            self._error(403 if self.headers.get("authorization") else 401, "GatedRepo")
            return
        path = model / file
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit_of(name, model), "ETag": f'"{_etag(path)}"'}
        if path.suffix == LARGE_SUFFIX:
            # another host than the hub's: clients do not follow this redirect by default
            port = self.hub.endpoint.rpartition(":")[2]
            headers |= {"X-Linked-Etag": f'"{_etag(path)}"', "X-Linked-Size": str(path.stat().st_size)}
            self._send(302, b"", headers | {"Location": f"http://localhost:{port}/blobs/{_etag(path)}"})
        else:
            self._send(200, path.read_bytes(), headers)

    def _blob(self, etag: str) -> None:
        everything = (file for model in self.hub.models.values() for file in files_of(model))
        self._send(200, next(file for file in everything if _etag(file) == etag).read_bytes())

    def _model(self, name: str, revision: str) -> Path | None:
        """Return the directory of a revision, or None after answering that it does not exist."""
        states = {key: path for key, path in self.hub.models.items() if key.partition("@")[0] == name}
        if not states:
            self._error(404, "RepoNotFound")
            return None
        for key, path in states.items():
            if revision in (key.partition("@")[2] or "main", commit_of(name, path)):
                return path
        self._error(404, "RevisionNotFound")
        return None

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    entry = {"type": "file", "path": file.name, "size": size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}
    is_large = file.suffix == LARGE_SUFFIX
    return entry | ({"lfs": {"oid": _etag(file), "size": size, "pointerSize": 134}} if is_large else {})


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
