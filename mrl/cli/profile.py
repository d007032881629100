"""`mrl profile CONFIG|RUN`: train a few steps, and write a trace over all processes with a summary of idle times."""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path

from mrl.cli.supervise import Lost, add_attempt, watched
from mrl.cli.train import started
from mrl.config.resolved.load import Resolved, load_config
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.errors import ConfigError, Problem
from mrl.files import read_text

EXAMPLE = "mrl profile configs/laptop-ppo.yaml --steps 2"
_WITHOUT_FILES = (
    "training.resume=never",
    "training.max_restarts=0",
    "training.fallback=[]",
    "training.trackers=[]",
    "training.dump_steps=[]",
    "training.record={}",
    "training.record_when={}",
    "validation.every=0",
    "validation.keep_best=false",
)
_FIRST = 1
"""Steps before the trace: the first one allocates, compiles and opens connections."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG|RUN", help="a YAML file, or the directory of a run with a checkpoint")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that override those of the file")
    parser.add_argument("--steps", type=int, default=2, help="steps in the trace, after one step before it (default 2)")
    parser.add_argument("--quiet", action="store_true", help="print no line per step")
    add_attempt(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train with the configuration, or from the newest checkpoint of a run, in a new run. Print the summary."""
    if arguments.steps < 1:
        raise ConfigError([Problem("command line", "", f"--steps {arguments.steps} is below 1", "--steps 2")])
    source = Path(arguments.config) if (Path(arguments.config) / "config.yaml").is_file() else None
    done = [0, *steps_in(source / CHECKPOINTS)][-1] if source is not None else 0
    path = str(source / "config.yaml") if source is not None else arguments.config
    config = load_config(path, [*arguments.overrides, "training.profile.steps=[1]"]).config
    runs, name = Path(config.run.dir), f"{config.run.name}-profile"
    names = (name + (f"-{number}" if number > 1 else "") for number in count(1))
    target = next(directory for one in names if not (directory := runs / one).exists())
    first, last = done + _FIRST + 1, done + _FIRST + arguments.steps
    ours = [f"run.name={target.name}", f"training.steps={last}", *_WITHOUT_FILES]
    ours.append(f"training.profile.steps={json.dumps(list(range(first, last + 1)))}")
    resolved = load_config(path, [*arguments.overrides, *ours])
    code = watched("profile", arguments, resolved, lambda lost: _train(resolved, source, done, lost, arguments.quiet))
    summary = target / "profile" / f"step-{first:06d}" / "summary.txt"
    if summary.is_file():
        trace = summary.parent / "trace.json"
        print(f"{read_text(summary)}open {trace} in https://ui.perfetto.dev or chrome://tracing")
    return code


def _train(resolved: Resolved[Config], source: Path | None, done: int, lost: Lost, quiet: bool) -> int:
    with started(resolved, lost, quiet) as trainer:
        if source is not None and done:
            trainer.begin_after(source / CHECKPOINTS, done)
            trainer.components.stream.go_on(done, {})
        while (step := trainer.num_steps_done + 1) <= resolved.config.training.steps:
            with trainer.profiler.step(step):
                report = trainer.step()
                trainer.record(report.step, report.batch, report.metrics)
    return 0
