"""Rules for scoring: reward functions and their options, reward models, the judge, environments."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.agent import EnvironmentConfig
from mrl.config.bounds import Bound
from mrl.config.keys import convert
from mrl.config.names import TEXT_FORMATS, is_path
from mrl.config.reward import BUILT_IN, JUDGE, JudgeOptions, RewardFunctionConfig, label_of
from mrl.config.rules import near_multiples, nearest, problem, stays_in_a_node
from mrl.config.schema import Config
from mrl.config.values import Secrets
from mrl.errors import Problem, did_you_mean

_FUNCTIONS = Path(__file__).parents[1] / "rewards" / "functions"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _sources_of_functions() -> Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = [node for file in _FUNCTIONS.glob("*.py") for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, _FUNCTION) and node.name in BUILT_IN}


@cache
def reward_functions() -> Mapping[str, Mapping[str, bool]]:
    """Return the built-in functions, each with its options and whether they are required. The options are read from the
    source of the function."""
    return {name: _signature(function) for name, function in sorted(_sources_of_functions().items())}


def gives_answers(name: str) -> bool:
    """Return whether a function reports the answer that it judged. For a function that is not built in, assume so."""
    function = _sources_of_functions().get(name)
    return function is None or ast.unparse(function.returns or ast.Tuple([])) in ("dict[str, float | str]", "Any")


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    _, *options = function.args.args  # the first is the sample
    num_required = len(options) - len(function.args.defaults)
    return {option.arg: number < num_required for number, option in enumerate(options)}


def is_measured(config: Config) -> bool:
    """Return whether validation has a function or an environment that scores. Reward models do not count: they have no
    notion of a solved task."""
    functions = config.validation_reward().functions.values()
    return any(function.weight for function in functions) or _environments_score(config)


def _environments_score(config: Config) -> bool:
    return any(environment.weight for environment in config.agent.environments.values())


def check_reward_rules(config: Config) -> Iterator[Problem]:
    functions, models = config.reward.functions, config.scoring_models()
    weights = [function.weight for function in functions.values()] + [model.weight for model in models.values()]
    if not functions and not models and not config.agent.environments:
        fix = "add one: reward.functions.answer.name=gsm8k, a reward_model section, or an environment that scores"
        if config.teacher is None:
            yield problem("reward.functions", "no reward function is configured", fix)
    elif not any(weights) and not _environments_score(config):
        key = "reward.functions" if functions else f"{next(iter(models))}.weight"
        yield problem(key, "every weight is 0, so every reward would be 0", "give at least one a weight other than 0")
    if functions and not models and config.validation.every and not is_measured(config):
        what = "validation uses only reward.functions, and each of them has weight 0"
        yield problem("validation.every", what, "give one a weight, or validation.every=0")
    yield from _unscored(config)
    yield from _models(config)
    for key, function in config.reward_functions():
        yield from _function(key, function, set(map(label_of, models)))
    yield from _judge_engines(config)
    yield from _environments(config)


def _unscored(config: Config) -> Iterator[Problem]:
    """Yield data sources without a reward function. Skip sources whose rows name their own source."""
    model_scores = any(model.weight for model in config.scoring_models().values())
    for key, source in config.data.sources():
        is_trained, name = key.startswith("data.train."), key.split(".", 2)[2]
        if source.columns.data_source is not None or (model_scores and is_trained):
            continue
        if config.agent.name_for(name) is not None:
            continue  # its environment may score it; a conversation without any score is reported elsewhere
        reward = config.reward if is_trained else config.validation_reward()
        if any(function.weight for function in reward.functions.values()) and not reward.scores(name):
            what = f'no function with a weight scores the data source "{name}"'
            section = "reward.functions" if reward is config.reward else "validation.reward_functions"
            yield problem(key, what, f"add it to {section}.NAME.sources")


def _models(config: Config) -> Iterator[Problem]:
    models = config.scoring_models()
    for role, model in models.items():
        if model.running and (model.mean, model.std) != (0.0, 1.0):
            what = "`running` computes mean and std from the scores, but fixed values are set too"
            yield problem(f"{role}.running", what, f"{role}.running=false, or remove {role}.mean and {role}.std")
    taken = {"score", "solved"} | ({"model"} if config.reward_model is not None else set())
    for name in taken & config.reward_models.keys():
        yield problem(f"reward_models.{name}", "metrics already use this name", "choose another name for this model")
    by_functions = any(function.weight for function in config.reward.functions.values())
    if models and config.data.sampler == "difficulty" and not by_functions and not _environments_score(config):
        what = "`difficulty` needs a function or an environment that scores, but only a reward model does"
        yield problem("data.sampler", what, "data.sampler=shares, or a reward function with a weight")


def _function(key: str, function: RewardFunctionConfig, model_labels: set[str]) -> Iterator[Problem]:
    label, name = key.rpartition(".")[2], function.name
    if label == "score":
        yield problem(key, "metrics use the name `score` for the weighted sum", "choose another name for this function")
    if label in model_labels:
        yield problem(key, "metrics use this name for the reward model", "choose another name for this function")
    if name in reward_functions():
        yield from _options(f"{key}.options", function)
        if function.group:
            yield problem(f"{key}.group", f"{name} scores one sample at a time", f"{key}.group=false")
    elif not is_path(name):
        suggestion = did_you_mean(name, reward_functions())
        fix = f"{suggestion}{'' if suggestion.endswith('?') else '.'} Or name your own as package.module:function"
        yield problem(f"{key}.name", f'unknown reward function "{name}"', fix)


# --- options of functions that mrl brings along -----------------------------------------------------------------------


def _options(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    """Check that the options of a built-in function are known, complete and within their ranges."""
    known, options = reward_functions()[function.name], function.options
    for name in options:
        if name not in known:
            fix = did_you_mean(name, known) or "remove it"
            yield problem(f"{key}.{name}", f"{function.name} has no such option", fix)
    for name, is_required in known.items():
        if is_required and name not in options:
            yield problem(key, f"{function.name} needs {name}", f"set {key}.{name}")
    if function.name == JUDGE:
        yield from _judge_options(key, options)
        return
    for name in known:
        bound = _OPTIONS.get(name, _TEXT)
        if name in options and not bound.allows(options[name]):
            shown = json.dumps(options[name], ensure_ascii=False, default=str)
            yield problem(f"{key}.{name}", f"must {bound}, not {shown}")
        elif name == "pattern" and name in options and (wrong := _wrong_pattern(options[name])):
            yield problem(f"{key}.{name}", wrong)
    smaller = {"overlong": "buffer_tokens", "length": "target_tokens"}.get(function.name, "")
    few, many = options.get(smaller), options.get("max_tokens")
    if isinstance(few, int) and isinstance(many, int) and few >= many:
        yield problem(f"{key}.{smaller}", f"{few} must be less than max_tokens, which is {many}")


def _judge_options(key: str, given: dict[str, Any]) -> Iterator[Problem]:
    options, problems = convert(JudgeOptions, given, Secrets(), lambda path: "")
    for inner in problems:
        # skip keys that are already reported
        if inner.key.partition(".")[0] in given.keys() & reward_functions()[JUDGE].keys():
            yield problem(f"{key}.{inner.key}", inner.what, inner.fix)
    if options is None:
        return
    service, verdict, template = options.service, options.verdict, options.template
    if service.url is not None and service.model is None:
        yield problem(f"{key}.service.model", "with `service.url`, the name of the model on that server is required")
    for name in ("model", "key_variable"):
        if service.url is None and getattr(service, name) is not None:
            what = "has no effect without service.url: the run's own engines have one model and their own key"
            yield problem(f"{key}.service.{name}", what, "remove it, or set service.url")
    if "{response}" not in template and not Path(template).is_file():
        yield problem(f"{key}.template", "does not contain {response}, and is not the path of a file")
    if wrong := _wrong_pattern(verdict.pattern):
        yield problem(f"{key}.verdict.pattern", wrong)
    elif (num_groups := re.compile(verdict.pattern).groups) != 1:
        what = f"has {num_groups} groups, but needs exactly one, which captures the verdict"
        yield problem(f"{key}.verdict.pattern", what, "write (?:...) for groups that capture nothing")
    if verdict.lowest >= verdict.highest:
        what = f"{verdict.lowest:g} must be less than highest, which is {verdict.highest:g}"
        yield problem(f"{key}.verdict.lowest", what)


def _between(lowest: float, highest: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _between(1)(value)


def _are_letters(value: Any) -> bool:
    return isinstance(value, str) and len(set(value)) == len(value) and re.fullmatch("[A-Z]{2,}", value) is not None


_TEXT = Bound("be text or null", lambda value: value is None or isinstance(value, str))
_OPTIONS = {
    **dict.fromkeys(("max_tokens", "buffer_tokens", "target_tokens", "attempts"), Bound("be a count", _is_count)),
    **dict.fromkeys(
        ("timeout_s", "backoff_s"), Bound("be a number of seconds", lambda value: _between(0)(value) and value > 0)
    ),
    **dict.fromkeys(
        ("last_number", "all_or_nothing", "fenced_only", "boxed", "share"),
        Bound("be true or false", lambda value: isinstance(value, bool)),
    ),
    **dict.fromkeys(("structure", "final", "retrieval"), Bound("be a number", _between(-math.inf))),
    "partial": Bound("be a number from 0 to 1", _between(0, 1)),
    "tolerance": Bound("be 0 or a number above it", _between(0)),
    "max_tests": Bound("be a count or null", lambda value: value is None or _is_count(value)),
    "limits": Bound("be numbers by name", lambda value: value is None or isinstance(value, dict)),
    "letters": Bound("be two or more different capital letters", _are_letters),
    "pattern": Bound("be text", lambda value: isinstance(value, str)),
    "url": Bound("begin with http:// or https://", lambda value: str(value).startswith(("http://", "https://"))),
}
"""Allowed values of each option, the same in every function that has it. All other options are texts."""


def _wrong_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return ""


# --- the judge's engines, and environments ----------------------------------------------------------------------------


def asks_own_engines(function: RewardFunctionConfig) -> bool:
    """Return whether a reward function uses the run's own judge engines, which exist only during a run."""
    service = function.options.get("service")
    return function.name == JUDGE and isinstance(service, dict) and service.get("url") is None


def _judge_engines(config: Config) -> Iterator[Problem]:
    asking = [f"{key}.options" for key, function in config.reward_functions() if asks_own_engines(function)]
    if config.judge is None:
        for key in asking:
            fix = f"{key}.service.url=http://HOST:8000/v1, or judge.path=MODEL and placement.roles.judge=POOL"
            yield problem(f"{key}.service.url", "is not set, and there is no section `judge`", fix)
        return
    if not asking:
        fix = "add a reward function `judge` without service.url, or set judge=null"
        yield problem("judge", "no reward function uses it", fix)
    pool = config.placement.roles.get(JUDGE)
    if pool not in config.placement.pools:
        return
    tp, devices = config.judge.tp, config.placement.pools[pool]
    if sharing := [role for role, other in config.placement.roles.items() if other == pool and role != JUDGE]:
        what = f'the judge would share pool "{pool}" with the {", ".join(sharing)}, but never frees its memory'
        yield problem("placement.roles.judge", what, "give the judge its own pool")
    if devices % tp:
        what = f'judge.tp = {tp} does not divide the {devices} devices of pool "{pool}"'
        yield problem("judge.tp", what, nearest(f"placement.pools.{pool}", near_multiples(devices, tp)))
    yield from stays_in_a_node("judge.tp", tp, devices, config.cluster.devices_per_node)


def _environments(config: Config) -> Iterator[Problem]:
    takes_all = ""
    for label, environment in config.agent.environments.items():
        key = f"agent.environments.{label}"
        if takes_all:
            what = f"{takes_all} comes first and handles every data source"
            yield problem(key, what, f"give {takes_all} sources, or move it to the end")
        takes_all = takes_all or ("" if environment.sources else label)
        if label in ("score", "model", *config.reward.functions):
            yield problem(
                key,
                "metrics already use this name for another part of the score",
                "choose another name for this environment",
            )
        yield from _environment(key, environment, config)
    if config.agent.deterministic and not config.agent.environments:
        what = "there is no environment, and each engine would generate one sample at a time"
        yield problem("agent.deterministic", what, "agent.deterministic=false")


def _environment(key: str, environment: EnvironmentConfig, config: Config) -> Iterator[Problem]:
    if environment.name == "tools" and not environment.tools:
        yield problem(f"{key}.tools", "no tool is configured", f"{key}.tools.calculator.name=calculator")
    if environment.name != "tools" and environment.tools:
        what = f"{environment.name} does not use `tools`; only the environment `tools` does"
        yield problem(f"{key}.tools", what, f"{key}.name=tools, or its own {key}.options")
    room, longest = config.rollout.max_response_tokens, environment.max_observation_tokens
    if longest is not None and longest >= room:
        what = f"an observation of {longest} tokens leaves no room for a turn in a response of {room} tokens"
        fix = f"set a smaller value, or rollout.max_response_tokens above {longest}"
        yield problem(f"{key}.max_observation_tokens", what, fix)
    if config.data.raw_text and environment.format not in TEXT_FORMATS and ":" not in environment.format:
        what = f"the format {environment.format} writes chat roles, but data.raw_text uses no chat template"
        yield problem(f"{key}.format", what, f"{key}.format={TEXT_FORMATS[0]}, or data.raw_text=false")
