"""The parts that a configuration names: mrl's own by a word, a user's as `package.module:attribute`.

Nothing is imported for it, so a login node without torch knows a wrong name as well. What is registered under these
words stands in `algos`, `data` and `rollout`; tests hold both lists to be the same.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from mrl.config.data_rules import is_file, is_path
from mrl.config.preference import DpoConfig
from mrl.config.preference_rules import OF_A_BATCH, PREFERENCE_LOSSES
from mrl.config.reward import RewardFunctionConfig
from mrl.config.rules import problem
from mrl.config.schema import Config
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
"""Those whose answers are text without roles."""
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


def check_names(config: AnyConfig) -> Iterator[Problem]:
    """Yield every name that nothing goes by, but a module that is not on this machine."""
    for key, kind, name, known in _known_names(config):
        if name not in known and ":" not in name:
            near = did_you_mean(name, known)
            yield problem(
                key, f'unknown {kind} "{name}"', f"{near}{_stop(near)} Or name your own as package.module:attribute"
            )
    for key, name in _datasets(config):
        head, _, task = name.partition(":")
        if head == "toy" and task not in TOY_TASKS:
            yield problem(key, f'there is no toy task "{task}"', did_you_mean(task, TOY_TASKS))
    for key, name in own_parts(config):
        if (wrong := _wrong_part(name)) is not None:
            yield problem(key, wrong)


def missing_modules(config: AnyConfig) -> Iterator[Problem]:
    """Yield the user's own parts whose modules are not on this machine."""
    for key, name in own_parts(config):
        module = name.partition(":")[0]
        if is_path(name) and _module_file(module) is None:
            yield problem(key, f'there is no module "{module}" on this machine', "is it installed, or on PYTHONPATH?")


def own_parts(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name a user's own part, with the name."""
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
        yield from [("reward.manager", config.reward.manager)] if config.reward.manager is not None else ()
    for section, functions in _reward_functions(config):
        for label, function in functions.items():
            if is_path(function.name):
                yield f"{section}.{label}.name", function.name


def _known_names(config: AnyConfig) -> Iterator[tuple[str, str, str, Collection[str]]]:
    for number, name in enumerate(config.training.trackers):
        yield f"training.trackers.{number}", "tracker", name, TRACKERS
    yield "data.sampler", "sampler", config.data.sampler, SAMPLERS
    if isinstance(config, DpoConfig) and config.preference.loss not in OF_A_BATCH:
        yield "preference.loss", "preference loss", config.preference.loss, PREFERENCE_LOSSES
    if isinstance(config, Config):
        yield from _algorithm_names(config)


def _algorithm_names(config: Config) -> Iterator[tuple[str, str, str, Collection[str]]]:
    algorithm, kl, loss = config.algorithm, config.algorithm.kl, config.algorithm.loss
    yield "algorithm.advantage", "advantage estimator", algorithm.advantage, ADVANTAGES
    yield "algorithm.loss.policy", "policy loss", loss.policy, POLICY_LOSSES
    yield "algorithm.loss.aggregation", "loss aggregation", loss.aggregation, AGGREGATIONS
    yield "algorithm.kl.in_reward", "KL estimator", kl.in_reward, KL_ESTIMATORS
    yield "algorithm.kl.in_loss", "KL estimator", kl.in_loss, KL_ESTIMATORS
    if algorithm.distillation is not None:
        estimator = algorithm.distillation.estimator
        yield "algorithm.distillation.estimator", "KL estimator", estimator, KL_ESTIMATORS
    if algorithm.correction is not None:
        yield "algorithm.correction.level", "importance ratio level", algorithm.correction.level, RATIO_LEVELS
    yield "rollout.engine", "rollout engine", config.rollout.engine, ENGINES
    for label, environment in config.agent.environments.items():
        key = f"agent.environments.{label}"
        yield f"{key}.name", "environment", environment.name, ENVIRONMENTS
        yield f"{key}.format", "format", environment.format, FORMATS
        yield from ((f"{key}.tools.{name}.name", "tool", each.name, TOOLS) for name, each in environment.tools.items())


def _reward_functions(config: AnyConfig) -> Iterator[tuple[str, Mapping[str, RewardFunctionConfig]]]:
    if isinstance(config, Config):
        yield "reward.functions", config.reward.functions
        yield "validation.reward_functions", config.validation.reward_functions


def _datasets(config: AnyConfig) -> Iterator[tuple[str, str]]:
    for part, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for name, source in sources.items():
            if ":" in source.dataset and not is_file(source):
                yield f"data.{part}.{name}.dataset", source.dataset


def _stop(fix: str) -> str:
    return "" if fix.endswith("?") else "."


def _wrong_part(name: str) -> str | None:
    """Return why a module that is here cannot give this part; None where it can, or where it is not here."""
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
    near = did_you_mean(first, [each for each in names if not each.startswith("_")])
    return f'{file} has no "{first}"' + (f"; {near}" if near else "")


def _module_file(module: str) -> Path | None:
    """Return the file of a module; finding the one below a package otherwise would import the packages around it."""
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
        found = [path.with_suffix(".py"), path / "__init__.py", *path.parent.glob(f"{path.name}.*.so")]
        if file := next((each for each in found if each.is_file()), None):
            return file
    return None


def _top_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what a module's statements define, those in its branches included."""
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
