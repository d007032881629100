"""Rules for the section `training`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.problems import problem
from mrl.config.sft import SftConfig
from mrl.errors import Problem


def check_epochs(config: SftConfig) -> Iterator[Problem]:
    steps, epochs = config.training.steps, config.training.epochs
    if (steps is None) == (epochs is None):
        what = "neither steps nor epochs is set" if steps is None else "steps and epochs are both set"
        yield problem("training", what, "training.epochs=null" if epochs else "training.epochs=1")
    if epochs and any(source.weight is not None for source in config.data.train.values()):
        what = "sources with weights have no common epoch"
        yield problem("training.epochs", what, "set training.steps, or remove the weights")
