"""The load of experts, which is that of transformers' routers in every layout, and the biases that even it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mrl.config.schema import ParallelConfig as Layout
from mrl.config.schema import TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.expert_load import ExpertLoad
from mrl.engine.parallel import model_parallel
from mrl.errors import EngineError
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
            found.append([engine.expert_load.take(was_applied=True), engine.expert_load.take(was_applied=True)])
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


RATE = 0.125  # a power of two, so that sums of steps are exact
BIASED = [Layout(), Layout(tp=2, ep=2, sequence_parallel=True), Layout(cp=2, ep=2), Layout(pp=2, vpp=2)]
Biases = dict[str, list[float]]


def biases_of(engine: MegatronEngine) -> Biases:
    """Return the biases of this rank's routers by layer."""
    routers = [module for chunk in engine.models for module in chunk.modules() if isinstance(module, TopKRouter)]
    return {str(router.layer_number): router.expert_bias.tolist() for router in routers}


def moved_biases(path: str) -> list[list[Biases]]:
    """Return the biases of each layout before and after an applied update, and after a skipped one, with the tokens
    that the first update sent to each expert."""
    found = []
    for layout in BIASED:
        with model_parallel(layout, seed=1) as groups:
            settings = TrainedModelConfig(
                parallel=layout,
                dtype="float32",
                max_tokens_per_device=64,
                optimizer={"lr": 1e-2},
                megatron=RECOMPUTED if layout.pp > 1 else {},
                router_bias_update_rate=RATE,
            )
            engine = MegatronEngine(EngineRequest(read_spec(path), "lm", settings), groups)
            engine.load(HfReader(path))
            load = engine.expert_load
            assert load is not None
            stages = [biases_of(engine)]
            step(engine)
            tokens = load._tokens.clone()
            torch.distributed.all_reduce(tokens)
            load.take(was_applied=True)
            stages.append(biases_of(engine))
            step(engine)
            load.take(was_applied=False)
            stages.append(biases_of(engine))
            stages.append({layer: tokens[int(layer) - 1].tolist() for layer in stages[0]})
            found.append(stages)
    return found


def test_biases_move_against_the_load_in_every_layout_and_not_after_a_skipped_update(tmp_path: Path) -> None:
    """The rule is Megatron's `get_updated_expert_bias` with the tokens of all ranks."""
    from tests.models.tiny_models import make_tiny

    path = make_tiny("glm4_moe", tmp_path)
    by_rank = run_distributed(2, moved_biases, str(path), timeout_s=LIMIT_S)
    first = by_rank[0][0][0]
    for rank in by_rank:
        for before, after, skipped, tokens in rank:
            for layer, biases in before.items():
                assert biases == first[layer]
                counts = torch.tensor(tokens[layer]).double()
                expected = torch.tensor(biases) + RATE * torch.sign(counts.mean() - counts)
                torch.testing.assert_close(torch.tensor(after[layer]), expected.float(), rtol=0, atol=1e-6)
                assert after[layer] == by_rank[0][0][1][layer], "every layout moves them alike"
                assert after[layer] != before[layer]
            assert skipped == after


def test_a_router_without_a_bias_refuses_a_rate(tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny

    with pytest.raises(EngineError, match=r"update rate is 0\.1, but routers of family qwen3_moe have no bias"):
        ExpertLoad([], read_spec(make_tiny("qwen3_moe", tmp_path)), None, 0.1)  # type: ignore[arg-type]
