"""The demo: a tiny model learns to add numbers, or to search, first from a careless teacher, then only from rewards.

SFT imitates the teacher, more than half of whose answers are wrong, so the model is wrong as often: it gives the right
answer no more often than the teacher did. No example is corrected. Rewards that compare sampled answers with the truth
then improve it, on problems other than those used for the evaluation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mrl.config.resolved.load import load_config, load_config_of
from mrl.config.schema import ClusterConfig
from mrl.controller import ray_cluster
from mrl.demo.model import make_model
from mrl.demo.preferences import sample_policy, train_judged
from mrl.demo.tasks import MAX_WARM_START, RIGHT_PAIRS, SUMS, DemoTask
from mrl.errors import SetupError
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.run import open_run
from mrl.trainer.sft import train_sft

Result = TypeVar("Result")

CONFIGS = Path(__file__).parent

RUN = """\
# Written by `mrl demo`. To run it again with changes: mrl train {path} run.name=mine
extends: {algorithm}
run: {{name: {run}, dir: {directory}}}
cluster: {{devices_per_node: {devices}}}
placement: {{pools: {{laptop: {devices}}}}}
model: {{path: {model}}}
actor:
  parallel: {{tp: {tp}, pp: {pp}}}
  schedule: {{decay_steps: {updates}}}
training: {{steps: {steps}, seed: {seed}}}
validation: {{every: {every}}}
"""


@dataclass(frozen=True)
class DemoSettings:
    directory: Path
    seed: int = 1
    algorithm: str = "ppo"
    tp: int = 2
    pp: int = 1
    steps: int = 60
    task: DemoTask = SUMS

    @property
    def cluster(self) -> ClusterConfig:
        """A cluster with one device for each rank of the actor."""
        return ClusterConfig(devices_per_node=self.tp * self.pp, device="cpu")


@dataclass(frozen=True)
class DemoResult:
    before: float
    figures: Mapping[str, float] | None
    """Metrics of the last validation, or None if the run was asked to stop before the end."""
    seconds: dict[str, float]
    config: Path
    task: DemoTask = SUMS

    @property
    def after(self) -> float | None:
        return None if self.figures is None else self.figures[self.task.solved]

    def missed(self) -> Iterator[str]:
        """Yield missed goals: the score should be low before training and high after it."""
        if self.before > MAX_WARM_START:
            yield f"{100 * self.before:.1f} % before; at most {100 * MAX_WARM_START:.0f} %"
        for name, goal in self.task.goals.items():
            if self.figures is not None and self.figures[name] < goal:
                yield f"{name} is {100 * self.figures[name]:.1f} %; at least {100 * goal:.0f} %"

    @property
    def is_success(self) -> bool:
        return self.figures is not None and not [*self.missed()]


def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Create the model, warm it up by SFT, train it with rewards, and evaluate it before and after."""
    seconds: dict[str, float] = {}
    settings.directory.mkdir(parents=True, mode=0o700)
    with ray_cluster(settings.cluster):
        model = warm_model(settings, console, seconds)
        if not settings.task.is_judged:
            return learn(settings, model, console, seconds)
        return learn_from_preferences(settings, model, console, seconds)


def warm_model(settings: DemoSettings, console: Console, seconds: dict[str, float]) -> Path:
    task = settings.task
    console.print(f"creating a random model with {task.num_layers} layers")
    initial = settings.directory / "initial"
    timed(seconds, "model", lambda: make_model(initial, settings.seed, task.num_layers))
    console.print(f"SFT on the answers of {task.teacher}")
    return timed(seconds, "sft", lambda: _warm_start(settings, initial, console))


def learn_from_preferences(
    settings: DemoSettings, model: Path, console: Console, seconds: dict[str, float]
) -> DemoResult:
    """Sample a warmed-up model, train a reward model on pairs of its answers, and train the model only with that reward
    model."""
    console.print("sampling 16 answers to each problem, for a judge that prefers the right ones")
    values = values_of(settings, model)
    samples = timed(seconds, "samples", lambda: sample_policy(values, settings.directory))
    console.print("training a reward model (mrl rm) on pairs of a right and a wrong answer")
    judge, right = timed(seconds, "rm", lambda: train_judged(samples, values, console))
    result = learn(settings, model, console, seconds, judge=judge)
    return result if result.figures is None else replace(result, figures={**result.figures, RIGHT_PAIRS: right})


def learn(
    settings: DemoSettings,
    model: Path,
    console: Console,
    seconds: dict[str, float],
    overrides: Sequence[str] = (),
    judge: Path | None = None,
) -> DemoResult:
    task = settings.task
    config = settings.directory / "demo.yaml"
    text = demo_yaml(settings, model, config)
    text += "" if judge is None else f"reward_model: {{path: {json.dumps(str(judge))}}}\n"
    config.write_text(text, encoding="utf-8")
    console.print(
        f"{settings.algorithm}: {settings.steps} steps of {task.samples_per_step} samples, configured in {config}"
    )
    resolved = load_config(str(config), overrides)
    with open_run(resolved, console) as run:
        trainer = RayPPOTrainer(run)
        began = time.monotonic()
        with trainer.init_workers():
            seconds["start of workers"] = time.monotonic() - began
            before = timed(seconds, "validation before", trainer.validate)[task.solved]
            console.print(f"right before training: {100 * before:.1f} % of sampled answers to {task.unseen}")
            figures = timed(seconds, settings.algorithm, trainer.fit)
        if task.validated_every is not None and trainer.num_steps_done == settings.steps:
            validated = [line for line in read_metrics(run.directory / "metrics.jsonl") if task.solved in line]
            figures = max(validated[1:], key=lambda line: line[task.solved])
    return DemoResult(before, figures if trainer.num_steps_done == settings.steps else None, seconds, config, task)


def timed(seconds: dict[str, float], name: str, work: Callable[[], Result]) -> Result:
    began = time.monotonic()
    result = work()
    seconds[name] = time.monotonic() - began
    return result


def _warm_start(settings: DemoSettings, initial: Path, console: Console) -> Path:
    def on_update(step: int, metrics: dict[str, float]) -> None:
        if step % 40 == 0:
            console.print(f"  update {step}: loss {metrics['loss']:.3f}")

    with open_run(
        load_config_of("sft", str(CONFIGS / settings.task.warm_up), values_of(settings, initial)), console
    ) as run:
        model = train_sft(run, on_update)
    if model is None:
        raise SetupError("the demo was asked to stop while its model was warmed up", fix="run it again")
    return model


def values_of(settings: DemoSettings, model: Path) -> list[str]:
    """Return the overrides of a run of the demo, in addition to its file."""
    devices = settings.cluster.devices_per_node
    values = [f"run.dir={settings.directory}", f"model.path={model}", f"training.seed={settings.seed}"]
    return [*values, f"cluster.devices_per_node={devices}", f"placement.pools.laptop={devices}"]


def demo_yaml(settings: DemoSettings, model: Path, path: Path) -> str:
    """Return the configuration of the run: the algorithm's file, and the settings of this demo."""
    return RUN.format(
        path=path,
        algorithm=json.dumps(str(CONFIGS / settings.task.algorithms[settings.algorithm])),
        run=settings.task.run,
        directory=json.dumps(str(settings.directory)),
        devices=settings.cluster.devices_per_node,
        model=json.dumps(str(model)),
        tp=settings.tp,
        pp=settings.pp,
        updates=max(settings.task.updates_per_step * settings.steps, 21),
        steps=settings.steps,
        every=settings.task.validated_every or settings.steps,
        seed=settings.seed,
    )
