"""`mrl import`: make a configuration from a script, command or YAML file of another system, and report each key."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.cli.arguments import aligned
from mrl.config.arithmetic import samples_per_step, updates_per_step
from mrl.config.nemo_rl import NEMO_RL
from mrl.config.nemo_rl_files import read_nemo_rl
from mrl.config.openrlhf import OPENRLHF, read_openrlhf
from mrl.config.peer_import import (
    EPOCHS,
    PER_UPDATE,
    PROMPTS,
    SAMPLES,
    UPDATES,
    Imported,
    Peer,
    as_yaml,
    import_keys,
    parsed,
    rows,
)
from mrl.config.resolved.load import load_any_config
from mrl.config.schema import BatchConfig
from mrl.config.slime import SLIME, read_slime
from mrl.config.values import KeyPath
from mrl.config.verl_import import VERL
from mrl.config.verl_script import read_verl
from mrl.errors import ConfigError, Problem, counted
from mrl.files import read_text, write_text

EXAMPLE = "mrl import verl run_qwen2-7b.sh training.steps=105 -o qwen2-7b.yaml"
_SYSTEMS: Mapping[str, tuple[Peer, Callable[[str, str], dict[KeyPath, Any]]]] = {
    "verl": (VERL, read_verl),
    "slime": (SLIME, read_slime),
    "nemo-rl": (NEMO_RL, read_nemo_rl),
    "openrlhf": (OPENRLHF, read_openrlhf),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", choices=_SYSTEMS, help="where the file comes from")
    parser.add_argument("file", metavar="FILE|COMMAND", help="a script, a YAML file, or a command in quotation marks")
    parser.add_argument("values", metavar="KEY=VALUE", nargs="*", help="mrl's keys to add, such as training.steps=100")
    parser.add_argument("-o", "--output", metavar="CONFIG", required=True, help="the configuration to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the configuration. Return 1 if it has problems, which are printed."""
    output = Path(arguments.output)
    if output.exists():
        raise ConfigError(
            [Problem("command line", "", f"-o {output} exists", "choose another file, or remove this one")]
        )
    peer, read = _SYSTEMS[arguments.system]
    is_command = " " in arguments.file and not Path(arguments.file).exists()
    name = "the command" if is_command else arguments.file
    made = import_keys(peer, read(arguments.file if is_command else read_text(Path(name)), name))
    for word in arguments.values:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError([Problem("command line", "", f"{word} is not key=value", "training.steps=100")])
        made.set(key, parsed(value), again=True)
    write_text(output, f"# From {Path(name).name} by mrl import {arguments.system}.\n{as_yaml(made)}")
    print("\n".join([*_report(made, peer.name), "", *_batches(made, peer.name)]))
    try:
        load_any_config(str(output), [])
    except ConfigError as error:
        print(f"\n{output} is written and needs changes:\n{error}")
        return 1
    print(f"\n{output} is written. Next: mrl check {output} --offline, and mrl plan {output}")
    return 0


def _report(made: Imported, system: str) -> Iterator[str]:
    """Yield the four parts of the report. A key that does not count in verl itself is left out, too."""
    for title, reports in (
        ("taken over", made.taken),
        ("taken over with another meaning or unit", made.changed),
        ("left out, with the reason", made.left_out),
        (f"not known as keys of {system}", made.unknown),
    ):
        yield f"{counted(len(reports), 'key')} {title}:"
        yield from (f"  {line}" for line in aligned([*rows(reports)]))


def _batches(made: Imported, system: str) -> Iterator[str]:
    """Yield the batch sizes of both sides, the other system's by its own rules."""
    ours: dict[str, int] = {}
    if (batch := _batch_of(made.values.get("batch", {}))) is not None:
        ours = {PROMPTS: batch.prompts_per_step, SAMPLES: samples_per_step(batch), PER_UPDATE: batch.samples_per_update}
        ours |= {UPDATES: updates_per_step(batch), EPOCHS: batch.epochs_per_step}
    lines = [("batch", system, "mrl", "")]
    for name, theirs in made.batch.items():
        differs = bool(ours) and theirs is not None and theirs != ours[name]
        shown = "not known" if theirs is None else f"{theirs:g}"
        lines.append((name, shown, f"{ours.get(name, 'not known')}", "DIFFERENT" if differs else ""))
    yield from aligned(lines)


def _batch_of(values: Mapping[str, Any]) -> BatchConfig | None:
    """Return the batch of an import, which may be incomplete elsewhere; None if its sizes are no whole numbers."""
    sizes = {key.name: values[key.name] for key in dataclasses.fields(BatchConfig) if key.name in values}
    required = {"prompts_per_step", "samples_per_prompt", "samples_per_update"}
    if not required <= sizes.keys() or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return None
    return BatchConfig(**sizes)
