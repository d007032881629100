"""`mrl plan`: show whether a configuration fits, its memory, and the time of a step, without starting anything."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence

from mrl.cli import rehearse
from mrl.cli.arguments import add_config, aligned, load_one
from mrl.config.arithmetic import (
    engine_nodes,
    gets_adapters_only,
    has_own_rollout_pool,
    longest_sample_tokens,
    mask_bytes,
    num_engines,
    samples_per_step,
)
from mrl.config.hardware import DEFAULT, HARDWARE
from mrl.config.resolved.load import Resolved
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, DpoConfig, SftConfig
from mrl.errors import ConfigError, Problem, counted
from mrl.models.spec import route_bytes
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.asynchrony import faster_split, plan_asynchrony
from mrl.plan.machine_memory import advise_machine, machine_plan_input, plan_machine
from mrl.plan.memory import MemoryPlan, gib, plan_memory, reference_host_bytes, update_phase
from mrl.plan.plan_input import PlanInput, make_plan_input, not_modeled
from mrl.plan.reshard_traffic import busiest_traffic, handed_over, sent_sizes
from mrl.plan.search import Changes, advise, found_lines, search
from mrl.plan.timing import Lengths, assumed_lengths, node_link_bytes_per_s, plan_time
from mrl.preflight.findings import SFT_ADVICE
from mrl.preflight.node_facts import usable_memory_bytes

EXAMPLE = "mrl plan configs/ppo-llama3.1-70b-8n8g.yaml actor.parallel.pp=2"
_DOES_NOT_FIT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--hardware", help=f"{', '.join(HARDWARE)} (default: cluster.hardware, or {DEFAULT})")
    parser.add_argument(
        "--model", help="model whose sizes to use: a directory, or a published model; default: model.path"
    )
    parser.add_argument(
        "--mean-prompt", type=float, metavar="TOKENS", help="mean prompt length; default: half of the longest"
    )
    parser.add_argument(
        "--mean-response", type=float, metavar="TOKENS", help="mean response length; default: half of the longest"
    )
    parser.add_argument("--verbose", action="store_true", help="show the origin of every number")
    parser.add_argument("--search", action="store_true", help="search for the fastest placements and layouts that fit")
    parser.add_argument("--rehearse", action="store_true", help="with --search: also rehearse the fastest that fits")
    parser.add_argument("--nodes", type=int, help="with --search: number of machines")
    parser.add_argument("--devices-per-node", type=int, metavar="N", help="with --search: devices per machine")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Return 2 if it does not fit."""
    resolved = load_one(arguments.config)
    path = resolved.path
    if resolved.config.cluster.device == "cpu" and not arguments.search:
        return _machine(path, resolved.config, arguments.model)
    if isinstance(resolved.config, SftConfig):
        return _sft(resolved, arguments)
    subject = make_plan_input(resolved, arguments.hardware, arguments.model)
    means = assumed_lengths(resolved.config)
    lengths = Lengths(arguments.mean_prompt or means.prompt, arguments.mean_response or means.response)
    device, plan = subject.hardware, plan_memory(subject)
    lines = [f"{path} on {device.name}, {gib(device.memory_bytes)} per device (--hardware to change)"]
    fastest = ""
    if arguments.search:
        found, fastest = _search(subject, lengths, arguments.nodes, arguments.devices_per_node)
        lines += ["", *found]
    elif arguments.nodes or arguments.devices_per_node or arguments.rehearse:
        flags = "--nodes, --devices-per-node and --rehearse need --search"
        fix = "to plan other devices, set cluster.nodes and placement.pools; to rehearse this one, use mrl rehearse"
        raise ConfigError([Problem("command line", "", flags, fix)])
    else:
        lines += ["", *_memory(subject, plan, verbose=arguments.verbose)]
        lines += [] if plan.shortages else ["", *_time(subject, lengths, verbose=arguments.verbose)]
        if not plan.shortages and resolved.config.asynchrony.ahead and has_own_rollout_pool(resolved.config):
            lines += ["", *_asynchrony(subject, lengths)]
        lines += ["", *_verdict(subject, plan)]
    if notes := list(not_modeled(subject.config)):
        lines += ["", f"Not included: {', '.join(notes)}"]
    for line in lines:
        print(resolved.secrets.hide(line).rstrip(), flush=True)
    if arguments.rehearse and fastest:
        return _rehearse([*arguments.config, *shlex.split(fastest)], arguments.model)
    return _DOES_NOT_FIT if plan.shortages and not arguments.search else 0


def _sft(resolved: Resolved[SftConfig], arguments: argparse.Namespace) -> int:
    """Print the memory of supervised training on GPUs. Its time is not planned, and no search is supported."""
    if arguments.search or arguments.nodes or arguments.devices_per_node:
        what = "--search, --nodes and --devices-per-node are for configurations of `mrl train`"
        raise ConfigError([Problem("command line", "", what, f"mrl plan {resolved.path}")])
    subject = make_plan_input(resolved, arguments.hardware, arguments.model)
    device, phase = subject.hardware, update_phase(subject)
    left = device.memory_bytes - phase.num_bytes
    print(f"{resolved.path} on {device.name}, {gib(device.memory_bytes)} per device (--hardware to change)\n")
    print("Memory of the fullest device, in an update:")
    rows = [(item.what, gib(item.num_bytes), item.origin if arguments.verbose else "") for item in phase.items]
    print("\n".join(aligned([*rows, ("total", gib(phase.num_bytes), "")])))
    if host := reference_host_bytes(subject):
        print(f"Host: {gib(host)} on each machine: the reference's weights, and space for the policy's (in_place).")
    elif isinstance(resolved.config, DpoConfig):
        print("Host: no reference weights.")
    print(f"\nIt {'fits: free' if left >= 0 else 'does not fit: missing'} {gib(abs(left))}.")
    if left < 0:
        print(f"To make it fit, set {SFT_ADVICE}.")
    return 0 if left >= 0 else _DOES_NOT_FIT


def _machine(path: str, config: AnyConfig, model: str | None) -> int:
    """Print the memory of a machine whose devices are CPU slots. Its time is not planned."""
    usable = usable_memory_bytes()
    subject = machine_plan_input(config, usable, model)
    plan = plan_machine(subject)
    print(f"{path} on CPU slots of this machine, {gib(usable)} before Ray's memory monitor ends processes\n")
    rows = [("process", "number", "each", "in its phase, at most")]
    rows += [(process.name, str(process.count), gib(process.held), gib(process.most)) for process in plan.processes]
    print("\n".join(aligned(rows)))
    print(f"Total: {gib(plan.min_bytes)} to {gib(plan.max_bytes)}, highest in the phase of the {plan.fullest}.\n")
    if plan.max_bytes <= usable:
        print("It fits.")
        return 0
    print("It does not fit." if plan.min_bytes > usable else "It may not fit.")
    if isinstance(config, SftConfig):
        print(f"To make it fit, set {SFT_ADVICE}.")
    elif changes := advise_machine(subject, usable):
        print(f"It fits with:\n  {subject.overrides(changes)}")
    else:
        print("None of the changes that were tried makes it fit.")
    return _DOES_NOT_FIT if plan.min_bytes > usable else 0


def _memory(subject: PlanInput, plan: MemoryPlan, *, verbose: bool) -> Iterator[str]:
    yield "Memory of the fullest device of each pool, GiB:"
    names = list(dict.fromkeys(item.role for phase in plan.phases for item in phase.items))
    rows: list[Sequence[str]] = [("pool", "phase", *names, "total", "left")]
    for phase in plan.phases:
        totals = [sum(item.num_bytes for item in phase.items if item.role == name) for name in names]
        numbers = [*totals, phase.num_bytes, subject.hardware.memory_bytes - phase.num_bytes]
        rows.append((phase.pool, phase.name, *(f"{number / 2**30:.1f}" for number in numbers)))
    yield from aligned(rows)
    for phase in plan.phases if verbose else ():
        yield f"{phase.name} ({phase.pool}):"
        yield from aligned([(item.role, item.what, f"{item.num_bytes:,}", item.origin) for item in phase.items])
    config, engine = subject.config, plan.engine
    engines = num_engines(config)
    share = -(-samples_per_step(config.batch) // (engines * config.rollout.dp))
    held = f"the cache of each holds {engine.cache_tokens:,} tokens"
    split = f"tp {config.rollout.tp}" + (f" and dp {config.rollout.dp}" if config.rollout.dp > 1 else "")
    split += f" and pp {config.rollout.pp}" if config.rollout.pp > 1 else ""
    yield f"Rollout: {counted(engines, 'engine')} with {split}; {held},"
    yield f"  {counted(engine.full_samples, 'sample')} of full length at a time, out of {share:,} per step."
    limits = f"{counted(engine.max_sequences, 'sample')} and {engine.max_tokens:,} tokens"
    yield f"  An engine runs up to {limits} at a time."
    if config.rollout.dp > 1:
        yield f"  These are figures of each of the {config.rollout.dp} data-parallel ranks of an engine."
    if config.rollout.pp > 1:
        part = math.ceil(min(share, engine.max_sequences) / config.rollout.pp)
        yield f"  Each stage computes {counted(part, 'sample')} at a time, and reads its weights again for the next."
    if (nodes := engine_nodes(config)) > 1 and config.rollout.tp > config.cluster.devices_per_node:
        rate = node_link_bytes_per_s(subject) / 1e9
        yield f"  Each spans {nodes} nodes: its ranks are assumed to add up at {rate:.0f} GB/s over all network cards."
    elif nodes > 1 and config.rollout.dp > 1:
        yield f"  Each spans {nodes} nodes: every rank sends the tokens of its samples to the experts of all nodes."
    elif nodes > 1:
        yield f"  Each spans {nodes} nodes, which only pass hidden states from stage to stage."
    yield from _turns(config)
    yield f"Host: {gib(plan.host_bytes_per_node)} on each machine: memory moved off devices, and a checkpoint copy."
    if config.algorithm.router_replay == "R3":
        per_token, tokens = route_bytes(subject.specs["actor"]), longest_sample_tokens(config.rollout)
        step = per_token * tokens * samples_per_step(config.batch)
        yield f"Router replay: {per_token} bytes per token, up to {gib(step)} per step over the memory of all machines."
    if config.algorithm.keep_sampling_mask:
        per_token, tokens = mask_bytes(config.rollout.top_k), config.rollout.max_response_tokens
        step = per_token * tokens * samples_per_step(config.batch)
        yield f"Sampling masks: {per_token} bytes per response token, up to {gib(step)} per step through the driver."


def _turns(config: Config) -> Iterator[str]:
    """Yield the cost of processing a conversation again in each turn, or what the prefix cache saves."""
    if not config.agent.environments:
        return
    turns = max(environment.max_turns for environment in config.agent.environments.values())
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    again = turns * prompt + (turns - 1) * response // 2  # turns and observations are assumed to have the same length
    if config.agent.deterministic or not config.rollout.vllm.get("enable_prefix_caching", True):
        cached = f"in {turns} turns; with a prefix cache, {prompt + response:,}"
        yield f"Turns: without a prefix cache, the longest conversation reads {again:,} tokens {cached}."
    else:
        cached = f"each of the {prompt + response:,} tokens of the longest conversation once"
        yield f"Turns: the prefix cache reads {cached}; without it, {turns} turns read {again:,}."


def _time(subject: PlanInput, lengths: Lengths, *, verbose: bool) -> Iterator[str]:
    plan = plan_time(subject, lengths)
    yield f"Seconds per step, simulated for {_means(lengths)}:"
    rows: list[Sequence[str]] = []
    for phase in plan.phases:
        parts = [f"{name} {seconds:.1f}" for name, seconds in phase.parts.items() if seconds >= 0.05]
        rows.append((phase.name, f"{phase.seconds:.1f}", ", ".join(parts) if verbose else ""))
    rows.append(("total", f"{plan.seconds:.1f}", f"{plan.tokens_per_device_and_s:,.0f} tokens/s per device"))
    yield from aligned(rows)
    yield from _weight_update(subject)
    if verbose:
        assumed = (f"{name} {value:g}" for name, value in dataclasses.asdict(ASSUMPTIONS).items())
        yield f"Assumed (mrl/plan/assumptions.py): {', '.join(assumed)}"


def _weight_update(subject: PlanInput) -> Iterator[str]:
    """Yield the bytes of a weight update, unless engines get adapters only."""
    config, spec = subject.config, subject.specs["actor"]
    if gets_adapters_only(config):
        return
    sizes = sent_sizes(config, spec)
    num_bytes, _ = handed_over(spec, sizes, config.rollout.vllm.get("dtype", config.actor.dtype))
    line = f"Weight update: {num_bytes / 1e9:,.1f} GB for each device of an engine"
    line += ", quantized by the trainer" if sizes.fp8 else ""
    if not has_own_rollout_pool(config):
        traffic = busiest_traffic(config, spec)
        line += f";\n  the busiest receives {traffic.network / 1e9:,.1f} GB of it from other machines"
    yield f"{line}."
    if sizes.unaligned:
        yield f"Not sent in FP8, because slices are not whole blocks of 128: {', '.join(sorted(sizes.unaligned))}."


def _asynchrony(subject: PlanInput, lengths: Lengths) -> Iterator[str]:
    """Yield the gain of asynchrony, the slower side, and the best division of the devices."""
    plan, mode = plan_asynchrony(subject, lengths), subject.config.asynchrony
    yield f"Asynchrony, simulated with log-normal responses (sigma {ASSUMPTIONS.response_sigma:g}, cut at the maximum):"
    rows: list[Sequence[str]] = [("", "s per step", "trainer idle", "engines idle", "tokens by age in updates")]
    ahead = f"{mode.ahead} ahead, {mode.weights.replace('_', ' ')}"
    both = {"synchronous": plan.synchronous, ahead: plan.asynchronous}
    if plan.shared is not None:
        both = {"synchronous, on shared devices": plan.shared, **both}
    for name, simulated in both.items():
        ages = ", ".join(f"{age}: {share:.0%}" for age, share in simulated.ages.items())
        rows.append(
            (name, f"{simulated.seconds:.1f}", f"{simulated.trainer_idle:.0%}", f"{simulated.engines_idle:.0%}", ages)
        )
    yield from aligned(rows)
    sides = f"max(generation {plan.generation_s:.1f}, training {plan.training_s:.1f}) + push {plan.push_s:.1f}"
    slower = "generation" if plan.generation_s > plan.training_s else "training"
    yield f"The bound is {sides} = {plan.bound_s:.1f} s: {slower} is the bottleneck."
    if plan.shared is not None and plan.shared.seconds < plan.asynchronous.seconds:
        yield "Shared devices are faster, although they wait, because all of them generate and all of them train."
    if (split := faster_split(subject, lengths, plan.asynchronous.seconds)) is None:
        yield "None of the other divisions of these devices that were tried is faster."
    else:
        seconds, changes = split
        yield f"Another division of these devices takes {seconds:.1f} s per step:\n  {subject.overrides(changes)}"


def _verdict(subject: PlanInput, plan: MemoryPlan) -> Iterator[str]:
    if not plan.shortages:
        taken = gib(plan.fullest.num_bytes)
        yield f"It fits. The peak is {taken} per device, in `{plan.fullest.name}`."
        return
    for shortage in plan.shortages:
        where = f"`{shortage.phase.name}` on pool `{shortage.phase.pool}`"
        yield f"{where} {shortage.what}: {gib(shortage.num_bytes)} too much."
    advice = advise(subject)
    yield (
        "It fits with:"
        if advice
        else "None of the changes that were tried makes it fit. Use larger devices (--hardware)."
    )
    for changes, changed in advice:
        yield f"  {subject.overrides(changes)}"
        taken = gib(changed.fullest.num_bytes)
        yield f"    peak {taken}, and {counted(changed.engine.full_samples, 'full sample')} in a cache"


def _rehearse(config: list[str], model: str | None) -> int:
    """Rehearse the configuration with these overrides."""
    parser = argparse.ArgumentParser()
    rehearse.add_arguments(parser)
    print(f"\nRehearsing the fastest: {' '.join(config)}", flush=True)
    return rehearse.run(parser.parse_args([*config, *(["--model", model] if model else [])]))


def _search(
    subject: PlanInput, lengths: Lengths, nodes: int | None, devices_per_node: int | None
) -> tuple[list[str], str]:
    """Return the lines of a search, and the overrides of the fastest layout."""
    cluster = subject.config.cluster
    wanted: Changes = {"cluster.nodes": nodes or cluster.nodes}
    wanted["cluster.devices_per_node"] = devices_per_node or cluster.devices_per_node
    if wanted["cluster.nodes"] > 1:
        wanted["cluster.ray_address"] = cluster.ray_address or "auto"
    result = search(subject.with_changes_unchecked(wanted), lengths)
    lines = [
        f"Fastest layout of each placement, simulated for {_means(lengths)}.",
        f"Phases run one after another in every placement. {result.num_tried:,} combinations were tried.",
    ]
    if not result.is_complete:
        lines.append("This is the limit: there may be faster ones.")
    if not result.found:
        lines.append("No combination fits.")
        return lines, ""
    return [*lines, *found_lines(subject, wanted, result)], subject.overrides(wanted | result.found[0].changes)


def _means(lengths: Lengths) -> str:
    means = f"means of {lengths.prompt:,.0f} prompt and {lengths.response:,.0f} response tokens"
    return f"{means} (--mean-prompt, --mean-response)"
