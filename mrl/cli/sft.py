"""`mrl sft CONFIG`: supervised training on prompts and their answers."""

from __future__ import annotations

import argparse

from mrl.config.load import load_sft_config
from mrl.config.run_directory import open_run_directory
from mrl.events import EventLog
from mrl.observe.metrics import MetricsFile

EXAMPLE = "mrl sft configs/laptop-sft.yaml model.path=my-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that replace those of the file")


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the model is."""
    resolved = load_sft_config(arguments.config, arguments.overrides)
    # These load torch and Ray, which a wrong configuration need not wait for.
    from mrl.trainer.sft import train_sft

    with open_run_directory(resolved, may_go_on=False) as directory:
        metrics = MetricsFile(directory / "metrics.jsonl", 1)
        steps = resolved.config.training.steps

        def on_step(step: int, figures: dict[str, float]) -> None:
            metrics.write(step, figures)
            shown = "  ".join(f"{name} {figures[name]:.4g}" for name in ("loss", "grad_norm", "lr"))
            print(f"{step}/{steps}  {shown}", flush=True)

        model = train_sft(resolved.config, directory, EventLog(directory / "events.jsonl"), on_step)
        print(f"the model is in {model}")
    return 0
