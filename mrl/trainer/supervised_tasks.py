"""The tasks of `mrl sft`, `mrl rm` and `mrl dpo`: worker, update and validation of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.algos.kto import kto_baseline, kto_losses
from mrl.algos.preference import PREFERENCE_LOSSES, PairLogProbs, Pairs
from mrl.config.arithmetic import keeps_reference
from mrl.config.sft import WITHOUT_REFERENCE, DpoConfig, DpoLossConfig, RmConfig, SftConfig
from mrl.errors import DataError, ModelError
from mrl.models.hf_reader import HfReader
from mrl.models.hf_writer import padding_token
from mrl.models.table import SCORE, Head
from mrl.observe.confidence import ratio_values, with_intervals
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import Metrics, SupervisedClient
from mrl.workers.messages import ModelSetup

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]
_NUM_BINS = 10
_MIN_PAIRS = 30  # with fewer pairs, correlations and shares are noise
_MAX_CORRELATION = 0.9
_MAX_FALL = 0.5  # nats per token


@dataclass(frozen=True)
class SupervisedTask:
    worker: str
    arguments: tuple[Any, ...]
    """Arguments of the worker, after its setup."""
    head: Head
    update: str
    measure: Callable[[SupervisedClient, Sequence[DataProto]], Metrics]
    """Computes figures from validation rows."""
    best: str
    """Name of the figure that ranks checkpoints."""
    sign: float
    """1 if a higher figure is better, -1 if a lower one is."""
    prepare: Callable[[SupervisedClient, DataProto], DataProto] | None = None
    """Adds to the rows of an update what the models must compute first. None adds nothing."""

    @property
    def best_by(self) -> str:
        return f"the {'highest' if self.sign > 0 else 'lowest'} {self.best}"


def task_of(config: SftConfig) -> SupervisedTask:
    if isinstance(config, RmConfig):
        worker, arguments = "mrl.workers.supervised:RmWorker", (config.reward,)
        if config.reward.loss == "regression":
            return SupervisedTask(worker, arguments, "score", "update_rm", measure_regression, "val/loss", -1.0)
        return SupervisedTask(worker, arguments, "score", "update_rm", measure_scores, "val/accuracy", 1.0)
    if isinstance(config, DpoConfig) and config.is_labeled():
        worker, measure = "mrl.workers.supervised:DpoWorker", partial(measure_labeled, loss=config.preference)
        of_loss = (config.preference,)
        return SupervisedTask(worker, of_loss, "lm", "update_kto", measure, "val/loss", -1.0, with_baseline)
    if isinstance(config, DpoConfig):
        worker, measure = "mrl.workers.supervised:DpoWorker", partial(measure_preferences, loss=config.preference)
        return SupervisedTask(worker, (config.preference,), "lm", "update_dpo", measure, "val/accuracy", 1.0)
    return SupervisedTask("mrl.workers.supervised:SftWorker", (), "lm", "update_sft", measure_loss, "val/loss", -1.0)


def supervised_setup(config: SftConfig) -> ModelSetup:
    task, path = task_of(config), config.model.path
    if task.head == "score" and padding_token(Path(path)) is None:
        raise ModelError(
            "the model has no separate padding token, but transformers reads the score before the first padding",
            where=path,
            fix="set pad_token_id in its config.json to an unused token, such as <|finetune_right_pad_id|>",
        )
    return ModelSetup(
        path,
        task.head,
        config.actor,
        config.training.seed,
        config.deadlines.call_s,
        new_head=task.head == "score" and SCORE not in HfReader(path),
        keeps_reference=keeps_reference(config),
    )


def measure_loss(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the mean loss per learned token, over all rows and for each source."""
    rows = _scored(client, "score_sft", batches)
    sums, units = -rows["sum_log_probs"].numpy(), np.arange(len(rows))
    return mean_by_source("loss", sums, rows["num_learned"].numpy(), rows["data_source"], units)


def measure_scores(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the figures of a reward model on pairs: accuracy, margins, calibration and the spread of its scores."""
    rows = _scored(client, "score_rm", batches)
    scores = rows["scores"].double().numpy()
    spread = {"val/score/mean": float(scores.mean()), "val/score/std": float(scores.std())}
    return pair_metrics(rows, scores) | spread


def measure_regression(client: SupervisedClient, batches: Sequence[DataProto]) -> Metrics:
    """Return the mean squared error of the scores."""
    rows = _scored(client, "score_rm", batches)
    errors = np.square((rows["scores"].double() - rows["label"].double()).numpy())
    return mean_by_source("loss", errors, np.ones_like(errors), rows["data_source"], np.arange(len(rows)))


def measure_preferences(client: SupervisedClient, batches: Sequence[DataProto], loss: DpoLossConfig) -> Metrics:
    """Return the figures of a policy on pairs: accuracy, margins and the log-probs per token of either response."""
    rows = _scored(client, "score_dpo", batches)
    sums, refs, nums = (rows[name].double() for name in ("sum_log_probs", "sum_ref_log_probs", "num_tokens"))
    log_ratios, pairs = sums - refs, _pairs_of(rows)
    better, worse = pairs.better_P, pairs.worse_P
    rewards = loss.beta * log_ratios / (nums if loss.is_of_means() else 1.0)
    log_probs = PairLogProbs(log_ratios[better], log_ratios[worse], nums[better], nums[worse])
    losses = PREFERENCE_LOSSES.resolve(loss.loss)(log_probs, loss)
    per_token = {
        "chosen": sums[better].sum() / nums[better].sum(),
        "rejected": sums[worse].sum() / nums[worse].sum(),
    }
    if loss.loss not in WITHOUT_REFERENCE:
        per_token["chosen_moved"] = log_ratios[better].sum() / nums[better].sum()
    figures = {f"val/log_prob/{name}": float(value) for name, value in per_token.items()}
    return pair_metrics(rows, rewards.numpy(), losses.numpy()) | figures


def measure_labeled(client: SupervisedClient, batches: Sequence[DataProto], loss: DpoLossConfig) -> Metrics:
    """Return the figures of a policy on labeled responses: loss, accuracy, and the log-probs per token by label."""
    rows = _scored(client, "score_dpo", batches)
    sums, refs, nums = (rows[name].double() for name in ("sum_log_probs", "sum_ref_log_probs", "num_tokens"))
    others, num = mismatched(DataProto.concat(batches)), max(map(len, batches))
    parts = [others.take(np.arange(at, min(at + num, len(others)))) for at in range(0, len(others), num)]
    baseline = kto_baseline(_log_ratios(_scored(client, "score_dpo", parts)))
    log_ratios, is_desirable = sums - refs, rows["label"] == 1
    losses = kto_losses(log_ratios, is_desirable, torch.full_like(log_ratios, baseline), loss)
    sides = (log_ratios - baseline).sign() * torch.where(is_desirable, 1, -1)
    units = ((rows["rank"] == 0).cumsum(0) - 1).numpy()
    figures: Metrics = {"val/kl_baseline": baseline}
    for name, values in (("loss", losses), ("accuracy", 0.5 * (sides + 1))):
        figures |= mean_by_source(name, values.numpy(), np.ones(len(rows)), rows["data_source"], units)
    for name, labeled in (("desirable", is_desirable), ("undesirable", ~is_desirable)):
        if bool(labeled.any()):
            num_tokens = nums[labeled].sum()
            figures[f"val/log_prob/{name}"] = float(sums[labeled].sum() / num_tokens)
            figures[f"val/log_prob/{name}_moved"] = float(log_ratios[labeled].sum() / num_tokens)
    return figures


def with_baseline(client: SupervisedClient, rows: DataProto) -> DataProto:
    """Return the rows of an update with KTO's baseline, by the current policy and the reference."""
    baseline = kto_baseline(_log_ratios(client.score("score_dpo", mismatched(rows))))
    return rows.with_column("kl_baseline", torch.full((len(rows),), baseline, dtype=torch.float64))


def mismatched(rows: DataProto) -> DataProto:
    """Return each prompt with the response of the next row that has another prompt, from the last row on to the
    first."""
    prompts = [prompt.numpy().tobytes() for prompt in rows["prompts"].rows()]
    if len(set(prompts)) == 1:
        raise DataError(
            f"all {len(rows)} responses answer the same prompt, but KTO's baseline needs those to other prompts",
            fix="larger batch.rows_per_update, or data with more prompts",
        )
    others, later = np.zeros(len(rows), dtype=np.int64), 0
    for place in reversed(range(2 * len(rows))):  # the second time round, the rows after the last one are known
        at, after = place % len(rows), (place + 1) % len(rows)
        later = after if prompts[after] != prompts[at] else later
        others[at] = later
    for name in ("responses", "response_mask"):
        values = rows[name].rows()
        rows = rows.with_column(name, from_rows([values[other] for other in others]))
    return rows


def _log_ratios(rows: DataProto) -> Tensor:
    ratios: Tensor = rows["sum_log_probs"].double() - rows["sum_ref_log_probs"].double()
    return ratios


def _scored(client: SupervisedClient, method: str, batches: Sequence[DataProto]) -> DataProto:
    return DataProto.concat([client.score(method, rows) for rows in batches])


def pair_metrics(rows: DataProto, scores: Floats, losses: Floats | None = None) -> Metrics:
    """Return loss, accuracy and margin over all pairs, for each source and by the longer response, and calibration.

    Each row has one score; the first row of a prompt is its best response. The pairs of one prompt have a total weight
    of one. Ties count half. Without `losses`, the loss is that of Bradley and Terry.
    """
    pairs, prompts = _pairs_of(rows), (rows["rank"] == 0).cumsum(0).numpy() - 1
    better, worse, weights = (index.numpy() for index in (pairs.better_P, pairs.worse_P, pairs.weight_P))
    lengths = rows.lengths("responses").astype(np.int64)
    gaps = scores[better] - scores[worse]
    correct = 0.5 * (np.sign(gaps) + 1)
    columns = {"loss": np.logaddexp(0, -gaps) if losses is None else losses, "accuracy": correct, "margin": gaps}
    figures: Metrics = {}
    for name, values in columns.items():
        figures |= mean_by_source(name, weights * values, weights, rows["data_source"][better], prompts[better])
    longer = np.sign(lengths[better] - lengths[worse])
    for name, sign in (("chosen_longer", 1), ("chosen_shorter", -1), ("same_length", 0)):
        chosen = longer == sign
        if chosen.any():
            figures[f"val/accuracy/{name}"] = float(np.average(correct[chosen], weights=weights[chosen]))
    if np.bincount(prompts).max() > 2:
        figures |= with_intervals("val", {"best_of_n": dict(enumerate(_best_of_n(scores, prompts)))})
    figures["val/pairs"] = float(len(gaps))
    figures["val/longer_wins"] = float(np.average(0.5 * (longer + 1), weights=weights))
    figures["val/calibration_error"] = calibration_error(gaps, weights)
    if lengths.std() and scores.std():
        figures["val/score_length_correlation"] = float(np.corrcoef(scores, lengths)[0, 1])
    return figures


def _pairs_of(rows: DataProto) -> Pairs:
    return Pairs.of((rows["rank"] == 0).cumsum(0), rows["rank"])


def _best_of_n(scores: Floats, prompts: Positions) -> list[float]:
    """Return for each prompt whether its best response has the highest score; 1/n if n responses tie for it."""
    highest = np.full(prompts[-1] + 1, -np.inf)
    np.maximum.at(highest, prompts, scores)
    is_highest = scores == highest[prompts]
    firsts = np.flatnonzero(np.diff(prompts, prepend=-1))
    shares: list[float] = (is_highest[firsts] / np.bincount(prompts, weights=is_highest)).tolist()
    return shares


def warnings_of(figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield a name and a message for each problem that these figures show."""
    longer, accuracy = figures.get("val/longer_wins", 0.5), figures.get("val/accuracy", 1.0)
    correlation = figures.get("val/score_length_correlation", 0.0)
    change = figures.get("val/log_prob/chosen_moved", 0.0)
    if figures.get("val/pairs", 0.0) >= _MIN_PAIRS:
        if longer > 0.5 and longer >= accuracy:
            problem = f"the longer response is preferred in {longer:.1%} of the pairs, and the model is right in "
            yield (
                "length wins",
                f"{problem}{accuracy:.1%}: no better than length alone (add pairs with a shorter preferred response)",
            )
        if abs(correlation) > _MAX_CORRELATION:
            problem = f"scores follow the length of the responses (correlation {correlation:.2f})"
            yield "length and score", f"{problem}; see val/accuracy/chosen_shorter, and balance the pairs by length"
    if change < -_MAX_FALL:
        problem = f"preferred responses have become less likely, by {-change:.2f} nats per token since the start"
        fix = "try preference.sft_weight=0.1, a larger preference.beta, or fewer updates"
        yield "preferred responses", f"{problem}; {fix}"


def calibration_error(gaps: Floats, weights: Floats) -> float:
    """Return the expected calibration error (ECE, ten bins) of the probabilities that the gaps imply."""
    sure = 1 / (1 + np.exp(-np.abs(gaps)))
    correct = 0.5 * (np.sign(gaps) + 1)
    bins = np.minimum(((sure - 0.5) * 2 * _NUM_BINS).astype(int), _NUM_BINS - 1)
    in_bins = [bins == number for number in range(_NUM_BINS)]
    errors = [abs(float((weights * (sure - correct))[in_bin].sum())) for in_bin in in_bins]
    return sum(errors) / float(weights.sum())


def mean_by_source(
    figure: str, sums: Floats, nums: npt.NDArray[np.number], sources: npt.NDArray[np.object_], units: Positions
) -> Metrics:
    """Return sum / number over all rows and for each source, with intervals. Rows of one unit are not independent."""
    parts = {"val": np.ones(len(sources), bool)}
    parts |= {f"val/{source}": sources == source for source in dict.fromkeys(sources)}
    figures: Metrics = {}
    for prefix, rows in parts.items():
        _, unit = np.unique(units[rows], return_inverse=True)
        values = ratio_values(*(np.bincount(unit, column[rows]).astype(np.float64) for column in (sums, nums)))
        figures |= with_intervals(prefix, {figure: dict(enumerate(values.tolist()))})
    return figures
