"""What a model learns from what the data say: by `mrl sft`, `mrl rm` and `mrl dpo`, which differ in this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.algos.preference import PREFERENCE_LOSSES, PairLogProbs, Pairs
from mrl.config.arithmetic import has_reference
from mrl.config.sft import WITHOUT_REFERENCE, DpoConfig, DpoLossConfig, RmConfig, SftConfig
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
class SupervisedTask:
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
    if isinstance(config, RmConfig):
        worker, arguments = "mrl.workers.supervised:RmWorker", (config.reward,)
        if config.reward.loss == "regression":
            return SupervisedTask(worker, arguments, "score", "update_rm", measure_regression, "val/loss", -1.0)
        return SupervisedTask(worker, arguments, "score", "update_rm", measure_scores, "val/accuracy", 1.0)
    if isinstance(config, DpoConfig):
        worker, measure = "mrl.workers.supervised:DpoWorker", partial(measure_preferences, loss=config.preference)
        return SupervisedTask(worker, (config.preference,), "lm", "update_dpo", measure, "val/accuracy", 1.0)
    return SupervisedTask("mrl.workers.supervised:SftWorker", (), "lm", "update_sft", measure_loss, "val/loss", -1.0)


def supervised_setup(config: SftConfig) -> ModelSetup:
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
    rows = _scored(client, "score_sft", batches)
    return mean_by_source("loss", -rows["sum_log_probs"].numpy(), rows["num_learned"].numpy(), rows["data_source"])


def measure_scores(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return how often, and how surely, the preferred response has the higher score."""
    rows = _scored(client, "score_rm", batches)
    scores = rows["scores"].double().numpy()
    spread = {"val/score/mean": float(scores.mean()), "val/score/std": float(scores.std())}
    return pair_metrics(rows, scores) | spread


def measure_regression(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the mean square of what scores miss."""
    rows = _scored(client, "score_rm", batches)
    missed = np.square((rows["scores"].double() - rows["label"].double()).numpy())
    return mean_by_source("loss", missed, np.ones_like(missed), rows["data_source"])


def measure_preferences(client: SupervisedClient, batches: Sequence[DataProto], loss: DpoLossConfig) -> Metrics:
    """Return how often, and by how much, the policy prefers what was preferred, and how likely it finds that."""
    rows = _scored(client, "score_dpo", batches)
    sums, refs, nums = (rows[name].double() for name in ("sum_log_probs", "sum_ref_log_probs", "num_tokens"))
    moved, pairs = sums - refs, _pairs_of(rows)
    better, worse = pairs.better_P, pairs.worse_P
    rewards = loss.beta * moved / (nums if loss.is_of_means() else 1.0)
    log_probs = PairLogProbs(moved[better], moved[worse], nums[better], nums[worse])
    losses = PREFERENCE_LOSSES.resolve(loss.loss)(log_probs, loss)
    per_token = {
        "chosen": sums[better].sum() / nums[better].sum(),
        "rejected": sums[worse].sum() / nums[worse].sum(),
    }
    if loss.loss not in WITHOUT_REFERENCE:
        per_token["chosen_moved"] = moved[better].sum() / nums[better].sum()
    figures = {f"val/log_prob/{name}": float(value) for name, value in per_token.items()}
    return pair_metrics(rows, rewards.numpy(), losses.numpy()) | figures


def _scored(client: SupervisedClient, method: str, batches: Sequence[DataProto]) -> DataProto:
    return DataProto.concat([client.score(method, rows) for rows in batches])


def pair_metrics(rows: DataProto, scores: Floats, losses: Floats | None = None) -> Metrics:
    """Return loss, accuracy and margin, of all pairs and of each source; by which half is longer; calibration.

    Rows have a score each; the first of a prompt is its best. The pairs of a prompt weigh one together, and ties count
    half. Without losses of their own they are those of Bradley and Terry.
    """
    pairs, prompts = _pairs_of(rows), (rows["rank"] == 0).cumsum(0).numpy() - 1
    better, worse, weights = (each.numpy() for each in (pairs.better_P, pairs.worse_P, pairs.weight_P))
    lengths = rows.lengths("responses").astype(np.int64)
    gaps = scores[better] - scores[worse]
    right = 0.5 * (np.sign(gaps) + 1)
    columns = {"loss": np.logaddexp(0, -gaps) if losses is None else losses, "accuracy": right, "margin": gaps}
    found: Metrics = {}
    for name, values in columns.items():
        found |= mean_by_source(name, weights * values, weights, rows["data_source"][better])
    longer = np.sign(lengths[better] - lengths[worse])
    for name, sign in (("chosen_longer", 1), ("chosen_shorter", -1), ("same_length", 0)):
        chosen = longer == sign
        if chosen.any():
            found[f"val/accuracy/{name}"] = float(np.average(right[chosen], weights=weights[chosen]))
    if np.bincount(prompts).max() > 2:
        found["val/best_of_n"] = _best_of_n(scores, prompts)
    found["val/pairs"] = float(len(gaps))
    found["val/longer_wins"] = float(np.average(0.5 * (longer + 1), weights=weights))
    found["val/calibration_error"] = calibration_error(gaps, weights)
    if lengths.std() and scores.std():
        found["val/score_length_correlation"] = float(np.corrcoef(scores, lengths)[0, 1])
    return found


def _pairs_of(rows: DataProto) -> Pairs:
    return Pairs.of((rows["rank"] == 0).cumsum(0), rows["rank"])


def _best_of_n(scores: Floats, prompts: Positions) -> float:
    """Return the share of prompts whose best response has the highest score of all; n that are equal count 1/n."""
    highest = np.full(prompts[-1] + 1, -np.inf)
    np.maximum.at(highest, prompts, scores)
    is_highest = scores == highest[prompts]
    firsts = np.flatnonzero(np.diff(prompts, prepend=-1))
    return float(np.mean(is_highest[firsts] / np.bincount(prompts, weights=is_highest)))


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


def mean_by_source(
    figure: str, sums: Floats, nums: npt.NDArray[np.number], sources: npt.NDArray[np.object_]
) -> Metrics:
    parts = {"val": np.ones(len(sources), bool)}
    parts |= {f"val/{source}": sources == source for source in dict.fromkeys(sources)}
    return {f"{prefix}/{figure}": float(sums[rows].sum() / nums[rows].sum()) for prefix, rows in parts.items()}
