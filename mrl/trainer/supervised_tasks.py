"""What a model learns from what the data say: by `mrl sft`, `mrl rm` and `mrl dpo`, which differ in this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.algos.preference import PREFERENCE_LOSSES, PairLogProbs, Pairs
from mrl.config.arithmetic import has_reference
from mrl.config.preference import WITHOUT_REFERENCE, DpoConfig, DpoLossConfig, RmConfig
from mrl.config.sft import SftConfig
from mrl.errors import ModelError
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import padding_token
from mrl.models.table import SCORE, Head
from mrl.protocol import DataProto
from mrl.trainer.role_client import Metrics, SupervisedClient
from mrl.workers.messages import ModelSetup

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]
_NUM_BINS = 10
_MIN_PAIRS = 30  # fewer say nothing of a correlation, or of a share
_MAX_CORRELATION = 0.9
_MAX_FALL = 0.5  # nats per token


@dataclass(frozen=True)
class PairFigures:
    """Pairs by the positions of their responses, with each response's score, length and source."""

    better: Positions
    worse: Positions
    weights: Floats
    """Of each pair: those of one prompt weigh one together."""
    scores: Floats
    lengths: Positions
    sources: list[str]
    """Of each pair."""
    prompts: Positions
    """Of each response, the number of the prompt that it answers; the first of a prompt is the best."""

    @classmethod
    def of(cls, batches: Sequence[DataProto], scores: Floats) -> PairFigures:
        """Return the pairs of these rows, which have a score each."""
        ranks = torch.cat([rows["rank"] for rows in batches])
        pairs = Pairs.of((ranks == 0).cumsum(0), ranks)
        lengths = np.concatenate([rows.lengths("responses") for rows in batches]).astype(np.int64)
        sources = [source for rows in batches for source in rows["data_source"]]
        better, worse, weights = (each.numpy() for each in (pairs.better_P, pairs.worse_P, pairs.weight_P))
        prompts = (ranks == 0).cumsum(0).numpy() - 1
        return cls(better, worse, weights, scores, lengths, [sources[row] for row in better], prompts)

    def metrics(self, losses: Floats | None = None) -> dict[str, float]:
        """Return loss, accuracy and margin, of all pairs and of each source; by which half is longer; calibration.

        Ties count half. Without losses of their own they are those of Bradley and Terry.
        """
        gaps = self.scores[self.better] - self.scores[self.worse]
        right = 0.5 * (np.sign(gaps) + 1)
        columns = {"loss": np.logaddexp(0, -gaps) if losses is None else losses, "accuracy": right, "margin": gaps}
        found: dict[str, float] = {}
        for name, values in columns.items():
            by_source = mean_by_source(self.weights * values, self.weights, self.sources)
            found |= {key.format(name): value for key, value in by_source.items()}
        longer = np.sign(self.lengths[self.better] - self.lengths[self.worse])
        for name, chosen in (
            ("chosen_longer", longer > 0),
            ("chosen_shorter", longer < 0),
            ("same_length", longer == 0),
        ):
            if chosen.any():
                found[f"val/accuracy/{name}"] = float(np.average(right[chosen], weights=self.weights[chosen]))
        if np.bincount(self.prompts).max() > 2:
            found["val/best_of_n"] = self._best_of_n()
        found["val/pairs"] = float(len(gaps))
        found["val/longer_wins"] = float(np.average(0.5 * (longer + 1), weights=self.weights))
        found["val/calibration_error"] = calibration_error(gaps, self.weights)
        if self.lengths.std() and self.scores.std():
            found["val/score_length_correlation"] = float(np.corrcoef(self.scores, self.lengths)[0, 1])
        return found

    def _best_of_n(self) -> float:
        """Return the share of prompts whose best response has the highest score of all; n that are equal count 1/n."""
        highest = np.full(self.prompts[-1] + 1, -np.inf)
        np.maximum.at(highest, self.prompts, self.scores)
        is_highest = self.scores == highest[self.prompts]
        firsts = np.flatnonzero(np.diff(self.prompts, prepend=-1))
        return float(np.mean(is_highest[firsts] / np.bincount(self.prompts, weights=is_highest)))


def warnings_of(figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a model that has these figures, each with a name of its own."""
    longer, accuracy = figures.get("val/longer_wins", 0.5), figures.get("val/accuracy", 1.0)
    correlation = figures.get("val/score_length_correlation", 0.0)
    moved = figures.get("val/log_prob/chosen_moved", 0.0)
    if figures.get("val/pairs", 0.0) >= _MIN_PAIRS:
        if longer > 0.5 and longer >= accuracy:
            what = f"the longer response is the preferred one in {longer:.1%} of the pairs, and the model is right in "
            yield (
                "length wins",
                f"{what}{accuracy:.1%}: no better than length alone (more pairs where the shorter wins)",
            )
        if abs(correlation) > _MAX_CORRELATION:
            what = f"scores follow the length of responses: their correlation is {correlation:.2f}"
            yield "length and score", f"{what} (see val/accuracy/chosen_shorter; balance the pairs by length)"
    if moved < -_MAX_FALL:
        what = f"what was preferred has itself become less likely: by {-moved:.2f} nats per token since the start"
        yield "preferred responses", f"{what} (preference.sft_weight=0.1, a larger preference.beta, or fewer updates)"


def calibration_error(gaps: Floats, weights: Floats) -> float:
    """Return how far the probability that a gap stands for is from how often it is right (ECE of ten bins)."""
    sure = 1 / (1 + np.exp(-np.abs(gaps)))
    right = 0.5 * (np.sign(gaps) + 1)
    bins = np.minimum(((sure - 0.5) * 2 * _NUM_BINS).astype(int), _NUM_BINS - 1)
    in_bins = [bins == each for each in range(_NUM_BINS)]
    missed = [abs(float((weights * (sure - right))[each].sum())) for each in in_bins]
    return sum(missed) / float(weights.sum())


def mean_by_source(sums: Floats, nums: npt.NDArray[np.number], sources: Sequence[str]) -> dict[str, float]:
    """Return the mean of all, and of each source, by the name of its figure with a place for what it is of."""
    means = {"val/{}": float(sums.sum() / nums.sum())}
    names = np.asarray(sources)
    for source in dict.fromkeys(sources):
        means[f"val/{source}/{{}}"] = float(sums[names == source].sum() / nums[names == source].sum())
    return means


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
    return SupervisedTask("mrl.workers.ranked:SftWorker", (), "lm", "update_sft", measure_loss, "val/loss", -1.0)


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
