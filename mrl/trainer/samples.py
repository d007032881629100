"""A step's samples for people: one on the terminal, all of them in a file."""

from __future__ import annotations

import json
from typing import Any

import torch

from mrl.observe.console import SamplePreview
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged
from mrl.trainer.step_metrics import written_lengths


def preview(batch: DataProto) -> SamplePreview:
    """Return the first sample as the terminal shows it."""
    return SamplePreview(batch["prompt_text"][0], batch["response_text"][0], float(batch["scores"][0]))


def tensor_columns(batch: DataProto) -> dict[str, Any]:
    """Return every column of numbers, a list per row, with the id of the row."""
    columns: dict[str, Any] = {"row_id": batch.row_ids.tolist()}
    for name, column in batch.columns().items():
        if isinstance(column, Jagged):
            columns[name] = [row.tolist() for row in column.rows()]
        elif isinstance(column, torch.Tensor):
            columns[name] = column.tolist()
    return columns


def _as_text(truth: Any) -> str | None:
    """Return a ground truth as a column of one type holds it: what is no text, as JSON."""
    return truth if truth is None or isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def sample_columns(batch: DataProto) -> dict[str, Any]:
    """Return what a file of samples says of each; of conversations, also what was said by turns and how they ended."""
    columns = batch.columns()
    return {
        "uid": batch["uid"],
        "data_source": batch["data_source"],
        "prompt": batch["prompt_text"],
        "response": batch["response_text"],
        "answer": batch["answer"],
        "ground_truth": [_as_text(truth) for truth in batch["ground_truth"]],
        "score": batch["scores"].tolist(),
        "num_tokens": written_lengths(batch).tolist(),
        "truncated": batch["truncated"].tolist(),
        **{name: batch[name].tolist() for name in columns if name.startswith("reward_model")},
        **{name: batch[name] for name in ("turns", "ended") if name in columns},
        **({"segments": [1 + len(more) for more in batch["other_segments"]]} if "other_segments" in columns else {}),
    }
