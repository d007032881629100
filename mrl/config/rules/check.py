"""All rules, in the order in which their problems are reported.

Each rule yields problems with the nearest values that would work. A rule stays silent if its inputs are invalid:
another rule reports those.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.agent import check_agent
from mrl.config.rules.algorithm import check_algorithm
from mrl.config.rules.asynchrony import check_asynchrony
from mrl.config.rules.batch import check_batch
from mrl.config.rules.cluster import check_cluster, check_placement
from mrl.config.rules.components import check_components, missing_modules
from mrl.config.rules.data import check_data, unchecked_data
from mrl.config.rules.fsdp import check_fsdp
from mrl.config.rules.judge import check_judge
from mrl.config.rules.lora import check_lora
from mrl.config.rules.model_shape import check_model_rules, read_model_shape, unchecked
from mrl.config.rules.own_options import check_own_options
from mrl.config.rules.passthrough import check_passthrough
from mrl.config.rules.preference import check_preference
from mrl.config.rules.reward import check_reward
from mrl.config.rules.roles import check_roles
from mrl.config.rules.rollout import check_rollout
from mrl.config.rules.sampling_mask import check_sampling_mask
from mrl.config.rules.training import check_training
from mrl.config.rules.validation import check_validation
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import Problem


def check(config: AnyConfig) -> tuple[list[Problem], list[str]]:
    """Return the problems, and the checks that were not possible on this machine."""
    problems, warnings = check_passthrough(config)
    problems += check_rules(config)
    warnings += unchecked_data(config)
    warnings += (f"{missing.key}: {missing.what}" for missing in missing_modules(config))
    roles_of: dict[tuple[str, str], list[str]] = {}
    for role in config.model_roles():
        roles_of.setdefault(config.model_of(role), []).append(role)
    for (key, path), roles in roles_of.items():
        shape = read_model_shape(key, path)
        if isinstance(shape, Problem):
            problems.append(shape)
            continue
        warnings += unchecked(path, shape)
        problems += check_model_rules(config, roles, shape) if shape is not None else ()
    return problems, warnings


def check_rules(config: AnyConfig) -> Iterator[Problem]:
    """Yield every problem between the keys of a configuration. The caller adds their origins."""
    yield from check_sizes(config)
    for check_any in (check_data, check_components, check_training, check_validation, check_lora, check_fsdp):
        yield from check_any(config)
    if isinstance(config, SftConfig):
        yield from check_preference(config)
        return
    for check_train in (check_asynchrony, check_reward, check_judge, check_agent, check_own_options):
        yield from check_train(config)


def check_sizes(config: AnyConfig) -> Iterator[Problem]:
    """Yield the problems that another layout or batch may cause. `mrl plan` asks this of each of its candidates."""
    for check_any in (check_cluster, check_placement, check_roles, check_batch):
        yield from check_any(config)
    if isinstance(config, Config):
        for check_train in (check_rollout, check_algorithm, check_sampling_mask):
            yield from check_train(config)
