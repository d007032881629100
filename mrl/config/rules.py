"""Rules between keys. Each is a small function that yields problems, with the nearest values that would work.

A rule may be met by a configuration that breaks another one, so each says nothing where what it needs
is missing: the other rule reports that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from mrl.config.arithmetic import longest_sample_tokens, role_devices, samples_per_step
from mrl.config.hardware import HARDWARE
from mrl.config.judge import JUDGE
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import Problem, did_you_mean


def near_multiples(value: int, step: int) -> list[int]:
    """Return the multiples of `step` just below and above `value`, the nearer first."""
    below = value // step * step
    return _by_distance({below, below + step} - {0}, value)


def near_divisors(value: int, total: int, step: int = 1) -> list[int]:
    """Return the divisors of `total` just below and above `value`, among the multiples of `step`, the nearer first."""
    fitting = [divisor for divisor in range(step, total + 1, step) if total % divisor == 0]
    below = [divisor for divisor in fitting if divisor <= value][-1:]
    above = [divisor for divisor in fitting if divisor > value][:1]
    return _by_distance({*below, *above}, value)


def nearest(key: str, values: Iterable[int]) -> str:
    """Return the fix of a problem, `nearest: key=4 or 8`; nothing where no value would work."""
    listed = " or ".join(str(value) for value in values)
    return f"nearest: {key}={listed}" if listed else ""


def _by_distance(values: set[int], value: int) -> list[int]:
    return sorted(values, key=lambda candidate: (abs(candidate - value), candidate))


_ROLES = ("actor", "critic", "reward_model", "teacher", "rollout", JUDGE)


def check_rules(config: AnyConfig) -> Iterator[Problem]:
    """Yield every problem between the keys of a configuration; where they stand is left to the caller."""
    for layout_rule in _LAYOUT_RULES:
        yield from layout_rule(config)
    if isinstance(config, Config):
        for rule in _RULES:
            yield from rule(config)


def problem(key: str, what: str, fix: str = "") -> Problem:
    """Return a problem that does not say where its key stands."""
    return Problem("", key, what, fix)


def schedules_are_whole(config: AnyConfig) -> Iterator[Problem]:
    """A rate that falls has an end, after its warm-up."""
    for role, model in config.trained_roles().items():
        schedule, key = model.schedule, f"{role}.schedule.decay_steps"
        if schedule.decay != "constant" and schedule.decay_steps is None:
            yield problem(key, f"decay is {schedule.decay}, and nothing says when it ends", f"{key}=1000")
        elif schedule.decay_steps is not None and schedule.decay_steps <= schedule.warmup_steps:
            what = f"{schedule.decay_steps} updates include a warm-up of {schedule.warmup_steps}"
            yield problem(key, what, f"at least {key}={schedule.warmup_steps + 1}")


def restarts_go_on(config: AnyConfig) -> Iterator[Problem]:
    """Who restarts may resume, and who falls back restarts."""
    if config.training.max_restarts and config.training.resume != "auto":
        key = "training.max_restarts"
        yield problem(key, "a run that never resumes cannot be restarted", f"{key}=0, or training.resume=auto")
    if config.training.fallback and not config.training.max_restarts:
        yield problem(
            "training.fallback", "nothing is restarted: training.max_restarts is 0", "training.max_restarts=3"
        )


def optimizers_have_sane_numbers(config: AnyConfig) -> Iterator[Problem]:
    """Rates and weights are finite and not negative, betas below 1."""
    for role, model in config.trained_roles().items():
        for name, value in model.optimizer.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0 <= value < (1 if "beta" in name else math.inf):
                yield problem(f"{role}.optimizer.{name}", f"must be {_range_of(name)}, not {value:g}")


def _range_of(name: str) -> str:
    return "from 0 to less than 1" if "beta" in name else "finite, and at least 0"


def pools_fit_the_cluster(config: AnyConfig) -> Iterator[Problem]:
    """The pools together take no more devices than there are."""
    cluster, pools = config.cluster, config.placement.pools
    wanted, present = sum(pools.values()), cluster.nodes * cluster.devices_per_node
    parts = " + ".join(f"{name} {size}" for name, size in pools.items())
    if wanted > present:
        what = f"{parts} = {wanted} devices; the cluster has {cluster.nodes} x {cluster.devices_per_node} = {present}"
        yield problem("placement.pools", what, nearest("cluster.nodes", [math.ceil(wanted / cluster.devices_per_node)]))


def hardware_is_known(config: AnyConfig) -> Iterator[Problem]:
    """Plans know the devices by these names."""
    name = config.cluster.hardware
    if name is not None and name not in HARDWARE:
        yield problem("cluster.hardware", f'"{name}" is not known', did_you_mean(name, HARDWARE))


def several_nodes_share_a_ray_cluster(config: AnyConfig) -> Iterator[Problem]:
    """Ray that is started here spans this machine only."""
    if config.cluster.nodes > 1 and config.cluster.ray_address is None:
        what = f"{config.cluster.nodes} nodes, but without cluster.ray_address Ray is started on this machine only"
        yield problem("cluster.nodes", what, "cluster.ray_address=auto, or cluster.nodes=1")


def roles_have_pools(config: AnyConfig) -> Iterator[Problem]:
    """Each role that has a model has a pool, and each pool a role."""
    placement, models = config.placement, [*config.model_roles()]
    if isinstance(config, Config) and config.judge is not None:
        models.append(JUDGE)
    for role, pool in placement.roles.items():
        key = f"placement.roles.{role}"
        if role not in _ROLES and role not in models:
            yield problem(key, "unknown role", did_you_mean(role, _ROLES))
        elif role not in models and (role != "rollout" or isinstance(config, SftConfig)):
            yield problem(key, f"there is no {role} section", f"add one, or set {key}=null")
        if pool not in placement.pools:
            yield problem(key, f'there is no pool "{pool}"', did_you_mean(pool, placement.pools))
    for role in models:
        if role not in placement.roles:
            pool, key = next(iter(placement.pools), "POOL"), "placement.roles"
            fix = f"{key}={{{role}: {pool}}}" if "." in role else f"{key}.{role}={pool}"
            yield problem(key, f"the {role} has no pool", fix)
    for pool in placement.pools:
        if pool not in placement.roles.values():
            yield problem(
                f"placement.pools.{pool}", "no role uses this pool", f"remove it: placement.pools.{pool}=null"
            )


def layouts_fit_their_pools(config: AnyConfig) -> Iterator[Problem]:
    """The devices of a role are a multiple of what its dense and its expert layout need."""
    for role, devices in _placed(config):
        at = config.model_roles()[role].parallel
        for formula, size in (("tp x cp x pp", at.tp * at.cp * at.pp), ("etp x ep x pp", at.etp * at.ep * at.pp)):
            if devices % size:
                pool = config.placement.roles[role]
                fix = nearest(f"placement.pools.{pool}", near_multiples(devices, size))
                yield problem(
                    f"{role}.parallel",
                    f'{formula} = {size} does not divide the {devices} devices of pool "{pool}"',
                    fix,
                )


def tensor_parallel_stays_in_a_node(config: Config) -> Iterator[Problem]:
    """Tensor parallelism needs the links inside a machine."""
    here = config.cluster.devices_per_node
    for role, devices in _placed(config):
        yield from stays_in_a_node(f"{role}.parallel.tp", config.model_roles()[role].parallel.tp, devices, here)
    for _, devices in _engines_placed(config):
        yield from stays_in_a_node("rollout.tp", config.rollout.tp, devices, here)


def uneven_stages_need_a_pipeline(config: AnyConfig) -> Iterator[Problem]:
    """A first or last stage of its own size is one of several."""
    for role, model in config.model_roles().items():
        for end in ("first", "last"):
            key = f"{role}.parallel.{end}_stage_layers"
            if getattr(model.parallel, f"{end}_stage_layers") and model.parallel.pp == 1:
                yield problem(key, "needs a pipeline, and pp is 1", f"{key}=null, or {role}.parallel.pp=2")


def stays_in_a_node(key: str, tp: int, devices: int, here: int) -> Iterator[Problem]:
    """Yield the problem of a group of devices that is larger than a node, or would span two."""
    if tp > here:
        yield problem(key, f"{tp} is more than the {here} devices of a node", nearest(key, [here]))
    elif devices > here and here % tp:
        what = f"{tp} does not divide the {here} devices of a node: some groups would span two nodes"
        yield problem(key, what, nearest(key, near_divisors(tp, here)))


def options_need_their_axis(config: AnyConfig) -> Iterator[Problem]:
    """Sequence parallelism and interleaving do nothing without the axis that they refine."""
    for role, model in config.model_roles().items():
        at = model.parallel
        if at.sequence_parallel and at.tp == 1:
            key = f"{role}.parallel.sequence_parallel"
            yield problem(key, "needs tensor parallelism, and tp is 1", f"{key}=false, or {role}.parallel.tp=2")
        if at.vpp > 1 and at.pp == 1:
            key = f"{role}.parallel.vpp"
            yield problem(
                key, f"{at.vpp} chunks per stage need a pipeline, and pp is 1", f"{key}=1, or {role}.parallel.pp=2"
            )


def engines_fit_their_pool(config: Config) -> Iterator[Problem]:
    """The rollout engines share their devices among them: all of them, unless a number is given."""
    tp, replicas = config.rollout.tp, config.rollout.replicas
    for role, devices in _engines_placed(config):
        pool = f"the {devices} devices of the pool of the {role}"
        if replicas is None and devices % tp:
            fix = nearest("rollout.tp", near_divisors(tp, devices))
            yield problem("rollout.tp", f"{tp} does not divide {pool}", fix)
        elif replicas is not None and replicas * tp > devices:
            fix = f"rollout.replicas={devices // tp}" if devices >= tp else f"rollout.tp={devices}"
            yield problem("rollout.replicas", f"{replicas} engines of {tp} devices do not fit on {pool}", fix)


def engines_share_with_the_actor_alone(config: Config) -> Iterator[Problem]:
    """Memory changes hands between the engines and the trainer; nothing does that for another role."""
    roles = config.placement.roles
    if "rollout" not in roles or roles["rollout"] == roles.get("actor"):
        return
    if beside := [role for role, pool in roles.items() if pool == roles["rollout"] and role != "rollout"]:
        what = f'the engines would share pool "{roles["rollout"]}" with the {", ".join(beside)}, but not the actor'
        fix = "a pool of their own, or placement.roles.rollout=null to have them with the actor"
        yield problem("placement.roles.rollout", what, fix)


def steps_split_over_ranks(config: Config) -> Iterator[Problem]:
    """The samples of a step are shared equally among the data-parallel ranks of each role."""
    batch, total, common = config.batch, samples_per_step(config.batch), _common_data_parallel_size(config)
    # Where the update is right by itself, what is proposed for the step fits it as well.
    multiple = batch.samples_per_update if batch.samples_per_update % common == 0 else common
    step = multiple // math.gcd(multiple, batch.samples_per_prompt)
    for roles, dp in _data_parallel_sizes(config, config.model_roles()):
        if total % dp:
            size = f"data-parallel size {dp} ({roles})"
            what = f"prompts_per_step x samples_per_prompt = {total} is not a multiple of {size}"
            key = "batch.prompts_per_step"
            yield problem(key, what, nearest(key, near_multiples(batch.prompts_per_step, step)))


def updates_split_the_step(config: Config) -> Iterator[Problem]:
    """A step is a whole number of updates, and an update is shared equally among the data-parallel ranks."""
    update, total, common = (
        config.batch.samples_per_update,
        samples_per_step(config.batch),
        _common_data_parallel_size(config),
    )
    key = "batch.samples_per_update"
    step_splits = total % common == 0  # if not, the rule above asks for another step first
    fix = nearest(key, near_divisors(update, total, common) if step_splits else near_multiples(update, common))
    if step_splits and total % update:
        yield problem(key, f"{update} does not divide prompts_per_step x samples_per_prompt = {total}", fix)
        return
    for roles, dp in _data_parallel_sizes(config, config.trained_roles()):
        if update % dp:
            yield problem(key, f"{update} is not a multiple of data-parallel size {dp} ({roles})", fix)


def samples_fit_a_micro_batch(config: Config) -> Iterator[Problem]:
    """The longest sample fits into one micro-batch."""
    rollout, longest = config.rollout, longest_sample_tokens(config.rollout)
    for role, model in config.model_roles().items():
        limit, cp = model.max_tokens_per_device, model.parallel.cp
        if longest > limit * cp:
            key = f"{role}.max_tokens_per_device"
            lengths = (
                f"max_prompt_tokens + max_response_tokens = {rollout.max_prompt_tokens} + {rollout.max_response_tokens}"
            )
            room = f"{limit} x cp {cp} = {limit * cp}" if cp > 1 else str(limit)
            yield problem(
                key,
                f"a sample of {lengths} = {longest} does not fit in {room}",
                f"smallest: {key}={math.ceil(longest / cp)}",
            )


def critic_serves_the_advantage(config: Config) -> Iterator[Problem]:
    """GAE reads a critic's values, and of the known estimators only GAE does."""
    advantage = config.algorithm.advantage
    if advantage == "gae" and config.critic is None:
        yield problem("algorithm.advantage", "gae needs a critic", "add a critic section, or algorithm.advantage=grpo")
    if config.critic is not None and advantage != "gae" and ":" not in advantage:
        yield problem(
            "critic", f"{advantage} does not read a critic's values", "critic=null, or algorithm.advantage=gae"
        )


def settings_have_what_they_need(config: Config) -> Iterator[Problem]:
    """A setting that some other section makes possible is not given without it."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if config.training.critic_warmup_steps and config.critic is None:
        key = "training.critic_warmup_steps"
        yield problem(key, "there is no critic to warm up", f"{key}=0")
    if kl.target is not None and kl.where not in ("reward", "both"):
        yield problem("algorithm.kl.target", "steers the KL in the reward, and there is none", "kl.where=reward")
    if algorithm.dynamic_sampling is not None and config.batch.samples_per_prompt == 1:
        key = "algorithm.dynamic_sampling"
        yield problem(key, "compares the samples of a prompt, and there is one", "batch.samples_per_prompt=8")
    if algorithm.overlong and algorithm.overlong.buffer_tokens > config.rollout.max_response_tokens:
        key, most = "algorithm.overlong.buffer_tokens", config.rollout.max_response_tokens
        yield problem(key, f"the buffer is longer than the longest response, {most}", f"{key}={most // 4 or 1}")
    if config.validation.every and not config.data.validation:
        yield problem("validation.every", "data.validation names no source", "add one, or validation.every=0")


def _placed(config: AnyConfig) -> Iterator[tuple[str, int]]:
    """Yield the roles that have a pool, with its devices."""
    for role in config.model_roles():
        if config.placement.roles.get(role) in config.placement.pools:
            yield role, role_devices(config, role)


def _engines_placed(config: Config) -> Iterator[tuple[str, int]]:
    """Yield the role on whose devices the engines are, with their number, if it has a pool."""
    roles, pools = config.placement.roles, config.placement.pools
    role = "rollout" if "rollout" in roles else "actor"
    if roles.get(role) in pools:
        yield role, pools[roles[role]]


def _data_parallel_sizes(config: Config, among: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the data-parallel sizes that occur among these roles, each with the names of its roles."""
    roles_of: dict[int, list[str]] = {}
    for role, devices in _placed(config):
        if role not in among:
            continue
        at = config.model_roles()[role].parallel
        if devices % (at.tp * at.cp * at.pp) == 0:
            roles_of.setdefault(devices // (at.tp * at.cp * at.pp), []).append(role)
    for dp, roles in roles_of.items():
        yield " and ".join(roles), dp


def _common_data_parallel_size(config: Config) -> int:
    return math.lcm(*(dp for _, dp in _data_parallel_sizes(config, config.model_roles())))


_LAYOUT_RULES: tuple[Callable[[AnyConfig], Iterator[Problem]], ...] = (
    pools_fit_the_cluster,
    hardware_is_known,
    several_nodes_share_a_ray_cluster,
    roles_have_pools,
    layouts_fit_their_pools,
    options_need_their_axis,
    uneven_stages_need_a_pipeline,
    schedules_are_whole,
    restarts_go_on,
    optimizers_have_sane_numbers,
)
_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    tensor_parallel_stays_in_a_node,
    engines_fit_their_pool,
    engines_share_with_the_actor_alone,
    steps_split_over_ranks,
    updates_split_the_step,
    samples_fit_a_micro_batch,
    critic_serves_the_advantage,
    settings_have_what_they_need,
)
