"""`mrl explain`: show what follows from a configuration: batch arithmetic, algorithm, and the ranks of each layout."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mrl.cli.arguments import add_config, aligned, load_one
from mrl.config.agent import ENVIRONMENTS
from mrl.config.arithmetic import (
    engine_nodes,
    has_own_rollout_pool,
    has_reference,
    longest_sample_tokens,
    num_engines,
    role_batch,
    role_devices,
    role_mesh,
    rollout_devices,
    rows_per_step,
    samples_per_step,
    shard_size,
    updates_per_step,
)
from mrl.config.catalog import find_algorithm
from mrl.config.own_code import read_function
from mrl.config.resolved.load import Resolved
from mrl.config.reward import JUDGE
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, DpoConfig, SftBatchConfig

EXAMPLE = "mrl explain configs/laptop-ppo.yaml actor.parallel.tp=1"
_WIDTH = 100
_MAX_TABLE_RANKS = 16  # with more ranks, those of one node share a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--all-ranks", action="store_true", help="one line per rank, for any number of ranks")


def run(arguments: argparse.Namespace) -> int:
    for line in explain(load_one(arguments.config), all_ranks=arguments.all_ranks):
        print(line)
    return 0


def explain(resolved: Resolved[Any], *, all_ranks: bool) -> Iterator[str]:
    config: AnyConfig = resolved.config
    batch = [*_batch(config), "", *_algorithm(config)] if isinstance(config, Config) else _sft_batch(config.batch)
    lines = [f"{resolved.path}", "", *batch, *_placement(config)]
    for role in config.model_roles():
        lines += ["", *_model_role(config, role, all_ranks=all_ranks)]
    if isinstance(config, Config):
        lines += ["", *_rollout(config, all_ranks=all_ranks)]
        lines += ["", *_asynchrony(config)] if config.asynchrony.ahead else []
        for name in config.agent.environments:
            lines += ["", *_environment(name, config)]
        if config.judge is not None:
            devices, tp = role_devices(config, JUDGE), config.judge.tp
            lines += ["", f"judge: {devices // tp} engines with tp {tp} on its own {devices} devices"]
    if resolved.warnings:
        lines += ["", "Not checked:", *(f"  - {warning}" for warning in resolved.warnings)]
    for line in lines:
        yield resolved.secrets.hide(line).rstrip()


def _batch(config: Config) -> Iterator[str]:
    batch, rollout = config.batch, config.rollout
    samples = samples_per_step(batch)
    per_epoch = samples // batch.samples_per_update
    prompts = f"prompts_per_step {batch.prompts_per_step} x samples_per_prompt {batch.samples_per_prompt}"
    updates = f"samples per step {samples} / samples_per_update {batch.samples_per_update}"
    longest = f"max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens {rollout.max_response_tokens}"
    epochs = f"updates per epoch {per_epoch} x epochs_per_step {batch.epochs_per_step}"
    rows = [
        ("samples per step", prompts, f"{samples}"),
        ("updates per epoch", updates, f"{per_epoch}"),
        ("optimizer steps per step", epochs, f"{updates_per_step(batch)}"),
        ("longest sample", longest, f"{longest_sample_tokens(rollout)} tokens"),
    ]
    yield from ("Batch:", *aligned(rows))


def _algorithm(config: Config) -> Iterator[str]:
    """Yield advantage and policy loss with paper, formula and the values of their options."""
    algorithm, loss = config.algorithm, config.algorithm.loss
    yield "Algorithm:"
    for kind, name, section in (("advantage", algorithm.advantage, algorithm), ("policy loss", loss.policy, loss)):
        entry = find_algorithm(kind, name)
        yield f"  {kind}: {name}{f'  [{entry.paper}]' if entry is not None and entry.paper else ''}"
        if entry is None:
            continue
        yield from textwrap.wrap(entry.formula, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        own = read_function(name)
        values = (
            {option: getattr(section, option) for option in entry.options}
            if own is None
            else own.values(section.options)
        )
        if values:
            yield f"    {', '.join(f'{option} {value}' for option, value in values.items())}"


def _sft_batch(batch: SftBatchConfig) -> Iterator[str]:
    longest = f"max_prompt_tokens {batch.max_prompt_tokens} + max_response_tokens {batch.max_response_tokens}"
    rows = [
        ("rows per update", "rows_per_update", f"{batch.rows_per_update}"),
        ("longest row", longest, f"{longest_sample_tokens(batch)} tokens"),
    ]
    yield from ("Batch:", *aligned(rows))


def _placement(config: AnyConfig) -> Iterator[str]:
    cluster, pools = config.cluster, config.placement.pools
    present = cluster.nodes * cluster.devices_per_node
    kind = "CPU slots" if cluster.device == "cpu" else "GPUs"
    yield ""
    placed = sum(pools.values())
    yield f"Devices: {cluster.nodes} x {cluster.devices_per_node} = {present} {kind}, {placed} of them in pools"
    yield from aligned((pool, str(size), _who(config, pool)) for pool, size in pools.items())
    if isinstance(config, DpoConfig) and config.preference.reference == "once":
        yield "  The reference has no separate weights (preference.reference: once): its log-probs are computed"
        yield "  before the first update, 4 bytes per response token in the run directory and in the driver's memory."
    if cluster.nodes > 1:
        yield "  Nodes below are numbered within each pool; Ray assigns them when the run starts."


def _who(config: AnyConfig, pool: str) -> str:
    """Return the roles of a pool, with the roles that share its processes or devices."""
    names = []
    for role in (role for role, other in config.placement.roles.items() if other == pool):
        names.append(role)
        if role == "actor" and isinstance(config, Config):
            names += [] if "rollout" in config.placement.roles else ["rollout"]
            where = f"kl.where: {config.algorithm.kl.where}"
            reader = where if config.algorithm.kl.where != "none" else config.algorithm.advantage
            names += [f"reference ({reader})"] if has_reference(config) else []
        elif role == "actor" and has_reference(config):
            names.append("reference (preference.reference: in_place)")
    return ", ".join(names) + (" take turns" if len(names) > 1 else "")


def _model_role(config: AnyConfig, role: str, *, all_ranks: bool) -> Iterator[str]:
    mesh, share, model = role_mesh(config, role), role_batch(config, role), config.model_roles()[role]
    per, samples = "update", f"rows_per_update {rows_per_step(config)}"
    if isinstance(config, Config):
        samples = f"samples_per_update {config.batch.samples_per_update}"
    if isinstance(config, Config) and role not in config.trained_roles():
        per, samples = "step", f"samples per step {samples_per_step(config.batch)}"
    chunks = f" ({model.parallel.vpp} model chunks each)" if model.parallel.vpp > 1 else ""
    sequence = ", sequence parallel" if model.parallel.sequence_parallel else ""
    layout = f"{mesh.world_size} ranks = tp {mesh.tp} x cp {mesh.cp} x dp {mesh.dp} x pp {mesh.pp}"
    experts = f"; expert layers etp {mesh.etp} x ep {mesh.ep} x edp {mesh.edp} x pp {mesh.pp}"
    has_experts = mesh.ep > 1 or mesh.etp > 1
    yield f"{role}: {layout}{chunks}{sequence}{experts if has_experts else ''}"
    if (size := shard_size(config, role)) is not None:
        copies = f", in {mesh.world_size // size} copies" if size < mesh.world_size else ""
        yield f"  torch shards the model of transformers over {size} ranks{copies}. Each gathers all layers in turn."
    if role == "actor" and isinstance(config, Config) and has_reference(config):
        kind = "this role with its adapters off" if config.actor.lora is not None else "a frozen copy of this role"
        yield f"  The reference model is {kind}: same processes, same layout."
    if (lora := getattr(model, "lora", None)) is not None and lora.base_quantization is not None:
        yield "  Linear layers of the frozen model are in FP8, with one scale per block of 128 x 128."
    if role not in config.trained_roles():
        yield "  It is frozen, and scores whole steps."
    room, of_rank = share.tokens_per_micro_batch, share.samples_per_rank
    capacity = f"max_tokens_per_device {model.max_tokens_per_device} x cp {mesh.cp}"
    needed = f"{of_rank} / floor({room} / longest sample {share.longest_sample_tokens}), rounded up"
    rows = [
        (f"samples per {per} and data-parallel rank", f"{samples} / dp {mesh.dp}", f"{of_rank}"),
        ("room of a micro-batch", capacity, f"{room} tokens"),
        (f"micro-batches per {per}, at most", needed, f"{share.max_micro_batches}"),
    ]
    yield from aligned(rows)
    axes = ["tp", "cp", "dp", "pp", *(["etp", "ep", "edp"] if has_experts else [])]
    places = map(mesh.coordinates, range(mesh.world_size))
    ranks = [{axis: getattr(place, axis) for axis in axes} for place in places]
    yield from _table(ranks, config.cluster.devices_per_node, all_ranks=all_ranks)


def _rollout(config: Config, *, all_ranks: bool) -> Iterator[str]:
    devices, tp, pp = rollout_devices(config), config.rollout.tp, config.rollout.pp
    whose = "their own" if has_own_rollout_pool(config) else "the actor's"
    nodes = f", each on {engine_nodes(config)} nodes" if engine_nodes(config) > 1 else ""
    dp = config.rollout.dp
    stages = f" and pp {pp}" if pp > 1 else f" and dp {dp}" if dp > 1 else ""
    yield f"rollout: {num_engines(config)} engines with tp {tp}{stages} on {whose} {devices} devices{nodes}"
    ranks = [
        {"engine": rank // (tp * pp * dp), "tp": rank % tp}
        | ({"pp": rank // tp % pp} if pp > 1 else {"dp": rank // tp % dp} if dp > 1 else {})
        for rank in range(devices)
    ]
    yield from _table(ranks, config.cluster.devices_per_node, all_ranks=all_ranks)


def _asynchrony(config: Config) -> Iterator[str]:
    asynchrony, samples, rollout = config.asynchrony, samples_per_step(config.batch), config.rollout
    ahead, batches = f"ahead {asynchrony.ahead}", 1
    under_way = "each batch is finished before the next begins"
    if asynchrony.weights == "in_flight":
        batches, under_way = asynchrony.ahead + 1, f"the step's batch and {ahead}"
    # prompt: an id; response: an id, log-prob and version, and perhaps a mask
    of_prompt, of_response = 4, 12 + bool(config.agent.environments)
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    size = f"{of_prompt} x max_prompt_tokens {prompt} + {of_response} x max_response_tokens {response}, each"
    kept = asynchrony.ahead * samples
    mib = kept * (of_prompt * prompt + of_response * response) / 2**20
    rows = [
        ("age of a token, at most", "updates that the weights are behind", f"{asynchrony.ahead}"),
        ("running samples, at most", f"samples per step {samples}; {under_way}", f"{batches * samples}"),
        ("samples in a checkpoint, at most", f"{ahead} x samples per step {samples}, not yet trained", f"{kept}"),
        ("size, without texts", size, f"{mib:,.1f} MiB"),
    ]
    yield f"asynchrony: {ahead}, weights {asynchrony.weights}"
    yield from aligned(rows)


def _environment(name: str, config: Config) -> Iterator[str]:
    environment, room = config.agent.environments[name], config.rollout.max_response_tokens
    turn, observation = environment.max_turn_tokens, environment.max_observation_tokens
    full = environment.full_turns(room)
    share = f"no separate limit: all share max_response_tokens {room}"
    rows = [
        ("data sources", ", ".join(environment.sources or ["all that no earlier environment handles"])),
        ("turns, at most", f"max_turns {environment.max_turns}, including the answer"),
        ("longest turn", share if turn is None else f"max_turn_tokens {turn}"),
        ("longest answer to one", share if observation is None else f"max_observation_tokens {observation}"),
    ]
    if full is not None:
        fit = f"floor((max_response_tokens {room} + {observation}) / ({turn} + {observation})) = {full}"
        less = "" if full >= environment.max_turns else f": less than the {environment.max_turns} that are allowed"
        rows.append(("full turns that fit", fit + less))
    scored_by = [f"{label} x {function.weight:g}" for label, function in config.reward.functions.items()]
    scored_by += [f"{role} x {model.weight:g}" for role, model in config.scoring_models().items()]
    if environment.name not in ENVIRONMENTS:  # the scores of built-in environments come from functions
        scored_by.insert(0, f"its own score x {environment.weight:g}")
    rows.append(("score", " + ".join(scored_by)))
    yield f"environment {name}: {environment.name}, in which the model writes {environment.format}"
    yield from aligned(rows)


def _table(places: Sequence[dict[str, int]], here: int, *, all_ranks: bool) -> Iterator[str]:
    """Yield one line per rank, or per node if there are many ranks. Nodes are numbered within the pool."""
    ranks = [{"rank": rank, "node": rank // here, "device": rank % here, **at} for rank, at in enumerate(places)]
    of_line = here if len(ranks) > _MAX_TABLE_RANKS and not all_ranks else 1
    groups = [ranks[begin : begin + of_line] for begin in range(0, len(ranks), of_line)]
    columns = list(ranks[0])
    yield from aligned([columns, *([_span(rank[column] for rank in group) for column in columns] for group in groups)])


def _span(values: Iterable[int]) -> str:
    present = sorted(set(values))
    return str(present[0]) if len(present) == 1 else f"{present[0]}-{present[-1]}"
