"""Displayed and saved samples of a step: one on the terminal, all in a file, at regular steps."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from mrl.data.row_files import write_samples
from mrl.observe.console import SamplePreview
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.step_metrics import preview, sample_columns
from tests.trainer.fakes import make_config, scene


def samples() -> DataProto:
    """Two samples as a step leaves them."""
    return DataProto.from_dict(
        {
            "prompts": from_rows([[1], [2, 3, 4]]),
            "responses": from_rows([[5, 6], [7]]),
            "scores": torch.tensor([0.25, -1.0], dtype=torch.float64),
            "truncated": torch.tensor([True, False]),
        },
        {
            "uid": ["a/0/1", "b/0/2"],
            "data_source": ["easy", "hard"],
            "prompt_text": ["one", "two"],
            "response_text": ["five", "seven"],
            "ground_truth": ["5", None],
            "answer": ["5", None],
        },
        row_ids=[4, 9],
    )


def test_the_first_sample_is_shown() -> None:
    assert preview(samples()) == SamplePreview("one", "five", 0.25)


def test_every_sample_is_in_the_file(tmp_path: Path) -> None:
    file = write_samples(tmp_path, 2, sample_columns(samples()))
    assert file.name == "step-000002.parquet"
    assert pq.read_table(file).to_pydict() == {
        "uid": ["a/0/1", "b/0/2"],
        "data_source": ["easy", "hard"],
        "prompt": ["one", "two"],
        "response": ["five", "seven"],
        "answer": ["5", None],
        "ground_truth": ["5", None],
        "score": [0.25, -1.0],
        "num_tokens": [2, 1],
        "truncated": [True, False],
    }


def test_answers_of_every_form_are_in_one_column(tmp_path: Path) -> None:
    batch = samples().with_column("ground_truth", ["5", {"target": ["7", "sept"]}])
    rows = pq.read_table(write_samples(tmp_path, 2, sample_columns(batch))).to_pylist()
    assert [row["ground_truth"] for row in rows] == ["5", '{"target": ["7", "sept"]}']


def test_a_conversation_is_in_the_file_by_turns(tmp_path: Path) -> None:
    batch = samples().with_column("turns", [["look", "it is 5", "five"], ["seven"]])
    batch = batch.with_column("ended", ["done", "length"])
    rows = pq.read_table(write_samples(tmp_path, 2, sample_columns(batch))).to_pylist()
    assert [row["turns"] for row in rows] == [["look", "it is 5", "five"], ["seven"]]
    assert [row["ended"] for row in rows] == ["done", "length"]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3]), (2, [2])])
def test_files_are_written_every_so_many_steps(every: int, steps: list[int], tmp_path: Path) -> None:
    with scene(make_config(tmp_path, training={"samples_every": every}), tmp_path) as found:
        found.trainer.fit()
    assert sorted(path.name for path in tmp_path.glob("samples/*")) == [f"step-{step:06d}.parquet" for step in steps]
    assert [(step, sample.prompt) for step, _, sample in found.screen.steps] == [
        (step, f"prompt {2 * step - 2}") for step in (1, 2, 3)
    ]
