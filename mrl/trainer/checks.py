"""What models and rewards are refused for, or warned of, before any device is asked for; `mrl check` asks the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from mrl.config.reward import RewardFunctionConfig
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, compare_tokenizer, different_tokens, load_tokenizer
from mrl.data.conversation import ResponseEncoder
from mrl.data.sources import data_sources
from mrl.errors import ModelError
from mrl.models.families import read_spec
from mrl.rewards.manager import nothing_scores

_MAX_MADE_ROWS = 10_000


def check_reward_models(config: Config, tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    """Refuse a reward model that cannot read what the policy writes; yield its role and what there is to be said."""
    for role, model in config.scoring_models().items():
        path = model.path
        if different := different_tokens(tokenizer, load_tokenizer(path, renders=False)):
            if config.agent.environments:
                what = f"{different}; it would be given texts, and conversations with environments are token ids"
                raise ModelError(what, where=path, fix="a reward model with the policy's tokenizer")
            ResponseEncoder(path, config.data)
            yield role, f"{path} reads texts, which are cut into its own tokens and put into its template: {different}"
            continue
        yield from ((role, warning) for warning in compare_tokenizer(tokenizer, path))
        _check_vocab(config, path, "a reward model that was made from a model of the policy's family")


def check_reference(config: Config, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Refuse a reference model that cannot read the policy's token ids; yield what to warn of."""
    if config.reference is not None and config.reference.path is not None:
        yield from compare_tokenizer(tokenizer, config.reference.path)
        _check_vocab(config, config.reference.path, "a model of the policy's family, or reference.path=null")


def check_teacher(config: Config, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Refuse a teacher that cannot read the policy's token ids, or says less of them than is asked for; what else there
    is to be warned of."""
    distillation = config.algorithm.distillation
    if config.teacher is None or distillation is None:
        return
    path = config.teacher.path
    yield from compare_tokenizer(tokenizer, path)
    written = _check_vocab(config, path, "a teacher of the policy's family whose vocabulary is no smaller")
    if distillation.form == "top_k" and distillation.top_k > written:
        what = f"algorithm.distillation.top_k={distillation.top_k}, and the policy has {written} tokens"
        raise ModelError(what, where=path, fix=f"algorithm.distillation.top_k={written}, which are all")


def _check_vocab(config: Config, path: str, fix: str) -> int:
    """Refuse a model that lacks tokens of the policy, and return how many that has."""
    known, written = read_spec(path).vocab, read_spec(config.model.path).vocab
    if known < written:
        raise ModelError(f"has embeddings for {known} tokens, but the policy writes {written}", where=path, fix=fix)
    return written


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
