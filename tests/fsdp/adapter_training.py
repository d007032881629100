"""Adapters of a tiny model that torch shards, on the rows of `tests.engine.adapter_training`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from safetensors.torch import load_file

from mrl.config.lora import LoraConfig
from mrl.config.schema import FsdpConfig, ParallelConfig, TrainedModelConfig
from mrl.engine.scores import ScoreRequest
from mrl.fsdp.engine import FsdpEngine, FsdpRequest
from mrl.fsdp.parallel import ShardGroups, shard_groups
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import Region, slices
from mrl.models.table import Head
from tests.engine.adapter_training import Floats, Found, log_probs_by_row
from tests.engine.tiny_training import negative_score, share


@dataclass(frozen=True)
class Case:
    """Adapters of a model over all ranks, or over `fsdp.shard_size` of them."""

    model: str
    adapters: str
    """A directory of PEFT; empty for new adapters."""
    lora: dict[str, Any]
    layout: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    dtype: Literal["bfloat16", "float32"] = "float32"
    head: Head = "lm"


def settings_of(case: Case, **optimizer: Any) -> TrainedModelConfig:
    return TrainedModelConfig(
        strategy="fsdp",
        parallel=case.layout,
        fsdp=case.fsdp,
        dtype=case.dtype,
        max_tokens_per_device=64,
        lora=LoraConfig(**case.lora),
        optimizer={"lr": 1e-2, "weight_decay": 0.01, "clip_grad": 0.0, **optimizer},
    )


def fresh(case: Case, groups: ShardGroups, seed: int = 1, **optimizer: Any) -> FsdpEngine:
    """Return an engine with the first adapters of the settings."""
    settings = settings_of(case, **optimizer)
    engine = FsdpEngine(FsdpRequest(read_spec(case.model), case.head, settings, seed=seed), groups)
    engine.load(HfReader(case.model))
    return engine


def engine_of(case: Case, groups: ShardGroups, **optimizer: Any) -> FsdpEngine:
    """Return an engine with the adapters of the case."""
    engine = fresh(case, groups, **optimizer)
    values = load_file(f"{case.adapters}/adapter_model.safetensors")
    assert engine.adapters is not None
    engine.adapters.fill(lambda name, box: values[name][slices(box)])
    return engine


def measure(cases: list[Case]) -> list[Found]:
    return [_measure(case) for case in cases]


def _measure(case: Case) -> Found:
    with shard_groups(case.layout, case.fsdp.shard_size, seed=1) as groups:
        engine = engine_of(case, groups)
        assert engine.adapters is not None
        assert engine.optimizer is not None
        on = log_probs_by_row(engine)
        with engine.adapters.off():
            off = log_probs_by_row(engine)
        engine.optimizer.zero_grad()
        reports = engine.forward_backward(*share(engine), negative_score, ScoreRequest())
        gradients = gradient_boxes(engine)
        others = sum(parameter.grad is not None for parameter in engine.weights.parameters.values())
        norm = engine.optimizer.step().grad_norm
        loss = reports["loss"] if groups.mesh.is_output_rank(groups.at.rank) else 0.0
        return Found(on, off, gradients, loss, norm, others)


def gradient_boxes(engine: FsdpEngine) -> list[tuple[str, Region, Floats]]:
    """Return the parts of the adapters' gradients on this rank, by PEFT's names."""
    state = engine.training_state
    shards = [shard for shard, _ in state.shards() if ".lora_" in shard.name]
    return [(x.name, x.pieces[0].source, state.gradient(x, x).float().numpy().copy()) for x in shards]  # type: ignore[arg-type]
