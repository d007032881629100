"""Plans for published models on clusters of eight-GPU nodes: traffic of each link, and the seconds it takes.

Nothing is measured here. Bandwidths are those of an H100 node, per GPU and direction: NVLink 450 GB/s, and one 400 Gb/s
network card per GPU. `seconds` is the time of the busiest GPU if links are never idle; `in_step_s` is the time if every
bucket waits for the previous one on all GPUs, which is an upper limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.models.families import spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.rollout_table import EngineSizes
from mrl.weight_sync.planner import BucketSizes, RankPlan, ReshardPlanner
from mrl.weight_sync.rollout_layout import RolloutLayout
from tests.models.published import LLAMA_31_70B, QWEN3_235B

GPUS_PER_NODE = 8
NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S = 450e9, 50e9
ITEM_BYTES = 2
SIZES = BucketSizes(slot_bytes=192 << 20, dtype="bfloat16", trained_dtype="bfloat16", alignment=64)

QWEN3_32B: dict[str, Any] = {
    **{name: value for name, value in QWEN3_235B.items() if "expert" not in name and "moe" not in name},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_235B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


@dataclass(frozen=True)
class Scene:
    """A model in a training layout, its engines, and published results for similar cases."""

    name: str
    config: dict[str, Any]
    layout: Layout
    mesh: Mesh
    sizes: EngineSizes
    published: str


SCENES = [
    Scene("Qwen3-32B TP4 PP2 -> TP4", QWEN3_32B, Layout(tp=4, pp=2), Mesh(8, tp=4, pp=2), EngineSizes(4), ""),
    Scene(
        "Llama-3.1-70B TP8 PP8 -> TP8",
        LLAMA_31_70B,
        Layout(tp=8, pp=8),
        Mesh(64, tp=8, pp=8),
        EngineSizes(8),
        "9.6 s (HybridFlow, A100, 200 Gb/s)",
    ),
    Scene(
        "Qwen3-30B-A3B EP8 -> TP8",
        QWEN3_30B_A3B,
        Layout(ep=8),
        Mesh(8, ep=8),
        EngineSizes(8),
        "7 s (slime, 8 GPUs), 1.9 s (NeMo-RL, GB200)",
    ),
    Scene("Qwen3-30B-A3B EP8 -> EP8", QWEN3_30B_A3B, Layout(ep=8), Mesh(8, ep=8), EngineSizes(8, 8), "as above"),
    Scene(
        "Qwen3-235B TP2 CP2 EP16 PP8 -> TP16",
        QWEN3_235B,
        Layout(tp=2, pp=8, ep=16, first_stage_layers=11, last_stage_layers=11),
        Mesh(128, tp=2, cp=2, pp=8, ep=16),
        EngineSizes(16),
        "30 to 40 s (NeMo-RL, B200), 4.6 s (its prototype)",
    ),
]


def plan_rows() -> Iterator[dict[str, Any]]:
    """Yield one row per scene."""
    for scene in SCENES:
        yield _row(scene)


def _row(scene: Scene) -> dict[str, Any]:
    num_ranks = scene.mesh.world_size
    nodes = tuple(rank // GPUS_PER_NODE for rank in range(num_ranks))
    rollout = RolloutLayout(scene.sizes, tuple(range(num_ranks)), nodes)
    planner = ReshardPlanner(spec_of(HfConfig(scene.config, "config.json")), scene.layout, scene.mesh, rollout)
    began = time.perf_counter()
    plans = [planner.plan(rank, SIZES) for rank in range(num_ranks)]
    plan_s = (time.perf_counter() - began) / num_ranks
    needed = sum(
        transfer.region.num_elements
        for plan in plans
        for b in plan.buckets
        for ms in b.incoming.values()
        for transfer in ms
    )
    least = sum(planner.least_received(rank) for rank in range(num_ranks))
    # Bytes by bucket, rank, direction (in, out) and link (NVLink, network).
    moved = np.stack([_moved(plan, nodes) for plan in plans], axis=1)
    link_s = moved / np.array([NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S])
    received = moved[:, :, 0].sum(axis=(0, 1)) / num_ranks
    return {
        "layout": scene.name,
        "gpus": num_ranks,
        "needed_gb": needed * ITEM_BYTES / num_ranks / 1e9,
        "nvlink_gb": received[0] / 1e9,
        "network_gb": received[1] / 1e9,
        "ratio": float(received.sum() * num_ranks / (least * ITEM_BYTES)) if least else 1.0,
        "busiest": float(moved.sum(axis=(0, 3)).max() / max(moved.sum(axis=(0, 3)).mean(), 1)),
        "seconds": float(link_s.sum(axis=0).max()),
        "in_step_s": float(link_s.max(axis=(1, 2, 3)).sum()),
        "plan_s": plan_s,
        "published": scene.published,
    }


def _moved(plan: RankPlan, nodes: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    moved = np.zeros((len(plan.buckets), 2, 2))
    for number, bucket in enumerate(plan.buckets):
        for direction, peers in enumerate((bucket.incoming, bucket.outgoing)):
            for peer, transfers in peers.items():
                if peer != plan.rank:
                    link = int(nodes[peer] != nodes[plan.rank])
                    moved[number, direction, link] += ITEM_BYTES * sum(
                        transfer.region.num_elements for transfer in transfers
                    )
    return moved
