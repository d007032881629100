"""The figures of a step that follow from its batch and its clock; their names are those that verl made known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mrl.config.hardware import device_flops_per_s
from mrl.config.schema import ClusterConfig
from mrl.protocol import DataProto
from mrl.trainer.role_client import RoleClient


def batch_metrics(batch: DataProto, max_response_tokens: int, solved_at: float) -> dict[str, float]:
    """Return the scores, the lengths, by outcome and by source too, and how many groups teach nothing."""
    scores = np.asarray(batch["scores"], dtype=np.float64)
    figures = summary_metrics("critic/score", scores) | summary_metrics("response_length", written_lengths(batch))
    figures |= _lengths_by(batch, {"solved": scores >= solved_at, "unsolved": scores < solved_at})
    sources = batch["data_source"].astype(str)
    if len(names := np.unique(sources)) > 1:
        figures |= _lengths_by(batch, {f"source/{name}": sources == name for name in names})
    figures |= summary_metrics("prompt_length", batch.lengths("prompts"))
    figures["response_length/clip_ratio"] = float((batch.lengths("responses") >= max_response_tokens).mean())
    uids, group = np.unique(batch["uid"].astype(str), return_inverse=True)
    lowest, highest = np.full(len(uids), np.inf), np.full(len(uids), -np.inf)
    np.minimum.at(lowest, group, scores)
    np.maximum.at(highest, group, scores)
    figures["groups/uniform_share"] = float((lowest == highest).mean())
    figures["batch/samples"] = len(batch)
    return figures


def written_lengths(batch: DataProto) -> npt.NDArray[np.int64]:
    """Return how many tokens of each response the model wrote itself: all, where no mask says otherwise."""
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
    """Return which share of the step the trainer waited for samples, and in which share no engine had any to write.

    The speed of engines goes by the time that they generate, which is not the time that is waited for them.
    """
    return {
        "perf/trainer_idle_share": seconds["rollout"] / seconds["step"],
        "perf/engines_idle_share": max(0.0, 1 - generating_s / seconds["step"]),
        "perf/generating_s": generating_s,
    }


def training_metrics(role: RoleClient, name: str, seconds: float, num_tokens: int) -> dict[str, float]:
    """What a role's updates of a step reached: floating-point operations per second and device, and, where the device
    is a known one, the share of what it could. Attention over other tokens is not counted."""
    if not seconds:
        return {}
    rate = 3 * role.flops_per_token * num_tokens / seconds / role.group.mesh.world_size
    peak = device_flops_per_s(role.device)
    return {f"perf/{name}_tflops": rate / 1e12} | ({f"perf/{name}_mfu": rate / peak} if peak else {})


def summary_metrics(name: str, values: npt.NDArray[np.generic]) -> dict[str, float]:
    """Return the mean, largest and smallest."""
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
