"""A step's samples for people: one on the terminal, all of them in a file."""

from __future__ import annotations

from typing import Any

from mrl.observe.console import SamplePreview
from mrl.protocol import DataProto


def preview(batch: DataProto) -> SamplePreview:
    """Return the first sample as the terminal shows it."""
    return SamplePreview(batch["prompt_text"][0], batch["response_text"][0], float(batch["scores"][0]))


def sample_columns(batch: DataProto) -> dict[str, Any]:
    """Return what a file of samples says of each."""
    return {
        "uid": batch["uid"],
        "data_source": batch["data_source"],
        "prompt": batch["prompt_text"],
        "response": batch["response_text"],
        "answer": batch["answer"],
        "ground_truth": batch["ground_truth"],
        "score": batch["scores"].tolist(),
        "num_tokens": batch.lengths("responses").tolist(),
        "truncated": batch["truncated"].tolist(),
    }
