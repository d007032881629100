"""Rules for learning: teachers, samples from older weights, validation, and `mrl sft`, `mrl rm` and `mrl dpo`.

These rules reject, before anything starts, a configuration that would learn or measure the wrong thing, and a setting
that would have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrl.config.arithmetic import has_own_rollout_pool, tokens_limit, updates_per_step
from mrl.config.names import OF_A_BATCH, PREFERENCE_LOSSES
from mrl.config.reward import label_of
from mrl.config.reward_rules import gives_answers, is_measured
from mrl.config.rules import nearest, problem, room_of
from mrl.config.schema import Config
from mrl.config.sft import WITHOUT_REFERENCE, AnyConfig, DpoConfig, RankedConfig, RmConfig, SftConfig
from mrl.errors import Problem, did_you_mean

_DISTILLATION = "algorithm.distillation"
_COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
_SMOOTHED = ("conservative", "robust", "simpo")
_OF_MEANS = ("ipo_sum", "ipo_mean", *WITHOUT_REFERENCE)


def check_learning_rules(config: AnyConfig) -> Iterator[Problem]:
    if config.validation.every and not config.data.validation:
        yield problem("validation.every", "data.validation has no source", "add one, or validation.every=0")
    if config.validation.keep_best and not config.validation.every:
        yield problem("validation.keep_best", "nothing is validated: validation.every is 0", "validation.every=10")
    if isinstance(config, SftConfig):
        yield from _epochs(config)
        yield from _ranked(config) if isinstance(config, RankedConfig) else ()
    else:
        yield from _validation(config)
        yield from _distillation(config)
        yield from _asynchrony(config)


def _validation(config: Config) -> Iterator[Problem]:
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
    names = [f"val/{figure}" for figure in figures] + ["val/teacher_kl"] * (config.teacher is not None)
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


def _distillation(config: Config) -> Iterator[Problem]:
    """Yield conflicts between the teacher, the form of distillation, and how samples are drawn and used."""
    distillation, rollout, key = config.algorithm.distillation, config.rollout, _DISTILLATION
    if distillation is None:
        if config.teacher is not None:
            yield problem("teacher", "nothing is learned from it", f"{key}.form=top_k, or teacher=null")
        return
    form, estimator = distillation.form, distillation.estimator
    if config.teacher is None:
        yield problem(key, "the section `teacher` is missing", f"add one, or {key}=null")
    if form in ("advantage", "sampled") and (rollout.top_p < 1 or rollout.top_k):
        what = f"{form} averages over tokens drawn from the policy; top_p and top_k draw from another distribution"
        yield problem(f"{key}.form", what, f"{key}.form=top_k, or rollout.top_p=1 and rollout.top_k=0")
    if config.batch.samples_per_prompt == 1 and (advantage := config.algorithm.advantage) in _COMPARING:
        what = f"{advantage} compares the samples of a prompt, but there is only one"
        fix = "algorithm.advantage=reinforce_plus_plus, or batch.samples_per_prompt=8"
        yield problem("algorithm.advantage", what, fix)
    if form == "sampled" and estimator in ("k1", "kl"):
        what = f"as a loss, {estimator} has zero gradient on average"
        yield problem(f"{key}.estimator", what, f"{key}.estimator=k2, or {key}.form=advantage")
    if form == "sampled" and (updates := updates_per_step(config.batch)) > 1:
        what = f"a step has {updates} updates, and each after the first uses tokens drawn from another policy"
        yield problem(f"{key}.form", what, f"{key}.form=advantage, which is clipped, or one update per step")
    if config.reward.functions or config.reward_model or config.agent.environments:
        return
    what = "needs scores, but only the teacher is configured"
    if config.algorithm.dynamic_sampling is not None:
        yield problem("algorithm.dynamic_sampling", what, "algorithm.dynamic_sampling=null")
    if config.data.sampler == "difficulty":
        yield problem("data.sampler", what, "data.sampler=shares")


def _asynchrony(config: Config) -> Iterator[Problem]:
    """Yield settings that would learn wrongly from samples of older weights, or would not be faster."""
    asynchrony, in_flight = config.asynchrony, config.asynchrony.weights == "in_flight"
    if asynchrony.replay and not (asynchrony.ahead and in_flight):
        what = "has no effect unless weights arrive in flight: without that, the same configuration gives the same run"
        yield problem("asynchrony.replay", what, "asynchrony.replay=null, and the same seeds")
    if not asynchrony.ahead:
        for name, value, default in (("weights", "in_flight", "between"), ("cache", "keep", "null")):
            if getattr(asynchrony, name) == value:
                key, what = f"asynchrony.{name}", f"{value} has no effect without batches ahead"
                yield problem(key, what, f"asynchrony.ahead=1, or {key}={default}")
        return
    ahead = f"{asynchrony.ahead} batches ahead"
    if config.algorithm.correction is None:
        what = f"{ahead}: samples of older weights would be used as if the current weights had drawn them"
        yield problem("algorithm.correction", what, "algorithm.correction={level: token}, or asynchrony.ahead=0")
    for name, everything in (("top_p", 1), ("top_k", 0)):
        if (actual := getattr(config.rollout, name)) != everything:
            what = f"{actual}: {ahead} are weighted by log-probs that are not those of the sampling distribution"
            yield problem(f"rollout.{name}", what, f"rollout.{name}={everything}, or asynchrony.ahead=0")
    if in_flight:
        for conflict in _against_in_flight(config):
            yield problem(
                "asynchrony.weights", f"in_flight cannot be combined with {conflict}", "asynchrony.weights=between"
            )
    elif "actor" in config.placement.roles and not has_own_rollout_pool(config):
        what = "with weights `between` batches, none can be ahead: engines and actor take turns on the same devices"
        fix = (
            "use in_flight, which carries unfinished samples over, or a pool for the engines (placement.roles.rollout)"
        )
        yield problem("asynchrony.weights", what, fix)
    if asynchrony.cache == "keep" and not (in_flight and has_own_rollout_pool(config)):
        fix = "asynchrony.cache=null, or weights in flight and a separate pool for rollout"
        yield problem("asynchrony.cache", "the cache no longer exists when weights arrive", fix)


def _against_in_flight(config: Config) -> Iterator[str]:
    if config.algorithm.advantage == "remax":
        yield "algorithm.advantage=remax: its greedy answer would come from other weights"
    if config.algorithm.dynamic_sampling is not None:
        yield "algorithm.dynamic_sampling: which prompts are drawn for which batch would depend on how fast samples end"
    if config.agent.deterministic:
        yield "agent.deterministic=true: the seeds do not determine when weights arrive"
    if config.data.sampler != "shares" and config.scoring_models():
        yield "data.sampler and a reward model: the sampler sees only the scores of functions"


def _epochs(config: SftConfig) -> Iterator[Problem]:
    steps, epochs = config.training.steps, config.training.epochs
    if (steps is None) == (epochs is None):
        what = "steps and epochs are both null" if steps is None else "steps and epochs are both set"
        yield problem("training", what, "training.epochs=null" if epochs else "training.epochs=1")
    if epochs and any(source.weight is not None for source in config.data.train.values()):
        what = "sources with weights have no common epoch"
        yield problem("training.epochs", what, "set training.steps, or remove the weights")


def _ranked(config: RankedConfig) -> Iterator[Problem]:
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
