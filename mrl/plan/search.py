"""Searches for other placements and layouts by planned memory and time: the smallest changes that fit, and the fastest.

`advise` tries a few changes of a configuration at a time. `search` finds the fastest. The time of a step is a sum over
the roles and the engines, and a role's part depends only on its own layout and pool. So `search` tries combinations in
the order of these sums, and stops when no later one can be faster: it finds what an exhaustive search would find.
Memory and rules, which connect the parts, are checked for each combination.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, TypeVar

from mrl.config.arithmetic import longest_sample_tokens, role_devices, samples_per_step
from mrl.config.hardware import DEFAULT_UTILIZATION
from mrl.config.resolved.load import Resolved
from mrl.config.reward import JUDGE
from mrl.config.schema import Config, MegatronModelConfig, ParallelConfig, RolloutConfig
from mrl.errors import ModelError, counted
from mrl.models.layout import check_layout
from mrl.models.spec import ModelSpec
from mrl.plan.engine_splits import engine_splits
from mrl.plan.memory import MemoryPlan, Role, gib, plan_memory, role_stages
from mrl.plan.plan_input import PlanInput, make_plan_input
from mrl.plan.shard_layouts import shard_layouts
from mrl.plan.timing import Lengths, TimePlan, assumed_lengths, plan_time, role_phases, rollout_phase

_MAX_TOGETHER = 3
_MAX_CHANGES_TRIED = 1000
Changes = dict[str, Any]
Plan = TypeVar("Plan")
FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NO_RECOMPUTATION = dict.fromkeys((*FULL_RECOMPUTATION, "recompute_modules"))


def advise(subject: PlanInput, max_found: int = 4) -> list[tuple[Changes, MemoryPlan]]:
    """Return ways to make it fit, with the fewest kinds of change, each with the resulting plan."""

    def fitting(varied: PlanInput) -> MemoryPlan | None:
        plan = plan_memory(varied)
        return None if plan.shortages else plan

    return smallest_changes(subject, _ladders(subject), fitting, max_found)


def smallest_changes(
    subject: PlanInput, ladders: Iterable[list[Changes]], fitting: Callable[[PlanInput], Plan | None], max_found: int
) -> list[tuple[Changes, Plan]]:
    """Return steps of the fewest ladders that make it fit, each with the result of `fitting`."""
    ladders = [ladder for ladder in ladders if any(ladder)]
    num_tried = 0
    for together in range(1, _MAX_TOGETHER + 1):
        found: list[tuple[Changes, Plan]] = []
        for chosen in combinations(ladders, together):
            for rungs in product(*chosen):
                num_tried += 1
                changes = {key: value for rung in rungs for key, value in rung.items()}
                varied = subject.with_changes(changes)
                if varied is not None and (plan := fitting(varied)) is not None:
                    found.append((changes, plan))
                    break  # the first step that fits is the smallest
            if len(found) == max_found or num_tried > _MAX_CHANGES_TRIED:
                return found
        if found:
            return found
    return []


def _ladders(subject: PlanInput) -> Iterator[list[Changes]]:
    """Yield kinds of change, cheapest first, each with its steps, smallest first."""
    config = subject.config
    roles = config.model_roles()
    utilization = config.rollout.vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    lower = [round(utilization - 0.05 * step, 2) for step in range(1, 13)]
    yield [{"rollout.vllm.gpu_memory_utilization": share} for share in lower if share >= 0.3]
    yield [{"rollout.vllm.gpu_memory_utilization": share} for share in (0.7, 0.8, 0.9) if share > utilization]
    yield [{f"{role}.parallel.sequence_parallel": True for role, model in roles.items() if model.parallel.tp > 1}]
    yield from activation_ladders(subject)
    yield [{"rollout.tp": config.rollout.tp * factor} for factor in (2, 4, 8)]
    yield [{f"{role}.fsdp.shard_size": None for role, model in roles.items() if model.fsdp.shard_size}]
    for axis in ("tp", "pp"):
        yield [_split_more(subject, axis, factor) for factor in (2, 4, 8)]
    if subject.specs["actor"].moe:
        yield [_split_more(subject, "ep", factor) for factor in (2, 4, 8)]
    yield [_more_nodes(subject, factor) for factor in (2, 4, 8)]


def activation_ladders(subject: PlanInput) -> Iterator[list[Changes]]:
    """Yield smaller micro-batches, and partial or full recomputation of layers."""
    config = subject.config
    longest = longest_sample_tokens(config.rollout)
    shares = (0.75, 0.5, 0.25, 0.125, 0.0)
    yield [
        {
            f"{role}.max_tokens_per_device": max(
                int(model.max_tokens_per_device * share), -(-longest // model.parallel.cp)
            )
            for role, model in config.model_roles().items()
        }
        for share in shares
    ]
    roles = config.trained_roles().items()
    by_role = {role: _recomputations(subject, role) for role, model in roles if model.strategy == "megatron"}
    sharded = {f"{role}.fsdp.recompute": True for role, model in roles if model.strategy == "fsdp"}
    yield [
        {f"{role}.megatron.{key}": value for role, ways in by_role.items() for key, value in ways[cost].items()}
        | sharded
        for cost in (1, 2)
    ]


def _recomputations(subject: PlanInput, role: str) -> tuple[Changes, Changes, Changes]:
    """Return Megatron's settings for no, partial and full recomputation of each layer."""
    part = "mlp"
    if subject.specs[role].moe:  # Megatron recomputes only the activation only if it multiplies all experts at once
        part = "moe_act" if subject.config.model_roles()[role].megatron.get("moe_grouped_gemm") else "moe"
    selective = NO_RECOMPUTATION | {"recompute_granularity": "selective", "recompute_modules": [part]}
    return NO_RECOMPUTATION, selective, NO_RECOMPUTATION | FULL_RECOMPUTATION


def _split_more(subject: PlanInput, axis: str, factor: int) -> Changes:
    changes: Changes = {}
    for role, model in subject.config.model_roles().items():
        if model.strategy == "fsdp":
            continue
        size = getattr(model.parallel, axis) * factor
        changes[f"{role}.parallel.{axis}"] = size
        if axis == "tp" and size > 1:
            changes[f"{role}.parallel.sequence_parallel"] = True
    return changes


def _more_nodes(subject: PlanInput, factor: int) -> Changes:
    config = subject.config
    changes: Changes = {"cluster.nodes": config.cluster.nodes * factor}
    changes |= {f"placement.pools.{pool}": size * factor for pool, size in config.placement.pools.items()}
    if config.cluster.ray_address is None:
        changes["cluster.ray_address"] = "auto"
    return changes


# --- the fastest that fit ---------------------------------------------------------------------------------------------

_SIZES, _CHUNKS, _MAX_STAGES = (1, 2, 4, 8), (1, 2), 32
_UTILIZATIONS, _OWN_UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85), (0.9,)
_MAX_TRIED = 5_000


@dataclass(frozen=True)
class Found:
    """One way to place and lay out everything."""

    placement: str
    changes: Changes
    memory: MemoryPlan
    time: TimePlan


@dataclass(frozen=True)
class Result:
    """Result of a search."""

    found: tuple[Found, ...]
    """Combinations that fit, fastest first."""
    num_tried: int
    is_complete: bool
    """Whether no untried combination can be faster."""


@dataclass(frozen=True)
class Option:
    """One choice for one part: its section of the configuration, how to write it, and the seconds of that part."""

    seconds: float
    section: MegatronModelConfig | RolloutConfig
    changes: Changes
    stages: tuple[Role, ...] = ()
    """Memory of a role with a model, at each stage."""


@dataclass(frozen=True)
class Placement:
    """The pools, their roles, and the choices for each part, fastest first."""

    name: str
    placed: PlanInput
    changes: Changes
    parts: dict[str, list[Option]]


def search(subject: PlanInput, lengths: Lengths, max_found: int = 2) -> Result:
    """Return the fastest few combinations that fit, for each kind of placement."""
    choices = list(placements(subject, lengths))
    results = [
        _search([choice for choice in choices if choice.name == name], lengths, max_found)
        for name in dict.fromkeys(choice.name for choice in choices)
    ]
    fastest = sorted((match for result in results for match in result.found), key=lambda match: match.time.seconds)
    is_complete = all(result.is_complete for result in results)
    return Result(tuple(fastest), sum(result.num_tried for result in results), is_complete)


def _search(choices: list[Placement], lengths: Lengths, max_found: int) -> Result:
    fastest: list[Found] = []
    num_tried = 0
    for bound, placement, chosen in _in_order(choices):
        is_complete = len(fastest) == max_found and bound >= fastest[-1].time.seconds
        if is_complete or num_tried == _MAX_TRIED:
            return Result(tuple(fastest), num_tried, is_complete)
        num_tried += 1
        if (match := try_out(placement, chosen, lengths)) is not None:
            fastest = sorted([*fastest, match], key=lambda item: item.time.seconds)[:max_found]
    return Result(tuple(fastest), num_tried, is_complete=True)


def try_out(placement: Placement, chosen: dict[str, Option], lengths: Lengths) -> Found | None:
    """Return a combination with its memory and time, or None if it does not fit or is not allowed."""
    sections: dict[str, Any] = {part: option.section for part, option in chosen.items()}
    subject = replace(placement.placed, config=replace(placement.placed.config, **sections))
    memory = plan_memory(subject, {part: option.stages for part, option in chosen.items() if option.stages})
    if memory.shortages or subject.with_changes({}) is None:
        return None
    changes = placement.changes | {key: value for option in chosen.values() for key, value in option.changes.items()}
    return Found(placement.name, changes, memory, plan_time(subject, lengths))


def _in_order(choices: list[Placement]) -> Iterator[tuple[float, Placement, dict[str, Option]]]:
    """Yield all combinations of all placements, ordered by the sum of their parts' seconds, a lower bound of the
    step."""

    def entry(number: int, picks: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        parts = choices[number].parts.values()
        return sum(options[pick].seconds for options, pick in zip(parts, picks, strict=True)), number, picks

    possible = [number for number, placement in enumerate(choices) if all(placement.parts.values())]
    heap = [entry(number, (0,) * len(choices[number].parts)) for number in possible]
    heapq.heapify(heap)
    seen = {(number, picks) for _, number, picks in heap}
    while heap:
        seconds, number, picks = heapq.heappop(heap)
        parts = choices[number].parts
        yield seconds, choices[number], {name: parts[name][pick] for name, pick in zip(parts, picks, strict=True)}
        for place, (options, pick) in enumerate(zip(parts.values(), picks, strict=True)):
            following = (*picks[:place], pick + 1, *picks[place + 1 :])
            if pick + 1 < len(options) and (number, following) not in seen:
                seen.add((number, following))
                heapq.heappush(heap, entry(number, following))


def placements(subject: PlanInput, lengths: Lengths) -> Iterator[Placement]:
    """Yield four kinds of placement: all roles together; the other models apart; the engines apart; every role apart.

    The judge keeps its number of devices.
    """
    config, other_roles = subject.config, [role for role in subject.specs if role != "actor"]
    aside = {JUDGE: role_devices(config, JUDGE)} if config.judge is not None else {}
    total = config.cluster.nodes * config.cluster.devices_per_node - sum(aside.values())
    kinds: list[tuple[str, dict[str, int], dict[str, str]]] = [
        ("colocated", {"all": total}, dict.fromkeys(subject.specs, "all"))
    ]
    for quarters in (1, 2, 3):
        part, rest = total * quarters // 4, total - total * quarters // 4
        if not part or not rest:
            continue
        together = dict.fromkeys(subject.specs, "train")
        kinds.append(("split", {"train": part, "rollout": rest}, {**together, "rollout": "rollout"}))
        if not other_roles:
            continue
        shared = dict.fromkeys(other_roles, other_roles[0])
        kinds.append(("hybrid", {"actor": part, other_roles[0]: rest}, {"actor": "actor", **shared}))
        if (size := rest // (len(other_roles) + 1)) > 0:
            own = {"actor": part, **dict.fromkeys(other_roles, size), "rollout": rest - size * len(other_roles)}
            kinds.append(("standalone", own, {name: name for name in own}))
    for name, pools, roles in kinds:
        pools, roles = pools | aside, roles | dict.fromkeys(aside, JUDGE)
        changes = {"placement.pools": pools, "placement.roles": roles, "rollout.replicas": None}
        placed = subject.with_changes_unchecked(changes)
        parts = {role: list(_role_options(placed, role, lengths)) for role in subject.specs}
        parts["rollout"] = list(_engine_options(placed, lengths))
        for options in parts.values():
            options.sort(key=lambda option: option.seconds)
        yield Placement(name, placed, changes, parts)


def _role_options(placed: PlanInput, role: str, lengths: Lengths) -> Iterator[Option]:
    """Yield the layouts of a role on its pool, with no, partial or full recomputation."""
    config, memory_bytes = placed.config, placed.hardware.memory_bytes
    devices = config.placement.pools[config.placement.roles[role]]
    is_sharded = config.model_roles()[role].strategy == "fsdp"
    for changes in (shard_layouts if is_sharded else _megatron_layouts)(placed, role, devices):
        subject = placed.with_changes_unchecked(changes)
        stages = role_stages(subject, role)
        if all(stage.alone_bytes <= memory_bytes for stage in stages):
            seconds = sum(phase.seconds for phase in role_phases(subject, role, lengths))
            yield Option(seconds, subject.config.model_roles()[role], changes, stages)


def _megatron_layouts(placed: PlanInput, role: str, devices: int) -> Iterator[Changes]:
    ways = _recomputations(placed, role) if role in placed.config.trained_roles() else ({},)
    for layout in _layouts(placed, placed.specs[role], role, devices):
        parallel = {f"{role}.parallel.{name}": size for name, size in layout.items()}
        for recomputation in ways:
            yield parallel | {f"{role}.megatron.{name}": value for name, value in recomputation.items()}


def _layouts(placed: PlanInput, spec: ModelSpec, role: str, devices: int) -> Iterator[dict[str, Any]]:
    config, model = placed.config, placed.config.model_roles()[role]
    here, longest = config.cluster.devices_per_node, longest_sample_tokens(config.rollout)
    samples_per_update = config.batch.samples_per_update
    experts = [n for n in range(1, spec.moe.num_experts + 1) if spec.moe.num_experts % n == 0] if spec.moe else [1]
    # Context parallelism costs more than it gains if a sample fits without it.
    cp = next((size for size in _SIZES if longest <= model.max_tokens_per_device * size), _SIZES[-1])
    for tp, (pp, first, last), vpp, ep in product(_SIZES, [*_stages(spec.num_layers)], _CHUNKS, experts):
        if tp > here or devices % (tp * cp * pp) or devices % (ep * pp) or (vpp > 1 and (pp == 1 or last)):
            continue
        dp = devices // (tp * cp * pp)
        if samples_per_step(config.batch) % dp or (role in config.trained_roles() and samples_per_update % dp):
            continue
        try:
            ends: dict[str, Any] = {"first_stage_layers": first, "last_stage_layers": last}
            check_layout(ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, **ends), spec)
        except ModelError:
            continue
        yield {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "ep": ep, "etp": 1, "sequence_parallel": tp > 1, **ends}


def _stages(num_layers: int) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield numbers of stages, with the layers of the first and the last where stages cannot be equal.

    These two have fewer layers than the others, because they have the embedding and the head.
    """
    for pp in range(1, min(_MAX_STAGES, num_layers) + 1):
        if num_layers % pp == 0:
            yield pp, None, None
        elif pp > 2 and pp & (pp - 1) == 0 and (ends := num_layers - (pp - 2) * -(-num_layers // pp)) > 1:
            yield pp, ends - ends // 2, ends // 2


def _engine_options(placed: PlanInput, lengths: Lengths) -> Iterator[Option]:
    shares = _OWN_UTILIZATIONS if "rollout" in placed.config.placement.roles else _UTILIZATIONS
    for layout in engine_splits(placed, _SIZES):
        fastest = float("inf")
        for share in shares:  # a larger share that is not faster only uses memory
            changes = layout | {"rollout.vllm.gpu_memory_utilization": share}
            subject = placed.with_changes_unchecked(changes)
            if (seconds := rollout_phase(subject, lengths).seconds) < fastest:
                fastest = seconds
                yield Option(seconds, subject.config.rollout, changes)


def fits_on(resolved: Resolved[Config], num_nodes: int) -> list[str]:
    """Return what to change if only `num_nodes` machines exist."""
    cluster = resolved.config.cluster
    if not num_nodes:
        return ["No machine is available."]
    if cluster.device == "cpu":
        slots = counted(num_nodes * cluster.devices_per_node, "CPU slot")
        return [f"cluster.nodes={num_nodes} has {slots} for placement.pools; the search supports only GPUs."]
    try:
        subject = make_plan_input(resolved, None)
    except ModelError as error:
        return [f"It is unknown what fits on {counted(num_nodes, 'node')}: {error.what}"]
    lengths, device = assumed_lengths(resolved.config), subject.hardware.name
    # Batches and layers are mostly divisible by powers of two: five machines may be no better than four.
    for nodes in [num_nodes, *(2**power for power in reversed(range(num_nodes.bit_length())) if 2**power < num_nodes)]:
        result = search(subject.with_changes_unchecked({"cluster.nodes": nodes}), lengths, max_found=1)
        if result.found:
            head = f"On {counted(nodes, 'node')} of {device} this fits (predicted):"
            return [head, *(f"  {line}" for line in found_lines(subject, {"cluster.nodes": nodes}, result))]
    few = "1 node" if num_nodes == 1 else f"{num_nodes} or fewer nodes"
    return [f"No layout of these models fits on {few} of {device}."]


def found_lines(subject: PlanInput, shared: Changes, result: Result) -> Iterator[str]:
    for match in result.found:
        rate, taken = f"{match.time.tokens_per_device_and_s:,.0f} tokens/s", gib(match.memory.fullest.num_bytes)
        yield f"{match.placement}: {match.time.seconds:.1f} s per step, {rate} per device, peak {taken}"
        yield f"  {subject.overrides(shared | match.changes)}"
