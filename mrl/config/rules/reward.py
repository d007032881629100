"""Rules for the sections `reward`, `reward_model` and `reward_models`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.arithmetic import teaches_itself
from mrl.config.bounds import is_path
from mrl.config.reward import RewardFunctionConfig, label_of
from mrl.config.rules.problems import problem
from mrl.config.rules.reward_options import asks_own_engines, check_options, reward_functions
from mrl.config.schema import Config
from mrl.errors import Problem, did_you_mean


def is_measured(config: Config) -> bool:
    """Return whether validation has a function or an environment that scores. Reward models do not count: they have no
    notion of a solved task."""
    functions = config.validation_reward().functions.values()
    return any(function.weight for function in functions) or environments_score(config)


def environments_score(config: Config) -> bool:
    return any(environment.weight for environment in config.agent.environments.values())


def check_reward(config: Config) -> Iterator[Problem]:
    functions, models = config.reward.functions, config.scoring_models()
    weights = [function.weight for function in functions.values()] + [model.weight for model in models.values()]
    if not functions and not models and not config.agent.environments:
        fix = "add one: reward.functions.answer.name=gsm8k, a reward_model section, or an environment that scores"
        if not config.teaching_models() and not teaches_itself(config):
            yield problem("reward.functions", "no reward function is configured", fix)
    elif not any(weights) and not environments_score(config):
        key = "reward.functions" if functions else f"{next(iter(models))}.weight"
        yield problem(key, "every weight is 0, so every reward would be 0", "give at least one a weight other than 0")
    yield from _models(config)
    for key, function in config.reward_functions():
        yield from _function(key, function, set(map(label_of, models)))
        if config.judge is None and asks_own_engines(function):
            fix = f"{key}.options.service.url=http://HOST:8000/v1, or judge.path=MODEL and placement.roles.judge=POOL"
            what = "is not set, and there is no section `judge`"
            yield problem(f"{key}.options.service.url", what, fix)


def _models(config: Config) -> Iterator[Problem]:
    models = config.scoring_models()
    for role, model in models.items():
        if model.running and (model.mean, model.std) != (0.0, 1.0):
            what = "`running` computes mean and std from the scores, but fixed values are set too"
            yield problem(f"{role}.running", what, f"{role}.running=false, or remove {role}.mean and {role}.std")
    taken = {"score", "solved"} | ({"model"} if config.reward_model is not None else set())
    for name in taken & config.reward_models.keys():
        yield problem(f"reward_models.{name}", "metrics already use this name", "choose another name for this model")


def _function(key: str, function: RewardFunctionConfig, model_labels: set[str]) -> Iterator[Problem]:
    label, name = key.rpartition(".")[2], function.name
    if label == "score":
        yield problem(key, "metrics use the name `score` for the weighted sum", "choose another name for this function")
    if label in model_labels:
        yield problem(key, "metrics use this name for the reward model", "choose another name for this function")
    if name in reward_functions():
        yield from check_options(f"{key}.options", function)
        if function.group:
            yield problem(f"{key}.group", f"{name} scores one sample at a time", f"{key}.group=false")
    elif not is_path(name):
        suggestion = did_you_mean(name, reward_functions())
        fix = f"{suggestion}{'' if suggestion.endswith('?') else '.'} Or name your own as package.module:function"
        yield problem(f"{key}.name", f'unknown reward function "{name}"', fix)
