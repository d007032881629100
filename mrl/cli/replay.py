"""`mrl replay RUN --step K`: train a recorded step again, also in another layout, and compare the results."""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path

from mrl.cli.diff import compare
from mrl.cli.supervise import Lost, add_attempt, watched
from mrl.cli.train import started
from mrl.config.resolved.load import Resolved, load_config
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.errors import SetupError

EXAMPLE = "mrl replay runs/laptop-ppo actor.parallel.tp=1 --step 3"
_WITHOUT_FILES = (
    "training.resume=never",
    "training.max_restarts=0",
    "training.fallback=[]",
    "training.time_limit_s=null",
    "training.trackers=[]",
    "training.dump_steps=[]",
    "training.samples_every=0",
    "training.record.every=1",
    "validation.every=0",
    "validation.keep_best=false",
    "asynchrony.replay=null",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run that recorded the step (training.record)")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that override those of the run")
    parser.add_argument("--step", type=int, required=True, help="the recorded step")
    parser.add_argument("--exact", action="store_true", help="accept no difference, not even that of rounding")
    parser.add_argument("--quiet", action="store_true", help="print no line per step")
    add_attempt(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train the step again and print the differences. Return 3 if they are larger than rounding explains."""
    source, step = Path(arguments.run), arguments.step
    if not (source / "config.yaml").is_file():
        raise SetupError(f"{source} is not the directory of a run: it has no config.yaml")
    checkpoint = beginning(source, step)
    target = next(path for number in count(1) if not (path := _target(source, step, number)).exists())
    ours = [f"run.name={target.name}", f"run.dir={json.dumps(str(target.parent))}", f"training.steps={step}"]
    ours += [f"training.samples_from={json.dumps(str(source))}", *_WITHOUT_FILES, "training.record.steps=[]"]
    resolved = load_config(str(source / "config.yaml"), [*ours, *arguments.overrides])
    code = watched("replay", arguments, resolved, lambda lost: _replay(resolved, checkpoint, lost, arguments.quiet))
    return code or compare(source, target, step=step, exact=arguments.exact)


def beginning(run: Path, step: int) -> int:
    """Return the newest checkpoint before a step from which all steps are recorded, or 0 for the untrained model.

    Raise an error with the cause if neither is possible.
    """
    from mrl.protocol.step_record import StepRecord, recorded_steps  # loads torch

    StepRecord.read(run, step)  # raises if it was not recorded, or is damaged
    known, saved = recorded_steps(run), [done for done in [0, *steps_in(run / CHECKPOINTS)] if done < step]
    newest = saved[-1]
    if missing := [number for number in range(newest + 1, step) if number not in known]:
        have = f"the newest checkpoint before it is step {newest}" if newest else "no checkpoint before it is left"
        problem = f"step {step} cannot be replayed: {have}, and step {missing[0]} between them was not recorded"
        fix = f"keep the checkpoint of step {step - 1} (training.save_every, training.keep), or training.record.every=1"
        raise SetupError(problem, where=str(run), fix=fix)
    return newest


def _target(source: Path, step: int, number: int) -> Path:
    return source.with_name(f"{source.name}-replay-{step}" + (f"-{number}" if number > 1 else ""))


def _replay(resolved: Resolved[Config], checkpoint: int, lost: Lost, quiet: bool) -> int:
    """Train from the checkpoint up to the step."""
    with started(resolved, lost, quiet) as trainer:
        if checkpoint:
            trainer.begin_after(Path(str(resolved.config.training.samples_from), CHECKPOINTS), checkpoint)
        while trainer.num_steps_done < resolved.config.training.steps:
            report = trainer.step()
            trainer.record(report.step, report.batch, report.metrics)
    return 0
