"""Tensors that autograd saves in a running engine, run on ranks, compared with the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.offload import memory_of
from mrl.engine.optimizer import Optimizer
from mrl.engine.packed_rows import TokenRows
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.models.spec import GdnSpec, MlaSpec, ModelSpec
from mrl.plan.activations import layer_bytes
from mrl.plan.known_models import model_spec
from tests.engine.tiny_training import negative_score

VOCAB, NUM_ROWS, ROW_TOKENS = 64, 4, 64


@dataclass(frozen=True)
class SavedCase:
    """A family of known models, shrunk, in a layout."""

    model: str
    layout: ParallelConfig


def small(model: str, num_layers: int) -> ModelSpec:
    """A known model with the same parts in small."""
    spec = model_spec(model)
    experts = {
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn": 96,
        "dense_layers": frozenset(),
        "num_groups": 1,
        "groups_per_token": 1,
    }
    moe = spec.moe and replace(spec.moe, **experts, shared_ffn=160 if spec.moe.shared_ffn else 0)  # type: ignore[arg-type]
    rope = replace(spec.rope, dim=32 * spec.rope.dim // spec.head_dim)
    sizes = {"hidden": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn": 192, "vocab": VOCAB}
    if mla := spec.mla:
        rope = replace(spec.rope, dim=8)
        is_narrow = mla.v_dim < spec.head_dim
        mla = MlaSpec(mla.q_rank and 48, kv_rank=40, nope_dim=24, rope_dim=8, v_dim=16 if is_narrow else 32)
        sizes["num_kv_heads"] = 4
    gdn = spec.gdn and GdnSpec(2, 4, key_dim=16, value_dim=24, kernel=4, layers=frozenset(range(num_layers // 2)))
    return replace(spec, num_layers=num_layers, tied=False, moe=moe, rope=rope, mla=mla, gdn=gdn, **sizes)  # type: ignore[arg-type]


def saved_and_predicted(cases: list[SavedCase]) -> list[tuple[float, float]]:
    """Bytes per token of a layer, of each case: the difference of four layers and two, and the prediction."""
    found = []
    for case in cases:
        settings = TrainedModelConfig(parallel=case.layout, max_tokens_per_device=256, optimizer={"lr": 1e-2})
        saved = [_saved(small(case.model, num_layers), settings) for num_layers in (2, 4)]
        spec = small(case.model, 2)
        predicted = layer_bytes(spec, settings, spec.has_experts(0)).total
        if spec.gdn:  # the mean of both kinds of layers
            predicted = (predicted + layer_bytes(spec, settings, spec.has_experts(0), is_linear=True).total) / 2
        found.append(((saved[1] - saved[0]) / 2 / (NUM_ROWS * ROW_TOKENS), predicted))
    return found


def _saved(spec: ModelSpec, settings: TrainedModelConfig) -> int:
    """Bytes of all tensors but parameters that are saved for backward, each storage counted once."""
    with model_parallel(settings.parallel, seed=1) as groups:
        engine = MegatronEngine(EngineRequest(spec, "lm", settings), groups)
        parameters = [parameter for model in engine.models for parameter in model.parameters()]
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.02)
        engine.optimizer = Optimizer(engine.models, settings)
        engine.memory = memory_of(engine.models, engine.optimizer, groups.device)
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

        def note(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            is_backward = torch._C._current_graph_task_id() != -1  # what the delta rule computes again lives shortly
            if storage.data_ptr() not in own and not is_backward:
                storages[storage.data_ptr()] = storage
            return x

        lengths = np.full(NUM_ROWS, ROW_TOKENS)
        rows = TokenRows(torch.randint(0, VOCAB, (int(lengths.sum()),)), lengths, lengths - 2, {})
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            engine.forward_backward(rows, [np.arange(NUM_ROWS)], negative_score, ScoreRequest())
        return sum(storage.nbytes() for storage in storages.values())
