"""`mrl verify layout`: the user's family and layout on a small model, and verdicts that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli.main import main
from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.models.families import spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.layout import check_layout
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.verify import layout
from mrl.verify.parity import ParityCase

ROOT = Path(__file__).parents[2]
LAYOUTS = [
    ("Llama-3.1-70B", ParallelConfig(tp=8, pp=4)),
    ("Qwen2.5-7B", ParallelConfig(tp=4)),
    ("Qwen2.5-0.5B", ParallelConfig(pp=2, vpp=2)),
    ("Qwen3-30B-A3B", ParallelConfig(tp=4, ep=8, etp=2)),
    ("Mixtral-8x22B", ParallelConfig(tp=2, pp=4, ep=4)),
    ("GLM-4.5-Air", ParallelConfig(tp=2, pp=2, ep=16)),
]


@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_a_small_model_is_divided_as_the_large_one(name: str, parallel: ParallelConfig) -> None:
    values = model_values(name)
    large = spec_of(HfConfig(values, name))
    small = spec_of(HfConfig(small_config(values, parallel), name))
    check_layout(parallel, small)
    assert small.family == large.family
    assert small.tied == large.tied
    assert (small.num_kv_heads < parallel.tp) == (large.num_kv_heads < parallel.tp)
    assert (small.num_heads > small.num_kv_heads) == (large.num_heads > large.num_kv_heads)
    assert small.num_parameters < 2_000_000


def test_all_vectors_of_a_random_model_show_a_mix_up_and_correction_biases_are_float32(tmp_path: Path) -> None:
    values = small_config(model_values("GLM-4.5-Air"), ParallelConfig())
    tensors = load_file(layout.make_random(values, "lm", tmp_path, torch.bfloat16) / "model.safetensors")
    vectors = {name: tensor.float() for name, tensor in tensors.items() if tensor.ndim == 1}
    assert [name for name, vector in vectors.items() if len(vector.unique()) < len(vector) / 2] == []
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert [name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16] == [bias]


def test_few_ranks_show_a_layout() -> None:
    assert layout.fewest_ranks(ParallelConfig(tp=2, pp=2), dp=16) == 8
    assert layout.fewest_ranks(ParallelConfig(tp=2), dp=1) == 2
    assert layout.fewest_ranks(ParallelConfig(tp=2, ep=8), dp=16) == 8


@pytest.mark.slow
def test_layouts_are_right_in_both_formats(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["verify", "layout", "configs/laptop-ppo.yaml", "--role=critic", "--model=Qwen2.5-0.5B"]
    assert main(arguments) == 0
    assert "critic: right on 4 ranks, a small qwen2 in float32: from transformers " in capfd.readouterr().out
    assert main([*arguments, "--dtype=bfloat16"]) == 0
    assert "critic: right on 4 ranks, a small qwen2 in bfloat16: from transformers " in capfd.readouterr().out


def test_adapters_are_verified_with_random_values(tmp_path: Path) -> None:
    """New ones change nothing, so a layout that forgot them would seem right."""
    lora = LoraConfig(rank=4, alpha=8.0)
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    settings = TrainedModelConfig(parallel=parallel, dtype="float32", max_tokens_per_device=64, lora=lora)
    verified = layout.verify_layout(model_values("Qwen3-8B"), "lm", settings, 2, tmp_path / "model")
    assert verified.is_right, verified
    alone = ParityCase(str(tmp_path / "model"), "lm", parallel, 64)
    values = layout.verify_layout(model_values("Qwen3-8B"), "score", settings, 2, tmp_path / "values" / "model")
    assert values.is_right, values
    base, merged = (layout.transformers_scores(tmp_path / name, alone) for name in ("model", "merged"))
    assert abs(base - merged).max() > 1000 * verified.tolerance.scores


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Replace the measurement by a good result, on a machine that seems to have eight GPUs."""
    monkeypatch.chdir(ROOT)
    right = layout.Verified(8, 0.0, 0.0, 0.0, 0.0, layout.FLOAT32)
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=8),
        mock.patch.object(layout, "verify_layout", return_value=right) as verify_layout,
    ):
        yield verify_layout


def test_what_is_measured_is_the_layout_with_the_users_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[ParityCase]] = []

    def run(num_ranks: int, function: Any, cases: list[ParityCase], **_: Any) -> Any:
        asked.append(cases)
        if num_ranks > 1:
            raise InterruptedError
        return [[None]]

    for name in ("transformers_scores", "merge_ranks"):
        monkeypatch.setattr(layout, name, lambda *_: None)
    monkeypatch.setattr(layout, "run_distributed", run)
    parallel, megatron = (
        ParallelConfig(tp=2, pp=2),
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    )
    ddp, optimizer = {"overlap_grad_reduce": True}, {"lr": 1.0, "adam_beta1": 0.5}
    settings = TrainedModelConfig(
        parallel=parallel, max_tokens_per_device=64, megatron=megatron, ddp=ddp, optimizer=optimizer
    )
    with pytest.raises(InterruptedError):
        layout.verify_layout(model_values("Qwen2.5-0.5B"), "lm", settings, 4, tmp_path)
    (alone,), cases = asked
    assert (alone.parallel, alone.megatron, alone.ddp) == (ParallelConfig(), {}, {})
    assert all((case.parallel, case.megatron, case.ddp) == (parallel, megatron, ddp) for case in cases)
    assert {case.max_tokens for case in cases} == set(layout.BUDGETS)
    assert all(case.optimizer["adam_beta1"] == 0.5 for case in [alone, *cases])


ON_8_GPUS = "configs/grpo-qwen2.5-7b-1n8g.yaml"
ON_64_GPUS = "configs/ppo-llama3.1-70b-8n8g.yaml"


@pytest.mark.parametrize(
    ("config", "options", "device", "dtype", "shows_all"),
    [
        (ON_8_GPUS, [], "gpu", "bfloat16", True),
        (ON_8_GPUS, ["--dtype=float32"], "gpu", "float32", True),
        (ON_8_GPUS, ["--device=cpu"], "cpu", "float32", False),
        (ON_8_GPUS, ["--device=cpu", "--dtype=bfloat16"], "cpu", "bfloat16", False),
        ("configs/laptop-grpo.yaml", ["--model=Qwen2.5-0.5B"], "cpu", "float32", True),
    ],
)
def test_ranks_are_what_the_configuration_says_unless_told_otherwise(
    measured: mock.Mock,
    capsys: pytest.CaptureFixture[str],
    config: str,
    options: list[str],
    device: str,
    dtype: str,
    *,
    shows_all: bool,
) -> None:
    assert main(["verify", "layout", config, *options]) == 0
    (_, _, settings, _, _, on_device), _ = measured.call_args
    assert (on_device, settings.dtype) == (device, dtype)
    said = capsys.readouterr().out
    assert f" in {dtype}: from transformers 0.0e+00 (at most 2.0e-05); from one rank: " in said
    assert ("checked with gloo on the CPU, without NCCL, Transformer Engine" in said) is not shows_all
    assert ("or bfloat16" in said) is (not shows_all and dtype == "float32")


def test_a_wrong_layout_has_an_exit_code(measured: mock.Mock, capsys: pytest.CaptureFixture[str]) -> None:
    measured.return_value = replace(measured.return_value, grad_norm=0.5)
    assert main(["verify", "layout", ON_8_GPUS]) == 1
    said = capsys.readouterr().out
    assert "actor: WRONG on 8 ranks, a small qwen2 in bfloat16: " in said
    assert "gradient norm 5.0e-01 (1.0e-05), parameters" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [],
            "64 GPUs, one for each rank, but this machine has 8; use a smaller pp, which checks the same, or --device=",
        ),
        (
            ["actor.parallel={tp: 8, pp: 1, vpp: 1}"],
            "16 GPUs, one for each rank, but this machine has 8; --device=cpu,",
        ),
        (
            ["--device=cpu"],
            "64 processes, but --max-ranks is 16; use a smaller pp, which checks the same, or --max-ranks=64",
        ),
    ],
)
def test_a_layout_that_is_too_large_starts_nothing(
    measured: mock.Mock, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["verify", "layout", ON_64_GPUS, "--role=actor", *options]) == 2
    assert f"actor: not checked: this layout needs {said}" in capsys.readouterr().out
    measured.assert_not_called()
