"""The teacher as the driver sees it: whether it reads the policy's tokens, and figures of how far the policy is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from mrl.config import step_calls
from mrl.config.schema import Config
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer, compare_tokenizer
from mrl.errors import ModelError
from mrl.models.families import read_spec
from mrl.protocol import DataProto
from mrl.trainer.role_client import ActorClient, TeacherClient
from mrl.trainer.segments import trained_rows

_READ = ("prompts", "responses", "response_mask")


def check_teacher(config: Config, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Refuse a teacher that cannot read the policy's token ids, or says less of them than is asked for; what else there
    is to be warned of."""
    distillation = config.algorithm.distillation
    if config.teacher is None or distillation is None:
        return
    path = config.teacher.path
    yield from compare_tokenizer(tokenizer, path)
    known, written = read_spec(path).vocab, read_spec(config.model.path).vocab
    if known < written:
        what = f"has embeddings for {known} tokens, but the policy writes {written}"
        raise ModelError(what, where=path, fix="a teacher of the policy's family whose vocabulary is no smaller")
    if distillation.form == "top_k" and distillation.top_k > written:
        what = f"algorithm.distillation.top_k={distillation.top_k}, and the policy has {written} tokens"
        raise ModelError(what, where=path, fix=f"algorithm.distillation.top_k={written}, which are all")


def distillation_share(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return which share of what sampled tokens earn is the teacher's: of |coef (log pi - log nu)| and |A| together."""
    taught, rewarded = (metrics.get(f"actor/{name}_abs", 0.0) for name in ("taught", "advantages"))
    return {"actor/taught_share": taught / (taught + rewarded)} if taught else {}


def validated_kl(actor: ActorClient, teacher: TeacherClient, samples: Sequence[DataProto], timeout_s: float) -> float:
    """Return the mean of log pi - log nu over the tokens that the policy wrote at validation."""
    apart = []
    for part in samples:  # the same row ids occur in several
        rows = trained_rows(part).batch
        batch = rows.select(*(name for name in _READ if name in rows.columns()))
        batch = actor.score(step_calls.LOG_PROB.method, batch)
        batch = teacher.score(step_calls.TEACHER_LOG_PROB.method, batch)
        found = fetch(batch, timeout_s)
        apart_T = found.values("old_log_probs").double() - found.values("teacher_log_probs").double()
        has_mask = "response_mask" in found.columns()
        apart.append(apart_T[found.values("response_mask").bool()] if has_mask else apart_T)
    return float(torch.cat(apart).mean())
