"""Weight updates of a running vLLM engine: dense, tied and expert models, fused or whole tensors, and rejections."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import Parameter

from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Sampling
from tests.models.quantized import pack_mxfp4, quantize
from tests.rollout.conftest import Small, requests
from tests.rollout.test_vllm_engine import assert_same
from tests.rollout.trainer_side import InBackground, fused, send, update, whole

SLOW, ON_DEMAND = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.on_demand]
MODELS = [pytest.param("qwen3", True), pytest.param("qwen3_moe", False)]
MODELS += [pytest.param(family, False, marks=SLOW) for family in ("deepseek_v3", "gpt_oss")]
OTHERS = ("qwen3", "glm4_moe", "llama", "mixtral", "glm4_moe_lite")
MODELS += [pytest.param(family, False, marks=ON_DEMAND) for family in OTHERS]
MODELS += [pytest.param("qwen3_moe", True, marks=ON_DEMAND)]
SAMPLING = Sampling(temperature=0.9)
Make = Callable[..., RolloutEngine]


def assert_follows(engine: RolloutEngine, oracle: RolloutEngine, models: list[Path]) -> None:
    """After each update the engine's results equal those of transformers with the same weights."""
    for version, model in enumerate(models, start=1):
        update(engine, model, version)
        update(oracle, model, version)
        assert_same(engine, oracle, requests(3, 2, 12), SAMPLING)


def force_whole_tensors(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "full_tensor_reason", "the test wants it")


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_new_weights_are_what_is_computed_with(
    make_engine: Make, small: Small, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool
) -> None:
    engine = make_engine("vllm", small(family, 0, tied))
    assert not engine.full_tensor_reason
    oracle = make_engine("transformers", small(family, 0, tied))
    models = [small(family, seed, tied) for seed in (1, 2)]
    assert_follows(engine, oracle, models)
    if family != "gpt_oss":  # refused
        force_whole_tensors(engine, monkeypatch)
        assert_follows(engine, oracle, models)


@pytest.fixture(scope="module")
def engine(make_engine: Make, small: Small) -> RolloutEngine:
    return make_engine("vllm", small("qwen3_moe"))


QKV, EXPERTS = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.2.mlp.experts.routed_experts.w2_weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop(EXPERTS), f"1 of the model's parameters were not sent: {EXPERTS}"),
        (
            lambda t: t.update({"model.layers.1.self_attn.qkv.weight": t.pop(QKV)}),
            "model has no parameter of this name",
        ),
        (
            lambda t: t.update({QKV: t[QKV][:-1].clone()}),
            rf"{QKV}: the trainer sends float32 \[255, 64\], but the model has float32",
        ),
        (
            lambda t: t.update({QKV: t[QKV].bfloat16()}),
            r"the trainer sends bfloat16 \[256, 64\], but the model has float32",
        ),
    ],
)
def test_what_does_not_fit_is_named_on_both_sides(
    engine: RolloutEngine, small: Small, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = dict(fused(small("qwen3_moe")))
    spoil(tensors)
    sending = InBackground(send, engine.settings, 1, tensors.items())
    with pytest.raises(RolloutError, match=message):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match=message):
        sending.result()
    with pytest.raises(RolloutError, match="stale"):
        engine.start(requests(1, 1), SAMPLING)


def test_a_parameter_that_comes_twice_is_named(engine: RolloutEngine, small: Small) -> None:
    tensors = list(fused(small("qwen3_moe")))
    sending = InBackground(send, engine.settings, 1, [*tensors, tensors[3]])
    with pytest.raises(RolloutError, match=f"{tensors[3][0]}: this parameter was sent twice"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match="sent twice"):
        sending.result()


def test_a_trainer_that_vanishes_leaves_an_engine_that_can_be_updated(
    make_engine: Make, engine: RolloutEngine, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for number, entry in enumerate(tensors):
            if number == 15:
                raise KeyError("the trainer dies")
            yield entry

    oracle = make_engine("transformers", small("qwen3_moe"))
    for source in (fused, whole):
        with monkeypatch.context() as patch:
            if source is whole:
                force_whole_tensors(engine, patch)
            sending = InBackground(send, engine.settings, 1, half(source(small("qwen3_moe", 1))))
            with pytest.raises(RolloutError, match=r"the trainer (has )?disconnected"):
                engine.receive_weights(1)
            with pytest.raises(KeyError):
                sending.result()
            assert engine.weight_version is None
            assert_follows(engine, oracle, [small("qwen3_moe", 2)])
    assert_follows(engine, oracle, [small("qwen3_moe", 3)])


@pytest.mark.parametrize(
    "missing", ["model.layers.2.self_attn.k_proj.weight", "model.layers.3.mlp.experts.2.up_proj.weight"]
)
def test_a_whole_tensor_that_is_not_sent_is_noticed(
    engine: RolloutEngine, small: Small, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    force_whole_tensors(engine, monkeypatch)
    sending = InBackground(
        send, engine.settings, 1, ((name, tensor) for name, tensor in whole(small("qwen3_moe")) if name != missing)
    )
    with pytest.raises(RolloutError, match=r"1 of the model's modules are incomplete: model\.layers\.[23]"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match="are incomplete"):
        sending.result()


def test_experts_that_stay_behind_are_seen_in_the_log_probs(
    make_engine: Make, engine: RolloutEngine, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own update leaves the packed experts unchanged, and digests of parameters do not show it."""
    from mrl.weight_sync import vllm_parameters  # loads vLLM

    oracle = make_engine("transformers", small("qwen3_moe"))
    with monkeypatch.context() as patch:
        patch.setattr(vllm_parameters, "_pack", lambda owner: owner.fresh.clear())
        update(engine, small("qwen3_moe", 1), 1)
    update(oracle, small("qwen3_moe", 1), 1)
    with pytest.raises(AssertionError):
        assert_same(engine, oracle, requests(2, 1, 4), SAMPLING)
    update(engine, small("qwen3_moe", 1), 1)
    assert_same(engine, oracle, requests(2, 1, 4), SAMPLING)


@pytest.mark.parametrize("name", [pytest.param("W_UK_T", marks=SLOW), pytest.param("W_UV", marks=ON_DEMAND)])
def test_old_copies_of_a_weight_of_latents_end_the_update(make_engine: Make, small: Small, name: str) -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def copy(worker: Any) -> None:
        modules = worker.model_runner.model.modules()
        attention = next(module for module in modules if isinstance(module, MLAAttention))
        setattr(attention, name, Parameter(getattr(attention, name).clone(), requires_grad=False))

    engine: Any = make_engine("vllm", small("deepseek_v3"))
    engine._engine.collective_rpc(copy)
    sending = InBackground(send, engine.settings, 1, fused(small("deepseek_v3", 1)))
    with pytest.raises(
        RolloutError, match=r"layers\.0\..*: attention decodes with weights that differ from those of kv"
    ):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match="decodes with weights that differ"):
        sending.result()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "change"), [("qwen3", quantize), ("gpt_oss", pack_mxfp4)], ids=["fp8", "mxfp4"])
def test_an_engine_of_a_quantized_model_computes_with_the_unquantized_weights_it_is_sent(
    make_engine: Make, small: Small, tmp_path: Path, family: str, change: Callable[[Path], Path]
) -> None:
    quantized = change(Path(shutil.copytree(small(family), tmp_path / "quantized")))
    engine = make_engine("vllm", quantized)
    assert not engine.full_tensor_reason
    oracle = make_engine("transformers", small(family))
    assert_follows(engine, oracle, [quantized])
