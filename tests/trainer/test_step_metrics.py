"""The figures of a step against numbers by hand, and its samples in files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig
from mrl.data.row_files import write_samples
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer import step_metrics
from mrl.trainer.step_metrics import sample_columns
from tests.trainer.fakes import make_config, scene

CLUSTER = ClusterConfig(nodes=2, devices_per_node=4, device="gpu")


def batch_of(scores: list[float], uids: list[str], responses: list[int], prompts: list[int]) -> DataProto:
    columns = {
        "prompts": from_rows([[1] * length for length in prompts]),
        "responses": from_rows([[1] * length for length in responses]),
        "scores": torch.tensor(scores, dtype=torch.float64),
    }
    return DataProto.from_dict(
        columns, {"uid": uids, "data_source": ["math" if uid == "b" else "code" for uid in uids]}
    )


BATCH = batch_of([1.0, 0.0, 0.5, 0.5, -2.0], ["a", "b", "a", "b", "c"], [8, 3, 7, 8, 4], [2, 5, 2, 5, 1])


def test_scores_lengths_and_groups() -> None:
    assert step_metrics.batch_metrics(BATCH, 8, 0.5) == pytest.approx(
        {
            "critic/score/mean": 0.0,
            "critic/score/max": 1.0,
            "critic/score/min": -2.0,
            "response_length/mean": 6.0,
            "response_length/max": 8,
            "response_length/min": 3,
            "prompt_length/mean": 3.0,
            "prompt_length/max": 5,
            "prompt_length/min": 1,
            "response_length/clip_ratio": 2 / 5,
            "response_length/solved/mean": 23 / 3,
            "response_length/unsolved/mean": 7 / 2,
            "response_length/source/code/mean": 19 / 3,
            "response_length/source/math/mean": 11 / 2,
            "groups/uniform_share": 1 / 3,  # c, which is alone
            "batch/samples": 5,
        }
    )


@pytest.mark.parametrize(
    ("scores", "share"),
    [([1, 1, 0, 0], 1.0), ([1, 0, 0, 0], 0.5), ([0, 1, 1, 0], 0.0), ([1, 1 + 1e-9, 0, 0], 0.5)],
)
def test_a_group_is_uniform_if_all_its_scores_are_the_same(scores: list[float], share: float) -> None:
    batch = batch_of(scores, ["a", "a", "b", "b"], [1] * 4, [1] * 4)
    assert step_metrics.batch_metrics(batch, 8, 1.0)["groups/uniform_share"] == share


def test_tokens_per_second_and_device() -> None:
    seconds = {"rollout": 1.5, "update_actor": 0.5, "step": 2.5}
    assert step_metrics.timing_metrics(seconds, BATCH, CLUSTER) == pytest.approx(
        {
            "timing_s/rollout": 1.5,
            "timing_s/update_actor": 0.5,
            "timing_s/step": 2.5,
            "perf/total_num_tokens": 45,
            "perf/throughput": 45 / 2.5 / 8,
            "perf/generated_per_s": 30 / 1.5 / 8,
        }
    )
    assert "perf/generated_per_s" not in step_metrics.timing_metrics({"step": 1.0}, BATCH, CLUSTER)
    mask = from_rows([[number != 1 for number in range(length)] for length in BATCH.lengths("responses")])
    figures = step_metrics.timing_metrics(seconds, BATCH.with_column("response_mask", mask), CLUSTER)
    assert figures["perf/generated_per_s"] == 25 / 1.5 / 8, "what it was answered is not generated"


def role_on(device: str) -> Any:
    return SimpleNamespace(flops_per_token=2e9, device=device, group=SimpleNamespace(mesh=Mesh(4, tp=2)))


def test_operations_per_second_and_device() -> None:
    """3 x 2e9 operations a token (forward once, backward twice), 1000 tokens, 0.5 s, 4 devices: 3e12 a second."""
    assert step_metrics.training_metrics(role_on("cpu"), "actor", 0.5, 1000) == pytest.approx(
        {"perf/actor_tflops": 3.0}
    )
    known = step_metrics.training_metrics(role_on("NVIDIA H100 80GB HBM3"), "critic", 0.5, 1000)
    assert known == pytest.approx({"perf/critic_tflops": 3.0, "perf/critic_mfu": 3e12 / 989e12})
    assert step_metrics.training_metrics(role_on("cpu"), "actor", 0.0, 1000) == {}


# --- samples in files ---


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
        "prompt_tokens": [1, 3],
        "response_tokens": [2, 1],
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
