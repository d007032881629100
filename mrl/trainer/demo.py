"""The demo: a tiny model learns to add numbers from 10 to 49, from a careless teacher first, then from rewards alone.

SFT imitates the teacher, of whose answers more than half are wrong, so the model is wrong as often: however likely the
right answer has become, it is sampled no more often than the teacher gave it. No example is ever corrected. Rewards
that compare sampled answers with the truth take it from there, on problems other than those that it is measured on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mrl.config.load import load_config
from mrl.config.schema import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrainedModelConfig,
)
from mrl.config.sft import SftBatchConfig, SftConfig, SftTrainingConfig
from mrl.controller import ray_cluster
from mrl.events import EventLog
from mrl.observe.console import Console
from mrl.trainer.demo_model import make_model
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.run import open_run
from mrl.trainer.sft import train_sft
from mrl.trainer.shutdown import ShutdownSignal

Result = TypeVar("Result")

MAX_OPERAND = 49
MISTAKES, SFT_STEPS = 0.64, 340
WARM_START_AT_MOST, GOAL = 0.40, 0.80
SOLVED = "val/solved/mean@4"

TEMPLATE = """\
# Written by `mrl demo`. Run it again, with whatever you like to change: mrl train {path} run.name=mine
run: {{name: ppo, dir: {directory}}}
cluster: {{devices_per_node: {devices}, device: cpu}}
placement:
  pools: {{laptop: {devices}}}
  roles: {{{roles}}}
model: {{path: {model}}}
algorithm:
{algorithm}batch:
  prompts_per_step: {prompts}
  samples_per_prompt: {samples}
  samples_per_update: 128 # four optimizer steps per step
actor:
  parallel: {{tp: {tp}, pp: {pp}}}
  dtype: float32
  max_tokens_per_device: 4096
  optimizer: {{lr: 5e-4, weight_decay: 0.0}}
  # Adam's first steps are its largest; smaller ones at the end keep what was learned from wavering
  schedule: {{warmup_steps: 20, decay: linear, decay_steps: {updates}, min_lr_ratio: 0.1}}
{critic}rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
sync: {{offload: false}} # trainer and engine fit into memory together
data:
  train: {{sums: {{dataset: "toy:addition", options: {{part: train, largest: {largest}}}}}}}
  validation: {{sums: {{dataset: "toy:addition", options: {{part: validation, largest: {largest}}}}}}}
reward:
  functions: {{answer: {{name: digits}}}} # partial credit; what the demo reports is the share of wholly right answers
  num_workers: 1
training: {{steps: {steps}, seed: {seed}{warmup}}}
validation: {{every: {steps}, samples_per_prompt: 4}}
"""
ALGORITHMS = {
    "ppo": "  advantage: gae\n",
    "grpo": "  advantage: grpo\n  kl: {where: loss}\n",
    "rloo": "  advantage: rloo\n",
    "reinforce_plus_plus": "  advantage: reinforce_plus_plus\n  kl: {where: reward}\n",
    "remax": "  advantage: remax\n",
    "dapo": "  advantage: grpo\n  loss: {clip_high: 0.28}\n  dynamic_sampling: {most_rounds: 20}\n",
}
"""Name -> the `algorithm` section."""
CRITIC = """\
critic:
  parallel: {} # another layout than the actor's
  dtype: float32
  max_tokens_per_device: 4096
  optimizer: {lr: 2e-3, weight_decay: 0.0}
"""


@dataclass(frozen=True)
class DemoSettings:
    """What `mrl demo` can be asked for."""

    directory: Path
    seed: int = 1
    algorithm: str = "ppo"
    tp: int = 2
    pp: int = 1
    steps: int = 60

    @property
    def cluster(self) -> ClusterConfig:
        """A device for each rank of the actor."""
        return ClusterConfig(devices_per_node=self.tp * self.pp, device="cpu")


@dataclass(frozen=True)
class DemoResult:
    """How it went."""

    before: float
    after: float | None
    """None where it was told to stop before the end."""
    seconds: dict[str, float]
    config: Path

    @property
    def is_success(self) -> bool:
        """Whether little was known before, and much after."""
        return self.after is not None and self.before <= WARM_START_AT_MOST and self.after >= GOAL


def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Make the model, warm it up by SFT, train it by rewards, and measure it before and after."""
    seconds: dict[str, float] = {}
    settings.directory.mkdir(parents=True, mode=0o700)
    with ray_cluster(settings.cluster):
        model = warm_model(settings, console, seconds)
        return learn(settings, model, console, seconds)


def warm_model(settings: DemoSettings, console: Console, seconds: dict[str, float]) -> Path:
    """A new model after its SFT."""
    console.print("making a model of 400,000 parameters that knows nothing")
    initial = _timed(seconds, "model", lambda: make_model(settings.directory / "initial", settings.seed))
    console.print(f"SFT on the answers of a teacher of whom {MISTAKES:.0%} are wrong")
    return _timed(seconds, "sft", lambda: _warm_start(settings, initial, console))


def learn(settings: DemoSettings, model: Path, console: Console, seconds: dict[str, float]) -> DemoResult:
    """Train a warmed-up model by rewards."""
    config = settings.directory / "demo.yaml"
    config.write_text(demo_yaml(settings, model, config), encoding="utf-8")
    console.print(f"{settings.algorithm}: {settings.steps} steps of 512 samples, as {config} says")
    resolved = load_config(str(config))
    with open_run(resolved, console) as run:
        trainer = RayPPOTrainer(run)
        began = time.monotonic()
        with trainer.init_workers():
            seconds["start of workers"] = time.monotonic() - began
            before = _timed(seconds, "validation before", trainer.validate)[SOLVED]
            console.print(
                f"right before: {100 * before:.1f} % of sampled answers to problems that are never trained on"
            )
            after = _timed(seconds, settings.algorithm, trainer.fit).get(SOLVED)
    return DemoResult(before, after if trainer.num_steps_done == settings.steps else None, seconds, config)


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Result]) -> Result:
    began = time.monotonic()
    result = work()
    seconds[name] = time.monotonic() - began
    return result


def _warm_start(settings: DemoSettings, initial: Path, console: Console) -> Path:
    directory = settings.directory / "sft"
    (directory / "logs").mkdir(parents=True, mode=0o700)
    devices = settings.cluster.devices_per_node
    options = {"part": "train", "largest": MAX_OPERAND, "mistakes": MISTAKES}
    config = SftConfig(
        run=RunConfig(name="sft", dir=str(settings.directory)),
        cluster=settings.cluster,
        placement=PlacementConfig(pools={"laptop": devices}, roles={"actor": "laptop"}),
        model=ModelConfig(path=str(initial)),
        data=DataConfig(train={"sums": SourceConfig(dataset="toy:addition", options=options)}),
        batch=SftBatchConfig(rows_per_update=256, max_prompt_tokens=16, max_response_tokens=8),
        actor=TrainedModelConfig(
            dtype="float32",
            max_tokens_per_device=4096,
            optimizer={"lr": 3e-3, "weight_decay": 0.0},
            schedule=ScheduleConfig(warmup_steps=20),
        ),
        training=SftTrainingConfig(steps=SFT_STEPS, seed=settings.seed),
    )

    def on_step(step: int, figures: dict[str, float]) -> None:
        if step % 40 == 0:
            console.print(f"  update {step}: loss {figures['loss']:.3f}")

    events = EventLog(directory / "events.jsonl")
    try:
        model = train_sft(config, directory, events, ShutdownSignal(None), on_step, console.print)
        assert model is not None, "nothing asks it to stop"
        return model
    finally:
        events.close()


def demo_yaml(settings: DemoSettings, model: Path, path: Path) -> str:
    """The configuration of the run, as a user would write it."""
    has_critic = settings.algorithm == "ppo"
    return TEMPLATE.format(
        path=path,
        directory=settings.directory,
        devices=settings.cluster.devices_per_node,
        roles="actor: laptop, critic: laptop" if has_critic else "actor: laptop",
        model=model,
        algorithm=ALGORITHMS[settings.algorithm],
        tp=settings.tp,
        pp=settings.pp,
        critic=CRITIC if has_critic else "",
        # Without a critic the samples of a prompt are each other's baseline.
        prompts=256 if has_critic else 64,
        samples=2 if has_critic else 8,
        warmup=", critic_warmup_steps: 2" if has_critic else "",
        largest=MAX_OPERAND,
        steps=settings.steps,
        updates=max(4 * settings.steps, 21),
        seed=settings.seed,
    )
