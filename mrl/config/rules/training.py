"""Rules for the section `training`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    yield from _records(config)
    if not isinstance(config, SftConfig):
        yield from _profile(config)


def _records(config: AnyConfig) -> Iterator[Problem]:
    training = config.training
    yield from _late("record", training.record.steps, training.steps)
    for name, usual in training.record_when.items():
        key = f"training.record_when.{name}"
        if usual.min is None and usual.max is None and usual.jump is None:
            yield problem(key, "it has no min, max or jump, so no value is unusual", f"{key}.max=10")
        elif usual.min is not None and usual.max is not None and usual.min > usual.max:
            yield problem(key, f"min={usual.min:g} is above max={usual.max:g}", "exchange them")


def _late(key: str, steps: Sequence[int], last: int | None) -> Iterator[Problem]:
    if last is not None and (late := [step for step in steps if step > last]):
        what = f"step {late[0]} is after the last step, training.steps={last}"
        yield problem(f"training.{key}.steps", what, f"training.steps={late[0]}, or another step")


def _profile(config: Config) -> Iterator[Problem]:
    training, profile = config.training, config.training.profile
    yield from _late("profile", profile.steps, training.steps)
    placement = config.placement
    sizes = {role: placement.pools.get(placement.roles.get(role, ""), 0) for role in config.trained_roles()}
    if absent := [rank for rank in profile.torch_ranks if rank >= max(sizes.values())]:
        listed = ", ".join(f"{role} {size}" for role, size in sizes.items())
        yield problem("training.profile.torch_ranks", f"no role has a rank {absent[0]} ({listed} ranks)", "[0]")
    if profile.torch_ranks and not profile.steps:
        what = "no step is profiled, so these ranks record nothing"
        yield problem("training.profile.torch_ranks", what, "set training.profile.steps")
    if profile.memory and (config.cluster.device != "gpu" or not profile.torch_ranks):
        what = "it records the GPUs of training.profile.torch_ranks, which has no GPU"
        yield problem("training.profile.memory", what, "training.profile.memory=false")
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
