"""The figures of a step that follow from its batch and its clock; their names are those that verl made known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mrl.config.hardware import device_flops_per_s
from mrl.config.schema import ClusterConfig
from mrl.protocol import DataProto
from mrl.trainer.role_client import RoleClient


def batch_metrics(batch: DataProto, max_response_tokens: int) -> dict[str, float]:
    """Return the scores, lengths, and how many groups teach nothing."""
    scores = np.asarray(batch["scores"], dtype=np.float64)
    figures = summary_metrics("critic/score", scores) | summary_metrics("response_length", batch.lengths("responses"))
    figures |= summary_metrics("prompt_length", batch.lengths("prompts"))
    figures["response_length/clip_ratio"] = float((batch.lengths("responses") >= max_response_tokens).mean())
    uids, group = np.unique(batch["uid"].astype(str), return_inverse=True)
    lowest, highest = np.full(len(uids), np.inf), np.full(len(uids), -np.inf)
    np.minimum.at(lowest, group, scores)
    np.maximum.at(highest, group, scores)
    figures["groups/uniform_share"] = float((lowest == highest).mean())
    figures["batch/samples"] = len(batch)
    return figures


def timing_metrics(seconds: Mapping[str, float], batch: DataProto, cluster: ClusterConfig) -> dict[str, float]:
    """Return the seconds of each phase, and tokens per second and device."""
    tokens = int(batch.lengths("prompts").sum()) + int(batch.lengths("responses").sum())
    devices = cluster.nodes * cluster.devices_per_node
    figures = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    figures["perf/total_num_tokens"] = tokens
    figures["perf/throughput"] = tokens / seconds["step"] / devices
    if seconds.get("rollout"):
        figures["perf/generated_per_s"] = int(batch.lengths("responses").sum()) / seconds["rollout"] / devices
    return figures


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
