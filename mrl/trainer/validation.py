"""Evaluation on prompts that are not trained on: mean@k, pass@k and maj@k per source, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.algos.kl import UNTAUGHT
from mrl.config import step_calls
from mrl.config.arithmetic import compares_teacher
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
from mrl.observe.confidence import ratio_values, with_intervals
from mrl.protocol import DataProto
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.model_scores import ModelScores
from mrl.trainer.role_client import Metrics, RoleClient
from mrl.trainer.segments import trained_rows
from mrl.trainer.step_metrics import sample_columns
from mrl.trainer.teachers import Teachers

Answers = list[tuple[str | None, float]]
"""Answer and score of each sample of one prompt. The answer is empty if none was found, None if none was expected."""
ByPrompt = dict[str, float]
"""Value of each prompt. A figure is their mean, and all have equal weight."""
Parts = dict[str, dict[str, ByPrompt]]
"""Figures of each source, and of all together, by the prefix of their names."""


class Validator:
    def __init__(
        self, config: Config, dataset: RLHFDataset, generator: Generator, directory: Path, events: EventLog
    ) -> None:
        self._config = config
        self._dataset, self._generator, self._directory = dataset, generator, directory
        self._skips = SkipLog(config.data.max_bad_rows, events)
        self._mute: set[str] = set()
        self.warnings: list[str] = []
        """Warnings that have not been shown yet."""
        self.samples: list[DataProto] = []
        """Samples of the last validation, if a teacher reads them too."""
        self.by_prompt: dict[str, ByPrompt] = {}
        """Figures of the last validation, by prompt."""

    def run(self, step: int, models: ModelScores) -> dict[str, float]:
        return self.measure(step, self.sample(), models)

    def sample(self) -> list[ScoredBatch]:
        """Generate the validation samples and score them by rule. Each validation uses the same sampling."""
        num, sampling = self._config.validation.samples_per_prompt, self._generator.validation
        prompts = one_pass(self._dataset, self._config.batch.prompts_per_step * 4, self._skips)
        return [self._generator.run(batch.repeat(num), sampling, step=0) for batch in prompts]

    def measure(self, step: int, sampled: Sequence[ScoredBatch], models: ModelScores) -> dict[str, float]:
        answers: dict[str, dict[str, Answers]] = defaultdict(lambda: defaultdict(list))
        columns: dict[str, list[Any]] = defaultdict(list)
        scored, whole = [part.batch for part in sampled], [models.add(part).batch for part in sampled]
        self.samples = scored if compares_teacher(self._config.algorithm) else []
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
                self.warnings.append(f"validation.save_samples: cannot write the responses: {error}")
        parts = self._by_rule(answers) if is_measured(self._config) else {}
        for prefix, by_models in model_values(self._config, scored, whole).items():
            parts[prefix] = parts.get(prefix, {}) | by_models
        self.by_prompt = {f"{prefix}/{name}": values for prefix, part in parts.items() for name, values in part.items()}
        figures: dict[str, float] = {}
        for prefix, values in parts.items():
            if is_measured(self._config):
                figures[f"{prefix}/prompts"] = float(len(next(iter(values.values()))))
            figures |= with_intervals(prefix, values)
        return figures

    def _by_rule(self, answers: Mapping[str, Mapping[str, Answers]]) -> Parts:
        together: dict[str, Answers] = {}
        voting: dict[str, Answers] = {}
        parts: Parts = {}
        for source, by_prompt in answers.items():
            named = {f"{source} {uid}": answers_of_prompt for uid, answers_of_prompt in by_prompt.items()}
            together |= named
            values = parts[f"val/{source}"] = score_values(named, self._config.validation)
            if any(answer is not None for answers_of_prompt in by_prompt.values() for answer, _ in answers_of_prompt):
                voting |= named
                values |= vote_values(named, self._config.validation)
            elif source not in self._mute and self._config.validation.counts[-1] > 1:
                self._mute.add(source)
                self.warnings.append(f"no maj@k for {source}: none of its reward functions returns the judged answer")
        parts["val"] = score_values(together, self._config.validation)
        parts["val"] |= vote_values(voting, self._config.validation) if voting else {}
        return parts


def score_values(by_prompt: Mapping[str, Answers], validation: ValidationConfig) -> dict[str, ByPrompt]:
    """Return mean@k (the mean over all samples) and pass@k (the unbiased probability that one of k samples is correct)
    of each prompt.

    For a prompt with fewer than k scored samples, k is their number.
    """
    scores = {prompt: np.array([score for _, score in answers]) for prompt, answers in by_prompt.items()}
    correct = {prompt: values >= validation.solved_at for prompt, values in scores.items()}
    num_samples = validation.samples_per_prompt
    figures = {
        f"score/mean@{num_samples}": {prompt: float(values.mean()) for prompt, values in scores.items()},
        f"solved/mean@{num_samples}": {prompt: float(values.mean()) for prompt, values in correct.items()},
    }
    for k in validation.counts:
        if k > 1:
            figures[f"solved/pass@{k}"] = {
                prompt: pass_at(k, len(values), int(values.sum())) for prompt, values in correct.items()
            }
    return figures


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Return the share of all choices of k samples that contain a correct one."""
    k = min(k, num_samples)
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def vote_values(by_prompt: Mapping[str, Answers], validation: ValidationConfig) -> dict[str, ByPrompt]:
    """Return maj@k of each prompt: how often the most common answer among k samples is correct, over groups of k."""
    return {
        f"solved/maj@{k}": {
            prompt: float(np.mean(_majorities(answers, k) >= validation.solved_at))
            for prompt, answers in by_prompt.items()
        }
        for k in validation.counts
        if k > 1
    }


def _majorities(answers: Answers, k: int) -> np.ndarray[Any, Any]:
    starts = range(0, max(1, len(answers) - k + 1), k)
    return np.array([_majority(answers[start : start + k]) for start in starts])


def _majority(answers: Sequence[tuple[str | None, float]]) -> float:
    """Return the score of the most common answer, the first one on ties. Samples without an answer do not vote."""
    votes = Counter(answer for answer, _ in answers if answer)
    if not votes:
        return -math.inf
    winner, _ = votes.most_common(1)[0]
    return next(score for answer, score in answers if answer == winner)


def check_best(config: Config, dataset: RLHFDataset) -> None:
    """Raise an error if `validation.best` names a data source without rows."""
    source, known = config.validation.source_of_best(validation_figures(config)), set[str]()
    if not source or not config.validation.every:
        return
    for begin in range(0, len(dataset), CHECKED_AT_ONCE):
        rows = dataset.read(dataset.draws(begin, begin + CHECKED_AT_ONCE))
        known |= {row.row.data_source for row in rows if isinstance(row, Prompt)}
        if source in known:
            return
    problem = f'{config.validation.best} refers to the source "{source}", but data.validation has no row of it'
    raise DataError(problem, where="validation.best_metric", fix=did_you_mean(source, sorted(known)))


Table = npt.NDArray[np.float64]
_RULE, _WORTH, _RAW = 0, 1, 2
"""Columns of a table with one row per sample of a prompt.

The score by rule, the models' addition to it, and then the raw score of each model.
"""


def model_values(config: Config, scored: Sequence[DataProto], whole: Sequence[DataProto]) -> Parts:
    """Return mean@k of each model and prompt, and best@k: whether the sample with the models' highest score is correct.

    Best@k averages over consecutive groups of k samples. It needs a rule that decides which answers are correct.
    """
    validation, models = config.validation, config.scoring_models()
    parts: Parts = defaultdict(lambda: defaultdict(dict))
    for source, uid, table in _tables(list(models), scored, whole) if models else ():
        values = {
            f"{label_of(role)}/mean@{validation.samples_per_prompt}": float(table[:, column].mean())
            for column, role in enumerate(models, _RAW)
        }
        for k in validation.counts if is_measured(config) else ():
            if k > 1:
                values[f"solved/best@{k}"] = float(np.mean(_best(table, k) >= validation.solved_at))
        for prefix in (f"val/{source}", "val"):
            for name, value in values.items():
                parts[prefix][name][f"{source} {uid}"] = value
    return parts


def _tables(
    roles: Sequence[str], scored: Sequence[DataProto], whole: Sequence[DataProto]
) -> Iterator[tuple[str, str, Table]]:
    """Yield source, uid and table of the samples of each prompt."""
    for before, after in zip(scored, whole, strict=True):
        added = after["scores"] - before["scores"]
        table = np.stack([before["scores"], added, *(after[role] for role in roles)], axis=1)
        rows: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row, prompt in enumerate(zip(before["data_source"], before["uid"], strict=True)):
            rows[prompt].append(row)
        yield from ((source, uid, table[sample_rows]) for (source, uid), sample_rows in rows.items())


def _best(table: Table, k: int) -> npt.NDArray[np.float64]:
    """Return the rule's score of the sample that the models choose, for consecutive groups of k samples."""
    starts = range(0, max(1, len(table) - k + 1), k)
    return np.array([table[start + np.argmax(table[start : start + k, _WORTH]), _RULE] for start in starts])


def validated_kl(
    actor: RoleClient, teachers: Teachers, samples: Sequence[DataProto], timeout_s: float
) -> tuple[ByPrompt, Metrics]:
    """Return values of the prompts whose mean is the mean of log pi - log nu over the tokens that the policy wrote.

    Tokens without a teacher are left out. Return also the share of the samples without one, if there may be some.
    """
    untaught: list[float] = []
    sums: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    for part in samples:  # row ids repeat across batches
        rows = trained_rows(part)
        batch = rows.select(*(name for name in ("prompts", "responses", "response_mask") if name in rows.columns()))
        batch = actor.score(step_calls.LOG_PROB.method, batch)
        written, figures = teachers.columns(step_calls.TEACHER_LOG_PROB, batch, rows)
        untaught += [figures["teacher/untaught_share"]] * len(rows) if "teacher/untaught_share" in figures else []
        columns = fetch(batch.union(written), timeout_s)
        difference_T = columns.values("old_log_probs").double() - columns.values("teacher_log_probs").double()
        has_mask = "response_mask" in columns.columns()
        mask_T = columns.values("response_mask").bool() if has_mask else torch.ones_like(difference_T, dtype=torch.bool)
        if step_calls.TEACHER_SPANS in columns.columns():
            mask_T = mask_T & (columns.values(step_calls.TEACHER_SPANS) != UNTAUGHT)
        lengths = torch.as_tensor(columns.lengths("responses"))
        parts = zip(*(torch.split(column_T, lengths.tolist()) for column_T in (difference_T, mask_T)), strict=True)
        for sample, (row_T, written_T) in zip(rows["sample"].tolist(), parts, strict=True):
            prompt = f"{part['data_source'][sample]} {part['uid'][sample]}"
            sums[prompt] += float(row_T[written_T].sum())
            sizes[prompt] += int(written_T.sum())
    prompts = [prompt for prompt, size in sizes.items() if size]
    share = {"val/untaught_share": float(np.mean(untaught))} if untaught else {}
    if not prompts:
        return {}, share
    values = ratio_values(*(np.array([column[prompt] for prompt in prompts]) for column in (sums, sizes)))
    return dict(zip(prompts, values.tolist(), strict=True)), share
