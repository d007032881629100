"""Workers that train on ranked responses equal transformers with torch's own optimizer, in any layout."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.config.sft import DpoLossConfig, RewardLossConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.data.packing import plan_step
from mrl.engine.scores import Scores
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.protocol import DataProto, Jagged
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import group_sizes
from mrl.verify.layout import make_random
from mrl.verify.spawn import run_distributed
from mrl.workers.messages import ModelSetup, UpdateReport
from mrl.workers.supervised import DpoWorker, RmWorker
from tests.workers.stubs import SETUP, LocalWorld, OfShards, Shards, StubEngine, make_place

Layouts = list[tuple[ParallelConfig, int]]
"""Each with the tokens of a micro-batch: how groups are cut changes nothing."""
DENSE: Layouts = [
    *((ParallelConfig(tp=2, pp=2), 48), (ParallelConfig(tp=2, sequence_parallel=True), 32)),
    *((ParallelConfig(cp=2), 400), (ParallelConfig(), 40), (ParallelConfig(tp=2, pp=2, vpp=2), 64)),
]
EXPERTS: Layouts = [(ParallelConfig(ep=2), 48), (ParallelConfig(tp=2, ep=2, sequence_parallel=True), 64)]
MODELS = {"Qwen3-8B": DENSE, "Qwen3-30B-A3B": EXPERTS}
NAMES = ["Qwen3-8B", pytest.param("Qwen3-30B-A3B", marks=pytest.mark.on_demand)]
NUM_RANKS, VOCAB, NUM_UPDATES, LR = 4, 100, 3, 1e-3
LENGTHS = [(3, (9, 2)), (1, (1, 4)), (7, (2, 3)), (5, (11, 6)), (2, (6, 6)), (9, (1, 5)), (4, (4, 2, 7)), (6, (8, 1))]
"""Tokens of the prompt, and of its responses, the best first."""
ADAM = {"lr": LR, "weight_decay": 0.0, "clip_grad": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
RM_LOSS = RewardLossConfig(margin=True, smoothing=0.05, centering=0.02)
DPO_LOSS = DpoLossConfig(loss="conservative", beta=0.5, smoothing=0.1, sft_weight=0.3)


class LocalRm(LocalWorld, RmWorker):
    """A worker of a reward model."""


class LocalDpo(LocalWorld, DpoWorker):
    """A worker of a policy."""


OfLayouts = list[tuple[list[dict[str, float]], list[float], dict[int, list[float]]]]
"""Reports and gradient norms of each update, and scores of all rows, of each layout."""


def make_batch() -> DataProto:
    chance = torch.Generator().manual_seed(3)
    prompts, responses, ranks, labels = [], [], [], []
    for num_prompt, nums in LENGTHS:
        prompt = torch.randint(1, VOCAB, (num_prompt,), generator=chance)
        for rank, num in enumerate(nums):
            prompts.append(prompt)
            responses.append(torch.randint(1, VOCAB, (num,), generator=chance))
            ranks.append(rank)
            labels.append(float(torch.rand((), generator=chance)) if rank == 0 else 0.0)
    tensors = {"prompts": from_rows(prompts), "responses": from_rows(responses)}
    tensors |= {"rank": torch.tensor(ranks), "label": torch.tensor(labels)}
    return DataProto.from_dict(tensors, row_ids=np.arange(len(ranks)) * 10)


def trained(kind: str, path: str, layouts: Layouts) -> list[dict[str, Any]]:
    """Return this rank's reports of each update, and its rows' scores after the last, in each layout.

    `once` is `dpo` with a reference that is computed before the first update.
    """
    rank, batch, found = torch.distributed.get_rank(), make_batch(), []
    lengths = batch.lengths("prompts") + batch.lengths("responses")
    for parallel, max_tokens in layouts:
        mesh = Mesh(NUM_RANKS, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp)
        settings = TrainedModelConfig(
            dtype="float32", parallel=parallel, max_tokens_per_device=max_tokens, optimizer=ADAM
        )
        place = RankInfo("actor", rank, rank, mesh, Rendezvous("", 0, NUM_RANKS, None))
        setup = ModelSetup(path, "score" if kind == "rm" else "lm", settings, 1, 60, keeps_reference=kind == "dpo")
        worker: Any = LocalRm(place, setup, RM_LOSS) if kind == "rm" else LocalDpo(place, setup, DPO_LOSS)
        with worker._groups:
            plan = plan_step(lengths, mesh.dp, max_tokens, worker.init_model().packing, group_sizes(batch))
            sizes = [[len(rows) for rows in batches] for batches in plan]
            shard = batch.take(np.concatenate(plan[place.coordinates.dp]))
            if kind == "once":
                said = worker.compute_ref_log_prob(shard, sizes)
                # Only the last stage returns log-probs. The others get zeros, and compute no loss with them.
                column = torch.zeros(shard.values("responses").shape) if said is None else said.values("ref_log_probs")
                shard = shard.with_column("ref_log_probs", Jagged(column, shard.lengths("responses")))
            update = worker.update_rm if kind == "rm" else worker.update_dpo
            reports = [update(shard, sizes) for _ in range(NUM_UPDATES)]
            scores = (worker.score_rm if kind == "rm" else worker.score_dpo)(shard, sizes)
            counts = mesh.is_output_rank(rank)
            columns = ["scores"] if kind == "rm" else ["sum_log_probs", "sum_ref_log_probs", "num_tokens"]
            rows: dict[int, list[float]] = {}
            if scores is not None and counts:
                values = zip(*(scores[name].tolist() for name in columns), strict=True)
                rows = dict(zip(scores.row_ids.tolist(), map(list, values), strict=True))
            parts = [{**report.parts} if counts else {} for report in reports]
            found.append({"parts": parts, "grad_norm": [report.grad_norm for report in reports], "rows": rows})
    return found


def trained_as(kinds: Sequence[str], path: str, layouts: Layouts) -> list[list[dict[str, Any]]]:
    return [trained(kind, path, layouts) for kind in kinds]


def by_layout(path: Path, layouts: Layouts, *kinds: str) -> list[OfLayouts]:
    """Return the combined reports of all ranks, for each kind."""
    by_rank = run_distributed(NUM_RANKS, trained_as, kinds, str(path), layouts, timeout_s=300)
    return [together([rank[number] for rank in by_rank]) for number in range(len(kinds))]


def together(by_rank: list[list[dict[str, Any]]]) -> OfLayouts:
    whole = []
    for number in range(len(by_rank[0])):
        of_ranks = [rank[number] for rank in by_rank]
        sums: list[dict[str, float]] = [{} for _ in range(NUM_UPDATES)]
        for each in of_ranks:
            for update, parts in enumerate(each["parts"]):
                for name, value in parts.items():
                    sums[update][name] = sums[update].get(name, 0.0) + float(value)
        rows = {row: values for each in of_ranks for row, values in each["rows"].items()}
        whole.append((sums, of_ranks[0]["grad_norm"], rows))
    return whole


def pairs() -> list[tuple[int, int, float]]:
    """Return the preferred row, the other, and the weight of the pair in the mean over groups."""
    found, first = [], 0
    for _, nums in LENGTHS:
        num = len(nums)
        found += [
            (first + a, first + b, 2 / (num * (num - 1) * len(LENGTHS))) for a in range(num) for b in range(a + 1, num)
        ]
        first += num
    return found


def ids_of(batch: DataProto) -> list[tuple[Tensor, int]]:
    """Return whole rows and the lengths of their responses."""
    rows = zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True)
    return [(torch.cat([prompt, response])[None].long(), len(response)) for prompt, response in rows]


def rm_loss(model: Any, batch: DataProto) -> Tensor:
    scores = torch.stack([model(ids).logits[0, 0] for ids, _ in ids_of(batch)])
    labels, total = batch["label"], torch.zeros(())
    for better, worse, weight in pairs():
        gap = scores[better] - scores[worse] - (labels[better] - labels[worse])
        smoothed = -0.95 * torch.nn.functional.logsigmoid(gap) - 0.05 * torch.nn.functional.logsigmoid(-gap)
        total = total + weight * (smoothed + 0.02 * (scores[better] + scores[worse]) ** 2)
    return total


def log_probs(model: Any, batch: DataProto) -> list[Tensor]:
    """Return log-probs of each row's response tokens."""
    found = []
    for ids, num in ids_of(batch):
        of_next = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(of_next[-num:].gather(1, ids[0, -num:, None])[:, 0])
    return found


def dpo_loss(model: Any, reference: Any, batch: DataProto) -> Tensor:
    mine = log_probs(model, batch)
    with torch.no_grad():
        theirs = log_probs(reference, batch)
    ratios = [(a - b).sum() for a, b in zip(mine, theirs, strict=True)]
    total = torch.zeros(())
    for better, worse, weight in pairs():
        gap = 0.5 * (ratios[better] - ratios[worse])
        total = total + weight * (
            -0.9 * torch.nn.functional.logsigmoid(gap) - 0.1 * torch.nn.functional.logsigmoid(-gap)
        )
    best = torch.cat([row for row, rank in zip(mine, batch["rank"].tolist(), strict=True) if rank == 0])
    return total - 0.3 * best.mean()


def stepped(model: Any, loss: Any) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of three updates by torch's own Adam."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    adam = torch.optim.Adam(parameters, LR, (0.9, 0.95), 1e-8)
    losses, norms = [], []
    for _ in range(NUM_UPDATES):
        adam.zero_grad()
        value = loss()
        value.backward()
        norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])))
        adam.step()
        losses.append(float(value))
    return losses, norms


class DpoOfShards(OfShards, DpoWorker):
    """A DPO worker on one of several shards of this process."""


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_likelihood_of_the_preferred_is_a_mean_over_their_tokens_alone(num_shards: int) -> None:
    """Division by the tokens of all responses would halve the effect of `sft_weight`."""
    batch, shards = make_batch(), Shards(num_shards)
    lengths, ranks = batch.lengths("responses").tolist(), batch["rank"].tolist()
    chance = torch.Generator().manual_seed(4)
    given = [-torch.rand(length, generator=chance, dtype=torch.float64) for length in lengths]
    bounds = [0, len(ranks)] if num_shards == 1 else [0, 6, len(ranks)]  # groups stay whole

    def work(shard: int) -> UpdateReport:
        rows = range(bounds[shard], bounds[shard + 1])
        worker = DpoOfShards(make_place(), SETUP, DpoLossConfig(loss="orpo", sft_weight=0.3))
        worker.shards, worker.shard = shards, shard
        worker.engine = StubEngine(  # type: ignore[assignment]
            Scores(log_probs_T=torch.cat([given[row] for row in rows]).requires_grad_())
        )
        return worker.update_dpo(batch.take(np.array(rows)), [[4, len(rows) - 4]])

    reports = shards.run(work)
    best = torch.cat([row for row, rank in zip(given, ranks, strict=True) if rank == 0])
    assert sum(report.parts["sft_loss"] for report in reports) == pytest.approx(float(-best.mean()), rel=1e-6)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_labeled_response_weighs_one_of_the_whole_update(num_shards: int) -> None:
    """The policy has moved by 0.1 per token, and the baseline is 0.4."""
    batch, shards = make_batch(), Shards(num_shards)
    lengths = batch.lengths("responses").tolist()
    labels = torch.tensor([float(number % 3 == 0) for number in range(len(lengths))])
    baseline = torch.full((len(lengths),), 0.4, dtype=torch.float64)
    batch = batch.with_column("label", labels).with_column("kl_baseline", baseline)
    bounds = [0, len(lengths)] if num_shards == 1 else [0, 6, len(lengths)]

    def work(shard: int) -> UpdateReport:
        rows = range(bounds[shard], bounds[shard + 1])
        num_tokens = sum(lengths[row] for row in rows)
        worker = DpoOfShards(make_place(), SETUP, DpoLossConfig(loss="kto", beta=0.5, undesirable_weight=0.6))
        worker.shards, worker.shard = shards, shard
        worker.engine = StubEngine(  # type: ignore[assignment]
            Scores(log_probs_T=torch.full((num_tokens,), -2.0, dtype=torch.float64).requires_grad_())
        )
        shard_rows = batch.take(np.array(rows))
        worker._reference_log_probs = lambda *_: torch.full((num_tokens,), -2.1)  # type: ignore[method-assign]
        return worker.update_kto(shard_rows, [[4, len(rows) - 4]])

    reports = shards.run(work)
    losses = [
        1 - sigmoid(0.5 * (0.1 * num - 0.4)) if label else 0.6 * (1 - sigmoid(0.5 * (0.4 - 0.1 * num)))
        for num, label in zip(lengths, labels.tolist(), strict=True)
    ]
    assert sum(report.parts["loss"] for report in reports) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert sum(report.parts["kl_baseline"] for report in reports) == pytest.approx(0.4)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_reference_has_none_of_the_adapters_that_a_run_starts_from() -> None:
    is_off: list[bool] = []

    @contextmanager
    def off() -> Iterator[None]:
        is_off.append(True)
        yield
        is_off.clear()

    seen: list[bool] = []

    def forward(*_: Any) -> None:
        seen.extend(is_off)

    engine = SimpleNamespace(optimizer=SimpleNamespace(num_steps=0), adapters=SimpleNamespace(off=off))
    worker: Any = SimpleNamespace(engine=engine, forward=forward)
    DpoWorker.compute_ref_log_prob(worker, make_batch(), [[8]])
    assert seen == [True]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_learns_as_transformers_would(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    layouts = MODELS[name]
    values = small_config(model_values(name), layouts[-1][0])
    path, batch = make_random(values, "score", tmp_path / "model"), make_batch()
    oracle = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    losses, norms = stepped(oracle, lambda: rm_loss(oracle, batch))
    with torch.no_grad():
        scores = [float(oracle(ids).logits) for ids, _ in ids_of(batch)]
    for layout, (reports, grad_norms, rows) in zip(layouts, *by_layout(path, layouts, "rm"), strict=True):
        assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-5), layout
        assert grad_norms == pytest.approx(norms, rel=1e-4), layout
        assert [rows[row] for row in batch.row_ids.tolist()] == [pytest.approx([each], abs=1e-4) for each in scores], (
            layout
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_learns_as_transformers_would(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    layouts = MODELS[name]
    values = small_config(model_values(name), layouts[-1][0])
    path, batch = make_random(values, "lm", tmp_path / "model"), make_batch()
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reference = copy.deepcopy(oracle)
    losses, norms = stepped(oracle, lambda: dpo_loss(oracle, reference, batch))
    with torch.no_grad():
        sums = [[float(row.sum()) for row in log_probs(model, batch)] for model in (oracle, reference)]
    in_place, once = by_layout(path, layouts, "dpo", "once")
    assert once == in_place, "to the bit: both go through the same micro-batches"
    for layout, (reports, grad_norms, rows) in zip(layouts, in_place, strict=True):
        assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-5), layout
        assert grad_norms == pytest.approx(norms, rel=1e-4), layout
        assert reports[0]["reward/margin"] == 0, "both go through the same micro-batches"
        assert reports[0]["accuracy"] == 0.5
        for row, (mine, theirs, num) in enumerate(rows[row_id] for row_id in batch.row_ids.tolist()):
            assert (mine, theirs) == (pytest.approx(sums[0][row], abs=2e-4), pytest.approx(sums[1][row], abs=2e-4))
            assert num == ids_of(batch)[row][1]
