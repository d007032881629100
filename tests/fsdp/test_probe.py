"""A model whose attention does not take packed rows is refused, with its name and the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.fsdp import attention, probe
from mrl.fsdp.model import Build, build
from mrl.fsdp.parallel import shard_groups
from tests.models.tiny_models import make_tiny

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": None,
}  # fmt: skip
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "bloom does more with its mask than to hand it to its attention"),
    "llama4_text": (
        {"attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        "the attention of Llama4TextAttention is not causal and not in a sliding window: for example in chunks",
    ),
    "gemma2": ({"head_dim": 8, "final_logit_softcapping": 30.0}, "gemma2 caps its logits"),
}


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    if dist.is_initialized():  # by an engine of an earlier test in this process, which is also alone
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def probed(path: Path) -> None:
    with shard_groups(ParallelConfig(), None, seed=1) as groups:
        model = build(Build(path, "lm", torch.float32, torch.float32), groups)
        random = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            local = parameter.data.to_local()  # type: ignore[attr-defined]
            local.copy_(torch.randn(local.shape, generator=random) * 0.3)
        probe.check_packing(model, groups, torch.float32)


def saved(model_type: str, own: dict[str, Any], directory: Path) -> Path:
    config = AutoConfig.for_model(model_type, **{**SIZES, **own})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_is_not_exact_is_refused(model_type: str, tmp_path: Path) -> None:
    own, message = REFUSED[model_type]
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        probed(saved(model_type, own, tmp_path / "model"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3", "gpt_oss"])
def test_a_model_that_is_exact_is_not(family: str, tmp_path: Path) -> None:
    probed(make_tiny(family, tmp_path / family))


@pytest.mark.usefixtures("alone")
def test_rows_that_see_each_other_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.in_blocks

    def one_row(qkv: Any, segments: Any, *options: Any) -> Any:
        ends = segments.query_lengths.sum(keepdims=True)
        whole = type(segments).of(ends, 1, 0, segments.device)
        return plain(qkv, whole, *options)

    monkeypatch.setattr(attention, "in_blocks", one_row)
    with pytest.raises(ModelError, match="qwen3 does not take packed rows"):
        probed(make_tiny("qwen3", tmp_path / "qwen3"))


def test_a_window_that_only_the_mask_has_is_refused() -> None:
    layer = torch.nn.Linear(1, 1)
    attention._check_mask(layer, attention.MaskMark(None), None)
    attention._check_mask(layer, attention.MaskMark(8), 8)
    for mask, window in ((8, None), (None, 8), (8, 4)):
        with pytest.raises(ModelError, match="in its mask, but"):
            attention._check_mask(layer, attention.MaskMark(mask), window)
    with pytest.raises(ModelError, match="makes a mask without transformers"):
        attention._check_mask(layer, torch.ones(2, 2), None)


def test_masks_are_windows_of_one_size_or_nothing() -> None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    assert attention._reach_of(causal) is None
    for window in (1, 2, 7, 4096):
        assert attention._reach_of(lambda b, h, q, k, w=window: (k <= q) & (k > q - w)) == window
    assert attention._reach_of(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8)) == 0
