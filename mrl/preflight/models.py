"""The models' own files: there, whole, and of a family that mrl knows; or what a run would do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mrl.config.model_names import model_names, rename_models
from mrl.config.schema import Config
from mrl.errors import ModelError
from mrl.hub import is_offline, model_directory
from mrl.models.families import read_spec
from mrl.plan.known_models import model_spec
from mrl.plan.memory import gib
from mrl.preflight.findings import CheckResult, guarded
from mrl.trainer.components import check_model, model_setup

_BYTES_PER_PARAMETER = 2  # published weights are bfloat16


def check_models(config: Config) -> Iterator[CheckResult]:
    """The files of each role's model, as a run looks at them before it asks for a device: headers alone are read."""
    for role in config.model_roles():
        key, name = config.model_of(role)
        about = f"model of the {role}"
        try:
            directory = model_directory(name)
        except ModelError as error:
            yield _absent(about, name, error)
        else:
            yield from guarded(about, _check(about, role, rename_models(config, {key: str(directory)}), directory))


def found_models(config: Config) -> Iterator[str]:
    """The directories of the models that are here; `check_models` has said which are not."""
    for name in dict.fromkeys(model_names(config).values()):
        with suppress(ModelError):
            yield str(model_directory(name))


def node_models(lacks: Mapping[str, str]) -> Iterator[CheckResult]:
    """What nodes lack of the models that are here, by node."""
    for node, what in lacks.items():
        if what:
            yield CheckResult("warn", "models", f"node {node}: {what}", "a run has such a node fetch them, if it can")
    if not any(lacks.values()):
        yield CheckResult("ok", "models", "every node has those that are here")


def _check(about: str, role: str, config: Config, directory: Path) -> Iterator[CheckResult]:
    check_model(model_setup(role, config))
    files = list(directory.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    yield CheckResult(
        "ok", about, f"{directory}: {read_spec(directory).family}, {len(files)} files of {gib(num_bytes)}"
    )


def _absent(about: str, name: str, error: ModelError) -> CheckResult:
    what = f"{error.where}: {error.what}" if error.where else error.what
    if is_offline():
        return CheckResult("fail", about, what, error.fix)
    try:
        size = f"about {gib(model_spec(name).num_parameters * _BYTES_PER_PARAMETER)}"
    except ModelError:
        size = "of a size that is not known here"
    return CheckResult("warn", about, f"{what}; `mrl train` downloads it, {size}", error.fix)
