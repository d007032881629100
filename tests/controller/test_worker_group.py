from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from mrl.config.mesh import Mesh
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, RunContext, worker_group
from mrl.controller.transport import fetch, store
from mrl.errors import BatchError, PlacementError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows


def prompts(num_rows: int = 6) -> DataProto:
    rows = [torch.arange(row + 1) for row in range(num_rows)]
    return DataProto.from_dict({"prompts": from_rows(rows)}, {"uid": [f"u{row}" for row in range(num_rows)]})


def test_one_to_all_asks_every_rank(rank_workers: RayWorkerGroup) -> None:
    assert rank_workers.greet("you") == [f"hello you from {rank} of 4" for rank in range(4)]


def test_a_large_argument_of_many_ranks_is_stored_once(
    rank_workers: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[object] = []
    put = ray.put

    def count(argument: object) -> object:
        stored.append(argument)
        return put(argument)

    monkeypatch.setattr(ray, "put", count)
    large = "x" * 70_000
    expected = [f"hello {large} from {rank} of 4" for rank in range(4)]
    assert rank_workers.greet(large) == expected
    is_direct = rank_workers._fan_out is None
    assert stored == ([] if is_direct else [[[large], {}]]), "four ranks are few for direct calls"
    monkeypatch.setattr(worker_group, "_STORED_ONCE_RANKS", 4)
    assert rank_workers.greet(large) == expected
    rank_workers.greet("you")
    assert stored == ([large] if is_direct else [[[large], {}]] * 2)


def test_rank_zero_alone_answers(rank_workers: RayWorkerGroup) -> None:
    assert rank_workers.who() == 0


def test_temporary_files_of_a_worker_go_with_its_ray(rank_workers: RayWorkerGroup) -> None:
    directory = Path(rank_workers.temporary_directory())
    assert directory.name == "ray"
    assert directory.parent.parent == Path(tempfile.gettempdir())
    assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_ranks_meet_in_torch_distributed(rank_workers: RayWorkerGroup) -> None:
    assert rank_workers.join() == [6.0] * 4


def test_data_parallel_splits_once_and_collects_from_who_holds_the_answer(rank_workers: RayWorkerGroup) -> None:
    batch = prompts()
    made = rank_workers.generate(batch, extra=2)
    assert made.meta_info == {"rank": [0, 2]}, "the first tp rank of each data-parallel shard answers"
    assert made.row_ids.tolist() == list(range(6))
    assert sorted(made.stored) == ["responses", "rollout_log_probs"], "sequences stay where they were made"
    assert made["scores"].tolist() == [3, 4, 5, 6, 7, 8], "numbers per row come along"
    rows = fetch(made, timeout_s=5)["responses"].rows()
    assert [(len(row), set(row.tolist())) for row in rows] == [
        (3, {0}),
        (4, {0}),
        (5, {0}),
        (6, {1}),
        (7, {1}),
        (8, {1}),
    ]


def test_rows_rebalanced_between_shards_arrive_whole(rank_workers: RayWorkerGroup) -> None:
    batch = prompts().union(rank_workers.generate(prompts(), extra=2))
    seen = rank_workers.count(batch.take([5, 0, 4, 1, 3, 2]))
    assert [shard["row_ids"] for shard in seen] == [[5, 0, 4], [1, 3, 2]]
    assert [shard["uid"] for shard in seen] == [["u5", "u0", "u4"], ["u1", "u3", "u2"]]
    assert [shard["tokens"] for shard in seen] == [8 + 3 + 7, 4 + 6 + 5]
    assert [shard["made_by"] for shard in seen] == [[0, 1], [0, 1]]
    assert all(shard["columns"] == ["responses", "uid"] for shard in seen), "only what is read is shipped"


def test_the_caller_may_cut_the_shards(rank_workers: RayWorkerGroup) -> None:
    batch = prompts().union(rank_workers.generate(prompts(), extra=1))
    seen = rank_workers.count(batch.split([1, 5]))
    assert [shard["row_ids"] for shard in seen] == [[0], [1, 2, 3, 4, 5]]
    nothing, everything = rank_workers.count(batch.split([0, 6]))
    assert (nothing["row_ids"], nothing["tokens"], everything["tokens"]) == ([], 0, 27)


def test_stored_and_local_columns_are_the_same_to_a_worker(rank_workers: RayWorkerGroup) -> None:
    batch = prompts()
    large = DataProto.from_dict({"prompts": from_rows([torch.arange(40_000)] * 3)}, row_ids=[4, 9, 1])
    for one in (batch, store(batch), large, store(large)):
        made = rank_workers.generate(one, extra=1)
        assert made.lengths("responses").tolist() == (one.lengths("prompts") + 1).tolist()
        assert np.array_equal(made.row_ids, one.row_ids)


def test_a_future_does_not_wait(rank_workers: RayWorkerGroup) -> None:
    future = rank_workers.generate.future(prompts(), extra=3)
    assert rank_workers.greet.future("later").get()[3] == "hello later from 3 of 4"
    assert len(future.get()) == 6


def test_calls_reach_a_rank_in_order_also_those_of_rank_0_alone(rank_workers: RayWorkerGroup) -> None:
    futures = []
    for number in range(8):
        futures += [rank_workers.note.future(number), rank_workers.note_alone.future(-number)]
    for future in reversed(futures):
        future.get()
    first, *others = rank_workers.noted()
    assert first == [entry for number in range(8) for entry in (number, -number)]
    assert others == [list(range(8))] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda group: group.count(prompts()),
            "count needs the column `responses`, which no method has written\n  fix: columns so far: prompts, uid",
        ),
        (
            lambda group: group.generate(prompts(1), extra=1),
            "1 rows cannot be split into 2 shards: each needs at least one row",
        ),
        (
            lambda group: group.generate([prompts()], extra=1),
            "generate got 1 shards, but actor has data-parallel size 2",
        ),
        (
            lambda group: group.generate("rows", extra=1),
            "generate takes a DataProto as first argument, or a list with one per data-parallel rank, not str",
        ),
    ],
)
def test_a_wrong_call_is_refused_before_it_is_sent(rank_workers: RayWorkerGroup, call: object, message: str) -> None:
    with pytest.raises(BatchError) as caught:
        call(rank_workers)  # type: ignore[operator]
    assert message in str(caught.value)
    assert rank_workers.who() == 0, "the workers are as well as before"


def test_an_unregistered_method_is_not_there(rank_workers: RayWorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r'actor has no registered method "gret"; did you mean "greet"\?'):
        rank_workers.gret("x")
    with pytest.raises(AttributeError, match="no registered method"):
        rank_workers.all_reduce()


def test_layout_and_pool_must_agree(run_context: RunContext) -> None:
    with pytest.raises(PlacementError, match='critic\'s layout has 8 ranks, but pool "all": 4 CPU slots on 1 node'):
        RayWorkerGroup("critic", RayClassWithInitArgs("tests.rank_workers:RankWorker"), Mesh(8, tp=2), run_context)
