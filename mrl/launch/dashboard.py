"""Wait until the dashboard of a Ray cluster answers: its tunnel, or the dashboard itself, may have just started."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from mrl.errors import SetupError

_LIMIT_S, _ANSWER_S, _POLL_S = 30.0, 10.0, 0.5
_DENIED = (401, 403)


def await_dashboard(address: str, limit_s: float = _LIMIT_S) -> None:
    """Return once the dashboard at an HTTP address answers, with the token that Ray would send."""
    if not address.startswith(("http://", "https://")):
        fix = "give the address with its scheme, such as http://127.0.0.1:8265"
        raise SetupError(f'"{address}" is not the address of a dashboard', fix=fix)
    request = urllib.request.Request(f"{address.rstrip('/')}/api/version", headers=_authorization())
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with _OPENER.open(request, timeout=_ANSWER_S):
                return
        except urllib.error.HTTPError as error:
            what = f"the dashboard at {address} answered with status {error.code} {error.reason}"
            token = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
            raise SetupError(what, fix=token if error.code in _DENIED else "check the address") from error
        except (OSError, HTTPException) as error:
            if time.monotonic() > deadline:
                fix = "check that the cluster runs, and that the address or its `ssh -L` tunnel is right"
                what = f"no dashboard answered at {address} within {limit_s:g} s: {getattr(error, 'reason', error)}"
                raise SetupError(what, fix=fix) from error
        time.sleep(_POLL_S)


def _authorization() -> dict[str, str]:
    """Return the header with the token, from where Ray reads it, or no header if Ray runs without tokens."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token is None:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            fix = "set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
            raise SetupError(f"the token cannot be read from {path}: {error}", fix=fix) from error
    return {"Authorization": f"Bearer {token}"}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could take the token to another host."""

    def redirect_request(self, *arguments: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
