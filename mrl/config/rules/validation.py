"""Rules for the section `validation`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.arithmetic import compares_teacher
from mrl.config.reward import label_of
from mrl.config.rules.problems import nearest, problem
from mrl.config.rules.reward import is_measured
from mrl.config.rules.reward_options import gives_answers
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.errors import Problem, did_you_mean


def check_validation(config: AnyConfig) -> Iterator[Problem]:
    if config.validation.every and not config.data.validation:
        yield problem("validation.every", "data.validation has no source", "add one, or validation.every=0")
    if config.validation.keep_best and not config.validation.every:
        yield problem("validation.keep_best", "nothing is validated: validation.every is 0", "validation.every=10")
    if not isinstance(config, Config):
        return
    yield from _figures(config)
    only_functions = config.reward.functions and not config.scoring_models()
    if only_functions and config.validation.every and not is_measured(config):
        what = "validation uses only reward.functions, and each of them has weight 0"
        yield problem("validation.every", what, "give one a weight, or validation.every=0")


def _figures(config: Config) -> Iterator[Problem]:
    validation, most = config.validation, config.validation.samples_per_prompt
    if validation.counts[-1] > most:
        what = f"{validation.counts[-1]} of {most} samples of a prompt cannot be drawn"
        yield problem("validation.k", what, nearest("validation.samples_per_prompt", [validation.counts[-1]]))
    plain = {"samples_per_prompt": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for name, value in plain.items() if validation.greedy else ():
        if (actual := getattr(validation, name)) != value:
            what = f"{actual} has no effect with validation.greedy, which does not sample"
            yield problem(f"validation.{name}", what, f"validation.{name}={value:g}, or validation.greedy=false")
    figures, key = validation_figures(config), "validation.best_metric"
    names = [f"val/{figure}" for figure in figures] + ["val/teacher_kl"] * compares_teacher(config.algorithm)
    is_read = validation.every or validation.best_metric is not None
    if is_read and names and validation.source_of_best(figures) is None and validation.best not in names:
        fix = f"{did_you_mean(validation.best, names)} Or for one source: val/SOURCE/{figures[0]}"
        yield problem(key, f'validation has no figure "{validation.best}"', fix)
    functions = [function.name for function in config.validation_reward().functions.values()]
    if "/solved/maj@" in validation.best and not any(map(gives_answers, functions)):
        listed = ", ".join(functions) or "no function"
        yield problem(key, f"maj@k needs answers to vote on, but none is reported by {listed}", f"{key}={names[0]}")


def validation_figures(config: Config) -> list[str]:
    """Return the metrics of each source and of all together, without the prefix `val/` or `val/SOURCE/`."""
    models = [label_of(role) for role in config.scoring_models()]
    return config.validation.figures(models, by_rule=is_measured(config))
