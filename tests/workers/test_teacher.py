"""A teacher and its student, each in its own layout, with a larger vocabulary cut before the softmax.

In every form, divergences and gradients equal those of whole distributions by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.config import step_calls
from mrl.config.algorithm import AlgorithmConfig, DistillationConfig, LossConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import MegatronModelConfig, ParallelConfig, TeacherConfig, TrainedModelConfig
from mrl.controller import RankInfo, Rendezvous
from mrl.data.packing import plan_step
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows, jagged
from mrl.verify.layout import make_random
from mrl.verify.spawn import run_distributed
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.frozen import TeacherWorker
from mrl.workers.messages import ModelSetup
from tests.workers.stubs import LocalWorld

LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2 sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "cp2": ParallelConfig(cp=2),
    "dp2": ParallelConfig(),
}
TEACHERS = {"tp2": "dp2", "tp2 sp": "pp2", "pp2": "tp2", "cp2": "tp2 sp", "dp2": "cp2"}
"""The teacher's layout by the student's."""
FORMS = {
    "top_k": DistillationConfig(form="top_k", coef=0.7, beta=0.0, top_k=9),
    "full": DistillationConfig(form="full", coef=0.7, beta=0.3),
    "sampled": DistillationConfig(form="sampled", coef=0.7, estimator="k2"),
    "advantage": DistillationConfig(form="advantage", coef=0.7),
}
NUM_RANKS, VOCAB, TEACHER_VOCAB, TEMPERATURE = 2, 131, 140, 0.7
LENGTHS = [(3, 9), (1, 1), (7, 2), (5, 14), (2, 6), (9, 1), (4, 4), (6, 11)]
"""Tokens of prompt and response of each row."""


class LocalTeacher(LocalWorld, TeacherWorker):
    """The teacher's worker."""


class LocalActor(LocalWorld, ActorRolloutRefWorker):
    """The student's worker."""


def make_batch() -> DataProto:
    chance = torch.Generator().manual_seed(3)
    prompts, responses = (
        from_rows([torch.randint(1, VOCAB, (pair[part],), generator=chance) for pair in LENGTHS]) for part in (0, 1)
    )
    none = from_rows([torch.zeros(pair[1]) for pair in LENGTHS])
    columns = {"prompts": prompts, "responses": responses, "advantages": none}
    return DataProto.from_dict(columns, row_ids=np.arange(len(LENGTHS)) * 10)


def shard_of(worker: Any, settings: MegatronModelConfig, batch: DataProto) -> tuple[DataProto, list[list[int]]]:
    lengths, place = batch.lengths("prompts") + batch.lengths("responses"), worker.place
    plan = plan_step(lengths, place.mesh.dp, settings.max_tokens_per_device, worker.init_model().packing)
    shard = batch.take(np.concatenate(plan[place.coordinates.dp]))
    return shard, [[len(rows) for rows in batches] for batches in plan]


def place_of(role: str, parallel: ParallelConfig) -> RankInfo:
    rank, mesh = torch.distributed.get_rank(), Mesh(NUM_RANKS, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp)
    return RankInfo(role, rank, rank, mesh, Rendezvous("", 0, NUM_RANKS, None))


def read(path: str, parallel: ParallelConfig, form: str) -> DataProto:
    """Return the teacher's results for all rows, on every rank."""
    methods = {"top_k": step_calls.TEACHER_TOP_K, "full": step_calls.TEACHER_HIDDEN}
    settings = TeacherConfig(path=path, dtype="float32", parallel=parallel, max_tokens_per_device=32)
    setup = ModelSetup(path, "lm", settings, seed=1, timeout_s=60, vocab=VOCAB)
    worker, batch, mine = LocalTeacher(place_of("teacher", parallel), setup, 9, TEMPERATURE), make_batch(), {}
    with worker._groups:
        call = methods.get(form, step_calls.TEACHER_LOG_PROB)
        written = getattr(worker, call.method)(*shard_of(worker, settings, batch))
        if written is not None and worker.place.mesh.is_output_rank(worker.rank):
            assert tuple(sorted(written.columns())) == tuple(sorted(call.writes))
            for name in call.writes:
                mine[name] = dict(zip(written.row_ids.tolist(), written.columns()[name].rows(), strict=True))
    everyones: list[Any] = [None] * NUM_RANKS
    torch.distributed.all_gather_object(everyones, mine)
    for name in call.writes:
        rows = {row_id: row for each in everyones for row_id, row in each.get(name, {}).items()}
        values = torch.cat([rows[row_id] for row_id in batch.row_ids.tolist()])
        batch = batch.with_column(name, jagged(values, batch.lengths("responses")))
    return batch


def learned(student: str, teacher: str, names: list[str]) -> list[dict[str, Any]]:
    """Return this rank's reports of an update in each layout and form."""
    found = []
    for name in names:
        for form, distillation in FORMS.items():
            batch, parallel = read(teacher, LAYOUTS[TEACHERS[name]], form), LAYOUTS[name]
            optimizer = {"lr": 1e-3, "clip_grad": 0.0}
            settings = TrainedModelConfig(
                dtype="float32", parallel=parallel, max_tokens_per_device=32, optimizer=optimizer
            )
            setup = ModelSetup(student, "lm", settings, seed=1, timeout_s=60, teacher=teacher)
            algorithm = AlgorithmConfig(advantage="grpo", distillation=distillation, loss=LossConfig(log_entropy=False))
            worker = LocalActor(place_of("actor", parallel), setup, algorithm, TEMPERATURE, 16)
            with worker._groups:
                report = worker.update_actor(*shard_of(worker, settings, batch))
            counts = worker.place.mesh.is_output_rank(worker.rank)
            found.append({"parts": report.parts if counts else {}, "grad_norm": report.grad_norm})
    return found


def expected(student: str, teacher: str) -> dict[str, dict[str, float]]:
    """Compute each form with transformers, on distributions of the student's vocabulary in float64."""
    from transformers import AutoModelForCausalLM

    policy, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher))
    batch, ours, theirs, labels = make_batch(), [], [], []
    for prompt, response in zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True):
        ids = torch.cat([prompt, response])[None].long()
        for model, places in ((policy, ours), (other, theirs)):
            logits = model(ids).logits[0, len(prompt) - 1 : -1, :VOCAB]
            places.append((logits / TEMPERATURE).log_softmax(-1))
        labels.append(response.long())
    log_probs, of_teacher, at = torch.cat(ours), torch.cat(theirs).detach(), torch.cat(labels)[:, None]
    sampled = (log_probs.gather(1, at) - of_teacher.gather(1, at))[:, 0]
    losses: dict[str, Tensor] = {"sampled": sampled.square() / 2}
    losses["advantage"] = sampled.detach() * log_probs.gather(1, at)[:, 0]
    ids = of_teacher.topk(9, dim=1).indices
    few = [
        torch.cat([each.gather(1, ids), each.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1)
        for each in (log_probs, of_teacher)
    ]
    losses["top_k"] = (few[1].exp() * (few[1] - few[0])).sum(1)
    p, q = log_probs.exp(), of_teacher.exp()
    m = 0.3 * q + 0.7 * p
    losses["full"] = (0.3 * q * (q / m).log() + 0.7 * p * (p / m).log()).sum(1)
    found = {}
    for form, loss in losses.items():
        gradients = torch.autograd.grad(0.7 * loss.mean(), list(policy.parameters()), retain_graph=True)
        norm = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
        found[form] = {"grad_norm": float(norm), "teacher_kl": float(sampled.mean())}
        found[form] |= {"taught_abs": 0.7 * float(sampled.abs().mean()), "advantages_abs": 0.0}
        if form != "advantage":
            found[form]["distill_loss"] = float(loss.mean())
    found["top_k"]["teacher_mass"] = float(few[0][:, :9].exp().sum(1).mean())
    found["full"]["teacher_mass"] = 1.0
    return found


@pytest.mark.slow
def test_what_is_learned_is_what_whole_distributions_say(tmp_path: Path) -> None:
    values = small_config(model_values("Qwen3-8B"), ParallelConfig(tp=2, pp=2))
    student = str(make_random(values, "lm", tmp_path / "student"))
    larger = {"vocab_size": TEACHER_VOCAB, "hidden_size": 2 * values["hidden_size"], "tie_word_embeddings": True}
    teacher = str(make_random(values | larger, "lm", tmp_path / "teacher"))
    wanted = expected(student, teacher)
    by_rank = run_distributed(NUM_RANKS, learned, student, teacher, list(LAYOUTS), timeout_s=500)
    cases = [(name, form) for name in LAYOUTS for form in FORMS]
    for number, (name, form) in enumerate(cases):
        reports = [rank[number] for rank in by_rank]
        assert reports[0]["grad_norm"] == pytest.approx(wanted[form]["grad_norm"], rel=2e-5), (name, form)
        for figure, value in wanted[form].items():
            if figure != "grad_norm":
                found = sum(report["parts"].get(figure, 0.0) for report in reports)
                assert found == pytest.approx(value, rel=1e-5, abs=1e-6), (name, form, figure)
    different = {round(each["grad_norm"], 4) for each in wanted.values()}
    assert len(different) == len(FORMS) - 1, (
        "k1 as an advantage and k2 as a loss have one gradient, the others their own"
    )
