"""A configuration made from the keys of another system, with a report on each key and on the batch sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mrl.config.values import KeyPath, dotted
from mrl.config.verl_values import Convert, Values, same

_CONVERTED = re.compile(r"=(\[.*?\]|[^,]*)(?:,? (.*))?", re.DOTALL)
_BY_HAND = "has no value that can be taken over: see docs/coming-from.md"


@dataclass(frozen=True)
class KeyReport:
    """A key of another system, and its counterpart."""

    key: str
    value: Any
    name: str
    """mrl's key with its value; empty if mrl has none."""
    remark: str = ""


@dataclass
class Imported:
    """The values of a configuration, and the keys behind them."""

    values: dict[str, Any] = field(default_factory=dict)
    taken: list[KeyReport] = field(default_factory=list)
    changed: list[KeyReport] = field(default_factory=list)
    """Taken over with another meaning or unit."""
    left_out: list[KeyReport] = field(default_factory=list)
    unknown: list[KeyReport] = field(default_factory=list)
    batch: dict[str, float | None] = field(default_factory=dict)
    """Batch sizes in the other system."""

    def set(self, name: str, value: Any, *, again: bool = False) -> Any:
        """Set a key. Return the value that it already has, if that is another one; with `again`, replace it."""
        *sections, last = name.split(".")
        section = self.values
        for part in sections:
            section = section.setdefault(part, {})
        if again:
            section[last] = value
        return section[last] if section.setdefault(last, value) != value else None


Batch = dict[str, float | None]
"""Batch sizes by name; None where the other system's keys do not say them."""
PROMPTS, SAMPLES, PER_UPDATE, UPDATES, EPOCHS = (
    "prompts per step", "samples per step", "samples per optimizer step", "optimizer steps per step", "epochs per step"
)  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """Another system: what its keys are called here, and what its defaults are."""

    name: str
    name_for: Callable[[KeyPath], tuple[str, Convert] | None]
    """Returns mrl's key and the conversion of the value, or None if mrl has no such key."""
    reason_for: Callable[[KeyPath], str | None]
    """Returns why mrl has no such key, or None if the key is not known."""
    switched_off: Callable[[KeyPath, Values], str]
    """Returns why a key has no effect in the other system, or nothing."""
    finish: Callable[[Imported, Values, Mapping[KeyPath, Any]], None]
    """Adds what several keys together or the other system's defaults mean."""
    batch: Callable[[Values], Batch]
    """Returns the batch sizes by the other system's own rules."""
    defaults: Mapping[KeyPath, Any] = field(default_factory=dict)


def import_keys(peer: Peer, leaves: Mapping[KeyPath, Any]) -> Imported:
    """Return the configuration for these keys."""
    values: dict[str, Any] = {}
    leaves = {**peer.defaults, **leaves}
    for path, value in leaves.items():
        _nest(values, path, value)
    made = Imported()
    by_width = sorted(leaves, key=lambda path: ", " in (peer.name_for(path) or ("",))[0])
    for path in by_width:  # a key for two of ours comes after the keys for one
        _take(made, peer, path, leaves[path], values)
    peer.finish(made, values, leaves)
    if type(nodes := made.values.get("cluster", {}).get("nodes")) is int and nodes > 1:
        made.set("cluster.ray_address", "auto")
        made.changed.append(
            KeyReport("(default)", "", "cluster.ray_address=auto", "join the Ray that runs on the nodes")
        )
    made.set("run.name", made.values.get("run", {}).get("name", "imported"))
    made.batch = peer.batch(values)
    return made


def _take(made: Imported, peer: Peer, path: KeyPath, value: Any, values: Mapping[str, Any]) -> None:
    key, off = dotted(path), peer.switched_off(path, values)
    match = peer.name_for(path)
    if off or match is None:
        reason = off or peer.reason_for(path)
        (made.left_out if reason else made.unknown).append(
            KeyReport(key, value, "", reason or f"no such key of {peer.name} is known")
        )
        return
    name, convert = match
    if "$" in str(value).replace("${oc.env:", ""):
        made.left_out.append(KeyReport(key, value, name, "the script computes its value: set it by hand"))
        return
    converted = _CONVERTED.fullmatch(text := convert(value, values))
    if name.startswith("reference.") and peer.name == "verl":
        made.left_out.append(KeyReport(key, value, "", "the reference has the actor's layout"))
    elif name.startswith(("agent.", "reward.functions.")) or converted is None or not converted[1].strip():
        made.left_out.append(KeyReport(key, value, name, text.lstrip(" ,=") or _BY_HAND))
    else:
        taken = value if convert is same else parsed(converted[1].strip())
        _set(made, KeyReport(key, value, name, converted[2] or ""), taken)


def _set(made: Imported, report: KeyReport, value: Any) -> None:
    files, kept = value if isinstance(value, list) and ".NAME." in report.name else [value], list[str]()
    for name in report.name.split(", "):
        parts = [".main."] if len(files) == 1 else [f".part{number}." for number in range(len(files))]
        entries = {name.replace(".NAME.", part): file for part, file in zip(parts, files, strict=True)}
        others = {entry: other for entry, one in entries.items() if (other := made.set(entry, one)) is not None}
        for entry, other in others.items():
            remark = f"another key has set {entry} to {other}"
            made.left_out.append(KeyReport(report.key, report.value, name, remark))
        kept += [] if others else [name]
        if name.endswith("megatron.recompute_granularity") and value == "full":
            made.set(name.replace("granularity", "method"), "uniform")
            made.set(name.replace("granularity", "num_layers"), 1)
    if kept:
        shown = ", ".join(f"{name.replace('NAME', 'main')}={value}" for name in kept)
        (made.changed if report.remark else made.taken).append(
            KeyReport(report.key, report.value, shown, report.remark)
        )


def as_yaml(made: Imported) -> str:
    return yaml.safe_dump(made.values, sort_keys=False)


def parsed(text: str) -> Any:
    """Return the value that a text means in a configuration."""
    try:
        return float(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
