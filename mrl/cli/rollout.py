"""`mrl rollout CONFIG -o DIR`: generate and score samples without training, as data for `mrl sft`, `dpo` and `rm`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.cli.arguments import add_config_first, aligned
from mrl.config.resolved.load import load_config, settle_models
from mrl.errors import ConfigError, Problem
from mrl.events import EventLog

EXAMPLE = "mrl rollout configs/laptop-ppo.yaml batch.samples_per_prompt=8 --prompts 200 -o samples"
_COLUMNS = "columns: {ability: null, extra_info: null}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_first(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="the directory to write")
    parser.add_argument("--prompts", type=int, help="first prompts of data.train to use; default: all")
    parser.add_argument("--least", type=float, help="least score of a row for SFT; default: validation.solved_at")
    parser.add_argument("--margin", type=float, default=0.0, help="a pair's scores differ by more (default 0)")


def run(arguments: argparse.Namespace) -> int:
    """Write the samples, the best sample of each prompt, and a pair of each prompt whose samples differ."""
    output = Path(arguments.output)
    for condition, what, fix in (
        (output.exists(), f"-o {output} exists", "choose another directory, or remove this one"),
        (arguments.prompts is not None and arguments.prompts < 1, f"--prompts {arguments.prompts}", "--prompts 100"),
    ):
        if condition:
            raise ConfigError([Problem("command line", "", what, fix)])
    resolved = load_config(arguments.config, arguments.overrides)
    config = settle_models(resolved).config
    output.mkdir(mode=0o700, parents=True)
    (output / "logs").mkdir(mode=0o700)
    from mrl.data.row_files import write_rows  # These load torch and Ray. A wrong configuration fails before.
    from mrl.trainer.rollouts import best_rows, pairs, roll_out

    events = EventLog(output / "events.jsonl")
    try:
        made = roll_out(config, arguments.prompts, output, events, lambda text: print(text, file=sys.stderr))
    finally:
        events.close()
    write_rows(output / "samples.parquet", made.rows)
    (output / "rollout.json").write_text(json.dumps(made.figures, indent=2) + "\n", encoding="utf-8")
    print("\n".join(aligned([name, f"{value:.6g}"] for name, value in made.figures.items())))
    print(f"{output / 'samples.parquet'}: {len(made.rows)} samples")
    if config.agent.environments:
        print("no rows for SFT and no pairs: a conversation with an environment is not one answer to a prompt")
        return 0
    least = config.validation.solved_at if arguments.least is None else arguments.least
    _write(output / "best.parquet", best_rows(made.rows, least), f"mrl sft, best of a prompt, score at least {least:g}")
    _write(output / "pairs.parquet", pairs(made.rows, arguments.margin), "mrl dpo and mrl rm, best and worst")
    return 0


def _write(path: Path, rows: Sequence[dict[str, Any]], purpose: str) -> None:
    """Write rows, and print the source that reads them. Without rows, say so and write nothing."""
    from mrl.data.row_files import write_rows

    if not rows:
        print(f"{path.name} is not written: no prompt has such samples ({purpose})")
        return
    write_rows(path, rows)
    print(f"{path}: {len(rows)} rows for {purpose}")
    print(f"  data.train.{path.stem}={{dataset: {json.dumps(str(path))}, {_COLUMNS}}}")
