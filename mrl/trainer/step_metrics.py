"""Metrics of a step's batch and timing, named as in verl, and the columns of its samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.config.hardware import device_flops_per_s
from mrl.config.reward import RewardConfig
from mrl.config.schema import ClusterConfig
from mrl.observe.console import SamplePreview
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged
from mrl.rewards.outcome import REWARD
from mrl.trainer.role_client import RoleClient


def batch_metrics(batch: DataProto, max_response_tokens: int, solved_at: float) -> dict[str, float]:
    """Return scores, lengths (also by outcome and by source) and the share of groups with equal scores."""
    scores = np.asarray(batch["scores"], dtype=np.float64)
    figures = summary_metrics("critic/score", scores) | summary_metrics("response_length", written_lengths(batch))
    figures |= _lengths_by(batch, {"solved": scores >= solved_at, "unsolved": scores < solved_at})
    sources = batch["data_source"].astype(str)
    if len(names := np.unique(sources)) > 1:
        figures |= _lengths_by(batch, {f"source/{name}": sources == name for name in names})
    figures |= summary_metrics("prompt_length", batch.lengths("prompts"))
    figures["response_length/clip_ratio"] = float((batch.lengths("responses") >= max_response_tokens).mean())
    figures["groups/uniform_share"] = _uniform_share(batch, scores)
    for name in batch.columns():
        if name.startswith(REWARD):  # the estimator normalizes each reward
            figures[f"{name}/uniform_share"] = _uniform_share(batch, np.asarray(batch[name], dtype=np.float64))
    figures["batch/samples"] = len(batch)
    return figures


def _uniform_share(batch: DataProto, scores: npt.NDArray[np.float64]) -> float:
    """Return the share of groups whose scores are equal."""
    uids, group = np.unique(batch["uid"].astype(str), return_inverse=True)
    lowest, highest = np.full(len(uids), np.inf), np.full(len(uids), -np.inf)
    np.minimum.at(lowest, group, scores)
    np.maximum.at(highest, group, scores)
    return float((lowest == highest).mean())


def reward_vector(batch: DataProto, reward: RewardConfig) -> list[tuple[float, list[float]]]:
    """Return the weight of each reward function with a column in the batch, and its scores."""
    labels = [label for label in reward.functions if f"{REWARD}{label}" in batch.columns()]
    return [(reward.functions[label].weight, batch[f"{REWARD}{label}"].tolist()) for label in labels]


def written_lengths(batch: DataProto) -> npt.NDArray[np.int64]:
    """Return the number of tokens in each response that the model wrote: all of them if the batch has no mask."""
    if "response_mask" not in batch.columns():
        return batch.lengths("responses").astype(np.int64)
    ends = np.cumsum(np.concatenate([[0], batch.lengths("responses")]))
    num_written = np.concatenate([[0], np.cumsum(batch.values("response_mask").numpy(), dtype=np.int64)])
    lengths: npt.NDArray[np.int64] = num_written[ends[1:]] - num_written[ends[:-1]]
    return lengths


def _lengths_by(batch: DataProto, parts: Mapping[str, npt.NDArray[np.bool_]]) -> dict[str, float]:
    lengths = written_lengths(batch)
    return {f"response_length/{name}/mean": float(lengths[rows].mean()) for name, rows in parts.items() if rows.any()}


def timing_metrics(seconds: Mapping[str, float], batch: DataProto, cluster: ClusterConfig) -> dict[str, float]:
    """Return the seconds of each phase, and tokens per second and device."""
    tokens = int(batch.lengths("prompts").sum()) + int(batch.lengths("responses").sum())
    devices = cluster.nodes * cluster.devices_per_node
    figures = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    figures["perf/total_num_tokens"] = tokens
    figures["perf/throughput"] = tokens / seconds["step"] / devices
    if seconds.get("rollout"):
        figures["perf/generated_per_s"] = int(written_lengths(batch).sum()) / seconds["rollout"] / devices
    return figures


def overlap_metrics(seconds: Mapping[str, float], generating_s: float) -> dict[str, float]:
    """Return the share of the step in which the trainer waited for samples, and the share in which engines were idle.

    The engines' speed follows from the time they generate, not from the time the trainer waits for them.
    """
    return {
        "perf/trainer_idle_share": seconds["rollout"] / seconds["step"],
        "perf/engines_idle_share": max(0.0, 1 - generating_s / seconds["step"]),
        "perf/generating_s": generating_s,
    }


def training_metrics(role: RoleClient, name: str, seconds: float, num_tokens: int) -> dict[str, float]:
    """Return the floating-point operations per second and device of a role's updates, and their share of the device's
    peak if the device is known. Attention between tokens is not counted.
    """
    if not seconds:
        return {}
    rate = 3 * role.flops_per_token * num_tokens / seconds / role.group.mesh.world_size
    peak = device_flops_per_s(role.device)
    return {f"perf/{name}_tflops": rate / 1e12} | ({f"perf/{name}_mfu": rate / peak} if peak else {})


def summary_metrics(name: str, values: npt.NDArray[np.generic]) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


OwnMetric = Callable[[DataProto], Mapping[str, Any]]


def own_metrics(
    functions: Mapping[str, OwnMetric], batch: DataProto, warn: Callable[[str, str], None]
) -> dict[str, float]:
    """Return the metrics of the user's functions on the batch as the driver sees it (texts, scores, lengths, uids).

    A function that raises an error is reported by name and reason, and the run continues.
    """
    figures: dict[str, float] = {}
    for name, function in functions.items():
        try:
            figures |= {f"own/{key}": float(value) for key, value in function(batch).items()}
        except Exception as error:
            warn(name, f"{type(error).__name__}: {error}")
    return figures


def preview(batch: DataProto) -> SamplePreview:
    return SamplePreview(batch["prompt_text"][0], batch["response_text"][0], float(batch["scores"][0]))


def tensor_columns(batch: DataProto) -> dict[str, Any]:
    """Return all numeric columns, a list per row, with the row ids."""
    columns: dict[str, Any] = {"row_id": batch.row_ids.tolist()}
    for name, column in batch.columns().items():
        if isinstance(column, Jagged):
            columns[name] = [row.tolist() for row in column.rows()]
        elif isinstance(column, torch.Tensor):
            columns[name] = column.tolist()
    return columns


def _as_text(truth: Any) -> str | None:
    """Return a ground truth as text: JSON unless it is a text, because the column has one type."""
    return truth if truth is None or isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def sample_columns(batch: DataProto) -> dict[str, Any]:
    """Return the columns of a samples file. Conversations also have their turns, how they ended, and the scores of
    their roles, if roles have their own."""
    columns = batch.columns()
    own = batch["role_scores"] if "role_scores" in columns else []
    return {
        "uid": batch["uid"],
        "data_source": batch["data_source"],
        "prompt": batch["prompt_text"],
        "response": batch["response_text"],
        "answer": batch["answer"],
        "ground_truth": [_as_text(truth) for truth in batch["ground_truth"]],
        "score": batch["scores"].tolist(),
        "prompt_tokens": batch.lengths("prompts").tolist(),
        "response_tokens": batch.lengths("responses").tolist(),
        "num_tokens": written_lengths(batch).tolist(),
        "truncated": batch["truncated"].tolist(),
        **{name: batch[name].tolist() for name in columns if name.startswith(("reward_model", REWARD))},
        **{name: batch[name] for name in ("turns", "ended") if name in columns},
        **({"role_scores": [json.dumps(of_roles) for of_roles in own]} if any(own) else {}),
        **({"segments": [1 + len(more) for more in batch["other_segments"]]} if "other_segments" in columns else {}),
    }


def distillation_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the teacher's share of the learning signal: |coef (log pi - log nu)| relative to its sum with |A|.

    If only some tokens have a teacher, return also the means over these tokens of what workers average over all.
    """
    from_teacher, from_rewards = (metrics.get(f"actor/{name}_abs", 0.0) for name in ("taught", "advantages"))
    figures = {"actor/taught_share": from_teacher / (from_teacher + from_rewards)} if from_teacher else {}
    if taught := metrics.get("actor/taught_tokens"):
        named = [name for name in ("actor/teacher_kl", "actor/teacher_mass") if name in metrics]
        figures |= {name: metrics[name] / taught for name in named}
    return figures
