"""Rules of the sections `data` and `reward`: what a source may be, which functions there are, and their options."""

from __future__ import annotations

import ast
import glob
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.judge import JudgeOptions
from mrl.config.keys import convert
from mrl.config.reward import BUILT_IN, RewardFunctionConfig, label_of
from mrl.config.rules import problem
from mrl.config.schema import Config, SourceConfig
from mrl.config.sft import AnyConfig
from mrl.config.values import Secrets
from mrl.errors import Problem, did_you_mean

FILE_KINDS = (".jsonl", ".parquet")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = Path(__file__).parents[1] / "rewards" / "functions"


def is_file(source: SourceConfig) -> bool:
    """Return whether a source is read from files; anything else is a dataset with a name."""
    return source.dataset.endswith(FILE_KINDS)


def check_data_rules(config: AnyConfig) -> Iterator[Problem]:
    """Yield every problem of the sources."""
    if not config.data.train:
        yield problem("data.train", "there is no source of prompts", "data.train.sums.dataset=toy:addition")
    for key, source in _sources(config):
        if not is_file(source) and ":" not in source.dataset:
            what = f'"{source.dataset}" is neither a {" or ".join(FILE_KINDS)} file nor the name of a dataset'
            yield problem(
                f"{key}.dataset", what, "convert it, or name a dataset as toy:addition or package.module:attribute"
            )
        if is_file(source) and source.options:
            given = ", ".join(source.options)
            yield problem(f"{key}.options", f"{given}: a file takes no options", "remove them")
    yield from _weights(config)
    for name in ("template", "template_file", "tools"):
        if config.data.raw_text and getattr(config.data, name):
            yield problem(f"data.{name}", "data.raw_text uses no chat template", f"data.{name}=null, or raw_text=false")
    if config.data.tools and "tools" in config.data.template:
        yield problem("data.tools", "data.template has tools already", "data.tools=null")


def unchecked_data(config: AnyConfig) -> Iterator[str]:
    """Yield the sources whose files are not on this machine."""
    for key, source in _sources(config):
        if is_file(source) and not any(glob.iglob(source.dataset, recursive=True)):
            yield f'{key}: no file "{source.dataset}" on this machine'


def _weights(config: AnyConfig) -> Iterator[Problem]:
    without = [name for name, source in config.data.train.items() if source.weight is None]
    if 0 < len(without) < len(config.data.train):
        key = f"data.train.{without[0]}.weight"
        yield problem(key, "other sources have a weight, this one has none", f"{key}=1, or no weight anywhere")
    for name, source in config.data.validation.items():
        if source.weight is not None:
            what = "validation goes through every source once, whatever its weight"
            yield problem(f"data.validation.{name}.weight", what, "remove this key")


def _sources(config: AnyConfig) -> Iterator[tuple[str, SourceConfig]]:
    train, validation = config.data.train, config.data.validation
    for name, source in train.items():
        yield f"data.train.{name}", source
    for name, source in validation.items():
        yield f"data.validation.{name}", source


@cache
def _sources_of_functions() -> Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = [node for file in _FUNCTIONS.glob("*.py") for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, _FUNCTION) and node.name in BUILT_IN}


@cache
def reward_functions() -> Mapping[str, Mapping[str, bool]]:
    """Return each function that mrl brings along with its options, and whether they must be given, read from its
    source."""
    return {name: _signature(function) for name, function in sorted(_sources_of_functions().items())}


def gives_answers(name: str) -> bool:
    """Return whether a function says which answer it judged; of one that mrl does not bring along it may be so."""
    function = _sources_of_functions().get(name)
    return function is None or ast.unparse(function.returns or ast.Tuple([])) in ("dict[str, float | str]", "Any")


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    _, *options = function.args.args  # the first is the sample
    num_required = len(options) - len(function.args.defaults)
    return {option.arg: number < num_required for number, option in enumerate(options)}


def check_reward_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem of the reward section."""
    functions, models = config.reward.functions, config.scoring_models()
    weights = [function.weight for function in functions.values()] + [model.weight for model in models.values()]
    if not functions and not models and not config.agent.environments:
        fix = "add one: reward.functions.answer.name=gsm8k, a reward_model section, or an environment that scores"
        if config.teacher is None:
            yield problem("reward.functions", "names no function", fix)
    elif not any(weights) and not _environments_score(config):
        key = "reward.functions" if functions else f"{next(iter(models))}.weight"
        yield problem(key, "every weight is 0, and so would be every reward", "give one another weight")
    if functions and not models and config.validation.every and not is_measured(config):
        what = "validation goes by reward.functions alone, and none of them has a weight"
        yield problem("validation.every", what, "give one a weight, or validation.every=0")
    yield from _unscored(config)
    if models:
        yield from _model_scores(config)
    keys = [(f"reward.functions.{label}", label, function) for label, function in functions.items()]
    of_validation = config.validation.reward_functions.items()
    keys += [(f"validation.reward_functions.{label}", label, function) for label, function in of_validation]
    for key, label, function in keys:
        if label == "score":
            yield problem(key, "metrics call the weighted sum so", "choose another name for this function")
        if label in map(label_of, models):
            yield problem(key, "metrics call the reward model so", "choose another name for this function")
        if function.name in reward_functions():
            yield from _options(key, function)
            if function.group:
                yield problem(f"{key}.group", f"{function.name} scores one sample at a time", f"{key}.group=false")
        elif not is_path(function.name):
            near = did_you_mean(function.name, reward_functions())
            fix = f"{near}{'' if near.endswith('?') else '.'} Or name your own as package.module:function"
            yield problem(f"{key}.name", f'unknown reward function "{function.name}"', fix)


def is_measured(config: Config) -> bool:
    """Return whether a function or an environment says in validation what is right, as no reward model does."""
    functions = config.validation_reward().functions.values()
    return any(function.weight for function in functions) or _environments_score(config)


def _environments_score(config: Config) -> bool:
    return any(environment.weight for environment in config.agent.environments.values())


def _unscored(config: Config) -> Iterator[Problem]:
    """Yield the sources that no function scores, among those whose rows are known by the name of their source."""
    model_scores = any(model.weight for model in config.scoring_models().values())
    for key, source in _sources(config):
        name = key.split(".", 2)[2]
        if source.columns.data_source is not None or (model_scores and key.startswith("data.train.")):
            continue
        if config.agent.name_for(name) is not None:
            continue  # its environment may score it; a conversation that nobody scores is a failure of its own
        reward = config.reward if key.startswith("data.train.") else config.validation_reward()
        if any(function.weight for function in reward.functions.values()) and not reward.scores(name):
            what = f'no function with a weight scores the data source "{name}"'
            section = "reward.functions" if reward is config.reward else "validation.reward_functions"
            yield problem(key, what, f"add it to {section}.NAME.sources")


def _model_scores(config: Config) -> Iterator[Problem]:
    """Yield what cannot be of reward models."""
    for role, model in config.scoring_models().items():
        if model.running and (model.mean, model.std) != (0.0, 1.0):
            what = "mean and std are those of what it has scored, and others are given"
            yield problem(f"{role}.running", what, f"{role}.running=false, or neither {role}.mean nor {role}.std")
    taken = {"score", "solved"} | ({"model"} if config.reward_model is not None else set())
    for name in taken & config.reward_models.keys():
        yield problem(f"reward_models.{name}", "metrics call something else so", "choose another name for this model")
    by_functions = any(function.weight for function in config.reward.functions.values())
    if config.data.sampler == "difficulty" and not by_functions and not _environments_score(config):
        what = "difficulty goes by what functions or environments count as solved, and a reward model scores alone"
        yield problem("data.sampler", what, "data.sampler=shares, or a reward function with a weight")


def is_path(name: str) -> bool:
    """Return whether a name is of the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def _options(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    """Check that the options of a built-in function are known, complete, and in their ranges."""
    known, given = reward_functions()[function.name], function.options
    for name in given:
        if name not in known:
            fix = did_you_mean(name, known) or "remove it"
            yield problem(f"{key}.options.{name}", f"{function.name} has no such option", fix)
    for name, is_required in known.items():
        if is_required and name not in given:
            yield problem(f"{key}.options", f"{function.name} needs {name}", f"set {key}.options.{name}")
    if function.name == "judge":
        yield from _judge(f"{key}.options", given)
        return
    for name in known:
        if name in given and (wrong := _wrong(name, given[name])):
            yield problem(f"{key}.options.{name}", wrong)
    yield from _sizes(key, function)


def _judge(key: str, given: dict[str, Any]) -> Iterator[Problem]:
    """Check what stands inside the options of a judge."""
    options, problems = convert(JudgeOptions, given, Secrets(), lambda path: "")
    for inner in problems:
        if inner.key.partition(".")[0] in given.keys() & reward_functions()["judge"].keys():  # else it is told of
            yield problem(f"{key}.{inner.key}", inner.what, inner.fix)
    if options is None:
        return
    service, verdict, template = options.service, options.verdict, options.template
    if service.url is not None and service.model is None:
        yield problem(f"{key}.service.model", "a server elsewhere must be told which of its models judges")
    for name in ("model", "key_variable"):
        if service.url is None and getattr(service, name) is not None:
            what = "means nothing without service.url: the run's own engines have one model and a key of their own"
            yield problem(f"{key}.service.{name}", what, "remove it, or set service.url")
    if "{response}" not in template and not Path(template).is_file():
        yield problem(f"{key}.template", "has no {response}, and there is no such file")
    if wrong := _wrong_pattern(verdict.pattern):
        yield problem(f"{key}.verdict.pattern", wrong)
    elif re.compile(verdict.pattern).groups != 1:
        what = f"has {re.compile(verdict.pattern).groups} groups; the verdict is what one group holds"
        yield problem(f"{key}.verdict.pattern", what, "write (?:...) where nothing is to be taken")
    if verdict.lowest >= verdict.highest:
        what = f"{verdict.lowest:g} must be less than highest, which is {verdict.highest:g}"
        yield problem(f"{key}.verdict.lowest", what)


def _wrong(name: str, value: Any) -> str:
    """Return what is wrong with the value of an option by itself."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name.endswith("_tokens") or name == "attempts":
        return "" if isinstance(value, int) and is_number and value >= 1 else f"must be a count, not {shown}"
    if name.endswith("_s"):
        return "" if is_number and value > 0 else f"must be a number of seconds, not {shown}"
    if name == "partial":
        return "" if is_number and 0 <= value <= 1 else f"must be a number from 0 to 1, not {shown}"
    if name in ("last_number", "all_or_nothing", "fenced_only", "boxed", "share"):
        return "" if isinstance(value, bool) else f"must be true or false, not {shown}"
    if name == "url":
        is_web = isinstance(value, str) and value.startswith(("http://", "https://"))
        return "" if is_web else f"must begin with http:// or https://, not {shown}"
    if name == "letters":
        is_set = isinstance(value, str) and re.fullmatch("[A-Z]{2,}", value) and len(set(value)) == len(value)
        return "" if is_set else f"must be two or more different capital letters, not {shown}"
    if name == "pattern":
        return _wrong_pattern(value) if isinstance(value, str) else f"must be text, not {shown}"
    if name == "tolerance":
        return "" if is_number and value >= 0 else f"must be 0 or a number above it, not {shown}"
    if name == "max_tests":
        is_count = isinstance(value, int) and is_number and value >= 1
        return "" if value is None or is_count else f"must be a count or null, not {shown}"
    if name == "limits":
        return "" if value is None or isinstance(value, dict) else f"must be numbers by name, not {shown}"
    return "" if value is None or isinstance(value, str) else f"must be text or null, not {shown}"


def _wrong_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression: {error}"
    return ""


def _sizes(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    """Check that the shorter of two lengths comes first."""
    smaller, larger = {"overlong": ("buffer_tokens", "max_tokens"), "length": ("target_tokens", "max_tokens")}.get(
        function.name, ("", "")
    )
    few, many = function.options.get(smaller), function.options.get(larger)
    if isinstance(few, int) and isinstance(many, int) and few >= many:
        what = f"{few} must be less than {larger}, which is {many}"
        yield problem(f"{key}.options.{smaller}", what)
