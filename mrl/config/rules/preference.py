"""Rules for the losses of `mrl rm` and `mrl dpo`: their sections `reward` and `preference`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.problems import problem
from mrl.config.sft import (
    OF_A_BATCH,
    PREFERENCE_LOSSES,
    UNPAIRED_LOSSES,
    WITHOUT_REFERENCE,
    AnyConfig,
    DpoConfig,
    RmConfig,
)
from mrl.errors import Problem

_SMOOTHED = ("conservative", "robust", "simpo")
_OF_MEANS = ("ipo_sum", "ipo_mean", *WITHOUT_REFERENCE)


def check_preference(config: AnyConfig) -> Iterator[Problem]:
    if isinstance(config, RmConfig) and config.reward.loss == "regression":
        for name, nothing in (("margin", "false"), ("smoothing", "0"), ("centering", "0")):
            if getattr(config.reward, name):
                what = "applies to pairs, but regression learns a number for each response"
                yield problem(f"reward.{name}", what, f"reward.{name}={nothing}")
    if isinstance(config, DpoConfig):
        yield from _preference(config)


def _preference(config: DpoConfig) -> Iterator[Problem]:
    options, loss, key = config.preference, config.preference.loss, "preference"
    if loss in OF_A_BATCH:
        what = f"{loss} depends on how an update is cut into micro-batches: {OF_A_BATCH[loss]}"
        yield problem(f"{key}.loss", what, f"{key}.loss=sigmoid")
    if loss in UNPAIRED_LOSSES:
        yield from _unpaired(config)
    for name in ("desirable_weight", "undesirable_weight"):
        if getattr(options, name) != 1 and loss in PREFERENCE_LOSSES:
            yield problem(f"{key}.{name}", f"{loss} does not read it", f"{key}.loss=kto, or {key}.{name}=1")
    if loss not in PREFERENCE_LOSSES:
        return
    if options.smoothing and loss not in _SMOOTHED:
        yield problem(f"{key}.smoothing", f"{loss} does not read it", f"{key}.loss=conservative, or {key}.smoothing=0")
    if options.gamma and loss != "simpo":
        yield problem(f"{key}.gamma", f"{loss} does not read it", f"{key}.loss=simpo, or {key}.gamma=0")
    if options.average and loss in _OF_MEANS:
        yield problem(f"{key}.average", f"{loss} itself determines whether it averages", f"{key}.average=false")
    if options.reference == "once" and loss in WITHOUT_REFERENCE:
        what = f"{loss} uses no reference, so there is nothing to compute"
        yield problem(f"{key}.reference", what, f"{key}.loss=sigmoid, or {key}.reference=in_place")
    if loss == "orpo" and not options.sft_weight:
        what = "ORPO adds the likelihood of the preferred response to its odds ratio, but its weight is 0"
        yield problem(f"{key}.sft_weight", what, f"{key}.sft_weight=1")


def _unpaired(config: DpoConfig) -> Iterator[Problem]:
    """Yield what a loss of single responses does not read, and updates without mismatched pairs."""
    options, key = config.preference, "preference"
    for name, nothing in (("smoothing", "0"), ("gamma", "0"), ("average", "false"), ("sft_weight", "0")):
        if getattr(options, name):
            yield problem(f"{key}.{name}", f"{options.loss} does not read it", f"{key}.{name}={nothing}")
    if options.reference == "once":
        what = f"the baseline of {options.loss} asks the reference about other pairs of prompt and response each time"
        yield problem(f"{key}.reference", what, f"{key}.reference=in_place")
    if config.batch.rows_per_update == 1:
        what = f"the baseline of {options.loss} needs the response to another prompt of the update"
        yield problem("batch.rows_per_update", what, "batch.rows_per_update=8")
