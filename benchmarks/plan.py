"""Predictions of `mrl plan` for published step times. Nothing is measured here.

The rows are NeMo-RL's table of GRPO on OpenMathInstruct-2 (versions 0.5 and 0.6), the only one with layouts, batch
sizes and mean lengths. They used another trainer with other kernels: the question is whether the model of time has the
right terms. Left out are models of a family that mrl does not support, and the run that is eight steps off-policy.

The constants in `mrl/plan/assumptions.py` are round numbers from before the comparison. After it, for all rows, the
engine's reserve changed from 3 to 2 GiB, and samples that do not fit at once are now assumed to be of all ages. No row
has its own constant.

Facts missing in the table are assumed: prompts of 110 tokens (the published tokens per second agree with that), 512
samples per update, one pass for old and one for reference log-probs, micro-batches of one longest sample. With `1-off`
the engines have half of the devices, and a step takes as long as the longer of generation and training.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.algorithm import AlgorithmConfig, KlConfig
from mrl.config.data import DataConfig
from mrl.config.hardware import hardware
from mrl.config.reward import RewardConfig
from mrl.config.schema import (
    BatchConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    RolloutConfig,
    RunConfig,
    TrainedModelConfig,
)
from mrl.config.training import TrainingConfig
from mrl.plan.known_models import model_spec
from mrl.plan.plan_input import PlanInput
from mrl.plan.search import FULL_RECOMPUTATION
from mrl.plan.timing import Lengths, plan_time

TOLERANCE, MIN_WITHIN = 0.25, 6
PROMPT_TOKENS = 110


@dataclass(frozen=True)
class Row:
    """One published run."""

    model: str
    gpus: int
    engine_tp: int
    parallel: ParallelConfig
    mean_response: int
    longest: int
    samples: int
    seconds: float
    hardware: str = "h100"
    domain: int = 8
    """Number of GPUs connected by NVLink."""
    split: bool = False
    """Whether engines and trainer have half of the GPUs each, and work at the same time."""
    megatron: dict[str, Any] = field(default_factory=dict)


_MOE, _DENSE = "Qwen3-30B-A3B", "Qwen3-32B"
_LARGE = "Qwen3-235B-A22B"
_LARGE_8 = ParallelConfig(tp=2, cp=2, ep=16, pp=8, sequence_parallel=True, first_stage_layers=11, last_stage_layers=11)
_LARGE_4 = dataclasses.replace(_LARGE_8, pp=4, first_stage_layers=23, last_stage_layers=23)
_SPLIT_8 = dataclasses.replace(_LARGE_8, tp=4, cp=1)
ROWS = [
    Row("Llama-3.1-8B", 16, 1, ParallelConfig(pp=2), 1019, 4096, 2048, 92.8, megatron=FULL_RECOMPUTATION),
    Row(_DENSE, 32, 4, ParallelConfig(tp=4, pp=4, sequence_parallel=True), 3251, 4096, 2048, 376),
    Row(_MOE, 32, 2, ParallelConfig(ep=8), 3203, 4096, 2048, 192),
    Row(_MOE, 32, 2, ParallelConfig(ep=8, pp=2), 3201, 4096, 2048, 152, split=True),
    Row(_LARGE, 128, 16, _LARGE_8, 5700, 8192, 512, 395, megatron=FULL_RECOMPUTATION),
    Row(_LARGE, 256, 16, _LARGE_8, 5700, 8192, 512, 312, megatron=FULL_RECOMPUTATION),
    Row(_LARGE, 256, 8, _SPLIT_8, 5721, 8192, 512, 231, split=True, megatron=FULL_RECOMPUTATION),
    Row(_MOE, 16, 1, ParallelConfig(ep=16), 3203, 4096, 2048, 221, hardware="gb200", domain=64),
    Row(_LARGE, 64, 8, _LARGE_4, 5700, 8192, 512, 286, hardware="gb200", domain=64, megatron=FULL_RECOMPUTATION),
]


def subject_of(row: Row) -> PlanInput:
    """Return the run as a configuration of mrl."""
    parts = {"train": row.gpus // 2, "rollout": row.gpus // 2} if row.split else {"train": row.gpus}
    roles = {"actor": "train"} | ({"rollout": "rollout"} if row.split else {})
    config = Config(
        run=RunConfig(name="published"),
        cluster=ClusterConfig(nodes=-(-row.gpus // row.domain), devices_per_node=row.domain, device="gpu"),
        placement=PlacementConfig(pools=parts, roles=roles),
        model=ModelConfig(path=row.model),
        # KL in the reward needs old log-probs, which that trainer always computes by default.
        algorithm=AlgorithmConfig(advantage="grpo", kl=KlConfig(where="reward")),
        data=DataConfig(train={}),
        reward=RewardConfig(functions={}),
        batch=BatchConfig(prompts_per_step=row.samples // 32, samples_per_prompt=32, samples_per_update=512),
        actor=TrainedModelConfig(
            parallel=row.parallel,
            max_tokens_per_device=row.longest // row.parallel.cp,
            megatron=row.megatron | {"moe_grouped_gemm": True},
        ),
        rollout=RolloutConfig(
            tp=row.engine_tp,
            max_prompt_tokens=PROMPT_TOKENS,
            max_response_tokens=row.longest - PROMPT_TOKENS,
            vllm={"gpu_memory_utilization": 0.8 if row.split else 0.6},
        ),
        training=TrainingConfig(steps=1),
    )
    return PlanInput(config, {"actor": model_spec(row.model)}, hardware(row.hardware))


def predictions() -> Iterator[dict[str, Any]]:
    """Yield one line for each published run."""
    for row in ROWS:
        plan = plan_time(subject_of(row), Lengths(PROMPT_TOKENS, row.mean_response))
        phase_seconds = {phase.name: phase.seconds for phase in plan.phases}
        rest = plan.seconds - phase_seconds["rollout"] - phase_seconds["weights"]
        seconds = phase_seconds["weights"] + max(phase_seconds["rollout"], rest) if row.split else plan.seconds
        yield {
            "run": f"{row.model} {row.gpus} {row.hardware}{' 1-off' if row.split else ''}",
            "predicted_s": seconds,
            "published_s": row.seconds,
            "error": seconds / row.seconds - 1,
            **{f"{name.replace(' ', '_')}_s": value for name, value in phase_seconds.items()},
        }


def main() -> int:
    """Predict, compare, print the results, and return the exit status."""
    arguments = parser("Compare the step times that `mrl plan` predicts with published ones.").parse_args()
    bench = Benchmark("plan")
    for line in predictions():
        bench.row(**line)
    within = sum(abs(line["error"]) <= TOLERANCE for line in bench.rows)
    bench.goal(f"rows predicted within {TOLERANCE:.0%}, of {len(ROWS)}", within, at_least=MIN_WITHIN)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
