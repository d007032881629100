"""`mrl replay RUN --step K`: train a recorded step again, also in another layout, and compare the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from mrl.cli.diff import compare
from mrl.cli.supervise import Lost, add_attempt, watched
from mrl.cli.train import started
from mrl.config.resolved.load import Resolved, config_kind, load_any_config, settle_models
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config, ParallelConfig
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import SetupError

EXAMPLE = "mrl replay runs/laptop-ppo actor.parallel.tp=1 --step 3"
_WITHOUT_FILES = (
    "training.resume=never",
    "training.max_restarts=0",
    "training.fallback=[]",
    "training.time_limit_s=null",
    "training.trackers=[]",
    "training.record.every=1",
    "training.record.steps=[]",
    "validation.every=0",
    "validation.keep_best=false",
)
_OF_RL = (
    "training.dump_steps=[]",
    "training.samples_every=0",
    "training.profile={steps: [], torch_ranks: [], memory: false}",
    "asynchrony.replay=null",
)
_OF_SUPERVISED = ("training.epochs=null", "training.until_loss=null")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run that recorded the step (training.record)")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that override those of the run")
    parser.add_argument("--step", type=int, required=True, help="the recorded step")
    parser.add_argument(
        "--reference",
        action="store_true",
        help="use transformers' models in float32 with torch's sharding: Megatron and its layouts take no part",
    )
    parser.add_argument("--exact", action="store_true", help="accept no difference, not even that of rounding")
    parser.add_argument("--quiet", action="store_true", help="print no line per step")
    add_attempt(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train the step again and print the differences. Return 3 if they are larger than rounding explains."""
    source, step = Path(arguments.run), arguments.step
    file = source / "config.yaml"
    if not file.is_file():
        raise SetupError(f"{source} is not the directory of a run: it has no config.yaml")
    checkpoint = beginning(source, step)
    target = next(path for number in count(1) if not (path := _target(source, step, number)).exists())
    ours = [f"run.name={target.name}", f"run.dir={json.dumps(str(target.parent))}", f"training.steps={step}"]
    is_rl = config_kind(str(file)) is Config
    if arguments.reference:
        ours += _reference(load_any_config(str(file)).config)
    ours += [f"training.samples_from={json.dumps(str(source))}", *_OF_RL] if is_rl else _OF_SUPERVISED
    resolved = load_any_config(str(file), [*ours, *_WITHOUT_FILES, *arguments.overrides])

    def replayed(lost: Lost) -> int:
        if is_rl:
            return _replay(resolved, checkpoint, lost, arguments.quiet)
        return _replay_updates(resolved, source, checkpoint, lost)

    code = watched("replay", arguments, resolved, replayed)
    return code or compare(source, target, step=step, exact=arguments.exact)


def _reference(config: AnyConfig) -> Iterator[str]:
    """Yield the overrides that replace Megatron in the trained roles."""
    whole = json.dumps(dataclasses.asdict(ParallelConfig()))
    for role, model in config.trained_roles().items():
        yield from (f"{role}.strategy=fsdp", f"{role}.parallel={whole}", f"{role}.dtype=float32")
        yield from (f"{role}.megatron.{name}=null" for name in model.megatron)
        yield from (f"{role}.ddp.{name}=null" for name in model.ddp)


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


def _replay_updates(resolved: Resolved[SftConfig], source: Path, checkpoint: int, lost: Lost) -> int:
    """Make the updates of a supervised run again, from the checkpoint up to the step."""
    # These load torch and Ray.
    from mrl.controller.cluster import when_ray_is_lost
    from mrl.observe.console import Console
    from mrl.preflight.findings import refuse
    from mrl.preflight.machine import check_start
    from mrl.trainer.run import open_run
    from mrl.trainer.sft import replay_updates

    refuse(resolved.path, check_start(resolved))
    resolved = settle_models(resolved)
    with when_ray_is_lost(lost), open_run(resolved, Console(1, quiet=True)) as opened:
        replay_updates(opened, source, checkpoint)
    return 0
