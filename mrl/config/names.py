"""Names in a configuration: datasets and components, built in by a word, the user's own as `package.module:attribute`.

Nothing is imported to check them, so a login node without torch also rejects a wrong name. The components are
registered in `algos`, `data` and `rollout`; tests keep both lists equal.
"""

from __future__ import annotations

import ast
import glob
import importlib.util
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from mrl.config.rules import problem
from mrl.config.schema import Config, SourceConfig
from mrl.config.sft import AnyConfig
from mrl.errors import Problem, did_you_mean

ADVANTAGES = (
    *("gae", "grpo", "dr_grpo", "rloo", "opo", "gpg", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
)
POLICY_LOSSES = ("ppo", "vanilla", "gspo", "cispo", "gmpo", "geo_mean", "gpg")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "kl", "mse", "low_var_kl")
RATIO_LEVELS = ("token", "sequence", "geometric")
ENGINES = {
    "vllm": "mrl.rollout.vllm_engine:VllmEngine",
    "transformers": "mrl.rollout.transformers_engine:TransformersEngine",
}
ENVIRONMENTS = {
    "tools": "mrl.agents.tools:ToolEnvironment",
    "search_r1": "mrl.agents.search:SearchR1",
    "program": "mrl.agents.program:Program",
}
TEXT_FORMATS = ("search_r1",)
"""Formats that write text without chat roles."""
FORMATS = ("hermes", "llama3_json", *TEXT_FORMATS)
TOOLS = {
    "calculator": "mrl.agents.built_in_tools:calculator",
    "python": "mrl.agents.built_in_tools:python",
    "search": "mrl.agents.search:search",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
SAMPLERS = ("shares", "difficulty")
DATASETS = ("toy", "reasoning_gym")
TOY_TASKS = ("addition", "reversing", "sorting")
FILE_KINDS = (".jsonl", ".parquet")
PREFERENCE_LOSSES = ("sigmoid", "conservative", "robust", "hinge", "ipo_sum", "ipo_mean", "simpo", "orpo")
OF_A_BATCH = {
    "kto": "its baseline is a mean over the batch",
    "aot": "it sorts the batch",
    "aot_unpaired": "it sorts the batch",
}
"""Preference losses that are refused, with the reason."""


def is_file(source: SourceConfig) -> bool:
    """Return whether a source is read from files. Any other source is a dataset with a name."""
    return source.dataset.endswith(FILE_KINDS)


def is_path(name: str) -> bool:
    """Return whether a name has the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def check_data(config: AnyConfig) -> Iterator[Problem]:
    data = config.data
    if not data.train:
        yield problem("data.train", "no source of prompts is configured", "data.train.sums.dataset=toy:addition")
    for key, source in data.sources():
        if not is_file(source) and ":" not in source.dataset:
            what = f'"{source.dataset}" is not a {" or ".join(FILE_KINDS)} file or the name of a dataset'
            fix = "convert the file, or name a dataset, as toy:addition or package.module:attribute"
            yield problem(f"{key}.dataset", what, fix)
        if is_file(source) and source.options:
            options = ", ".join(source.options)
            yield problem(f"{key}.options", f"{options}: a file takes no options", "remove them")
    without = [name for name, source in data.train.items() if source.weight is None]
    if 0 < len(without) < len(data.train):
        key = f"data.train.{without[0]}.weight"
        yield problem(key, "other sources have a weight, but this one does not", f"{key}=1, or remove all weights")
    for name, source in data.validation.items():
        if source.weight is not None:
            what = "validation uses every source once, so a weight has no effect"
            yield problem(f"data.validation.{name}.weight", what, "remove this key")
    for name in ("template", "template_file", "tools"):
        if data.raw_text and getattr(data, name):
            yield problem(f"data.{name}", "data.raw_text uses no chat template", f"data.{name}=null, or raw_text=false")
    if data.tools and "tools" in data.template:
        yield problem("data.tools", "data.template already contains tools", "data.tools=null")


def check_names(config: AnyConfig) -> Iterator[Problem]:
    """Yield every unknown name, except modules that are not on this machine."""
    for key, kind, name, known in _known_names(config):
        if name not in known and ":" not in name:
            suggestion = did_you_mean(name, known)
            fix = f"{suggestion}{'' if suggestion.endswith('?') else '.'} Or name your own as package.module:attribute"
            yield problem(key, f'unknown {kind} "{name}"', fix)
    for key, name in _datasets(config):
        head, _, task = name.partition(":")
        if head == "toy" and task not in TOY_TASKS:
            yield problem(key, f'unknown toy task "{task}"', did_you_mean(task, TOY_TASKS))
    for key, name in own_parts(config):
        if (wrong := _wrong_part(name)) is not None:
            yield problem(key, wrong)


def unchecked_data(config: AnyConfig) -> Iterator[str]:
    for key, source in config.data.sources():
        if is_file(source) and not any(glob.iglob(source.dataset, recursive=True)):
            yield f'{key}: no file "{source.dataset}" on this machine'


def missing_modules(config: AnyConfig) -> Iterator[Problem]:
    """Yield the user's own components whose modules are not on this machine."""
    for key, name in own_parts(config):
        module = name.partition(":")[0]
        if is_path(name) and _module_file(module) is None:
            yield problem(key, f'there is no module "{module}" on this machine', "install it, or add it to PYTHONPATH")


def own_parts(config: AnyConfig) -> Iterator[tuple[str, str]]:
    for key, _, name, _ in _known_names(config):
        if ":" in name:
            yield key, name
    for key, name in _datasets(config):
        if name.partition(":")[0] not in DATASETS:
            yield key, name
    for role, model in config.model_roles().items():
        if model.worker is not None:
            yield f"{role}.worker", model.worker
    if isinstance(config, Config):
        yield from ((f"training.metrics.{number}", name) for number, name in enumerate(config.training.metrics))
        if config.reward.manager is not None:
            yield "reward.manager", config.reward.manager
        yield from (
            (f"{key}.name", function.name) for key, function in config.reward_functions() if is_path(function.name)
        )


_KINDS: tuple[tuple[str, str, Collection[str]], ...] = (
    ("data.sampler", "sampler", SAMPLERS),
    ("algorithm.advantage", "advantage estimator", ADVANTAGES),
    ("algorithm.loss.policy", "policy loss", POLICY_LOSSES),
    ("algorithm.loss.aggregation", "loss aggregation", AGGREGATIONS),
    ("algorithm.kl.in_reward", "KL estimator", KL_ESTIMATORS),
    ("algorithm.kl.in_loss", "KL estimator", KL_ESTIMATORS),
    ("algorithm.distillation.estimator", "KL estimator", KL_ESTIMATORS),
    ("algorithm.correction.level", "importance ratio level", RATIO_LEVELS),
    ("preference.loss", "preference loss", (*PREFERENCE_LOSSES, *OF_A_BATCH)),
)


def _known_names(config: AnyConfig) -> Iterator[tuple[str, str, str, Collection[str]]]:
    """Yield each key that names a component, with the kind of component, the name, and the built-in names."""
    for number, name in enumerate(config.training.trackers):
        yield f"training.trackers.{number}", "tracker", name, TRACKERS
    for key, kind, known in _KINDS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None:
            yield key, kind, value, known
    if not isinstance(config, Config):
        return
    yield "rollout.engine", "rollout engine", config.rollout.engine, ENGINES
    for label, environment in config.agent.environments.items():
        key = f"agent.environments.{label}"
        yield f"{key}.name", "environment", environment.name, ENVIRONMENTS
        yield f"{key}.format", "format", environment.format, FORMATS
        yield from ((f"{key}.tools.{name}.name", "tool", tool.name, TOOLS) for name, tool in environment.tools.items())


def _datasets(config: AnyConfig) -> Iterator[tuple[str, str]]:
    for key, source in config.data.sources():
        if ":" in source.dataset and not is_file(source):
            yield f"{key}.dataset", source.dataset


def _wrong_part(name: str) -> str | None:
    """Return why a module on this machine does not define this component. Return None if it does, or if it is not
    here."""
    module, _, attribute = name.partition(":")
    if not is_path(name):
        return f'"{name}" is not of the form package.module:attribute'
    file = _module_file(module)
    if file is None or file.suffix != ".py":
        return None
    try:
        names = set(_top_names(ast.parse(file.read_text(encoding="utf-8")).body))
    except (SyntaxError, ValueError) as error:
        return f"{file} cannot be read as Python: {error}"
    first = attribute.partition(".")[0]
    if first in names or "*" in names or "__getattr__" in names:
        return None
    suggestion = did_you_mean(first, [known for known in names if not known.startswith("_")])
    return f'{file} has no "{first}"' + (f"; {suggestion}" if suggestion else "")


def _module_file(module: str) -> Path | None:
    """Return the file of a module. Search below the package by hand: find_spec would import the parent packages."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not below and spec.origin is not None:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        candidates = [path.with_suffix(".py"), path / "__init__.py", *path.parent.glob(f"{path.name}.*.so")]
        if file := next((candidate for candidate in candidates if candidate.is_file()), None):
            return file
    return None


def _top_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a module's statements define, including those in branches."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case _:
                yield from _top_names(ast.iter_child_nodes(node))
