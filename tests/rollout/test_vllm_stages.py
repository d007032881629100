"""vLLM engines with pipeline stages: each update reaches every stage, and samples are those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mrl.errors import SetupError
from mrl.models.rollout_table import stage_layers
from mrl.rollout.engine import RolloutEngine
from tests.rollout.conftest import Small, requests
from tests.rollout.test_vllm_engine import assert_same
from tests.rollout.test_vllm_weights import SAMPLING, assert_follows, force_whole_tensors
from tests.rollout.trainer_side import update

ON_DEMAND = (pytest.mark.slow, pytest.mark.on_demand)
MORE = [
    ("qwen3_moe", False, 2, 2),
    ("llama", False, 2, 2),
    ("mistral", False, 1, 4),
    ("qwen2", True, 1, 3),
    ("mixtral", False, 1, 2),
]
MORE += [(family, False, 1, 2) for family in ("qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss")]


@pytest.mark.parametrize(
    ("family", "tied", "tp", "pp"),
    [
        pytest.param("qwen3", True, 1, 2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=ON_DEMAND) for case in MORE),
    ],
)
def test_an_engine_with_stages_computes_with_each_version(
    make_engine: Callable[..., RolloutEngine],
    small: Small,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    tied: bool,
    tp: int,
    pp: int,
) -> None:
    engine = make_engine("vllm", small(family, 0, tied), tp, pp=pp)
    assert not engine.full_tensor_reason
    oracle = make_engine("transformers", small(family, 0, tied))
    assert_follows(engine, oracle, [small(family, seed, tied) for seed in (1, 2)])
    engine.start(requests(3, 2, 12), SAMPLING)
    engine.step()
    engine.abort()  # while a batch is on its way through the stages
    for either in (engine, oracle):
        either.sleep()
        either.wake("weights")
        update(either, small(family, 3, tied), 3)
        either.wake("kv_cache")
    assert_same(engine, oracle, requests(3, 2, 12), SAMPLING)
    if family != "gpt_oss":  # refused
        force_whole_tensors(engine, monkeypatch)
        assert_follows(engine, oracle, [small(family, 4, tied)])


def test_stages_have_the_layers_that_vllm_gives_them() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            ours = [stage_layers(layers, pp, stage) for stage in range(pp)]
            assert ours == [range(*get_pp_indices(layers, stage, pp)) for stage in range(pp)]


def test_layers_that_the_environment_gives_to_stages_are_refused(
    make_engine: Callable[..., RolloutEngine], small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    with pytest.raises(SetupError, match="is 1,3, but mrl sends each stage of an engine the layers"):
        make_engine("vllm", small("qwen3"), pp=2)
