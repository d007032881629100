"""Transfer of one version to one worker: placement, comparison, and workers that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.dtypes import dtype_name, torch_dtype
from mrl.errors import EngineError, RolloutError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.rollout_table import EngineSizes
from mrl.models.table import shards_of
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.exchange import JoinedTransport
from mrl.weight_sync.ipc import NUM_SLOTS, IpcReceiver
from mrl.weight_sync.planner import ReshardPlanner
from mrl.weight_sync.resharder import EngineTransfer, Resharder, ReshardReport, WeightSyncSpec, _few
from mrl.weight_sync.rollout_layout import RolloutLayout
from tests.models.conftest import Tiny
from tests.rollout.trainer_side import fused

CPU = torch.device("cpu")
LIMIT_S = 20.0
BUCKET_BYTES = 200_000
Change = Callable[[dict[str, str]], dict[str, str]]


def nothing_else(digests: dict[str, str]) -> dict[str, str]:
    return digests


class Worker:
    """An engine's side in a thread. It receives versions, keeps the tensors, and returns the configured answers."""

    def __init__(self, path: Path, answers: list[Change | str]) -> None:
        self.versions: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.receiver = IpcReceiver(path, LIMIT_S)
        self.thread = threading.Thread(target=self.take_in, args=(answers,), daemon=True)
        self.thread.start()

    def take_in(self, answers: list[Change | str]) -> None:
        for answer in answers:
            held: dict[str, torch.Tensor] = {}
            digests, version = Digests(), -1
            for bucket in self.receiver.buckets():
                version = bucket.version
                if isinstance(answer, str):
                    self.receiver.reject(answer)
                    break
                for name, tensor in bucket.tensors.items():
                    held[name] = tensor.clone()
                    digests.add(name, held[name])
            if not isinstance(answer, str):
                self.receiver.reply(answer(digests.read()))
            self.versions.append((version, held))

    def end(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the worker still waits"
        self.receiver.close()


def held_by_one_rank(model: Path, dtype: torch.dtype) -> dict[tuple[int, str], torch.Tensor]:
    reader, spec = HfReader(model), read_spec(model)
    shards = shards_of(spec, Layout(), RankPlace(0, 0, 0, 0), "lm")
    return {(shard.chunk, shard.name): load_shard(reader, shard, dtype) for shard in shards}


class Sender:
    """A trainer of one rank and an engine with tp 1."""

    def __init__(self, model: Path, path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        planner = ReshardPlanner(read_spec(model), Layout(), Mesh(1), RolloutLayout(EngineSizes(1), (0,), (0,)))
        self.held = held_by_one_rank(model, torch_dtype(settings.get("trained_dtype", "float32")))
        transport = JoinedTransport(HashStore(), 0, 1, CPU, LIMIT_S)
        whole = {"trained_dtype": "float32", "bucket_bytes": BUCKET_BYTES, **settings}
        spec = WeightSyncSpec(planner.rollout, (path,), dtype_name(dtype), **whole)
        self.resharder = Resharder(planner, transport, self.held, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_version_arrives_as_the_worker_holds_it_and_is_reported(
    tiny: Tiny, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tiny("qwen3")
    worker = Worker(tmp_path / "0.sock", [nothing_else, nothing_else])
    sender = Sender(model, tmp_path / "0.sock", dtype)
    first = sender.resharder.send(5)
    for tensor in sender.held.values():
        tensor.mul_(2)
    second = sender.resharder.send(6, [0])
    worker.end()
    assert [version for version, _ in worker.versions] == [5, 6]
    for factor, (_, held) in zip((1, 2), worker.versions, strict=True):
        expected = dict(fused(model))
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], (factor * tensor).to(dtype)) for name, tensor in expected.items())
    for version, report in ((5, first), (6, second)):
        assert (report.version, report.worker, report.failure) == (version, 0, "")
        assert report.bytes_sent == report.bytes_received == report.least_bytes == report.num_transfers == 0
        assert report.num_buckets == len(sender.resharder.plan.buckets) > 2
        assert NUM_SLOTS * 0.75 * BUCKET_BYTES < report.extra_bytes <= 2 * BUCKET_BYTES
        assert report.seconds > 0


def test_a_worker_that_is_not_named_is_not_asked(tiny: Tiny, tmp_path: Path) -> None:
    sender = Sender(tiny("qwen3"), tmp_path / "0.sock")
    report = sender.resharder.send(3, [])  # no worker listens, and none is waited for
    assert (report.worker, report.failure, report.least_bytes) == (None, "", 0)
    assert report.extra_bytes < BUCKET_BYTES


def test_buckets_are_no_smaller_than_the_largest_tensor(tiny: Tiny, tmp_path: Path) -> None:
    worker = Worker(tmp_path / "0.sock", [nothing_else])
    sender = Sender(tiny("qwen3"), tmp_path / "0.sock", bucket_bytes=1000)
    assert sender.resharder.send(1).failure == ""
    worker.end()
    assert worker.versions[0][1].keys() == dict(fused(tiny("qwen3"))).keys()


def test_the_trainers_dtype_is_what_it_was_said_to_be(tiny: Tiny, tmp_path: Path) -> None:
    held = held_by_one_rank(tiny("qwen3"), torch.float32)
    planner = ReshardPlanner(read_spec(tiny("qwen3")), Layout(), Mesh(1), RolloutLayout(EngineSizes(1), (0,), (0,)))
    transport = JoinedTransport(HashStore(), 0, 1, CPU, LIMIT_S)
    spec = WeightSyncSpec(planner.rollout, (tmp_path / "0.sock",), "float32", "bfloat16")
    with pytest.raises(EngineError, match=r"should be torch\.bfloat16, but it is torch\.float32"):
        Resharder(planner, transport, held, spec)


def without(name: str) -> Change:
    return lambda digests: {key: value for key, value in digests.items() if key != name}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda digests: {**digests, NORM: "another"}, f"1 differ: `{NORM}`"),
        (without(NORM), f"1 are missing: `{NORM}`"),
        (lambda digests: {**digests, "stale": "x"}, "1 were not sent: `stale`"),
        (
            lambda digests: {**without(NORM)(digests), "stale": "x"},
            f"1 are missing: `{NORM}`; 1 were not sent: `stale`",
        ),
    ],
    ids=["differ", "missing", "not sent", "both"],
)
def test_a_worker_that_holds_something_else_stops_the_run(
    tiny: Tiny, tmp_path: Path, answer: Change, what: str
) -> None:
    worker = Worker(tmp_path / "0.sock", [answer])
    sender = Sender(tiny("qwen3"), tmp_path / "0.sock")
    with pytest.raises(RolloutError) as caught:
        sender.resharder.send(4)
    worker.end()
    assert caught.value.what == f"rollout worker 0 does not hold version 4 as it was sent: {what}"


def test_a_worker_that_refuses_is_reported_and_the_next_version_reaches_it(tiny: Tiny, tmp_path: Path) -> None:
    worker = Worker(tmp_path / "0.sock", ["out of memory", nothing_else])
    sender = Sender(tiny("qwen3"), tmp_path / "0.sock")
    reports: list[ReshardReport] = [sender.resharder.send(version) for version in (1, 2)]
    worker.end()
    assert reports[0].failure == "rollout worker 0 refused the weights: out of memory"
    assert reports[1].failure == ""
    assert [version for version, _ in worker.versions] == [1, 2]


def test_after_a_failure_nothing_more_is_attempted() -> None:
    asked: list[str] = []

    class Broken:
        receiver = "rollout worker 0"

        def begin(self, version: int) -> None:
            asked.append("begin")
            raise RolloutError(f"no worker listens for {version}")

        def slot(self) -> None:
            asked.append("slot")

        def end(self) -> None:
            asked.append("end")

        def close(self) -> None:
            asked.append("close")

    sender: Any = Broken()
    delivery = EngineTransfer(sender, 8, torch.float32)
    bucket: Any = type("Bucket", (), {"tensors": (1,)})
    assert delivery.open(bucket) is None
    delivery.end()
    assert delivery.failure == "no worker listens for 8"
    assert asked == ["begin", "close", "close"]


def test_few_of_many_names_are_named() -> None:
    assert _few(["a", "b"]) == "`a`, `b`"
    assert _few([str(number) for number in range(8)]).endswith("`7`")
    assert _few([str(number) for number in range(11)]).endswith("`7` and 3 more")
