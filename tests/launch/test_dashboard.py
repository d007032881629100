"""The wait for the dashboard of a Ray cluster, against real HTTP servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mrl.errors import SetupError
from mrl.launch.dashboard import await_dashboard
from mrl.launch.node import free_port

TOKEN = "the token of the cluster"


class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        may_pass = self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path == "/api/version"
        moved = getattr(self.server, "moved_to", None)
        self.send_response(302 if moved else 200 if may_pass else 401)
        if moved:
            self.send_header("Location", moved)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def dashboard(port: int = 0, moved_to: str | None = None) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", port), Dashboard) as server:
        server.moved_to = moved_to  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    return path


def test_a_dashboard_that_comes_up_late_is_waited_for() -> None:
    port, late = free_port(), threading.Event()

    def comes_late() -> None:
        time.sleep(0.3)
        with dashboard(port):
            late.wait(10)

    thread = threading.Thread(target=comes_late)
    thread.start()
    begun = time.monotonic()
    await_dashboard(f"http://127.0.0.1:{port}/")
    late.set()
    thread.join()
    assert time.monotonic() - begun >= 0.3, "nothing answered before"


def test_where_nothing_answers_the_error_has_the_reason() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SetupError, match=rf"no dashboard answered at {address} within 0 s: .*Connection refused"):
        await_dashboard(address, limit_s=0)


def test_a_wrong_token_and_a_missing_one_are_errors(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dashboard() as address:
        token.write_text("another")
        with pytest.raises(SetupError, match="status 401 Unauthorized") as caught:
            await_dashboard(address)
        assert "RAY_AUTH_TOKEN_PATH" in caught.value.fix
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        await_dashboard(address)  # Ray prefers this variable
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        token.unlink()
        with pytest.raises(SetupError, match=rf"the token cannot be read from {token}"):
            await_dashboard(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        with pytest.raises(SetupError, match="status 401"):
            await_dashboard(address)


def test_the_token_does_not_follow_a_redirect() -> None:
    moved = pytest.raises(SetupError, match="status 302")
    with dashboard() as elsewhere, dashboard(moved_to=f"{elsewhere}/api/version") as address, moved:
        await_dashboard(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "auto"])
def test_an_address_without_its_scheme_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match=f'"{address}" is not the address of a dashboard'):
        await_dashboard(address)
