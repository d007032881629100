"""How good the policy is on prompts that it is not trained on: mean@k, pass@k and maj@k per source."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.config import step_calls
from mrl.config.reward import label_of
from mrl.config.rules.reward import is_measured
from mrl.config.rules.validation import validation_figures
from mrl.config.schema import Config
from mrl.config.training import ValidationConfig
from mrl.controller.transport import fetch
from mrl.data.prompt_loader import SkipLog, one_pass
from mrl.data.rlhf_dataset import CHECKED_AT_ONCE, Prompt, RLHFDataset
from mrl.data.row_files import write_samples
from mrl.errors import DataError, did_you_mean
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.model_scores import ModelScores
from mrl.trainer.role_client import RoleClient
from mrl.trainer.segments import trained_rows
from mrl.trainer.step_metrics import sample_columns

Answers = list[tuple[str | None, float]]
"""The answer of each sample of one prompt, and its score; empty where there is none, None where nobody looked."""


class Validator:
    def __init__(
        self, config: Config, dataset: RLHFDataset, generator: Generator, directory: Path, events: EventLog
    ) -> None:
        self._config = config
        self._dataset, self._generator, self._directory = dataset, generator, directory
        self._skips = SkipLog(config.data.max_bad_rows, events)
        self._mute: set[str] = set()
        self.warnings: list[str] = []
        """What has not been said yet."""
        self.samples: list[DataProto] = []
        """Of the last run, where a teacher is to read them too."""

    def run(self, step: int, models: ModelScores) -> dict[str, float]:
        return self.measure(step, self.sample(), models)

    def sample(self) -> list[ScoredBatch]:
        """Generate what is measured, and score it by rule. The sampling is the same at each validation."""
        num, sampling = self._config.validation.samples_per_prompt, self._generator.validation
        prompts = one_pass(self._dataset, self._config.batch.prompts_per_step * 4, self._skips)
        return [self._generator.run(some.repeat(num), sampling, step=0) for some in prompts]

    def measure(self, step: int, sampled: Sequence[ScoredBatch], models: ModelScores) -> dict[str, float]:
        answers: dict[str, dict[str, Answers]] = defaultdict(lambda: defaultdict(list))
        columns: dict[str, list[Any]] = defaultdict(list)
        scored, whole = [each.batch for each in sampled], [models.add(each).batch for each in sampled]
        self.samples = scored if self._config.teacher is not None else []
        for batch in scored:
            rows = zip(batch["data_source"], batch["uid"], batch["answer"], batch["scores"].tolist(), strict=True)
            for source, uid, answer, score in rows:
                answers[source][uid].append((answer, score))
        for batch in whole:
            for name, values in sample_columns(batch).items():
                columns[name].extend(values)
        if self._config.validation.save_samples:
            try:
                write_samples(self._directory / "samples", step, columns, "validation")
            except OSError as error:
                self.warnings.append(f"validation.save_samples: the responses cannot be written: {error}")
        by_models = model_figures(self._config, scored, whole)
        return (self._figures(answers) if is_measured(self._config) else {}) | by_models

    def _figures(self, answers: Mapping[str, Mapping[str, Answers]]) -> dict[str, float]:
        figures: dict[str, float] = {}
        together: dict[str, Answers] = {}
        voting: dict[str, Answers] = {}
        for source, by_prompt in answers.items():
            named = {f"{source} {uid}": found for uid, found in by_prompt.items()}
            together |= named
            figures |= score_figures(f"val/{source}", named, self._config.validation)
            if any(answer is not None for found in by_prompt.values() for answer, _ in found):
                voting |= named
                figures |= vote_figures(f"val/{source}", named, self._config.validation)
            elif source not in self._mute and self._config.validation.counts[-1] > 1:
                self._mute.add(source)
                self.warnings.append(f"no maj@k of {source}: no reward function says which answer it judged")
        figures |= score_figures("val", together, self._config.validation)
        return figures | (vote_figures("val", voting, self._config.validation) if voting else {})


def score_figures(prefix: str, by_prompt: Mapping[str, Answers], validation: ValidationConfig) -> dict[str, float]:
    """Return mean@k, the mean over all samples, and pass@k: how likely one of k samples is right, without bias.

    Every prompt counts alike. Where fewer than k samples of one have a score, k is their number.
    """
    scores = [np.array([score for _, score in answers]) for answers in by_prompt.values()]
    right = [of_prompt >= validation.solved_at for of_prompt in scores]
    num_samples = validation.samples_per_prompt
    figures = {
        f"{prefix}/prompts": float(len(scores)),
        f"{prefix}/score/mean@{num_samples}": float(np.mean([of_prompt.mean() for of_prompt in scores])),
        f"{prefix}/solved/mean@{num_samples}": float(np.mean([of_prompt.mean() for of_prompt in right])),
    }
    for k in validation.counts:
        if k > 1:
            passed = [pass_at(k, len(of_prompt), int(of_prompt.sum())) for of_prompt in right]
            figures[f"{prefix}/solved/pass@{k}"] = float(np.mean(passed))
    return figures


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Return the share of all choices of k samples that have a right one among them."""
    k = min(k, num_samples)
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def vote_figures(prefix: str, by_prompt: Mapping[str, Answers], validation: ValidationConfig) -> dict[str, float]:
    """Return maj@k: whether the commonest answer among k samples is right, on average over one k after the other."""
    return {
        f"{prefix}/solved/maj@{k}": float(
            np.mean([np.mean(_majorities(answers, k) >= validation.solved_at) for answers in by_prompt.values()])
        )
        for k in validation.counts
        if k > 1
    }


def _majorities(answers: Answers, k: int) -> np.ndarray[Any, Any]:
    starts = range(0, max(1, len(answers) - k + 1), k)
    return np.array([_majority(answers[start : start + k]) for start in starts])


def _majority(answers: Sequence[tuple[str | None, float]]) -> float:
    """Return the score of the commonest answer, the first of equals. A sample without an answer does not vote."""
    votes = Counter(answer for answer, _ in answers if answer)
    if not votes:
        return -math.inf
    commonest, _ = votes.most_common(1)[0]
    return next(score for answer, score in answers if answer == commonest)


def check_best(config: Config, dataset: RLHFDataset) -> None:
    """Refuse a best that goes by a source of which there is no row."""
    wanted, found = config.validation.source_of_best(validation_figures(config)), set[str]()
    if not wanted or not config.validation.every:
        return
    for begin in range(0, len(dataset), CHECKED_AT_ONCE):
        rows = dataset.read(dataset.draws(begin, begin + CHECKED_AT_ONCE))
        found |= {row.row.data_source for row in rows if isinstance(row, Prompt)}
        if wanted in found:
            return
    what = f'{config.validation.best} is of the source "{wanted}", of which data.validation has no row'
    raise DataError(what, where="validation.best_metric", fix=did_you_mean(wanted, sorted(found)))


Table = npt.NDArray[np.float64]
_RULE, _WORTH, _RAW = 0, 1, 2
"""Columns of a table that has a row for each sample of a prompt: the score by rule, what the models add to it, and from
then on what each of them says."""


def model_figures(config: Config, scored: Sequence[DataProto], whole: Sequence[DataProto]) -> dict[str, float]:
    """Return each model's mean@k, and best@k, whether the sample is right that has the highest score by the models.

    Best@k goes through k samples after the other, and is there where a rule says what is right.
    """
    validation, models = config.validation, config.scoring_models()
    if not models:
        return {}
    tables: dict[str, list[Table]] = defaultdict(list)
    for source, table in _tables(list(models), scored, whole):
        tables[f"val/{source}"].append(table)
    tables["val"] = [table for of_source in list(tables.values()) for table in of_source]
    figures = {}
    for prefix, of_prompts in tables.items():
        for column, role in enumerate(models, _RAW):
            mean = float(np.mean([table[:, column].mean() for table in of_prompts]))
            figures[f"{prefix}/{label_of(role)}/mean@{validation.samples_per_prompt}"] = mean
        for k in validation.counts if is_measured(config) else ():
            if k > 1:
                right = [np.mean(_best(table, k) >= validation.solved_at) for table in of_prompts]
                figures[f"{prefix}/solved/best@{k}"] = float(np.mean(right))
    return figures


def _tables(
    roles: Sequence[str], scored: Sequence[DataProto], whole: Sequence[DataProto]
) -> Iterator[tuple[str, Table]]:
    """Yield of each prompt its source and the table of its samples."""
    for before, after in zip(scored, whole, strict=True):
        worth = after["scores"] - before["scores"]
        table = np.stack([before["scores"], worth, *(after[role] for role in roles)], axis=1)
        rows: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row, prompt in enumerate(zip(before["data_source"], before["uid"], strict=True)):
            rows[prompt].append(row)
        yield from ((source, table[of_prompt]) for (source, _), of_prompt in rows.items())


def _best(table: Table, k: int) -> npt.NDArray[np.float64]:
    """Return the score by rule of the sample that the models choose, of one k samples after the other."""
    starts = range(0, max(1, len(table) - k + 1), k)
    return np.array([table[start + np.argmax(table[start : start + k, _WORTH]), _RULE] for start in starts])


def validated_kl(actor: RoleClient, teacher: RoleClient, samples: Sequence[DataProto], timeout_s: float) -> float:
    """Return the mean of log pi - log nu over the tokens that the policy wrote at validation."""
    apart = []
    for part in samples:  # the same row ids occur in several
        rows = trained_rows(part)
        batch = rows.select(*(name for name in ("prompts", "responses", "response_mask") if name in rows.columns()))
        batch = actor.score(step_calls.LOG_PROB.method, batch)
        batch = teacher.score(step_calls.TEACHER_LOG_PROB.method, batch)
        found = fetch(batch, timeout_s)
        apart_T = found.values("old_log_probs").double() - found.values("teacher_log_probs").double()
        has_mask = "response_mask" in found.columns()
        apart.append(apart_T[found.values("response_mask").bool()] if has_mask else apart_T)
    return float(torch.cat(apart).mean())
