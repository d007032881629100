"""Rules for the section `training`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import Problem


def check_training(config: AnyConfig) -> Iterator[Problem]:
    key, training = "training.max_restarts", config.training
    if training.max_restarts and training.resume != "auto":
        yield problem(key, "a run that never resumes cannot be restarted", f"{key}=0, or training.resume=auto")
    if training.fallback and not training.max_restarts:
        yield problem("training.fallback", f"the run never restarts, because {key} is 0", f"{key}=3")
    if isinstance(config, SftConfig):
        yield from _epochs(config)
    elif config.training.critic_warmup_steps and config.critic is None:
        key = "training.critic_warmup_steps"
        yield problem(key, "there is no critic to warm up", f"{key}=0")
    if not isinstance(config, SftConfig):
        yield from _records(config)


def _records(config: Config) -> Iterator[Problem]:
    training = config.training
    if late := [step for step in training.record.steps if step > training.steps]:
        what = f"step {late[0]} is after the last step, training.steps={training.steps}"
        yield problem("training.record.steps", what, f"training.steps={late[0]}, or another step")
    for name, usual in training.record_when.items():
        key = f"training.record_when.{name}"
        if usual.min is None and usual.max is None and usual.jump is None:
            yield problem(key, "it has no min, max or jump, so no value is unusual", f"{key}.max=10")
        elif usual.min is not None and usual.max is not None and usual.min > usual.max:
            yield problem(key, f"min={usual.min:g} is above max={usual.max:g}", "exchange them")
    if training.samples_from is not None and config.validation.every:
        what = "a run of recorded samples has no engine to validate with"
        yield problem("training.samples_from", what, "validation.every=0, and mrl eval on its checkpoint")


def _epochs(config: SftConfig) -> Iterator[Problem]:
    steps, epochs = config.training.steps, config.training.epochs
    if (steps is None) == (epochs is None):
        what = "steps and epochs are both null" if steps is None else "steps and epochs are both set"
        yield problem("training", what, "training.epochs=null" if epochs else "training.epochs=1")
    if epochs and any(source.weight is not None for source in config.data.train.values()):
        what = "sources with weights have no common epoch"
        yield problem("training.epochs", what, "set training.steps, or remove the weights")
