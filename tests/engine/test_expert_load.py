"""The load of the busiest expert is that of transformers' routers, in every layout and with recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.config.schema import TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import model_parallel
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import LENGTHS, VOCAB, log_probs, step

LIMIT_S = 300.0
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = [(Layout(), {}), (Layout(ep=2), RECOMPUTED), (Layout(pp=2), RECOMPUTED)]


def loads(path: str) -> list[list[dict[str, float]]]:
    """Return what each layout reports after one pass for log-probs and one update, and then without any."""
    found = []
    for layout, megatron in CASES:
        with model_parallel(layout, seed=1) as groups:
            settings = TrainedModelConfig(
                parallel=layout, dtype="float32", max_tokens_per_device=64, optimizer={"lr": 1e-2}, megatron=megatron
            )
            engine = MegatronEngine(EngineRequest(read_spec(path), "lm", settings), groups)
            engine.load(HfReader(path))
            assert engine.expert_load is not None
            log_probs(engine)
            step(engine)
            found.append([engine.expert_load.take(), engine.expert_load.take()])
    return found


def test_the_busiest_expert_is_the_one_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # not for the ranks, which import this module

    from tests.models.tiny_models import make_tiny

    path = make_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        rows = [
            model(row[None], output_router_logits=True).router_logits for row in torch.split(tokens, LENGTHS.tolist())
        ]
    by_layer = [torch.cat(layer).topk(2).indices.flatten().bincount(minlength=4) for layer in zip(*rows, strict=True)]
    busiest = [float(counts.max() / counts.double().mean()) for counts in by_layer]
    assert len(busiest) == 3, "one of the four layers has no experts"
    halves = [counts.view(2, 2).sum(1).double() for counts in by_layer]
    busiest_rank = max(float(half.max() / half.mean()) for half in halves)
    expected = {"experts/busiest": max(busiest), "experts/busiest_mean": sum(busiest) / 3}
    for rank in run_distributed(2, loads, str(path), timeout_s=LIMIT_S):
        for (layout, _), (of_update, afterwards) in zip(CASES, rank, strict=True):
            of_rank = {"experts/busiest_rank": busiest_rank if layout.ep == 2 else 1.0}
            assert of_update == pytest.approx(expected | of_rank)
            assert afterwards == {}
