"""verl's rules that concern several keys: switches, token budgets, machines, rewards, the strategy, batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.fsdp import OPTIMIZER_DEFAULTS
from mrl.config.peer_import import (
    EPOCHS,
    PER_UPDATE,
    PROMPTS,
    SAMPLES,
    UPDATES,
    Batch,
    Imported,
    KeyReport,
    Peer,
    import_keys,
)
from mrl.config.values import KeyPath
from mrl.config.verl_keys import name_for, reason_for
from mrl.config.verl_values import find

_SAMPLES = ("actor_rollout_ref", "rollout", "n")
"""The key of samples per prompt, whose default in verl is 1."""
_SOURCES = {
    "gsm8k": ["openai/gsm8k"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math*", "aime*"],
}
"""Functions by which verl scores without a function of the user -> the data sources."""


def import_verl(leaves: Mapping[KeyPath, Any]) -> Imported:
    """Return the configuration for these keys of verl."""
    return import_keys(VERL, leaves)


def _finish(made: Imported, values: Mapping[str, Any], leaves: Mapping[KeyPath, Any]) -> None:
    _choose_strategy(made, values, leaves)
    _add_budgets(made, values)
    _add_machines(made, values)
    _add_rewards(made, leaves)


def _batch(values: Mapping[str, Any]) -> Batch:
    prompts, n = (_whole(find(values, key)) or None for key in ("train_batch_size", "rollout.n"))
    mini, epochs = _whole(find(values, "ppo_mini_batch_size")) or None, _whole(find(values, "actor.ppo_epochs")) or 1
    updates = -(-prompts // mini) * epochs if prompts and mini else None
    per_update = mini * n if mini and n else None
    return {PROMPTS: prompts, SAMPLES: prompts * n if prompts and n else None, PER_UPDATE: per_update,
            UPDATES: updates, EPOCHS: epochs}  # fmt: skip


def _choose_strategy(made: Imported, values: Mapping[str, Any], leaves: Mapping[KeyPath, Any]) -> None:
    """Train by FSDP as verl does, unless the configuration has something that only Megatron does here.

    verl trains by FSDP unless a key says otherwise.
    """
    default = None if any("megatron" in path for path in leaves) else "fsdp"
    for role, section in (("actor", "actor_rollout_ref.actor"), ("critic", "critic")):
        key, settings = f"{section}.strategy", made.values.get(role, {})
        strategy = find(values, key) or default
        if strategy not in ("fsdp", "fsdp2") or not settings:
            continue
        made.left_out[:] = [report for report in made.left_out if report.key != key]
        axes = {axis for axis, size in settings.get("parallel", {}).items() if axis != "cp" and size not in (1, False)}
        known = {"lr", *OPTIMIZER_DEFAULTS}
        others = [name for name in settings.get("megatron", {}) if not name.startswith("recompute")]
        only = [*sorted(axes), *others, *settings.get("ddp", {}), *(settings.get("optimizer", {}).keys() - known)]
        only += ["router replay"] if find(values, "router_replay.mode") not in (None, "disabled") else []
        if only:
            remark = f"Megatron, because mrl's fsdp has no {', '.join(only)} (docs/fsdp.md)"
            made.changed.append(KeyReport(key, strategy, f"{role}.strategy=megatron", remark))
            continue
        made.set(f"{role}.strategy", "fsdp")
        if settings.pop("megatron", None):
            made.set(f"{role}.fsdp.recompute", True)
        made.taken.append(KeyReport(key, strategy, f"{role}.strategy=fsdp"))


def _switched_off(path: KeyPath, values: Mapping[str, Any]) -> str:
    """Return why a key has no effect in verl, or nothing."""
    if path[0] == "critic" and find(values, "adv_estimator") not in (None, "gae"):
        return f"adv_estimator={find(values, 'adv_estimator')} has no critic"
    if path[0] == "reward_model" and path[-1] != "enable" and find(values, "reward_model.enable") is not True:
        return "reward_model.enable is not true"
    if "multi_turn" in path and path[-1] != "enable" and find(values, "multi_turn.enable") is not True:
        return "multi_turn.enable is not true"
    if ("lora" in path or path[-1].startswith(("lora_", "target_modules"))) and not (
        find(values, "lora_rank") or find(values, "lora.rank")
    ):
        return "without a rank, all weights are trained"
    return ""


def _add_budgets(made: Imported, values: Mapping[str, Any]) -> None:
    """Add the tokens of a micro-batch of each role that verl gives in samples."""
    length = sum(_whole(find(values, key)) for key in ("max_prompt_length", "max_response_length"))
    for role, section in (("actor", "actor_rollout_ref.actor"), ("critic", "critic"), ("reward_model", "reward_model")):
        if role not in made.values or "max_tokens_per_device" in made.values[role]:
            continue
        sizes = (f"{section}.{name}_size_per_gpu" for name in ("ppo_micro_batch", "micro_batch"))
        samples = next(filter(None, (_whole(find(values, name)) for name in sizes)), 1)
        made.set(f"{role}.max_tokens_per_device", samples * length)
        remark = f"{samples} samples of up to {length} tokens; mrl fills a micro-batch with shorter ones"
        shown = f"{role}.max_tokens_per_device={samples * length}"
        made.changed.append(KeyReport(f"{section}.ppo_micro_batch_size_per_gpu", samples, shown, remark))


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _add_machines(made: Imported, values: Mapping[str, Any]) -> None:
    """Add the pool of all devices. verl's defaults are one machine with 8 devices."""
    cluster = made.values.setdefault("cluster", {})
    made.set("cluster.device", "gpu")
    nodes, here = cluster.setdefault("nodes", 1), cluster.setdefault("devices_per_node", 8)
    if isinstance(nodes, int) and isinstance(here, int):
        made.set("placement.pools.all", nodes * here)
    else:
        made.left_out.append(KeyReport("trainer.nnodes", nodes, "placement.pools.all", "set it to all devices by hand"))
    roles = {"critic": find(values, "adv_estimator") in (None, "gae"), "reward_model": "reward_model" in made.values}
    made.set("placement.roles", {"actor": "all"} | {role: "all" for role, has_it in roles.items() if has_it})


def _add_rewards(made: Imported, leaves: Mapping[KeyPath, Any]) -> None:
    if not any(path[0] == "custom_reward_function" for path in leaves):
        made.set("reward.functions", {name: {"name": name, "sources": [*of]} for name, of in _SOURCES.items()})
        remark = "verl's default for these data sources; others need a function"
        made.changed.append(KeyReport("default_compute_score", "", "reward.functions", remark))


VERL = Peer("verl", name_for, reason_for, _switched_off, _finish, _batch, {_SAMPLES: 1})
