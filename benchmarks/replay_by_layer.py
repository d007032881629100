"""The mismatch of engine and trainer by layer: a trainer that replays the engine's experts in some of its layers.

    python benchmarks/replay_by_layer.py [--seeds 1 2 3] [--prompts 32] [--json FILE]

Each seed has a random mixture in bfloat16, whose experts are four times as strong as usual. A vLLM engine samples from
it and returns its routes. Megatron computes the log-probs of the same samples with the routes of no layer, of one
layer, of all layers except one, and of all layers. Other experts in an early layer change the scores of every later
router. So "other experts" has two columns: the share of tokens for which the trainer would choose other experts in this
layer if it replayed no layer, and if it replayed all.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.harness import Benchmark, parser
from mrl.algos.rollout_correction import RolloutPair, mismatch_metrics
from mrl.algos.rows import Rows
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.packed_rows import TokenRows
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.rollout.engine import EngineSettings, engine_class
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed
from mrl.verify.spawn import run_distributed

STRENGTH = 4.0
"""Factor of the experts' outputs. A token that goes to other experts then has very different log-probs."""
NUM_LAYERS, VOCAB = 6, 128
PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 16, 48, 4
LIMIT_S = 600.0


@dataclass(frozen=True)
class Sampled:
    """Samples of an engine as the rows of a trainer, with the engine's log-probs and routes."""

    rows: TokenRows
    log_probs_T: Tensor


@dataclass(frozen=True)
class Compared:
    """The trainer's log-probs if it replays some layers, and the shares of tokens with other experts by layer."""

    k3: float
    other_experts: dict[int, float]


def main() -> int:
    """Sample and score with each seed's mixture."""
    options = parser("The mismatch of engine and trainer by layer.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--prompts", type=int, default=32)
    arguments = options.parse_args()
    bench = Benchmark("replay_by_layer")
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            model = make_mixture(Path(directory, "model"), seed)
            sampled = sample(model, Path(directory), seed, arguments.prompts)
            (found,) = run_distributed(1, compare, str(model), sampled, timeout_s=LIMIT_S)
        for row in rows_of(found):
            bench.row(seed=str(seed), **row)
    for layer in dict.fromkeys(row["replayed layers"] for row in bench.rows):
        ours = [row for row in bench.rows if row["replayed layers"] == layer]
        bench.row(seed="mean", **{"replayed layers": layer}, **means(ours))
    mean_k3 = {row["replayed layers"]: row["k3"] for row in bench.rows if row["seed"] == "mean"}
    bench.goal("k3 without replay over k3 with replay of all layers", mean_k3["none"] / mean_k3["all"], at_least=2)
    return bench.finish(arguments)


def make_mixture(directory: Path, seed: int) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=PROMPT_TOKENS + NEW_TOKENS,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter *= STRENGTH
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def sample(model: Path, sockets: Path, seed: int, num_prompts: int) -> Sampled:
    """Return an engine's samples of random prompts."""
    noise = np.random.default_rng(seed)
    prompts = [noise.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32) for _ in range(num_prompts)]
    requests = [
        GenerationRequest(f"{at}/{number}", str(at), ids, request_seed(seed, 0, str(at), number), NEW_TOKENS)
        for at, ids in enumerate(prompts)
        for number in range(SAMPLES)
    ]
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    settings = EngineSettings(
        model, "bfloat16", "cpu", PROMPT_TOKENS + NEW_TOKENS, VOCAB, sockets, "engine", vllm=options
    )
    engine = engine_class("vllm")(replace(settings, loads_files=True, returns_routes=True))
    engine.receive_weights(1)  # those of the files
    engine.start(requests, Sampling())
    samples: list[Generated] = []
    while engine.unfinished:
        samples += engine.step()
    engine.close()
    by_key = {request.key: request.prompt_ids for request in requests}
    tokens = np.concatenate([ids for found in samples for ids in (by_key[found.key], found.token_ids)])
    responses = np.array([len(found.token_ids) for found in samples])
    routes = np.concatenate([found.routes for found in samples if found.routes is not None]).astype(np.int16)
    rows = TokenRows(
        torch.from_numpy(tokens.astype(np.int64)),
        PROMPT_TOKENS + responses,
        responses,
        {},
        routes=torch.from_numpy(routes),
    )
    return Sampled(rows, torch.from_numpy(np.concatenate([found.log_probs for found in samples])))


def compare(path: str, sampled: Sampled) -> dict[str, Compared]:
    """Return the trainer's figures for each choice of replayed layers, on this rank."""
    layout, spec = ParallelConfig(), read_spec(path)
    every = range(NUM_LAYERS)
    choices = {"none": [], "all": [*every]}
    choices |= {f"layer {layer}": [layer] for layer in every}
    choices |= {f"all except layer {layer}": [other for other in every if other != layer] for layer in every}
    settings = TrainedModelConfig(parallel=layout, dtype="bfloat16", max_tokens_per_device=4096, optimizer={"lr": 1e-3})
    with model_parallel(layout, seed=1) as groups:
        engine = MegatronEngine(EngineRequest(spec, "lm", settings, replays_routes=True), groups)
        engine.load(HfReader(path))
        return {name: _with_layers(engine, sampled, layers) for name, layers in choices.items()}


def _with_layers(engine: MegatronEngine, sampled: Sampled, layers: list[int]) -> Compared:
    rows, routes = sampled.rows, sampled.rows.routes
    assert routes is not None, "the engine returned routes"
    is_replayed = torch.tensor([layer in layers for layer in range(NUM_LAYERS)])
    rows = replace(rows, routes=torch.where(is_replayed[:, None], routes, -1))
    batches = np.array_split(np.arange(len(rows.lengths)), 4)
    scores, own = engine.forward_with_routes(rows, batches, ScoreRequest())
    assert scores is not None, "one rank has all stages"
    assert scores.log_probs_T is not None, "the head returns log-probs"
    own, mask_T = own.to(torch.int16), torch.ones(len(sampled.log_probs_T), dtype=torch.bool)
    others_L = (own.sort(-1).values != routes.sort(-1).values).any(-1).double().mean(0)
    pair = RolloutPair(Rows.of(rows.response_lengths.tolist()), mask_T, scores.log_probs_T.cpu(), sampled.log_probs_T)
    return Compared(mismatch_metrics(pair)["k3_kl"], dict(enumerate(others_L.tolist())))


def rows_of(found: dict[str, Compared]) -> list[dict[str, Any]]:
    """Return a line for each layer, and one for no layers and for all."""
    none, every = found["none"], found["all"]
    lines: list[dict[str, Any]] = [
        {
            "replayed layers": f"layer {layer}",
            "k3": found[f"layer {layer}"].k3,
            "k3, all except this": found[f"all except layer {layer}"].k3,
            "other experts, none replayed": none.other_experts[layer],
            "other experts, all replayed": every.other_experts[layer],
        }
        for layer in range(NUM_LAYERS)
    ]
    for name, figures in (("none", none), ("all", every)):
        lines.append({"replayed layers": name, "k3": figures.k3})
    return lines


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in rows[0] if name not in ("seed", "replayed layers")]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


if __name__ == "__main__":
    sys.exit(main())
