"""Removes secrets from logs, events and run directories, recognized by key, by environment variable or by form.

A value is secret if its key says so (`hub_token`, `api_key`, ...), if it is in an environment variable whose name says
so, or if it has the form of a well-known credential.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET_KEY = re.compile(
    r"(^|[_.\-])(token|secret|passw(or)?d|passphrase|credentials?|auth|bearer"
    r"|(api|access|private|secret|signing|encryption)[_\-]?key)$",
    re.IGNORECASE,
)
_ORDINARY_KEY = re.compile(r"(^|[_.\-])(pad|eos|bos|unk|sep|cls|mask|stop|end|start|image|tool)_token$", re.IGNORECASE)
_CREDENTIAL = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_\-]{16,}|AKIA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9\-]{10,}|AIza[A-Za-z0-9_\-]{30,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,})"
)
_URL = re.compile(r"\b[a-z][a-z0-9+.\-]*://[^\s\"'<>]+", re.IGNORECASE)
_URL_QUERY = re.compile(r"(?P<name>[?&;](?P<key>[^=&;#]+)=)[^&;#]+")
_URL_QUERY_KEY = re.compile(r"(^|[_.\-])(key|sig|signature|code|sas)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"(?P<kind>\b(Bearer|Basic)\s+)[A-Za-z0-9+/=_.\-]{8,}")
_MIN_SECRET_LENGTH = 6  # shorter values would remove ordinary words
REDACTED = "<redacted>"


@functools.lru_cache(4096)  # called for each environment variable with each line of a log
def is_secret_key(key: str) -> bool:
    """Return whether a configuration key or environment variable of this name holds a secret."""
    return bool(_SECRET_KEY.search(key)) and not _ORDINARY_KEY.search(key)


def environment_secrets(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return secret values of the environment, each with the name of its variable."""
    environment = os.environ if environment is None else environment
    return {
        value: name
        for name in filter(is_secret_key, environment)
        if len(value := environment.get(name, "")) >= _MIN_SECRET_LENGTH and not os.path.exists(value)
    }


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with every secret of the environment and every well-known credential removed."""
    for value, name in sorted(environment_secrets(environment).items(), key=lambda item: -len(item[0])):
        text = text.replace(value, f"<redacted:{name}>")
    text = _CREDENTIAL.sub(REDACTED, text)
    text = _AUTHORIZATION.sub(rf"\g<kind>{REDACTED}", text)
    text = _URL_PASSWORD.sub(rf"\g<scheme>{REDACTED}@", text)
    return _URL.sub(lambda url: _URL_QUERY.sub(_without_value, url[0]), text) if "=" in text else text


def _without_value(parameter: re.Match[str]) -> str:
    """Return a parameter of a URL's query, without its value if its name marks it as secret."""
    key = parameter["key"]
    return f"{parameter['name']}{REDACTED}" if is_secret_key(key) or _URL_QUERY_KEY.search(key) else parameter[0]


def redact(value: Any, key: str = "") -> Any:
    """Return a copy of nested dicts, lists and scalars without secrets. Numbers and booleans are never secret."""
    if isinstance(value, Mapping):
        return {redact_text(str(name)): redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_key(key) else redact_text(value)
    return value
