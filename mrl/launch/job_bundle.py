"""What a job takes along: the configuration as it is now, and the names of what it needs beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.load import Resolved
from mrl.config.names import own_parts
from mrl.config.sft import AnyConfig
from mrl.config.sources import read_chain, read_overrides
from mrl.config.values import ENVIRONMENT_VARIABLE, KeyPath, dotted, merge
from mrl.errors import ConfigError, Problem


@dataclass(frozen=True)
class JobBundle:
    """A configuration that no longer changes while its job waits: one file, with `${oc.env:NAME}` as written."""

    text: str
    variables: tuple[str, ...]
    """The environment variables that it takes values from."""


def pack(resolved: Resolved[Any], overrides: Sequence[str]) -> JobBundle:
    """Return the file, what it extends and the overrides as one. Secrets are no part of it: written out, they are an
    error."""
    layer = merge(read_chain(resolved.path), read_overrides(overrides)[0])
    problems = []
    for path, written in _leaves(layer.values, ()):
        shown = json.dumps(written, ensure_ascii=False)
        is_secret = path in resolved.secrets.paths and "${oc.env:" not in shown and written is not None
        if is_secret or resolved.secrets.hide(shown) != shown:
            what, fix = "a secret would go into the files of the job", "take it from the environment: ${oc.env:NAME}"
            problems.append(Problem(layer.origin(path, resolved.path), dotted(path), what, fix))
    if problems:
        raise ConfigError(problems)
    text = json.dumps(layer.values, indent=2, ensure_ascii=False)  # JSON is YAML
    return JobBundle(f"{text}\n", tuple(dict.fromkeys(ENVIRONMENT_VARIABLE.findall(text))))


def user_modules(config: AnyConfig) -> Iterator[str]:
    """Yield the modules of the user's own that the configuration names as `package.module:attribute`."""
    yield from (name.partition(":")[0] for _, name in own_parts(config))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    else:
        yield path, value
