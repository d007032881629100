"""A step's samples for people: one on the terminal, all of them in a file."""

from __future__ import annotations

from typing import Any

from mrl.observe.console import SamplePreview
from mrl.protocol import DataProto


def preview(batch: DataProto) -> SamplePreview:
    """Return the first sample as the terminal shows it."""
    columns = batch.non_tensor_batch
    return SamplePreview(columns["prompt_text"][0], columns["response_text"][0], float(batch.batch["scores"][0]))


def sample_columns(batch: DataProto) -> dict[str, Any]:
    """Return what a file of samples says of each."""
    columns = batch.non_tensor_batch
    return {
        "uid": columns["uid"],
        "data_source": columns["data_source"],
        "prompt": columns["prompt_text"],
        "response": columns["response_text"],
        "ground_truth": columns["ground_truth"],
        "score": batch.batch["scores"].tolist(),
        "num_tokens": batch.lengths("responses").tolist(),
        "truncated": batch.batch["truncated"].tolist(),
    }
