"""`mrl sft CONFIG`: supervised training on prompts and their answers.

`mrl rm` trains a reward model and `mrl dpo` trains a policy without one, both on preferred and rejected responses.
"""

from __future__ import annotations

import argparse

from mrl.cli.arguments import add_config_first
from mrl.cli.supervise import Lost, add_attempt, finished, watched
from mrl.config.resolved.load import Resolved, load_config_of, settle_models
from mrl.config.sft import SftConfig
from mrl.errors import EXIT_STOPPED

_SHOWN = ("loss", "accuracy", "val/loss", "val/accuracy", "grad_norm", "lr")
EXAMPLE = "mrl {verb} configs/laptop-{verb}.yaml model.path=my-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_first(parser)
    parser.add_argument("--quiet", action="store_true", help="print no line per update")
    add_attempt(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print the path of the model. Return EXIT_STOPPED if the run was asked to stop and has saved."""
    verb: str = arguments.called_as
    resolved = load_config_of(verb, arguments.config, arguments.overrides)
    if (newest := finished(resolved, resolved.config.training.steps)) is not None:
        from mrl.trainer.sft import MODEL  # loads torch

        model = newest.parents[1] / MODEL
        # otherwise it is the model of a shorter run
        if model.is_dir() and model.stat().st_mtime > newest.stat().st_mtime:
            print(f"all {resolved.config.training.steps} steps are done; the model is in {model}")
            return 0
    return watched(verb, arguments, resolved, lambda lost: _train(resolved, lost, arguments.quiet))


def _train(resolved: Resolved[SftConfig], lost: Lost, quiet: bool) -> int:
    # These load torch and Ray. A wrong configuration fails before.
    from mrl.controller.cluster import when_ray_is_lost
    from mrl.observe.console import Console
    from mrl.preflight.findings import refuse
    from mrl.preflight.machine import check_start
    from mrl.trainer.run import open_run
    from mrl.trainer.sft import train_sft

    warnings = refuse(resolved.path, check_start(resolved))
    resolved = settle_models(resolved)
    num_steps = resolved.config.training.steps
    # the number of updates in an epoch is not known
    console = Console(num_steps or 1, quiet=quiet or num_steps is None)

    def on_update(step: int, metrics: dict[str, float]) -> None:
        if quiet:
            return
        names = [name for name in _SHOWN if name in metrics]
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
        console.print(f"{step}/{num_steps}  {shown}" if num_steps else f"{step}  epoch {metrics['epoch']:.2f}  {shown}")

    with when_ray_is_lost(lost), open_run(resolved, console) as opened:
        for warning in warnings:
            opened.warn(warning.about, f"{warning.what} ({warning.fix})")
        model = train_sft(opened, on_update)
    if model is None:
        return EXIT_STOPPED
    print(f"the model is in {model}")
    return 0
