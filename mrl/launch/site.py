"""The cluster file: settings that a site needs for every job, separate from those of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from mrl.config.bounds import matching
from mrl.config.keys import convert
from mrl.config.resolved.sources import read_chain
from mrl.config.values import interpolate
from mrl.errors import ConfigError, Problem
from mrl.redaction import is_secret_key, redact_text

Variable = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]


class Site(Protocol):
    """The part that the cluster files of all schedulers have."""

    @property
    def environment(self) -> dict[Variable, str]:
        """Return the variables for every process of a job."""


S = TypeVar("S", bound=Site)


def load_site(path: str, kind: type[S], example: str, secret_fix: str) -> S:
    """Return the cluster file, or raise an error with all of its problems. `secret_fix` says how to pass on a secret
    variable, whose name it gets."""
    try:
        layer = read_chain(path)
    except ConfigError:
        if Path(path).exists():
            raise
        how = f"copy {example} from mrl's repository, fill it in, and pass it as --cluster FILE"
        raise ConfigError([Problem(path, "", "the cluster file does not exist", how)]) from None
    values, problems, secrets = interpolate(layer, path)
    site: Any
    site, mistakes = convert(kind, values, secrets, lambda key: layer.origin(key, path))
    problems += mistakes
    for name, value in site.environment.items() if site is not None else ():
        if is_secret_key(name) or redact_text(value) != value:
            where = layer.origin(("environment", name), path)
            fix = secret_fix.format(name=name)
            problems.append(Problem(where, f"environment.{name}", "a secret must not be written in a file", fix))
    if site is None or problems:
        raise secrets.error(problems)
    found: S = site
    return found
