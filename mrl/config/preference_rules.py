"""Rules of `mrl rm` and `mrl dpo`: a setting that would do nothing, or needs what the data do not have, is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrl.config.arithmetic import tokens_limit
from mrl.config.preference import WITHOUT_REFERENCE, DpoConfig, RankedConfig, RmConfig
from mrl.config.rules import problem
from mrl.errors import Problem

PREFERENCE_LOSSES = ("sigmoid", "conservative", "robust", "hinge", "ipo_sum", "ipo_mean", "simpo", "orpo")
_SMOOTHED = ("conservative", "robust", "simpo")
_OF_MEANS = ("ipo_sum", "ipo_mean", *WITHOUT_REFERENCE)
OF_A_BATCH = {
    "kto": "its baseline is a mean over the batch",
    "aot": "it sorts the batch",
    "aot_unpaired": "it sorts the batch",
}
"""Losses that are refused, and why."""


def check_ranked_rules(config: RankedConfig) -> Iterator[Problem]:
    """Yield every problem of the batch, the columns and the loss."""
    if config.batch.messages is not None:
        fix = "batch.messages=null; columns.chosen may hold whole conversations"
        yield problem("batch.messages", "responses that were ranked stand in columns.chosen and columns.rejected", fix)
    if config.batch.loss_on != "last":
        yield problem("batch.loss_on", "of ranked responses the last message alone is compared", "batch.loss_on=last")
    yield from _columns(config)
    yield from _pair_fits(config)
    yield from _reward(config) if isinstance(config, RmConfig) else ()
    yield from _preference(config) if isinstance(config, DpoConfig) else ()


def _columns(config: RankedConfig) -> Iterator[Problem]:
    regression = isinstance(config, RmConfig) and config.reward.loss == "regression"
    for part, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for name, source in sources.items():
            key = f"data.{part}.{name}.columns"
            if source.columns.rejected is None and not regression:
                yield problem(f"{key}.rejected", "a preference is of two responses", f"{key}.rejected=rejected")
            reads_label = isinstance(config, RmConfig) and (regression or config.reward.margin)
            if source.columns.label is None and reads_label:
                who, name = (
                    ("reward.loss=regression learns", "score") if regression else ("reward.margin reads", "margin")
                )
                yield problem(
                    f"{key}.label", f"{who} a number of each row, and no column has it", f"{key}.label={name}"
                )
            if source.columns.label is not None and not reads_label:
                fix = f"{key}.label=null, or reward.margin=true in `mrl rm`"
                yield problem(f"{key}.label", "nothing reads it", fix)


def _pair_fits(config: RankedConfig) -> Iterator[Problem]:
    """The responses to a prompt go into one micro-batch, each behind the prompt."""
    limit, cp, longest = config.actor.max_tokens_per_device, config.actor.parallel.cp, tokens_limit(config)
    if config.is_of_pairs() and longest > limit * cp:
        lengths = f"{config.batch.max_prompt_tokens} + {config.batch.max_response_tokens}"
        room = f"{limit} x cp {cp} = {limit * cp}" if cp > 1 else str(limit)
        key = "actor.max_tokens_per_device"
        what = f"a pair of 2 x (max_prompt_tokens + max_response_tokens) = 2 x ({lengths}) = {longest} does not fit"
        yield problem(key, f"{what} in {room}", f"smallest: {key}={math.ceil(longest / cp)}")


def _reward(config: RmConfig) -> Iterator[Problem]:
    reward = config.reward
    if reward.loss == "regression":
        for name, given in (
            ("margin", reward.margin),
            ("smoothing", reward.smoothing),
            ("centering", reward.centering),
        ):
            if given:
                key = f"reward.{name}"
                what = "is of pairs, and regression learns each response's own number"
                yield problem(key, what, f"{key}={'false' if name == 'margin' else 0}")


def _preference(config: DpoConfig) -> Iterator[Problem]:
    loss = config.preference
    if loss.loss in OF_A_BATCH:
        what = f"{loss.loss} depends on how an update is cut into micro-batches: {OF_A_BATCH[loss.loss]}"
        yield problem("preference.loss", what, "preference.loss=sigmoid")
    if loss.loss not in PREFERENCE_LOSSES:
        return
    if loss.smoothing and loss.loss not in _SMOOTHED:
        what = f"{loss.loss} does not read it"
        yield problem("preference.smoothing", what, "preference.loss=conservative, or preference.smoothing=0")
    if loss.gamma and loss.loss != "simpo":
        yield problem(
            "preference.gamma", f"{loss.loss} does not read it", "preference.loss=simpo, or preference.gamma=0"
        )
    if loss.average and loss.loss in _OF_MEANS:
        yield problem(
            "preference.average", f"{loss.loss} says itself whether it is of means", "preference.average=false"
        )
    if loss.reference == "once" and loss.loss in WITHOUT_REFERENCE:
        what = f"{loss.loss} knows no reference: there is nothing to compute"
        yield problem("preference.reference", what, "preference.loss=sigmoid, or preference.reference=in_place")
    if loss.loss == "orpo" and not loss.sft_weight:
        what = "ORPO is its odds ratio beside the likelihood of what was preferred, which has no weight"
        yield problem("preference.sft_weight", what, "preference.sft_weight=1")
