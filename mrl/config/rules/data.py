"""Rules for the section `data`."""

from __future__ import annotations

import glob
from collections.abc import Iterator

from mrl.config.data import FILE_KINDS, TOY_TASKS, is_file
from mrl.config.rules.algorithm import only_teaches
from mrl.config.rules.problems import problem
from mrl.config.rules.reward import environments_score
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, RankedConfig, RmConfig
from mrl.errors import Problem, did_you_mean


def check_data(config: AnyConfig) -> Iterator[Problem]:
    data = config.data
    if not data.train:
        yield problem("data.train", "no source of prompts is configured", "data.train.sums.dataset=toy:addition")
    for key, source in data.sources():
        if not is_file(source) and ":" not in source.dataset:
            what = f'"{source.dataset}" is not a {" or ".join(FILE_KINDS)} file or the name of a dataset'
            fix = "convert the file, or name a dataset, as toy:addition or package.module:attribute"
            yield problem(f"{key}.dataset", what, fix)
        head, colon, task = source.dataset.partition(":")
        if head == "toy" and colon and task not in TOY_TASKS and not is_file(source):
            yield problem(f"{key}.dataset", f'unknown toy task "{task}"', did_you_mean(task, TOY_TASKS))
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
    if isinstance(config, Config):
        yield from _scored(config)
        yield from _difficulty(config)
    if isinstance(config, RankedConfig):
        yield from _labels(config) if config.is_labeled() else _columns(config)


def _difficulty(config: Config) -> Iterator[Problem]:
    """Check that the sampler `difficulty` has scores to choose by."""
    if config.data.sampler != "difficulty":
        return
    if only_teaches(config):
        what = "needs scores, but only the teacher is configured"
        yield problem("data.sampler", what, "data.sampler=shares")
    by_functions = any(function.weight for function in config.reward.functions.values())
    if config.scoring_models() and not by_functions and not environments_score(config):
        what = "`difficulty` needs a function or an environment that scores, but only a reward model does"
        yield problem("data.sampler", what, "data.sampler=shares, or a reward function with a weight")


def unchecked_data(config: AnyConfig) -> Iterator[str]:
    for key, source in config.data.sources():
        if is_file(source) and not any(glob.iglob(source.dataset, recursive=True)):
            yield f'{key}: no file "{source.dataset}" on this machine'


def _scored(config: Config) -> Iterator[Problem]:
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


def _labels(config: RankedConfig) -> Iterator[Problem]:
    """Check that each source says in one way which responses are desirable."""
    for source_key, source in config.data.sources():
        key, columns = f"{source_key}.columns", source.columns
        if columns.rejected is None and columns.label is None:
            what = "kto learns which responses are desirable, but no label and no rejected responses say so"
            yield problem(f"{key}.label", what, f"{key}.label=label, or {key}.rejected=rejected")
        if columns.rejected is not None and columns.label is not None:
            what = "kto takes chosen responses as desirable and rejected ones as undesirable, or reads one response"
            yield problem(f"{key}.label", f"{what} and its label", f"{key}.rejected=null, or {key}.label=null")


def _columns(config: RankedConfig) -> Iterator[Problem]:
    regression = isinstance(config, RmConfig) and config.reward.loss == "regression"
    reads_label = isinstance(config, RmConfig) and (regression or config.reward.margin)
    for source_key, source in config.data.sources():
        key, columns = f"{source_key}.columns", source.columns
        if columns.rejected is None and not regression:
            yield problem(f"{key}.rejected", "a preference needs two responses", f"{key}.rejected=rejected")
        if columns.label is None and reads_label:
            reader, name = (
                ("reward.loss=regression learns", "score") if regression else ("reward.margin reads", "margin")
            )
            what = f"{reader} a number from each row, but no column is set"
            yield problem(f"{key}.label", what, f"{key}.label={name}")
        if columns.label is not None and not reads_label:
            yield problem(f"{key}.label", "no loss reads it", f"{key}.label=null, or reward.margin=true in `mrl rm`")
