"""Rules for the section `batch`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from mrl.config.arithmetic import samples_per_step
from mrl.config.rules.cluster import placed
from mrl.config.rules.problems import near_divisors, near_multiples, nearest, problem
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, RankedConfig, SftBatchConfig
from mrl.errors import Problem


def check_batch(config: AnyConfig) -> Iterator[Problem]:
    if isinstance(config, Config):
        yield from _splits(config)
    elif isinstance(config, RankedConfig):
        yield from _ranked(config.batch)


def _ranked(batch: SftBatchConfig) -> Iterator[Problem]:
    if batch.messages is not None:
        fix = "batch.messages=null; columns.chosen may hold whole conversations"
        yield problem("batch.messages", "ranked responses are read from columns.chosen and columns.rejected", fix)
    if batch.loss_on != "last":
        yield problem("batch.loss_on", "only the last message of ranked responses is compared", "batch.loss_on=last")


def _splits(config: Config) -> Iterator[Problem]:
    """Check that a step is a whole number of updates, and that it splits equally over the ranks of each role."""
    batch, total, key = config.batch, samples_per_step(config.batch), "batch.samples_per_update"
    sizes, update = _data_parallel_sizes(config, config.model_roles()), batch.samples_per_update
    common = math.lcm(*sizes)
    # If the update is valid by itself, propose a step that fits it too.
    multiple = update if update % common == 0 else common
    step = multiple // math.gcd(multiple, batch.samples_per_prompt)
    for dp, roles in sizes.items():
        if total % dp:
            size = f"data-parallel size {dp} ({roles})"
            what = f"prompts_per_step x samples_per_prompt = {total} is not a multiple of {size}"
            fix = nearest("batch.prompts_per_step", near_multiples(batch.prompts_per_step, step))
            yield problem("batch.prompts_per_step", what, fix)
    step_splits = total % common == 0  # otherwise, another step size is proposed first
    fix = nearest(key, near_divisors(update, total, common) if step_splits else near_multiples(update, common))
    if step_splits and total % update:
        yield problem(key, f"{update} does not divide prompts_per_step x samples_per_prompt = {total}", fix)
        return
    for dp, roles in _data_parallel_sizes(config, config.trained_roles()).items():
        if update % dp:
            yield problem(key, f"{update} is not a multiple of data-parallel size {dp} ({roles})", fix)


def _data_parallel_sizes(config: Config, among: Collection[str]) -> dict[int, str]:
    """Return the data-parallel sizes of these roles, each with the names of its roles."""
    roles_of: dict[int, list[str]] = {}
    for role, devices in placed(config):
        at = config.model_roles()[role].parallel
        if role in among and devices % (at.tp * at.cp * at.pp) == 0:
            roles_of.setdefault(devices // (at.tp * at.cp * at.pp), []).append(role)
    return {dp: " and ".join(roles) for dp, roles in roles_of.items()}
