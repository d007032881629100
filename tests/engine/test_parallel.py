"""The device of each rank, and the end of Megatron's groups. The tests of the engine cover the groups themselves."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from mrl.config.schema import ParallelConfig
from mrl.engine.parallel import model_parallel, take_device


class Engine:
    itself: Engine


@pytest.mark.parametrize(("local_rank", "visible", "taken"), [(0, 8, 0), (3, 8, 3), (3, 1, 0)])
def test_each_rank_has_a_gpu_of_its_own_also_where_it_sees_that_one_alone(
    local_rank: int, visible: int, taken: int
) -> None:
    """CUDA is mocked, because these tests run without it."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=visible),
        mock.patch.object(torch.cuda, "set_device") as set_device,
    ):
        assert take_device(local_rank) == "nccl"
    set_device.assert_called_once_with(taken)


def test_without_cuda_a_rank_has_one_thread() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch, "set_num_threads") as set_num_threads,
    ):
        assert take_device(3) == "gloo"
    set_num_threads.assert_called_once_with(1)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_nobody_reads_groups_of_gloo_so_megatron_makes_none(on_gpu: bool) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=on_gpu),
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "get_world_size", return_value=1),
        mock.patch("mrl.engine.cpu_shim.install"),
        mock.patch("megatron.core.parallel_state.initialize_model_parallel", side_effect=KeyboardInterrupt) as made,
        pytest.raises(KeyboardInterrupt),
        model_parallel(ParallelConfig(), seed=1),
    ):
        pass
    assert made.call_args.kwargs["create_gloo_process_groups"] is False


def test_an_earlier_engine_and_the_threads_of_its_groups_end_before_new_groups_begin() -> None:
    gc.disable()  # it may run at any allocation
    engine = Engine()
    engine.itself, earlier = engine, weakref.ref(engine)
    del engine
    with (
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "get_world_size", return_value=1),
        mock.patch("mrl.engine.cpu_shim.install"),
        mock.patch("megatron.core.parallel_state.initialize_model_parallel", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
        model_parallel(ParallelConfig(), seed=1),
    ):
        pass
    is_collected = earlier() is None
    gc.enable()
    assert is_collected


def test_every_rank_destroys_groups_in_the_same_order() -> None:
    pg_map = distributed_c10d._pg_map
    made = list(range(1, 9))
    with (
        mock.patch.dict(pg_map),
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "get_world_size", return_value=1),
        mock.patch.object(torch.distributed, "destroy_process_group") as destroy,
        mock.patch("mrl.engine.cpu_shim.install"),
        mock.patch(
            "megatron.core.parallel_state.initialize_model_parallel",
            side_effect=lambda **_: pg_map.update(dict.fromkeys(made)),  # type: ignore[arg-type]
        ),
        mock.patch("megatron.core.tensor_parallel.model_parallel_cuda_manual_seed", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
        model_parallel(ParallelConfig(), seed=1),
    ):
        pass
    assert [call.args[0] for call in destroy.call_args_list] == made[::-1]
