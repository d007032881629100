"""Measurements to compare layouts with one rank and with transformers: log-probs, loss, gradient norm and the
parameters after three steps.

The rows and the loss are created from a seed, completely on every rank, so the comparison does not depend on the
layout. Each rank takes its data-parallel share of the same batch, cut into a different number of micro-batches in each
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.losses import PolicyTokens, ValueTokens
from mrl.algos.objectives import ActorColumns, actor_objective, critic_objective
from mrl.algos.rows import Rows
from mrl.config.algorithm import LossConfig
from mrl.config.fsdp import FsdpConfig
from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.data.packing import plan_step
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.packed_rows import TokenRows
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.scores import LossFunction, LossInput, LossOutput, ScoreRequest
from mrl.fsdp.engine import FsdpEngine, FsdpRequest
from mrl.fsdp.parallel import shard_groups
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.mla import set_latent_epsilon
from mrl.models.regions import Region, slices
from mrl.models.spec import ModelSpec
from mrl.models.table import Head

Engine = MegatronEngine | FsdpEngine
Floats = npt.NDArray[np.float64]
HORIZON_TOKENS = 32
TEMPERATURE = 0.9
_LATER_BUDGETS = (40, 1000)
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.01, "adam_eps": 1e-6}
"""Defaults under a case's own settings. Steps are large, so that a wrong one is visible. With the usual 1e-8, Adam
moves as far for a gradient that is only rounding as for any other, such as that of a key's bias where nothing rotates
it."""


@dataclass(frozen=True)
class ParityCase:
    """One measurement: a model in a layout, with the user's settings of Megatron."""

    model: str
    head: Head
    parallel: ParallelConfig
    max_tokens: int
    """Tokens of a micro-batch on one device, before and in the first step."""
    aggregation: str = "token-mean"
    num_rows: int = 12
    longest: int = 24
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "float32"
    megatron: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    strategy: Literal["megatron", "fsdp"] = "megatron"
    shard_size: int | None = None
    """Ranks that share a copy of the model, with the strategy `fsdp`."""
    routes: bool = False
    """Whether most tokens are sent to random experts, as router replay does."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """`max_tokens` of each step.

        They differ because Megatron must not expect as many micro-batches as in the first step.
        """
        return (self.max_tokens, *_LATER_BUDGETS)

    @property
    def settings(self) -> TrainedModelConfig:
        return TrainedModelConfig(
            parallel=self.parallel,
            dtype=self.dtype,
            max_tokens_per_device=self.max_tokens,
            megatron=dict(self.megatron),
            ddp=dict(self.ddp),
            optimizer={**OPTIMIZER, **self.optimizer},
            lora=self.lora,
            strategy=self.strategy,
            fsdp=FsdpConfig(shard_size=self.shard_size),
        )


@dataclass(frozen=True)
class HeldParameter:
    """A box of a Hugging Face tensor on a rank, after the last step."""

    name: str
    box: Region
    values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class RankResult:
    """Results of one rank. Scores by row number exist only on the last stage."""

    scores: dict[int, Floats]
    entropies: dict[int, Floats]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    held: list[HeldParameter]


@dataclass(frozen=True)
class ParityResult:
    """Merged results of all ranks: scores of all response tokens, and loss and gradient norm per step."""

    scores: Floats
    entropies: Floats
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    held: list[HeldParameter]


def make_rows(spec: ModelSpec, case: ParityCase) -> TokenRows:
    """Create random rows of different lengths: one with two tokens, one with an empty response, one of full length."""
    random = np.random.default_rng(case.seed)
    lengths = random.integers(4, case.longest + 1, case.num_rows)
    lengths[:3] = (2, case.longest // 2, case.longest)
    responses = np.maximum(1, (lengths - 1) * random.uniform(0.3, 0.95, case.num_rows)).astype(np.int64)
    responses[1] = 0
    total = int(responses.sum())
    columns = {
        "noise": torch.from_numpy(random.normal(0, 0.15, total)).float(),
        "advantages": torch.from_numpy(random.normal(0, 1, total)).float(),
        "response_mask": torch.from_numpy(random.uniform(size=total) > 0.1),
    }
    tokens = torch.from_numpy(random.integers(0, spec.vocab, int(lengths.sum())))
    routes = _random_routes(spec, int((lengths - 1).sum()), random) if case.routes else None
    return TokenRows(tokens, lengths, responses, columns, routes=routes)


def _random_routes(spec: ModelSpec, num_tokens: int, random: np.random.Generator) -> torch.Tensor:
    """Return different experts for each token and layer, but none for every seventh token."""
    assert spec.moe is not None, "only a mixture has routes"
    layers = sum(map(spec.has_experts, range(spec.num_layers)))
    order = random.uniform(size=(num_tokens, layers, spec.moe.num_experts)).argsort(-1)
    routes = torch.from_numpy(order[:, :, : spec.moe.experts_per_token]).to(torch.int16)
    routes[::7] = -1
    return routes


def measure(cases: list[ParityCase]) -> list[RankResult]:
    """Measure all cases, one after another, on this rank of a world that fits their layouts."""
    return [measure_one(case) for case in cases]


def measure_one(case: ParityCase) -> RankResult:
    spec = read_spec(case.model)
    if case.strategy == "fsdp":
        with shard_groups(case.parallel, case.shard_size, seed=1) as own_groups:
            sharded = FsdpEngine(FsdpRequest(spec, case.head, case.settings), own_groups)
            sharded.load(HfReader(case.model))
            return _measure(sharded, spec, case, own_groups)
    with model_parallel(case.parallel, seed=1) as groups:
        engine = MegatronEngine(EngineRequest(spec, case.head, case.settings, replays_routes=case.routes), groups)
        engine.load(HfReader(case.model))
        return _measure(engine, spec, case, groups)


def _measure(engine: Engine, spec: ModelSpec, case: ParityCase, groups: ParallelGroups) -> RankResult:
    rows = make_rows(spec, case)
    shards = [_shard(rows, budget, engine, groups) for budget in case.budgets]
    request = ScoreRequest(temperature=TEMPERATURE, entropy="grad")
    before = engine.forward(shards[0].rows, shards[0].micro_batches, request)
    row_ranges = Rows.of(torch.from_numpy(rows.response_lengths))
    norm = LossNormalizer.of(case.aggregation, row_ranges, rows.columns["response_mask"], HORIZON_TOKENS)
    losses, norms = [], []
    for step, shard in enumerate(shards):
        reports, outcome = engine.update(shard.rows, shard.micro_batches, _loss(case.head, norm, step), request)
        losses.append(reports.get("loss", 0.0))
        norms.append(outcome.grad_norm)
    scores = None if before is None else (before.values_T if case.head == "score" else before.log_probs_T)
    return RankResult(
        scores=_by_row(scores, shards[0]),
        entropies=_by_row(before.entropy_T if before else None, shards[0]),
        # Context and tensor ranks all have the whole loss of their rows: only one of them reports it.
        losses=tuple(losses) if groups.mesh.is_output_rank(groups.at.rank) else (0.0,) * len(losses),
        grad_norms=tuple(norms),
        held=_held(engine),
    )


@dataclass(frozen=True)
class _Shard:
    """A data-parallel rank's rows, their numbers in the whole batch, and their micro-batches."""

    rows: TokenRows
    numbers: list[int]
    micro_batches: list[npt.NDArray[np.int64]]


def _shard(rows: TokenRows, max_tokens: int, engine: Engine, groups: ParallelGroups) -> _Shard:
    plan = plan_step(rows.lengths, groups.mesh.dp, max_tokens, engine.packing)
    own_part = plan[groups.at.dp]
    numbers = np.sort(np.concatenate(own_part))
    return _Shard(rows.take(numbers), numbers.tolist(), [np.searchsorted(numbers, part) for part in own_part])


def _by_row(values: torch.Tensor | None, shard: _Shard) -> dict[int, Floats]:
    if values is None:
        return {}
    parts = torch.split(values.double().cpu(), shard.rows.response_lengths.tolist())
    return {number: part.numpy() for number, part in zip(shard.numbers, parts, strict=True)}


def _held(engine: Engine) -> list[HeldParameter]:
    adapters = () if engine.adapters is None else engine.adapters.held()
    return [
        HeldParameter(
            piece.hf,
            piece.source,
            parameter[slices(piece.target)].detach().float().cpu().numpy(),
        )
        for shard, parameter in (*engine.held_tensors(), *adapters)
        for piece in shard.pieces
    ]


def _loss(head: Head, norm: LossNormalizer, step: int) -> LossFunction:
    return partial(_value_loss if head == "score" else _policy_loss, norm, step)


def _policy_loss(norm: LossNormalizer, step: int, batch: LossInput) -> LossOutput:
    """Return the PPO loss around log-probs with added noise, and an entropy term, with clipped and unclipped tokens."""
    log_probs_T = batch.scores.log_probs_T
    assert log_probs_T is not None, "a policy returns log-probs"
    tokens = PolicyTokens(
        Rows.of(torch.from_numpy(batch.response_lengths), log_probs_T.device),
        batch.columns["response_mask"],
        log_probs_T,
        log_probs_T.detach() + (1 + step) * batch.columns["noise"],
        batch.columns["advantages"],
    )
    objective = actor_objective(
        tokens, LossConfig(entropy_coef=0.01), norm, ActorColumns(entropy_T=batch.scores.entropy_T)
    )
    return LossOutput(objective.loss, {"loss": objective.loss.detach()} | objective.reports)


def _value_loss(norm: LossNormalizer, step: int, batch: LossInput) -> LossOutput:
    values_T = batch.scores.values_T
    assert values_T is not None, "a value model returns values"
    mask_T = batch.columns["response_mask"]
    old_T = values_T.detach() + (1 + step) * batch.columns["noise"]
    tokens = ValueTokens(mask_T, values_T, old_T, batch.columns["advantages"])
    objective = critic_objective(tokens, Rows.of(torch.from_numpy(batch.response_lengths), values_T.device), norm)
    return LossOutput(objective.loss, {"loss": objective.loss.detach()} | objective.reports)


def merge_ranks(ranks: list[RankResult]) -> ParityResult:

    def joined(per_rank: list[dict[int, Floats]]) -> Floats:
        rows: dict[int, Floats] = {}
        for rank_rows in per_rank:
            rows.update(rank_rows)
        return np.concatenate([rows[number] for number in sorted(rows)]) if rows else np.zeros(0)

    return ParityResult(
        scores=joined([rank.scores for rank in ranks]),
        entropies=joined([rank.entropies for rank in ranks]),
        losses=tuple(np.sum([rank.losses for rank in ranks], axis=0).tolist()),
        grad_norms=ranks[0].grad_norms,
        held=[held for rank in ranks for held in rank.held],
    )


@dataclass(frozen=True)
class Difference:
    """Distance of a layout from the one-rank run."""

    scores: float
    entropy: float
    loss: float
    grad_norm: float
    parameters: float

    @classmethod
    def between(cls, one: ParityResult, other: ParityResult) -> Difference:
        """Return the largest differences: absolute for scores, entropy and parameters, relative for the rest."""
        return cls(
            scores=_largest(one.scores, other.scores),
            entropy=_largest(one.entropies, other.entropies),
            loss=_relative(one.losses, other.losses),
            grad_norm=_relative(one.grad_norms, other.grad_norms),
            parameters=_parameter_difference(one, other),
        )


def _largest(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    return float(np.abs(a - b).max(initial=0.0)) if a.shape == b.shape else float("inf")


def _relative(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max(abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b, strict=True))


def _parameter_difference(one: ParityResult, other: ParityResult) -> float:
    whole: dict[str, npt.NDArray[np.float32]] = {}
    for held in one.held:
        if held.name not in whole:
            shape = np.max([part.box for part in one.held if part.name == held.name], axis=0)[:, 1]
            whole[held.name] = np.zeros(shape, np.float32)
        whole[held.name][slices(held.box)] = held.values
    return max(_largest(whole[held.name][slices(held.box)], held.values) for held in other.held)


def transformers_scores(path: str | Path, case: ParityCase) -> Floats:
    """Return the same log-probs or values from transformers, row by row, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    rows = make_rows(read_spec(path), case)
    kind = AutoModelForCausalLM if case.head == "lm" else AutoModelForSequenceClassification
    model = kind.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    set_latent_epsilon(model)
    parts = []
    with torch.no_grad():
        sequences = torch.split(rows.tokens, rows.lengths.tolist())
        for tokens, num in zip(sequences, rows.response_lengths.tolist(), strict=True):
            if case.head == "score":
                hidden = model.model(tokens[None]).last_hidden_state[0]
                parts.append(model.score(hidden)[len(tokens) - num - 1 : len(tokens) - 1, 0])
            else:
                logits = model(tokens[None]).logits[0] / TEMPERATURE
                predicted = logits[len(tokens) - num - 1 : len(tokens) - 1].log_softmax(-1)
                parts.append(predicted.gather(1, tokens[len(tokens) - num :, None])[:, 0])
    scores: Floats = torch.cat(parts).double().numpy()
    return scores
