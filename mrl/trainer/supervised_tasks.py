"""What a model learns from what the data say: by `mrl sft`, `mrl rm` and `mrl dpo`, which differ in this alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.algos.preference import PREFERENCE_LOSSES, PairLogProbs
from mrl.config.arithmetic import has_reference
from mrl.config.sft import WITHOUT_REFERENCE, DpoConfig, DpoLossConfig, RmConfig, SftConfig
from mrl.errors import ModelError
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import padding_token
from mrl.models.table import SCORE, Head
from mrl.protocol import DataProto
from mrl.trainer.pair_figures import PairFigures, mean_by_source
from mrl.trainer.role_client import Metrics, SupervisedClient
from mrl.workers.messages import ModelSetup


@dataclass(frozen=True)
class SupervisedTask:
    """The worker and its methods, and how the model is measured."""

    worker: str
    arguments: tuple[Any, ...]
    """Of the worker, behind its setup."""
    head: Head
    update: str
    measure: Callable[[SupervisedClient, Sequence[DataProto]], Metrics]
    """Validation rows to figures."""
    best: str
    """The figure by which one checkpoint is better than another."""
    sign: float
    """1 where more of it is better, -1 where less is."""

    @property
    def best_by(self) -> str:
        return f"the {'highest' if self.sign > 0 else 'lowest'} {self.best}"


def task_of(config: SftConfig) -> SupervisedTask:
    """Return what this configuration has a model learn."""
    if isinstance(config, RmConfig):
        worker, arguments = "mrl.workers.ranked:RmWorker", (config.reward,)
        if config.reward.loss == "regression":
            return SupervisedTask(worker, arguments, "score", "update_rm", measure_regression, "val/loss", -1.0)
        return SupervisedTask(worker, arguments, "score", "update_rm", measure_scores, "val/accuracy", 1.0)
    if isinstance(config, DpoConfig):
        loss = config.preference

        def measure(client: SupervisedClient, rows: Sequence[DataProto]) -> Metrics:
            return measure_preferences(client, rows, loss)

        return SupervisedTask("mrl.workers.ranked:DpoWorker", (loss,), "lm", "update_dpo", measure, "val/accuracy", 1.0)
    return SupervisedTask("mrl.workers.sft:SftWorker", (), "lm", "update_sft", measure_loss, "val/loss", -1.0)


def supervised_setup(config: SftConfig) -> ModelSetup:
    """Return what the workers are told of their model."""
    task, path = task_of(config), config.model.path
    if task.head == "score" and padding_token(Path(path)) is None:
        raise ModelError(
            "no token stands for padding alone, and transformers reads a score before the first token of padding",
            where=path,
            fix="set pad_token_id in its config.json to a token that ends nothing, as <|finetune_right_pad_id|>",
        )
    return ModelSetup(
        path,
        task.head,
        config.actor,
        config.training.seed,
        config.deadlines.call_s,
        new_head=task.head == "score" and SCORE not in HfReader(path),
        keeps_reference=has_reference(config),
    )


def measure_loss(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the mean loss of a learned token: of all rows, and of each source."""
    scored = [client.score("score_sft", rows) for rows in batches]
    sums, nums = (np.concatenate([rows[name].numpy() for rows in scored]) for name in ("sum_log_probs", "num_learned"))
    sources = [source for rows in scored for source in rows["data_source"]]
    return {name.format("loss"): value for name, value in mean_by_source(-sums, nums, sources).items()}


def measure_scores(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return how often, and how surely, the preferred response has the higher score."""
    scored = [client.score("score_rm", rows) for rows in batches]
    scores = np.concatenate([rows["scores"].double().numpy() for rows in scored])
    spread = {"val/score/mean": float(scores.mean()), "val/score/std": float(scores.std())}
    return PairFigures.of(scored, scores).metrics() | spread


def measure_regression(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the mean square of what scores miss."""
    scored = [client.score("score_rm", rows) for rows in batches]
    scores, labels = (np.concatenate([rows[name].double().numpy() for rows in scored]) for name in ("scores", "label"))
    sources = [source for rows in scored for source in rows["data_source"]]
    missed = mean_by_source(np.square(scores - labels), np.ones_like(scores), sources)
    return {name.format("loss"): value for name, value in missed.items()}


def measure_preferences(client: SupervisedClient, batches: Sequence[DataProto], loss: DpoLossConfig) -> Metrics:
    """Return how often, and by how much, the policy prefers what was preferred, and how likely it finds that."""
    scored = [client.score("score_dpo", rows) for rows in batches]
    sums, refs, nums = (
        torch.cat([rows[name] for rows in scored]).double()
        for name in ("sum_log_probs", "sum_ref_log_probs", "num_tokens")
    )
    rewards = loss.beta * (sums - refs) / (nums if loss.is_of_means() else 1.0)
    figures = PairFigures.of(scored, rewards.numpy())
    better, worse = figures.better, figures.worse
    pairs = PairLogProbs((sums - refs)[better], (sums - refs)[worse], nums[better], nums[worse])
    losses = PREFERENCE_LOSSES.resolve(loss.loss)(pairs, loss).numpy()
    per_token = {
        "chosen": sums[better].sum() / nums[better].sum(),
        "rejected": sums[worse].sum() / nums[worse].sum(),
        "chosen_moved": (sums - refs)[better].sum() / nums[better].sum(),
    }
    if loss.loss in WITHOUT_REFERENCE:
        del per_token["chosen_moved"]
    return figures.metrics(losses) | {f"val/log_prob/{name}": float(value) for name, value in per_token.items()}
