"""The files of a job, and a run as a job on a running Ray cluster, to which only these files are sent."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl import files
from mrl.config.data import is_file
from mrl.config.resolved.load import Resolved, model_names
from mrl.config.resolved.sources import read_chain, read_overrides
from mrl.config.rules.components import own_parts
from mrl.config.sft import AnyConfig
from mrl.config.values import ENVIRONMENT_VARIABLE, dotted, leaves_of, merge
from mrl.errors import ConfigError, Problem, SetupError
from mrl.redaction import is_secret_key

CONFIG, RUNTIME_ENVIRONMENT = "config.yaml", "runtime_environment.json"


def pack(resolved: Resolved[Any], overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the configuration as one file that no longer changes while its job waits, with `${oc.env:NAME}`
    unresolved, and the environment variables that it uses. Secrets in plain text are an error."""
    layer = merge(read_chain(resolved.path), read_overrides(overrides)[0])
    problems = []
    for path, written in leaves_of(layer.values):
        shown = json.dumps(written, ensure_ascii=False)
        is_secret = path in resolved.secrets.paths and "${oc.env:" not in shown and written is not None
        if is_secret or resolved.secrets.hide(shown) != shown:
            what, fix = (
                "a secret would be written to the files of the job",
                "take it from the environment: ${oc.env:NAME}",
            )
            problems.append(Problem(layer.origin(path, resolved.path), dotted(path), what, fix))
    if problems:
        raise ConfigError(problems)
    text = json.dumps(layer.values, indent=2, ensure_ascii=False)  # JSON is YAML
    return f"{text}\n", tuple(dict.fromkeys(ENVIRONMENT_VARIABLE.findall(text)))


@dataclass(frozen=True)
class RayJob:
    config: str
    """Text of the configuration file."""
    code: tuple[Path, ...]
    """The user's files and packages, below the current directory."""
    environment: dict[str, str]
    missing: tuple[str, ...]
    """Secret variables that must already be set where Ray runs."""


def make_job(
    resolved: Resolved[Any], overrides: Sequence[str], further: Sequence[str], *, has_token: bool = False
) -> RayJob:
    """Return the job of a configuration. Paths that would be wrong on the cluster are an error.

    With `has_token`, the cluster is started with a token.
    """
    config, (text, variables) = resolved.config, pack(resolved, overrides)
    if problems := list(_relative_paths(config)):
        raise ConfigError(problems)
    is_secure = has_token or os.environ.get("RAY_AUTH_MODE") == "token"
    if not is_secure and not config.cluster.allow_insecure_ray:
        fix = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's token, or "
        fix += "cluster.allow_insecure_ray=true"
        raise SetupError("the job would be submitted without token authentication", fix=fix)
    modules = dict.fromkeys(name.partition(":")[0] for _, name in own_parts(config))
    code = [*filter(None, map(_own_code, modules)), *map(_below_here, further)]
    secret = tuple(name for name in variables if is_secret_key(name))
    environment = {name: os.environ[name] for name in variables if name not in secret}
    return RayJob(text, tuple(dict.fromkeys(code)), environment, secret)


def write_job_directory(job: RayJob, directory: Path) -> None:
    """Write the job's working directory, and the runtime environment next to it."""
    working = directory / "job"
    working.mkdir()
    (working / CONFIG).write_text(job.config, encoding="utf-8")
    for path in job.code:
        (working / path.parent).mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, working / path, ignore=_left_here)
        else:
            shutil.copy(path, working / path)
    environment = {"working_dir": str(working), "env_vars": job.environment}
    files.write_text(directory / RUNTIME_ENVIRONMENT, json.dumps(environment), mode=0o600)


def _left_here(directory: str, names: Sequence[str]) -> set[str]:
    """Return the files of a package that are not sent: hidden files such as `.env` and `.git`, keys, and links."""
    patterns = ("__pycache__", ".*", "*.pem", "*.key", "id_rsa*", "id_ed25519*")
    left = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    return left | {name for name in names if os.path.islink(os.path.join(directory, name))}


def submit_command(address: str, directory: Path, verb: str, *, wait: bool) -> list[str]:
    """Return the `ray job submit` command for a prepared directory."""
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address={address}"]
    submit += [f"--runtime-env={directory / RUNTIME_ENVIRONMENT}", *([] if wait else ["--no-wait"])]
    return [*submit, "--", "mrl", verb, CONFIG, "cluster.ray_address=auto"]


def submit_script(job: RayJob, command: Sequence[str]) -> str:
    """Return the command as a commented shell script. `mrl launch ray` runs the same command without a shell."""
    shipped = ", ".join([CONFIG, *map(str, job.code)])
    variables = ", ".join(job.environment) or "none"
    travels = f"#   files: {shipped}\n#   variables: {variables}\n"
    if job.missing:
        travels += f"#   secret by name, so set them where Ray runs: {', '.join(job.missing)}\n"
    end = command.index("--")
    begin = next(number for number, word in enumerate(command) if word.startswith("--"))
    lines = [shlex.join(command[:begin]), *map(shlex.quote, command[begin:end]), shlex.join(command[end:])]
    return _SUBMIT + travels + _ENTRY + " \\\n  ".join(lines) + "\n"


_SUBMIT = """\
#!/bin/bash
# Written by `mrl launch ray`. Its directory with the runtime environment exists only during the call.
set -euo pipefail

# The cluster's token gives permission to run code there. Ray reads it from the file RAY_AUTH_TOKEN_PATH, with
# RAY_AUTH_MODE=token. Set both where you call this script.

# The runtime environment lists the files that are sent. Nothing else in the current directory is sent.
"""
_ENTRY = """
# The entry point runs on the cluster, where `ray_address=auto` is the cluster itself. Without `--no-wait`, the command
# shows the run's output, and exits with its exit code.
"""


def _own_code(module: str) -> Path | None:
    """Return the file or package of the user's module below the current directory, or None if it is installed."""
    top = module.partition(".")[0]
    for path in (Path(top), Path(f"{top}.py")):
        if path.exists():
            return path
    if importlib.util.find_spec(top) is None:
        raise SetupError(
            f'no module "{module}" here', fix="run this command in its directory, or install it on the cluster"
        )
    return None


def _below_here(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts or not path.exists():
        raise SetupError(f"{text} cannot be shipped", fix="use a file or directory below the current one")
    return path


def _relative_paths(config: AnyConfig) -> Iterator[Problem]:
    """Yield relative paths, which the job would not find or would lose, because it runs in a directory of Ray's."""
    paths = {"run.dir": config.run.dir}
    paths |= {key: name for key, name in model_names(config).items() if Path(name).is_dir()}
    for part, sources in (("train", config.data.train), ("validation", config.data.validation)):
        paths |= {f"data.{part}.{name}.dataset": source.dataset for name, source in sources.items() if is_file(source)}
    for key, path in paths.items():
        if not os.path.isabs(path):
            what = f'"{path}" is relative, but a job runs in a directory that Ray creates and removes'
            yield Problem("", key, what, f"{key}={os.path.abspath(path)}, if the nodes share that directory")
