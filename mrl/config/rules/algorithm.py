"""Rules for the section `algorithm`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.algorithm import (
    ADVANTAGES,
    CHOOSING_LOSSES,
    NORM_ADVANTAGES,
    VECTOR_ADVANTAGES,
    CorrectionConfig,
    DistillationConfig,
)
from mrl.config.arithmetic import (
    corrects_engines,
    longest_sample_tokens,
    samples_per_step,
    shows_success,
    teaches_itself,
    updates_per_step,
)
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.errors import Problem

_ADVANTAGE, _DISTILLATION = "algorithm.advantage", "algorithm.distillation"
_WITHOUT_VALUES = tuple(name for name in ADVANTAGES if name != "gae")
_COMPARING = (
    *("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk", "maxrl", "gdpo"),
    *("online_dpo", "optimal_token_baseline"),
)


def check_algorithm(config: Config) -> Iterator[Problem]:
    """Check that settings that depend on another section are set only if that section is."""
    algorithm, kl, key = config.algorithm, config.algorithm.kl, "algorithm.advantage"
    if algorithm.advantage == "gae" and config.critic is None:
        yield problem(key, "gae needs a critic", f"add a critic section, or {key}=grpo")
    for name in ("lam_critic", "lam_length"):
        if getattr(algorithm, name) is not None and algorithm.advantage in _WITHOUT_VALUES:
            what = f"{algorithm.advantage} does not read a critic's values"
            yield problem(f"algorithm.{name}", what, f"algorithm.{name}=null, or {key}=gae")
    if kl.target is not None and kl.where not in ("reward", "both"):
        yield problem(
            "algorithm.kl.target", "adapts the KL in the reward, but the reward contains no KL", "kl.where=reward"
        )
    if algorithm.dynamic_sampling is not None and config.batch.samples_per_prompt == 1:
        key = "algorithm.dynamic_sampling"
        yield problem(key, "compares the samples of a prompt, but there is only one", "batch.samples_per_prompt=8")
    if algorithm.overlong and algorithm.overlong.buffer_tokens > config.rollout.max_response_tokens:
        key, most = "algorithm.overlong.buffer_tokens", config.rollout.max_response_tokens
        yield problem(
            key, f"the buffer is longer than the longest response of {most} tokens", f"{key}={most // 4 or 1}"
        )
    yield from _old_log_probs(config)
    if config.asynchrony.ahead and not corrects_engines(config):
        ahead = f"{config.asynchrony.ahead} batches ahead"
        what = f"{ahead}: samples of older weights would be used as if the current weights had drawn them"
        fix = "algorithm.correction={level: token}, algorithm.old_log_probs=engine, or asynchrony.ahead=0"
        yield problem("algorithm.correction", what, fix)
    if algorithm.correction is not None:
        yield from _rejection(algorithm.correction)
    yield from _covariance(config)
    yield from _without_penalties(config)
    yield from _several_rewards(config)
    yield from _distillation(config)
    if algorithm.advantage == "online_dpo":
        yield from _online_dpo(config)
    if algorithm.advantage == "rae":
        yield from _role_baselines(config)
    if algorithm.advantage in NORM_ADVANTAGES:
        yield from _token_baseline(config)
    if algorithm.router_replay != "none":
        yield from _router_replay(config)


def _old_log_probs(config: Config) -> Iterator[Problem]:
    """Yield what reads old log-probs that the trainer would have to compute, and what would have no effect."""
    algorithm, key = config.algorithm, "algorithm.old_log_probs"
    source, fix = algorithm.old_log_probs, "algorithm.old_log_probs=trainer"
    if source == "trainer":
        return
    if algorithm.kl.where in ("reward", "both"):
        what = "the KL in the reward compares the reference with old log-probs of the trainer"
        yield problem("algorithm.kl.where", what, f"algorithm.kl.where=loss, or {fix}")
    if algorithm.loss.policy in CHOOSING_LOSSES:
        what = f"{algorithm.loss.policy} chooses tokens by the trainer's log-probs from before the first update"
        yield problem("algorithm.loss.policy", what, f"algorithm.loss.policy=ppo, or {fix}")
    if algorithm.router_replay == "R2":
        what = "R2 keeps the experts of the trainer's pass for old log-probs, which is not made"
        yield problem("algorithm.router_replay", what, f"algorithm.router_replay=R3, or {fix}")
    if source == "engine" and algorithm.correction is not None:
        what = "the ratio to the engine's log-probs corrects already: the weights would count twice"
        yield problem("algorithm.correction", what, f"algorithm.correction=null, or {fix}")
    if source == "interpolated" and not config.asynchrony.ahead:
        what = "without asynchrony.ahead no sample is older than the policy: each ratio would be 1, and nothing clipped"
        yield problem(key, what, f"asynchrony.ahead=1, or {fix}")


def _rejection(correction: CorrectionConfig) -> Iterator[Problem]:
    """Yield bounds that keep nothing or have no effect."""
    key = "algorithm.correction"
    if correction.level == "none" and not correction.reject:
        yield problem(
            f"{key}.level", "none weighs nothing, and nothing is rejected", f"{key}=null, or {key}.level=token"
        )
    for number, rule in enumerate(correction.reject):
        of_rule, lower = f"{key}.reject.{number}", 1 / rule.upper if rule.lower is None else rule.lower
        if not rule.statistic.endswith("k1"):
            if rule.lower is not None:
                what = f"{rule.statistic} is at least 0 and has only an upper bound"
                yield problem(f"{of_rule}.lower", what, "remove it")
        elif lower >= rule.upper:
            what = f"no ratio is above {lower:g} and below upper, which is {rule.upper:g}"
            yield problem(f"{of_rule}.{'upper' if rule.lower is None else 'lower'}", what, f"{of_rule}.upper=2")


def _covariance(config: Config) -> Iterator[Problem]:
    """Yield what keeps `clip_cov` and `kl_cov` from the covariances of their paper."""
    loss, distillation = config.algorithm.loss, config.algorithm.distillation
    if loss.policy == "clip_cov" and loss.cov_low >= loss.cov_high:
        key, what = "algorithm.loss.cov_low", f"no covariance is above {loss.cov_low:g} and below {loss.cov_high:g}"
        yield problem(key, what, f"{key}={min(1.0, loss.cov_high - 1):g}")
    if loss.policy in CHOOSING_LOSSES and distillation is not None and distillation.form == "advantage":
        what = f"{loss.policy} reads the covariance of advantages before the teacher's part is added to them"
        yield problem(f"{_DISTILLATION}.form", what, f"{_DISTILLATION}.form=top_k, or algorithm.loss.policy=ppo")


def _online_dpo(config: Config) -> Iterator[Problem]:
    """Yield what gives the loss of sampled pairs another gradient than that of DPO."""
    algorithm, loss = config.algorithm, config.algorithm.loss
    if config.batch.samples_per_prompt == 1:
        what = "online_dpo makes a pair of two samples of a prompt, but there is only one"
        yield problem("batch.samples_per_prompt", what, "batch.samples_per_prompt=2")
    if loss.policy != "gpg":
        what = f"online_dpo has DPO's gradient with the loss -A log pi, not with {loss.policy}"
        yield problem("algorithm.loss.policy", what, "algorithm.loss.policy=gpg")
    if loss.aggregation != "token-sum":
        what = f"DPO adds up the log-probs of a response and averages over pairs, unlike {loss.aggregation}"
        yield problem("algorithm.loss.aggregation", what, "algorithm.loss.aggregation=token-sum")
    if (updates := updates_per_step(config.batch)) > 1:
        what = f"a step has {updates} updates, and pairs are weighed by the policy before the first"
        fix = f"batch.samples_per_update={samples_per_step(config.batch)} and batch.epochs_per_step=1"
        yield problem("batch.samples_per_update", what, fix)
    if algorithm.old_log_probs != "trainer":
        what = "online_dpo weighs pairs by the trainer's log-probs from before the update"
        yield problem("algorithm.old_log_probs", what, "algorithm.old_log_probs=trainer")
    if loss.opsm_delta is not None:
        what = "would drop the rejected response of a pair alone"
        yield problem("algorithm.loss.opsm_delta", what, "algorithm.loss.opsm_delta=null")
    if algorithm.correction is not None:
        what = "weighs the two responses of a pair differently; DPO's loss of a pair needs no weights"
        yield problem("algorithm.correction", what, "algorithm.correction=null and asynchrony.ahead=0")


def _role_baselines(config: Config) -> Iterator[Problem]:
    """Yield what leaves a baseline of roles without roles, or with other scores than those in the advantages."""
    if not config.agent.environments:
        what = "rae has a baseline for each role of an environment, but there is no environment"
        yield problem(_ADVANTAGE, what, f"add agent.environments, or {_ADVANTAGE}=reinforce_plus_plus")
    if config.algorithm.kl.where in ("reward", "both"):
        what = "rae's baselines are averages of scores without the KL, so the KL would not cancel out"
        yield problem("algorithm.kl.where", what, "algorithm.kl.where=loss")


def _token_baseline(config: Config) -> Iterator[Problem]:
    """Yield what leaves a baseline of tokens without other samples, or without the policy's whole distribution."""
    algorithm, name = config.algorithm, config.algorithm.advantage
    if config.batch.samples_per_prompt == 1:
        what = f"{name} compares the samples of a prompt, but there is only one"
        yield problem("batch.samples_per_prompt", what, "batch.samples_per_prompt=8")
    if algorithm.old_log_probs != "trainer":
        what = f"{name} weighs tokens by the trainer's distributions from before the update"
        yield problem("algorithm.old_log_probs", what, "algorithm.old_log_probs=trainer")
    if algorithm.router_replay == "R2":
        what = f"R2 keeps the experts of a pass that does not return the distributions that {name} needs"
        yield problem("algorithm.router_replay", what, "algorithm.router_replay=R3")


def _several_rewards(config: Config) -> Iterator[Problem]:
    """Yield the parts of a score that come from no reward function, for an estimator that normalizes each function."""
    algorithm, name = config.algorithm, config.algorithm.advantage
    if name not in VECTOR_ADVANTAGES:
        return
    what, fix = f"{name} normalizes the score of each reward function, and this is none", f"{_ADVANTAGE}=grpo"
    if algorithm.kl.where in ("reward", "both"):
        yield problem("algorithm.kl.where", what, f"algorithm.kl.where=loss, or {fix}")
    if algorithm.overlong is not None:
        yield problem("algorithm.overlong", what, f"algorithm.overlong=null, or {fix}")
    for role in config.scoring_models():
        yield problem(role, what, f"{role}=null, or {fix}")
    if config.agent.environments:
        yield problem("agent.environments", what, fix)
    if not any(function.weight for function in config.reward.functions.values()):
        yield problem("reward.functions", f"{name} needs at least one function with a weight", fix)


def _without_penalties(config: Config) -> Iterator[Problem]:
    """Yield the penalties that would make scores negative, for an estimator that divides by their mean."""
    algorithm = config.algorithm
    if algorithm.advantage != "maxrl":
        return
    what = "maxrl divides by the mean score of a prompt, which must not be negative"
    if algorithm.kl.where in ("reward", "both"):
        yield problem("algorithm.kl.where", f"{what}: the KL in the reward is subtracted from it", "kl.where=loss")
    if algorithm.overlong is not None:
        yield problem("algorithm.overlong", f"{what}: the penalty is subtracted from it", "algorithm.overlong=null")


def _router_replay(config: Config) -> Iterator[Problem]:
    """Yield what keeps the engines from returning the experts that they chose."""
    key, rollout, on_gpu = "algorithm.router_replay", config.rollout, config.cluster.device == "gpu"
    if config.algorithm.router_replay == "R2":
        if updates_per_step(config.batch) == 1:
            what = "a step has one update, which makes the same choice as its old log-probs: R2 would do nothing"
            yield problem(key, what, f"{key}=R3, or {key}=none")
        return
    if rollout.engine != "vllm":
        yield problem(key, f"only vllm returns the experts that it chose, not {rollout.engine}", "rollout.engine=vllm")
    caches = rollout.vllm.get("enable_prefix_caching")
    if caches is True and not on_gpu:
        what = "on a CPU, tokens from the prefix cache have no routes"
        yield problem("rollout.vllm.enable_prefix_caching", what, "rollout.vllm.enable_prefix_caching=false")
    if caches is False and on_gpu:
        what = "vLLM keeps routes in its prefix cache, which must be on"
        yield problem("rollout.vllm.enable_prefix_caching", what, "rollout.vllm.enable_prefix_caching=true")
    if config.asynchrony.weights == "in_flight" and on_gpu:
        what = "vLLM cannot drop the cache of samples under way while it keeps their routes"
        yield problem(key, what, f"asynchrony.weights=between, or {key}=none")


def _distillation(config: Config) -> Iterator[Problem]:
    """Yield conflicts between the teacher, the form of distillation, and how samples are drawn and used."""
    distillation, rollout, key = config.algorithm.distillation, config.rollout, _DISTILLATION
    if distillation is None:
        return
    form, estimator = distillation.form, distillation.estimator
    yield from _context(config, distillation)
    yield from _success(config, distillation)
    yield from _several_teachers(config)
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
    if distillation.reward_coef != 1 and only_teaches(config):
        what = "there are no advantages from rewards, because only the teacher is configured"
        yield problem(f"{key}.reward_coef", what, "remove it, or add reward.functions")
    if distillation.reward_coef == 0 and config.algorithm.kl.where in ("reward", "both"):
        what = "the KL in the reward is a part of the advantages, which reward_coef=0 leaves out"
        yield problem("algorithm.kl.where", what, f"algorithm.kl.where=loss, or a larger {key}.reward_coef")
    if config.algorithm.dynamic_sampling is not None and only_teaches(config):
        what = "needs scores, but only the teacher is configured"
        yield problem("algorithm.dynamic_sampling", what, "algorithm.dynamic_sampling=null")


def _context(config: Config, distillation: DistillationConfig) -> Iterator[Problem]:
    """Yield what keeps a teacher from reading another prompt, or the policy from being its own teacher."""
    key, context = f"{_DISTILLATION}.context", distillation.context
    if context is None:
        if not config.teaching_models():
            own = f"{key}='The answer is {{ground_truth}}. {{prompt}}', with which the policy teaches itself"
            fix = f"add one, {_DISTILLATION}=null, or {own}"
            yield problem(_DISTILLATION, "the section `teacher` is missing", fix)
        if distillation.context_tokens is not None:
            yield problem(f"{key}_tokens", "without a context, the teacher reads the policy's prompt", "remove it")
        return
    if "{prompt}" not in context:
        what = "has no {prompt}: the teacher would not know the question"
        yield problem(key, what, f"write {{prompt}} in {key}")
    if config.agent.environments:
        what = "conversations with environments are token ids, not messages in which a context could be written"
        yield problem(key, what, f"{key}=null")
    if teaches_itself(config) and distillation.form == "full":
        what = "the policy's output matrix changes in the update, so it is no fixed teacher"
        yield problem(f"{_DISTILLATION}.form", what, f"{_DISTILLATION}.form=top_k")


def _success(config: Config, distillation: DistillationConfig) -> Iterator[Problem]:
    """Yield what keeps a teacher from reading another sample of the prompt."""
    key = f"{_DISTILLATION}.context"
    if not shows_success(config.algorithm):
        for name in ("success_at", "success_after"):
            if getattr(distillation, name) is not None:
                what = f"{key} has no {{success}}, so no sample is chosen"
                yield problem(f"{_DISTILLATION}.{name}", what, f"write {{success}} in {key}, or remove {name}")
        return
    if only_teaches(config):
        what = "{success} is a sample with a score, but only the teacher is configured"
        yield problem(key, what, "add reward.functions, or a context without {success}")
    if config.batch.samples_per_prompt == 1:
        what = "{success} is another sample of the same prompt, but there is only one"
        yield problem(key, what, "batch.samples_per_prompt=8")
    if distillation.success_at is None:
        of_success = f"{_DISTILLATION}.success_at"
        yield problem(of_success, "{success} needs the score from which a sample is one", f"{of_success}=1")
    if distillation.context_tokens is None:
        what = "null is the length of the longest prompt and leaves no room for {success}"
        yield problem(f"{key}_tokens", what, f"{key}_tokens={longest_sample_tokens(config.rollout)} or more")


def _several_teachers(config: Config) -> Iterator[Problem]:
    """Yield conflicts between teachers: each sample has one, by its data source."""
    teachers, form = config.teaching_models(), f"{_DISTILLATION}.form"
    if config.teachers and config.algorithm.distillation is not None and config.algorithm.distillation.form == "full":
        what = "every rank of the actor holds the output matrix of one teacher, the section `teacher`"
        yield problem(form, what, f"{form}=top_k, or only the section `teacher`")
    unnamed = [role for role, model in teachers.items() if not model.sources]
    for role in unnamed[1:]:
        what = f"empty, as are those of {unnamed[0]}: both would read the same samples"
        yield problem(f"{role}.sources", what, f"{role}.sources=[DATA_SOURCE], as in the column data_source")
    owners: dict[str, str] = {}
    for role, model in teachers.items():
        for pattern in model.sources:
            if (other := owners.setdefault(pattern, role)) != role:
                what = f'"{pattern}" is also in {other}.sources'
                yield problem(f"{role}.sources", what, "name it in the sources of one teacher")


def only_teaches(config: Config) -> bool:
    """Return whether the policy learns from the teacher alone, without scores."""
    scored = config.reward.functions or config.scoring_models() or config.agent.environments
    return config.algorithm.distillation is not None and not scored
