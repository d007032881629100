"""A vLLM engine that keeps its weights in FP8: what each update leaves in its memory, and what it computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.rollout_table import EngineSizes
from mrl.models.table import shards_of
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Sampling
from mrl.weight_sync.exchange import JoinedTransport
from mrl.weight_sync.ipc import socket_path
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec
from mrl.weight_sync.rollout_layout import RolloutLayout
from mrl.weight_sync.row_planner import sizes_for_fp8
from tests.rollout.conftest import Small, requests, run
from tests.rollout.trainer_side import DEADLINE_S, InBackground, fused
from tests.rollout.trainer_side import update as plain_update

Make = Callable[..., RolloutEngine]
_LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


def held(worker: Any) -> dict[str, Tensor]:
    """Return copies of a worker's parameters."""
    return {name: parameter.clone() for name, parameter in worker.model_runner.model.named_parameters()}


def by_channel(whole_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a matrix: divide by its largest element over 448. Return vLLM's form, and the scales."""
    scale_N1 = whole_NK.abs().amax(1, keepdim=True).float() / _LARGEST
    scaled_NK = (whole_NK.float() / scale_N1).clamp(-_LARGEST, _LARGEST)
    return scaled_NK.to(torch.float8_e4m3fn).t(), scale_N1


def expected(model: Path, sizes: EngineSizes, worker: int) -> dict[str, Tensor]:
    """Return the parameters of a worker. A scale belongs to a row of the whole matrix, also if it is cut by columns."""
    tp, rank = sizes.tp, worker % sizes.tp
    ranks = [dict(fused(model, sizes, worker - rank + other, "bfloat16")) for other in range(tp)]
    parameters = {}
    for name, tensor in ranks[rank].items():
        if not name.endswith("_proj.weight"):
            parameters[name] = tensor
            continue
        cut_by_columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        whole = torch.cat([each[name] for each in ranks], 1) if cut_by_columns else tensor
        quantized, parameters[f"{name}_scale"] = by_channel(whole)
        parameters[name] = quantized.chunk(tp, 0)[rank] if cut_by_columns else quantized
    return parameters


def update(engine: RolloutEngine, model: Path, version: int) -> None:
    """Send a version in FP8. Each of the engine's workers is next to a trainer rank with the whole model."""
    settings, spec = engine.settings, read_spec(model)
    size = settings.num_workers
    sizes = sizes_for_fp8(spec, ParallelConfig(), None, EngineSizes(settings.tp, pp=settings.pp), "channel")
    layout = RolloutLayout(sizes, tuple(range(size)), (0,) * size)
    sockets = tuple(socket_path(settings.sockets, settings.replica, worker) for worker in range(size))
    reader, store = HfReader(model), HashStore()

    def rank(number: int) -> ReshardReport:
        transport = JoinedTransport(store, number, size, torch.device("cpu"), DEADLINE_S)
        shards = shards_of(spec, ParallelConfig(), RankPlace(), "lm")
        held = {(shard.chunk, shard.name): load_shard(reader, shard, torch.float32) for shard in shards}
        planner = ReshardPlanner(spec, ParallelConfig(), Mesh(size), layout)
        route = WeightSyncSpec(layout, sockets, "bfloat16", "float32")
        return Resharder(planner, transport, held, route).send(version)

    ranks = [InBackground(rank, number) for number in range(size)]
    engine.receive_weights(version)
    assert [each.result().failure for each in ranks] == [""] * size


SLOW = [("qwen3", 2, 1, update), ("qwen3", 1, 2, update)]
ON_DEMAND = [("qwen2", 1, 1, update), ("qwen3", 1, 1, plain_update), ("qwen3", 2, 1, plain_update)]
CASES = [pytest.param("qwen3", 1, 1, update), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
CASES += [pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.on_demand]) for case in ON_DEMAND]


@pytest.mark.parametrize(("family", "tp", "pp", "update"), CASES)
def test_each_update_leaves_the_bits_of_the_formula_in_the_same_memory(
    make_engine: Make, small: Small, family: str, tp: int, pp: int, update: Callable[[RolloutEngine, Path, int], object]
) -> None:
    """The trainer quantizes, or vLLM does."""
    engine: Any = make_engine("vllm", small(family), tp, pp=pp, dtype="bfloat16", quantization="fp8_per_channel")
    assert not engine.full_tensor_reason
    addresses = []
    for version in (1, 2):
        model = small(family, version)
        update(engine, model, version)
        for worker, parameters in enumerate(engine._engine.collective_rpc(held)):
            wanted = expected(model, EngineSizes(tp, pp=pp), worker)
            assert parameters.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert parameters[name].dtype == tensor.dtype, name
                assert torch.equal(parameters[name].float(), tensor.float()), name
        addresses.append(engine._engine.collective_rpc(addresses_of))
        samples = run(engine, requests(2, 1, 6), Sampling(temperature=1.0))
        assert all(len(sample.token_ids) for sample in samples.values())
    assert addresses[0] == addresses[1]


def addresses_of(worker: Any) -> dict[str, int]:
    model = worker.model_runner.model
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters() if "scale" in name}
