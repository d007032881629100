"""Rules for the sections that only `mrl rm` and `mrl dpo` have: their losses, and columns of ranked responses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrl.config.arithmetic import tokens_limit
from mrl.config.names import OF_A_BATCH, PREFERENCE_LOSSES
from mrl.config.rules.problems import problem
from mrl.config.rules.roles import room_of
from mrl.config.sft import WITHOUT_REFERENCE, DpoConfig, RankedConfig, RmConfig
from mrl.errors import Problem

_SMOOTHED = ("conservative", "robust", "simpo")
_OF_MEANS = ("ipo_sum", "ipo_mean", *WITHOUT_REFERENCE)


def check_ranked(config: RankedConfig) -> Iterator[Problem]:
    batch, limit, cp = config.batch, config.actor.max_tokens_per_device, config.actor.parallel.cp
    if batch.messages is not None:
        fix = "batch.messages=null; columns.chosen may hold whole conversations"
        yield problem("batch.messages", "ranked responses are read from columns.chosen and columns.rejected", fix)
    if batch.loss_on != "last":
        yield problem("batch.loss_on", "only the last message of ranked responses is compared", "batch.loss_on=last")
    yield from _columns(config)
    if config.is_of_pairs() and (longest := tokens_limit(config)) > limit * cp:  # both responses repeat the prompt
        lengths, key = f"{batch.max_prompt_tokens} + {batch.max_response_tokens}", "actor.max_tokens_per_device"
        what = f"a pair of 2 x (max_prompt_tokens + max_response_tokens) = 2 x ({lengths}) = {longest} does not fit"
        yield problem(key, f"{what} in {room_of(limit, cp)}", f"smallest: {key}={math.ceil(longest / cp)}")
    if isinstance(config, RmConfig) and config.reward.loss == "regression":
        for name, nothing in (("margin", "false"), ("smoothing", "0"), ("centering", "0")):
            if getattr(config.reward, name):
                what = "applies to pairs, but regression learns a number for each response"
                yield problem(f"reward.{name}", what, f"reward.{name}={nothing}")
    if isinstance(config, DpoConfig):
        yield from _preference(config)


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


def _preference(config: DpoConfig) -> Iterator[Problem]:
    options, loss, key = config.preference, config.preference.loss, "preference"
    if loss in OF_A_BATCH:
        what = f"{loss} depends on how an update is cut into micro-batches: {OF_A_BATCH[loss]}"
        yield problem(f"{key}.loss", what, f"{key}.loss=sigmoid")
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
