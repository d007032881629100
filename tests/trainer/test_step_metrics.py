"""The figures of a step against numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer import step_metrics

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
