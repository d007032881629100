"""Rules between the keys of every configuration: cluster, pools, layouts, batches, optimizers.

Each rule yields problems with the nearest values that would work. A rule stays silent if its inputs are invalid:
another rule reports those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from mrl.config.arithmetic import longest_sample_tokens, role_devices, samples_per_step
from mrl.config.hardware import HARDWARE
from mrl.config.reward import JUDGE
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import Problem, did_you_mean

_ROLES = ("actor", "critic", "reference", "reward_model", "teacher", "rollout", JUDGE)


def near_multiples(value: int, step: int) -> list[int]:
    """Return the multiples of `step` just below and above `value`, nearest first."""
    below = value // step * step
    return _by_distance({below, below + step} - {0}, value)


def near_divisors(value: int, total: int, step: int = 1) -> list[int]:
    """Return the divisors of `total` just below and above `value` that are multiples of `step`, nearest first."""
    fitting = [divisor for divisor in range(step, total + 1, step) if total % divisor == 0]
    below = [divisor for divisor in fitting if divisor <= value][-1:]
    above = [divisor for divisor in fitting if divisor > value][:1]
    return _by_distance({*below, *above}, value)


def _by_distance(values: set[int], value: int) -> list[int]:
    return sorted(values, key=lambda candidate: (abs(candidate - value), candidate))


def nearest(key: str, values: Iterable[int]) -> str:
    """Return the fix of a problem, `nearest: key=4 or 8`, or an empty string if no value would work."""
    listed = " or ".join(map(str, values))
    return f"nearest: {key}={listed}" if listed else ""


def problem(key: str, what: str, fix: str = "") -> Problem:
    """Return a problem without the origin of its key."""
    return Problem("", key, what, fix)


def check_rules(config: AnyConfig) -> Iterator[Problem]:
    """Yield every problem between the keys of a configuration. The caller adds their origins."""
    yield from _cluster(config)
    yield from _roles_have_pools(config)
    yield from _layouts(config)
    yield from _training(config)
    if isinstance(config, Config):
        yield from _engines(config)
        yield from _batch(config)
        yield from _micro_batches(config)
        yield from _settings(config)


def _cluster(config: AnyConfig) -> Iterator[Problem]:
    """Check that the pools fit into the cluster, and that a Ray started here is used on one machine only."""
    cluster, pools = config.cluster, config.placement.pools
    wanted, present = sum(pools.values()), cluster.nodes * cluster.devices_per_node
    if wanted > present:
        parts = " + ".join(f"{name} {size}" for name, size in pools.items())
        what = f"{parts} = {wanted} devices; the cluster has {cluster.nodes} x {cluster.devices_per_node} = {present}"
        yield problem("placement.pools", what, nearest("cluster.nodes", [math.ceil(wanted / cluster.devices_per_node)]))
    if (name := cluster.hardware) is not None and name not in HARDWARE:
        yield problem("cluster.hardware", f'"{name}" is not known', did_you_mean(name, HARDWARE))
    if cluster.nodes > 1 and cluster.ray_address is None:
        what = f"{cluster.nodes} nodes, but without cluster.ray_address Ray starts on this machine only"
        yield problem("cluster.nodes", what, "cluster.ray_address=auto, or cluster.nodes=1")


def _roles_have_pools(config: AnyConfig) -> Iterator[Problem]:
    placement, models = config.placement, [*config.model_roles()]
    if isinstance(config, Config) and config.judge is not None:
        models.append(JUDGE)
    for role, pool in placement.roles.items():
        key = f"placement.roles.{role}"
        if role not in _ROLES and role not in models:
            yield problem(key, "unknown role", did_you_mean(role, _ROLES))
        elif role not in models and (role != "rollout" or isinstance(config, SftConfig)):
            fix = f"set {key}=null" if isinstance(config, SftConfig) else f"add one, or set {key}=null"
            yield problem(key, f"the section `{role}` is missing", fix)
        if pool not in placement.pools:
            yield problem(key, f'unknown pool "{pool}"', did_you_mean(pool, placement.pools))
    for role in models:
        if role not in placement.roles:
            pool, key = next(iter(placement.pools), "POOL"), "placement.roles"
            fix = f"{key}={{{role}: {pool}}}" if "." in role else f"{key}.{role}={pool}"
            yield problem(key, f"the {role} has no pool", fix)
    for pool in placement.pools:
        if pool not in placement.roles.values():
            key = f"placement.pools.{pool}"
            yield problem(key, "no role uses this pool", f"remove it: {key}=null")


def _layouts(config: AnyConfig) -> Iterator[Problem]:
    """Check that a role's devices are a multiple of its layouts' sizes, and that settings of an axis have that axis."""
    for role, devices in _placed(config):
        at, pool = config.model_roles()[role].parallel, config.placement.roles[role]
        for formula, size in (("tp x cp x pp", at.tp * at.cp * at.pp), ("etp x ep x pp", at.etp * at.ep * at.pp)):
            if devices % size:
                what = f'{formula} = {size} does not divide the {devices} devices of pool "{pool}"'
                fix = nearest(f"placement.pools.{pool}", near_multiples(devices, size))
                yield problem(f"{role}.parallel", what, fix)
    for role, model in config.model_roles().items():
        at, key = model.parallel, f"{role}.parallel"
        if at.sequence_parallel and at.tp == 1:
            fix = f"{key}.sequence_parallel=false, or {key}.tp=2"
            yield problem(f"{key}.sequence_parallel", "needs tensor parallelism, but tp is 1", fix)
        if at.vpp > 1 and at.pp == 1:
            what = f"{at.vpp} chunks per stage need a pipeline, but pp is 1"
            yield problem(f"{key}.vpp", what, f"{key}.vpp=1, or {key}.pp=2")
        for end in ("first_stage_layers", "last_stage_layers"):
            if getattr(at, end) and at.pp == 1:
                yield problem(f"{key}.{end}", "needs a pipeline, but pp is 1", f"{key}.{end}=null, or {key}.pp=2")


def _training(config: AnyConfig) -> Iterator[Problem]:
    """Check that a decay ends after its warm-up, that a run that restarts may resume, and that optimizer values are
    valid."""
    for role, model in config.trained_roles().items():
        schedule, key = model.schedule, f"{role}.schedule.decay_steps"
        if schedule.decay != "constant" and schedule.decay_steps is None:
            yield problem(key, f"decay is {schedule.decay}, but its end is not set", f"{key}=1000")
        elif schedule.decay_steps is not None and schedule.decay_steps <= schedule.warmup_steps:
            what = f"{schedule.decay_steps} updates include a warm-up of {schedule.warmup_steps}"
            yield problem(key, what, f"at least {key}={schedule.warmup_steps + 1}")
    key, training = "training.max_restarts", config.training
    if training.max_restarts and training.resume != "auto":
        yield problem(key, "a run that never resumes cannot be restarted", f"{key}=0, or training.resume=auto")
    if training.fallback and not training.max_restarts:
        yield problem("training.fallback", f"the run never restarts, because {key} is 0", f"{key}=3")
    for role, model in config.trained_roles().items():
        for name, value in model.optimizer.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            limit, words = math.inf, "finite, and at least 0"
            if "beta" in name:
                limit, words = 1, "from 0 to less than 1"
            if is_number and not 0 <= value < limit:
                yield problem(f"{role}.optimizer.{name}", f"must be {words}, not {value:g}")


def stays_in_a_node(key: str, tp: int, devices: int, here: int) -> Iterator[Problem]:
    """Yield a problem if a tensor-parallel group, which needs the links inside a machine, would span two machines."""
    if tp > here:
        yield problem(key, f"{tp} is more than the {here} devices of a node", nearest(key, [here]))
    elif devices > here and here % tp:
        what = f"{tp} does not divide the {here} devices of a node: some groups would span two nodes"
        yield problem(key, what, nearest(key, near_divisors(tp, here)))


def _engines(config: Config) -> Iterator[Problem]:
    """Check that the engines fit on their devices and share them only with the actor. Only the actor and the engines
    can hand memory to each other."""
    here, roles, pools = config.cluster.devices_per_node, config.placement.roles, config.placement.pools
    for role, devices in _placed(config):
        yield from stays_in_a_node(f"{role}.parallel.tp", config.model_roles()[role].parallel.tp, devices, here)
    tp, replicas, role = config.rollout.tp, config.rollout.replicas, "rollout" if "rollout" in roles else "actor"
    if roles.get(role) in pools:
        devices = pools[roles[role]]
        yield from stays_in_a_node("rollout.tp", tp, devices, here)
        pool = f"the {devices} devices of the pool of the {role}"
        if replicas is None and devices % tp:
            fix = nearest("rollout.tp", near_divisors(tp, devices))
            yield problem("rollout.tp", f"{tp} does not divide {pool}", fix)
        elif replicas is not None and replicas * tp > devices:
            fix = f"rollout.replicas={devices // tp}" if devices >= tp else f"rollout.tp={devices}"
            yield problem("rollout.replicas", f"{replicas} engines with {tp} devices each do not fit on {pool}", fix)
    if role == "actor" or roles[role] == roles.get("actor"):
        return
    if sharing := [other for other, pool in roles.items() if pool == roles[role] and other != role]:
        what = f'the engines would share pool "{roles[role]}" with the {", ".join(sharing)}, but not the actor'
        fix = "give the engines their own pool, or set placement.roles.rollout=null to put them on the actor's devices"
        yield problem("placement.roles.rollout", what, fix)


def _batch(config: Config) -> Iterator[Problem]:
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


def _micro_batches(config: Config) -> Iterator[Problem]:
    """Check that the longest sample fits into one micro-batch."""
    rollout, longest = config.rollout, longest_sample_tokens(config.rollout)
    lengths = f"max_prompt_tokens + max_response_tokens = {rollout.max_prompt_tokens} + {rollout.max_response_tokens}"
    for role, model in config.model_roles().items():
        limit, cp, key = model.max_tokens_per_device, model.parallel.cp, f"{role}.max_tokens_per_device"
        if longest > limit * cp:
            what = f"a sample of {lengths} = {longest} does not fit in {room_of(limit, cp)}"
            yield problem(key, what, f"smallest: {key}={math.ceil(longest / cp)}")


def room_of(limit: int, cp: int) -> str:
    return f"{limit} x cp {cp} = {limit * cp}" if cp > 1 else str(limit)


def _settings(config: Config) -> Iterator[Problem]:
    """Check that settings that depend on another section are set only if that section is."""
    algorithm, kl, key = config.algorithm, config.algorithm.kl, "algorithm.advantage"
    if algorithm.advantage == "gae" and config.critic is None:
        yield problem(key, "gae needs a critic", f"add a critic section, or {key}=grpo")
    if config.critic is not None and algorithm.advantage != "gae" and ":" not in algorithm.advantage:
        yield problem("critic", f"{algorithm.advantage} does not read a critic's values", f"critic=null, or {key}=gae")
    if config.training.critic_warmup_steps and config.critic is None:
        key = "training.critic_warmup_steps"
        yield problem(key, "there is no critic to warm up", f"{key}=0")
    if kl.target is not None and kl.where not in ("reward", "both"):
        yield problem(
            "algorithm.kl.target", "adapts the KL in the reward, but the reward contains no KL", "kl.where=reward"
        )
    if config.reference is not None and kl.where == "none":
        what = "algorithm.kl.where is none: nothing reads the reference model"
        fix = "algorithm.kl.where=loss, or placement.roles.reference=null and reference=null"
        yield problem("reference", what, fix)
    if algorithm.dynamic_sampling is not None and config.batch.samples_per_prompt == 1:
        key = "algorithm.dynamic_sampling"
        yield problem(key, "compares the samples of a prompt, but there is only one", "batch.samples_per_prompt=8")
    if algorithm.overlong and algorithm.overlong.buffer_tokens > config.rollout.max_response_tokens:
        key, most = "algorithm.overlong.buffer_tokens", config.rollout.max_response_tokens
        yield problem(
            key, f"the buffer is longer than the longest response of {most} tokens", f"{key}={most // 4 or 1}"
        )


def _placed(config: AnyConfig) -> Iterator[tuple[str, int]]:
    """Yield each role that has a pool, and its number of devices."""
    for role in config.model_roles():
        if config.placement.roles.get(role) in config.placement.pools:
            yield role, role_devices(config, role)


def _data_parallel_sizes(config: Config, among: Collection[str]) -> dict[int, str]:
    """Return the data-parallel sizes of these roles, each with the names of its roles."""
    roles_of: dict[int, list[str]] = {}
    for role, devices in _placed(config):
        at = config.model_roles()[role].parallel
        if role in among and devices % (at.tp * at.cp * at.pp) == 0:
            roles_of.setdefault(devices // (at.tp * at.cp * at.pp), []).append(role)
    return {dp: " and ".join(roles) for dp, roles in roles_of.items()}
