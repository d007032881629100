"""Rules of the `data` section: what a source may be, and which of its keys go together."""

from __future__ import annotations

import glob
from collections.abc import Iterator

from mrl.config.schema import SourceConfig
from mrl.config.sft import AnyConfig
from mrl.errors import Problem

FILE_KINDS = (".jsonl", ".parquet")


def is_file(source: SourceConfig) -> bool:
    """Whether a source is read from files; anything else is a dataset with a name."""
    return source.dataset.endswith(FILE_KINDS)


def check_data_rules(config: AnyConfig) -> Iterator[Problem]:
    """Every problem of the sources."""
    if not config.data.train:
        yield Problem("", "data.train", "there is no source of prompts", "data.train.sums.dataset=toy:addition")
    for key, source in _sources(config):
        if not is_file(source) and ":" not in source.dataset:
            what = f'"{source.dataset}" is neither a {" or ".join(FILE_KINDS)} file nor the name of a dataset'
            yield Problem(
                "", f"{key}.dataset", what, "convert it, or name a dataset as toy:addition or package.module:attribute"
            )
        if is_file(source) and source.options:
            given = ", ".join(source.options)
            yield Problem("", f"{key}.options", f"{given}: a file takes no options", "remove them")
    yield from _weights(config)


def unchecked_data(config: AnyConfig) -> Iterator[str]:
    """Files that are not on this machine."""
    for key, source in _sources(config):
        if is_file(source) and not any(glob.iglob(source.dataset, recursive=True)):
            yield f'{key}: no file "{source.dataset}" on this machine'


def _weights(config: AnyConfig) -> Iterator[Problem]:
    without = [name for name, source in config.data.train.items() if source.weight is None]
    if 0 < len(without) < len(config.data.train):
        key = f"data.train.{without[0]}.weight"
        yield Problem("", key, "other sources have a weight, this one has none", f"{key}=1, or no weight anywhere")
    for name, source in config.data.validation.items():
        if source.weight is not None:
            what = "validation goes through every source once, whatever its weight"
            yield Problem("", f"data.validation.{name}.weight", what, "remove this key")


def _sources(config: AnyConfig) -> Iterator[tuple[str, SourceConfig]]:
    train, validation = config.data.train, config.data.validation
    for name, source in train.items():
        yield f"data.train.{name}", source
    for name, source in validation.items():
        yield f"data.validation.{name}", source
