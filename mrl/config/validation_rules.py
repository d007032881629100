"""Rules of the section `validation`: what cannot be measured is said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.data_rules import gives_answers, is_measured
from mrl.config.reward import label_of
from mrl.config.rules import nearest, problem
from mrl.config.schema import Config
from mrl.config.sft import SftConfig
from mrl.errors import Problem, did_you_mean


def check_validation_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem of the section."""
    validation, most = config.validation, config.validation.samples_per_prompt
    if validation.counts[-1] > most:
        what = f"{validation.counts[-1]} of {most} samples of a prompt cannot be drawn"
        yield problem("validation.k", what, nearest("validation.samples_per_prompt", [validation.counts[-1]]))
    if validation.greedy:
        plain = {"samples_per_prompt": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        for name, value in plain.items():
            if (given := getattr(validation, name)) != value:
                what = f"{given} means nothing beside validation.greedy, which draws nothing"
                yield problem(f"validation.{name}", what, f"validation.{name}={value:g}, or validation.greedy=false")
    yield from _best_is_measured(config)


def validation_figures(config: Config) -> list[str]:
    """Return what is measured of each source and of all together, as it stands behind `val/` or `val/SOURCE/`."""
    models = [label_of(role) for role in config.scoring_models()]
    return config.validation.figures(models, by_rule=is_measured(config))


def check_sft_rules(config: SftConfig) -> Iterator[Problem]:
    """Yield every problem of the sections `training` and `validation` of `mrl sft`."""
    steps, epochs = config.training.steps, config.training.epochs
    if (steps is None) == (epochs is None):
        what = "neither steps nor epochs say when to end" if steps is None else "steps and epochs both say when to end"
        yield problem("training", what, "training.epochs=null" if epochs else "training.epochs=1")
    if epochs and any(source.weight is not None for source in config.data.train.values()):
        yield problem(
            "training.epochs", "sources with weights have no epoch in common", "training.steps, or no weights"
        )
    if config.validation.every and not config.data.validation:
        yield problem("validation.every", "data.validation names no source", "add one, or validation.every=0")
    if config.validation.keep_best and not config.validation.every:
        yield problem("validation.keep_best", "nothing is validated: validation.every is 0", "validation.every=10")


def _best_is_measured(config: Config) -> Iterator[Problem]:
    validation, key = config.validation, "validation.best_metric"
    if validation.keep_best and not validation.every:
        yield problem("validation.keep_best", "nothing is validated: validation.every is 0", "validation.every=10")
    figures = validation_figures(config)
    names = [f"val/{figure}" for figure in figures]
    names += ["val/teacher_kl"] if config.teacher is not None else []
    is_read = validation.every or validation.best_metric is not None
    if is_read and names and validation.source_of_best(figures) is None and validation.best not in names:
        fix = f"{did_you_mean(validation.best, names)} Or of one source: val/SOURCE/{figures[0]}"
        yield problem(key, f'validation has no figure "{validation.best}"', fix)
    functions = config.validation_reward().functions.values()
    if "/solved/maj@" in validation.best and not any(gives_answers(function.name) for function in functions):
        listed = ", ".join(function.name for function in functions) or "no function"
        yield problem(key, f"answers vote, and none is given by {listed}", f"{key}={names[0]}")
