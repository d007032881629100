"""Scores of reward models: the tokens that a model reads of each sample, and how its raw scores become rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.config.reward import ModelScoreConfig, label_of
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, different_tokens, load_tokenizer
from mrl.data.conversation import ResponseEncoder
from mrl.errors import RewardError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.role_client import Metrics, RewardModelClient
from mrl.trainer.step_metrics import summary_metrics

Scores = npt.NDArray[np.float64]


class ScoringModel:
    """One reward model, the scaling of its scores, and the mean and spread of all scores it gave in training."""

    def __init__(
        self, role: str, config: ModelScoreConfig, client: RewardModelClient, encoder: ResponseEncoder | None = None
    ) -> None:
        """Create a scoring model. If it has another tokenizer than the policy, pass an encoder."""
        self.config = config
        self.role, self.client, self.encoder = role, client, encoder
        self._num, self._mean, self._squares = 0, 0.0, 0.0

    def raw(self, batch: DataProto) -> Scores:
        """Return the model's score of each sample. A score that is not finite raises an error."""
        rows = batch
        if self.encoder is not None:
            samples = zip(batch["messages"], batch["response_text"], batch["truncated"].tolist(), strict=True)
            rows = self._fitting(batch, [self.encoder.encode(*sample) for sample in samples])
        scores: Scores = self.client.compute_rm_score(rows)["rm_scores"].double().numpy()
        for row in np.flatnonzero(~np.isfinite(scores))[:1].tolist():
            raise RewardError(
                f"the reward model gives {_sample(batch, row)} a score of {float(scores[row])}; "
                f"response {batch['response_text'][row]!r:.200}",
                where=self.role,
                fix=f"check that its weight files are complete and that {self.role}.dtype is its training dtype",
            )
        return scores

    def _fitting(self, batch: DataProto, encoded: list[tuple[list[int], list[int]]]) -> DataProto:
        for row, (prompt, response) in enumerate(encoded):
            num = len(prompt) + len(response)
            if num > self.client.capacity:
                problem = (
                    f"{_sample(batch, row)} has {num} tokens with the reward model's tokenizer; a micro-batch holds"
                )
                fix = f"increase {self.role}.max_tokens_per_device"
                raise RewardError(f"{problem} {self.client.capacity}", where=self.role, fix=fix)
        parts = zip(("prompts", "responses"), zip(*encoded, strict=True), strict=True)
        columns = {name: from_rows([torch.tensor(ids) for ids in rows]) for name, rows in parts}
        return DataProto.from_dict(tensors=columns, row_ids=batch.row_ids)

    def learn(self, scores: Scores) -> None:
        """Merge these scores into the running mean and spread, by the parallel variance formula."""
        if not len(scores):
            return
        num, mean, squares = len(scores), float(scores.mean()), float(np.square(scores - scores.mean()).sum())
        total, apart = self._num + num, mean - self._mean
        self._mean += apart * num / total
        self._squares += squares + apart * apart * self._num * num / total
        self._num = total

    def scaled(self, scores: Scores) -> tuple[Scores, Metrics]:
        """Return the scores normalized by mean and spread and clipped, and metrics of both."""
        mean, std, clip, figures = self.config.mean, self.config.std, self.config.clip, {}
        if self.config.running:
            mean, std = self._mean, math.sqrt(self._squares / max(1, self._num))
            figures = {"running_mean": mean, "running_std": std}
        scaled = (scores - mean) / (std or 1.0)  # equal scores carry no information: 0
        if clip is not None:
            figures["clipped_share"] = float((np.abs(scaled) > clip).mean())
            scaled = scaled.clip(-clip, clip)
        return scaled, figures

    def state_dict(self) -> dict[str, Any]:
        return {"num": self._num, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num, self._mean, self._squares = state["num"], state["mean"], state["squares"]


def scoring_models(config: Config, roles: Mapping[str, Any], policy: ChatTokenizer) -> list[ScoringModel]:
    models = []
    for role, model in config.scoring_models().items():
        is_other = different_tokens(policy, load_tokenizer(model.path, renders=False))
        encoder = ResponseEncoder(model.path, config.data) if is_other else None
        models.append(ScoringModel(role, model, roles[role], encoder))
    return models


class ModelScores:
    """Adds the scores of the reward models to those of each generated round."""

    def __init__(
        self,
        models: list[ScoringModel],
        clock: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the scores. `pause` is called before the models score, to free their devices."""
        self._models, self._clock, self._pause = models, clock, pause

    def add(self, samples: ScoredBatch, *, learn: bool = False) -> ScoredBatch:
        """Return the samples with their total scores, and one column of raw scores per model.

        Without models, return them as they came. With `learn`, for training samples, update the running means and
        spreads.
        """
        if not self._models:
            return samples
        batch, metrics = samples.batch, dict(samples.metrics)
        with self._clock("reward_model"):
            self._pause()
            for model in self._models:
                raw, label = model.raw(batch), label_of(model.role)
                metrics |= summary_metrics(f"reward/{label}", raw)
                worth, figures = self._worth(model, raw, batch["truncated"].numpy(), learn=learn)
                metrics |= {f"reward/{label}/{name}": value for name, value in figures.items()}
                whole = batch["scores"] + model.config.weight * torch.from_numpy(worth)
                batch = batch.with_column("scores", whole).with_column(model.role, torch.from_numpy(raw))
        return ScoredBatch(batch, metrics)

    def _worth(
        self, model: ScoringModel, raw: Scores, is_truncated: npt.NDArray[np.bool_], *, learn: bool
    ) -> tuple[Scores, Metrics]:
        is_ruled = is_truncated & (model.config.truncated_score is not None)
        if learn:
            model.learn(raw[~is_ruled])
        worth, figures = model.scaled(raw)
        if model.config.truncated_score is not None:
            worth[is_ruled] = model.config.truncated_score
            figures["truncated_share"] = float(is_ruled.mean())
        is_scaled = bool(figures) or (model.config.mean, model.config.std) != (0.0, 1.0)
        return worth, figures | ({"scaled_mean": float(worth.mean())} if is_scaled else {})

    def state_dict(self) -> dict[str, Any]:
        return {model.role: model.state_dict() for model in self._models}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for model in self._models:
            if model.role in state:  # otherwise the model is new in this run
                model.load_state_dict(state[model.role])


def _sample(batch: DataProto, row: int) -> str:
    return f"sample {batch.row_ids[row]} of prompt {batch['uid'][row]}"
