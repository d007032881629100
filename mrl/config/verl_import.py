"""A configuration made from verl's keys, with a report on each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mrl.config.values import KeyPath, dotted
from mrl.config.verl_keys import name_for, reason_for
from mrl.config.verl_values import find, same

_CONVERTED = re.compile(r"=(\[.*?\]|[^,]*)(?:,? (.*))?", re.DOTALL)
_SAMPLES = ("actor_rollout_ref", "rollout", "n")
"""The key of samples per prompt, whose default in verl is 1."""
_BY_HAND = "has no value that can be taken over: see docs/coming-from-verl.md"
_SOURCES = {
    "gsm8k": ["openai/gsm8k"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math*", "aime*"],
}
"""Functions by which verl scores without a function of the user -> the data sources."""


@dataclass(frozen=True)
class KeyReport:
    """A key of verl, and its counterpart."""

    key: str
    value: Any
    name: str
    """mrl's key with its value; empty if mrl has none."""
    remark: str = ""


@dataclass
class Imported:
    """The values of a configuration, and the keys of verl behind them."""

    values: dict[str, Any] = field(default_factory=dict)
    taken: list[KeyReport] = field(default_factory=list)
    changed: list[KeyReport] = field(default_factory=list)
    """Taken over with another meaning or unit."""
    left_out: list[KeyReport] = field(default_factory=list)
    unknown: list[KeyReport] = field(default_factory=list)

    def set(self, name: str, value: Any, *, again: bool = False) -> Any:
        """Set a key. Return the value that it already has, if that is another one; with `again`, replace it."""
        *sections, last = name.split(".")
        section = self.values
        for part in sections:
            section = section.setdefault(part, {})
        if again:
            section[last] = value
        return section[last] if section.setdefault(last, value) != value else None


def import_verl(leaves: Mapping[KeyPath, Any]) -> Imported:
    """Return the configuration for these keys of verl."""
    values: dict[str, Any] = {}
    leaves = {_SAMPLES: 1, **leaves}
    for path, value in leaves.items():
        _nest(values, path, value)
    made = Imported()
    for path, value in leaves.items():
        _take(made, path, value, values)
    _add_budgets(made, values)
    _add_machines(made, values)
    made.set("run.name", made.values.get("run", {}).get("name", "imported"))
    _add_rewards(made, leaves)
    return made


def _take(made: Imported, path: KeyPath, value: Any, values: Mapping[str, Any]) -> None:
    key, off = dotted(path), _switched_off(path, values)
    match = name_for(path)
    if off or match is None:
        reason = off or reason_for(path)
        (made.left_out if reason else made.unknown).append(
            KeyReport(key, value, "", reason or "no key of verl is known")
        )
        return
    name, convert = match
    if "$" in str(value).replace("${oc.env:", ""):
        made.left_out.append(KeyReport(key, value, name, "the script computes its value: set it by hand"))
        return
    converted = _CONVERTED.fullmatch(text := convert(value, values))
    if name.startswith("reference."):
        made.left_out.append(KeyReport(key, value, "", "the reference has the actor's layout"))
    elif name.startswith(("agent.", "reward.functions.")) or converted is None or not converted[1].strip():
        made.left_out.append(KeyReport(key, value, name, text.lstrip(" ,=") or _BY_HAND))
    else:
        taken = value if convert is same else parsed(converted[1].strip())
        _set(made, KeyReport(key, value, name, converted[2] or ""), taken)


def _set(made: Imported, report: KeyReport, value: Any) -> None:
    files = value if isinstance(value, list) and ".NAME." in report.name else [value]
    for name in report.name.split(", "):
        for number, one in enumerate(files):
            entry = name.replace(".NAME.", ".main." if len(files) == 1 else f".part{number}.")
            if (other := made.set(entry, one)) is not None:
                made.left_out.append(
                    KeyReport(report.key, report.value, name, f"another key has set {entry} to {other}")
                )
                return
        if name.endswith("megatron.recompute_granularity") and value == "full":
            made.set(name.replace("granularity", "method"), "uniform")
            made.set(name.replace("granularity", "num_layers"), 1)
    shown = ", ".join(f"{name.replace('NAME', 'main')}={value}" for name in report.name.split(", "))
    (made.changed if report.remark else made.taken).append(KeyReport(report.key, report.value, shown, report.remark))


def as_yaml(made: Imported) -> str:
    return yaml.safe_dump(made.values, sort_keys=False)


def parsed(text: str) -> Any:
    """Return the value that a text means in a configuration."""
    try:
        return float(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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


def _nest(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        inner = values.setdefault(part, {})
        values = inner if isinstance(inner, dict) else values.setdefault(f"{part}.", {})
    values[path[-1]] = value


def rows(reports: list[KeyReport]) -> Iterator[tuple[str, str]]:
    """Yield what the report shows of each key."""
    for report in reports:
        old = f"{report.key}={report.value}" if report.value != "" else report.key
        yield old, f"{report.name}{': ' if report.name and report.remark else ''}{report.remark}"
