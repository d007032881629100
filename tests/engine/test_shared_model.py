"""A critic on the actor's frozen model computes exactly what it computes on a copy. The actor does, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.config.schema import TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.engine.shared_model import SharedModel
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.table import Head
from mrl.verify.spawn import run_distributed
from tests.engine.adapter_training import Floats, log_probs_by_row
from tests.engine.tiny_training import negative_score, share
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: list[tuple[str, Layout, dict[str, Any]]] = [
    ("qwen3", Layout(tp=2, sequence_parallel=True), RECOMPUTED),
    ("qwen3", Layout(pp=2, vpp=2), {}),
    ("qwen2", Layout(), {"overlap_grad_reduce": True}),
]
"""Settings with `overlap` in their name are DDP's. With stages, the frozen model is in FP8."""
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}


@dataclass(frozen=True)
class Found:
    """Results of one rank after two updates of each role, in turns."""

    norms: list[float]
    scores: list[dict[int, Floats]]
    """Log-probs, log-probs of the reference, and values."""
    held_bytes: list[int]
    """Memory of the critic's parameters, of all parameters, and after the critic and then the actor have left."""


def measure(models: list[str]) -> list[tuple[Found, Found]]:
    """Return the results with a copy and with a shared model, by layout."""
    cases = zip(models, LAYOUTS, strict=True)
    return [tuple(measure_one(model, *case[1:], shares) for shares in (False, True)) for model, case in cases]  # type: ignore[misc]


def measure_one(model: str, layout: Layout, settings: dict[str, Any], shares: bool) -> Found:
    with model_parallel(layout, seed=1) as groups:
        actor = engine_of(model, "lm", layout, settings, groups, None)
        critic = engine_of(model, "score", layout, settings, groups, SharedModel(actor) if shares else None)
        norms = []
        for size in (2, 1):  # another number of micro-batches in the second update
            for engine in (actor, critic):
                rows, _ = share(engine)
                number = len(rows.lengths)
                micro_batches = np.array_split(np.arange(number), number // size)
                _, outcome = engine.update(rows, micro_batches, negative_score, ScoreRequest())
                norms.append(outcome.grad_norm)
        scores = [log_probs_by_row(actor)]
        assert actor.adapters is not None
        with actor.adapters.off():
            scores.append(log_probs_by_row(actor))
        scores.append(log_probs_by_row(critic))
        return Found(norms, scores, held_bytes(actor, critic))


def held_bytes(actor: MegatronEngine, critic: MegatronEngine) -> list[int]:
    def on_device() -> int:
        frozen = {id(part): part.device_bytes for e in (actor, critic) for part in e.memory._parts.values()}
        return sum(frozen.values())

    sizes = [sum(b.param_data.nbytes for b in critic.optimizer.buffers) if critic.optimizer else 0, on_device()]
    critic.memory.offload("parameters", "gradients", "optimizer")
    sizes.append(on_device())
    assert log_probs_by_row(actor) or not actor.groups.is_last_stage, "the actor works while the critic is away"
    actor.memory.offload("parameters", "gradients", "optimizer")
    sizes.append(on_device())
    critic.memory.onload("parameters")
    assert log_probs_by_row(critic) or not critic.groups.is_last_stage, "the critic works while the actor is away"
    return sizes


def engine_of(
    model: str, head: Head, layout: Layout, settings: dict[str, Any], groups: ParallelGroups, shared: SharedModel | None
) -> MegatronEngine:
    trained = TrainedModelConfig(
        parallel=layout,
        dtype="float32",
        max_tokens_per_device=64,
        megatron={name: value for name, value in settings.items() if "overlap" not in name},
        ddp={name: value for name, value in settings.items() if "overlap" in name},
        lora=LoraConfig(
            rank=4,
            alpha=8.0,
            targets=["all-linear"] if head == "lm" else ["q_proj", "down_proj"],
            base_quantization="fp8_per_block" if layout.pp > 1 else None,
        ),
        optimizer={"lr": 1e-2, "clip_grad": 0.0},
    )
    request = EngineRequest(read_spec(model), head, trained, new_head=head == "score", seed=3)
    engine = MegatronEngine(request, groups, shared)
    engine.load(HfReader(model))
    return engine


@pytest.mark.slow
def test_a_critic_on_the_actors_model_equals_one_on_a_copy(tmp_path: Path) -> None:
    families = {"qwen3": SIZES, "qwen2": {}}
    made = {family: make_tiny(family, tmp_path / family, sizes=sizes) for family, sizes in families.items()}
    models = [str(made[family]) for family, *_ in LAYOUTS]
    for rank in run_distributed(2, measure, models, timeout_s=LIMIT_S):
        for copy, found in rank:
            assert found.norms == copy.norms
            assert len(set(found.norms)) == 4, "every update learned"
            for own, other in zip(found.scores, copy.scores, strict=True):
                assert own.keys() == other.keys()
                assert all(np.array_equal(own[row], other[row]) for row in own)
            adapters, both, actor_alone, none = found.held_bytes
            assert 0 < adapters < actor_alone < both < copy.held_bytes[1] * 0.6, "one frozen model"
            assert none == 0
