"""What reward models say in validation: of all samples, and of the one among several that they would choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mrl.config.reward import label_of
from mrl.config.reward_rules import is_measured
from mrl.config.schema import Config
from mrl.protocol import DataProto

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
