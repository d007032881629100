"""Which data sources the prompts come from, and whether a reward function scores each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from mrl.config.reward import RewardFunctionConfig
from mrl.config.schema import Config
from mrl.data.sources import data_sources
from mrl.rewards.manager import nothing_scores

_MAX_MADE_ROWS = 10_000


def check_reward_sources(config: Config) -> Iterator[str]:
    """Raise where nothing scores a data source; yield what to warn of: patterns that match no data source.

    Rows are read only where a function names its sources. Of many training rows that code makes some are read; a
    sample of yet another source stops the run. What is right in validation the functions alone say.
    """
    rewards = {"train": config.reward, "validation": config.validation_reward()}
    patterns = {
        f"{key}.{label}": function.sources
        for key, functions in (("reward.functions", config.reward.functions), *_own_of_validation(config))
        for label, function in functions.items()
        if function.sources
    }
    if not patterns:
        return
    found = {
        (part, f"data.{part}.{name}"): data_sources(source, name, _MAX_MADE_ROWS if part == "train" else None)
        for part, sources in (("train", config.data.train), ("validation", config.data.validation))
        for name, source in sources.items()
    }
    for (part, key), names in found.items():
        by_model = any(model.weight for model in config.scoring_models().values())
        if part == "train" and (by_model or (config.teacher is not None and not config.reward.functions)):
            continue
        for name in sorted(names):
            if not rewards[part].scores(name) and config.agent.name_for(name) is None:
                raise nothing_scores(rewards[part], name, key)
    everything = set().union(*found.values())
    for label, of_function in patterns.items():
        for pattern in of_function:
            if not any(fnmatchcase(name, pattern) for name in everything):
                known = ", ".join(sorted(everything)) or "none"
                yield f'{label}.sources: "{pattern}" matches no data source; there are {known:.500}'


def _own_of_validation(config: Config) -> Iterator[tuple[str, Mapping[str, RewardFunctionConfig]]]:
    if config.validation.reward_functions:
        yield "validation.reward_functions", config.validation.reward_functions
