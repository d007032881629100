"""`mrl import`: make a configuration from a script or a YAML file of verl, and report each key."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mrl.cli.arguments import aligned
from mrl.config.arithmetic import samples_per_step, updates_per_step
from mrl.config.resolved.load import load_any_config
from mrl.config.schema import Config
from mrl.config.verl_import import Imported, as_yaml, import_verl, parsed, rows
from mrl.config.verl_script import read_verl
from mrl.errors import ConfigError, Problem, counted
from mrl.files import read_text, write_text

EXAMPLE = "mrl import verl run_qwen2-7b.sh training.steps=105 -o qwen2-7b.yaml"
_SYSTEMS = ("verl",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", choices=_SYSTEMS, help="where the file comes from")
    parser.add_argument("file", metavar="FILE", help="a script that starts a run, or a YAML file")
    parser.add_argument("values", metavar="KEY=VALUE", nargs="*", help="mrl's keys to add, such as training.steps=100")
    parser.add_argument("-o", "--output", metavar="CONFIG", required=True, help="the configuration to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the configuration. Return 1 if it has problems, which are printed."""
    output = Path(arguments.output)
    if output.exists():
        raise ConfigError(
            [Problem("command line", "", f"-o {output} exists", "choose another file, or remove this one")]
        )
    made = import_verl(read_verl(read_text(Path(arguments.file)), arguments.file))
    for word in arguments.values:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError([Problem("command line", "", f"{word} is not key=value", "training.steps=100")])
        made.set(key, parsed(value), again=True)
    write_text(output, f"# From {Path(arguments.file).name} by mrl import.\n{as_yaml(made)}")
    print("\n".join(_report(made)))
    try:
        config = load_any_config(str(output), []).config
    except ConfigError as error:
        print(f"\n{output} is written and needs changes:\n{error}")
        return 1
    if isinstance(config, Config):
        print(f"\n{_arithmetic(config)}")
    print(f"\n{output} is written. Next: mrl check {output} --offline, and mrl plan {output}")
    return 0


def _report(made: Imported) -> Iterator[str]:
    """Yield the four parts of the report. A key that does not count in verl itself is left out, too."""
    for title, reports in (
        ("taken over", made.taken),
        ("taken over with another meaning or unit", made.changed),
        ("left out, with the reason", made.left_out),
        ("not known as keys of verl", made.unknown),
    ):
        yield f"{counted(len(reports), 'key')} {title}:"
        yield from (f"  {line}" for line in aligned([*rows(reports)]))


def _arithmetic(config: Config) -> str:
    batch, updates = config.batch, updates_per_step(config.batch)
    return (
        f"A step has {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
        f"{samples_per_step(batch)} samples, and {counted(updates, 'update')} of {batch.samples_per_update} samples."
    )
