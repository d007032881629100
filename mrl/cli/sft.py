"""`mrl sft CONFIG`: supervised training on prompts and their answers."""

from __future__ import annotations

import argparse

from mrl.cli.train import EXIT_STOPPED
from mrl.config.load import load_sft_config
from mrl.config.model_names import settle_models
from mrl.config.run_directory import open_run_directory
from mrl.events import EventLog

EXAMPLE = "mrl sft configs/laptop-sft.yaml model.path=my-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that replace those of the file")


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the model is; EXIT_STOPPED when the run was asked to stop before and has saved."""
    resolved = settle_models(load_sft_config(arguments.config, arguments.overrides))
    # These load torch and Ray, which a wrong configuration need not wait for.
    from mrl.trainer.sft import train_sft
    from mrl.trainer.shutdown import ShutdownSignal

    training = resolved.config.training
    stopping = ShutdownSignal(training.time_limit_s)

    def on_step(step: int, figures: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {figures[name]:.4g}" for name in ("loss", "grad_norm", "lr"))
        print(f"{step}/{training.steps}  {shown}", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    with open_run_directory(resolved, may_go_on=training.resume == "auto") as directory, stopping.on_signals():
        events = EventLog(directory / "events.jsonl")
        try:
            model = train_sft(resolved.config, directory, events, stopping, on_step, say)
        finally:
            events.close()
    if model is None:
        return EXIT_STOPPED
    print(f"the model is in {model}")
    return 0
