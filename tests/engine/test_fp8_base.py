"""A frozen model in FP8 trains, moves, resumes and is exported like a model that starts from the same values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.dtypes import torch_dtype
from mrl.engine import fp8_base
from mrl.engine.adapter_files import export_merged, write_peft
from mrl.engine.fp8_base import Fp8Weight
from mrl.engine.parallel import model_parallel
from mrl.models.adapters import adapter_tensors
from mrl.models.families import read_spec
from mrl.models.fp8_base import fp8_tensors
from mrl.models.fp8_exact import rounded_to_fp8
from mrl.plan.weights import stage_weights
from mrl.verify.spawn import run_distributed
from tests.engine.adapter_training import Case, engine_of, log_probs_by_row, measure, settings_of
from tests.engine.test_adapter_checkpoint import resume, rows_of, save
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 128}
SIZES |= {"num_key_value_heads": 2}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}
FP8 = {**LORA, "base_quantization": "fp8_per_block"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: list[tuple[str, Layout, dict[str, Any]]] = [
    ("qwen3", Layout(tp=2, sequence_parallel=True), RECOMPUTED),
    ("qwen3", Layout(pp=2, vpp=2), {}),
    ("qwen3_moe", Layout(ep=2), {}),
    ("qwen3_moe", Layout(tp=2, etp=2, sequence_parallel=True), RECOMPUTED),
    ("mixtral", Layout(), {"dtype": "bfloat16"}),
]


def make_pair(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """Save a model, and the same model with the values of its matrices in FP8, as a trainer in `dtype` rounds them."""
    model = make_tiny(family, directory / family, sizes=SIZES)
    rounded, values = directory / f"{family}-rounded", load_file(model / "model.safetensors")
    rounded.mkdir()
    (rounded / "config.json").write_bytes((model / "config.json").read_bytes())
    values |= {name: rounded_to_fp8(values[name].to(dtype)).float() for name in fp8_tensors(read_spec(model))}
    save_file(values, rounded / "model.safetensors", metadata={"format": "pt"})
    return str(model), str(rounded)


def case_of(model: str, layout: Layout, settings: dict[str, Any], lora: dict[str, Any]) -> Case:
    adapters, spec = Path(f"{model}-adapters"), read_spec(model)
    if not adapters.exists():
        random, shapes = torch.Generator().manual_seed(5), adapter_tensors(spec, LoraConfig(**lora))
        values = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
        write_peft(adapters, values, LoraConfig(**lora), model)
    dtype = settings.get("dtype", "float32")
    return Case(model, str(adapters), layout, lora, {x: settings[x] for x in settings if x != "dtype"}, dtype)


def inspect(cases: list[Case]) -> list[dict[str, Any]]:
    return [_inspect(case) for case in cases]


def _inspect(case: Case) -> dict[str, Any]:
    """Return the memory of the parameters, whether they survive an offload, the digest, and the weights for engines."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = engine_of(case, groups)
        sent, held = engine.weights_to_send(), list(engine.held_tensors())
        assert all(torch.equal(sent[shard.chunk, shard.name], tensor) for shard, tensor in held)
        assert len(sent) == len(held)
        before, found = log_probs_by_row(engine), {"bytes": engine.memory.device_bytes["parameters"]}
        engine.memory.offload("parameters", "gradients", "optimizer")
        away = sum(engine.memory.device_bytes.values())
        engine.memory.onload("parameters", "gradients", "optimizer")
        after = log_probs_by_row(engine)
        same = all(np.array_equal(before[row], after[row]) for row in before)
        weights = stage_weights(engine.request.spec, engine.request.settings, groups.mesh, "lm", groups.at.pp)
        return found | {"same": same, "away": away, "digest": engine.base_digest(), "planned": weights.parameters}


@pytest.mark.slow
def test_model_in_fp8_equals_one_that_starts_from_its_values(tmp_path: Path) -> None:
    families = {family: torch_dtype(settings.get("dtype", "float32")) for family, _, settings in CASES}
    pairs = {family: make_pair(family, tmp_path, dtype) for family, dtype in families.items()}
    quantized = [case_of(pairs[family][0], layout, settings, FP8) for family, layout, settings in CASES]
    plain = [case_of(pairs[family][1], layout, settings, LORA) for family, layout, settings in CASES]
    by_rank = run_distributed(2, measure, [*quantized, *plain], timeout_s=LIMIT_S)
    for number, case in enumerate(quantized):
        for found in by_rank:
            one, other = found[number], found[number + len(CASES)]
            assert (one.loss, one.grad_norm, one.num_buffered) == (other.loss, other.grad_norm, other.num_buffered)
            for mine, its in ((one.on, other.on), (one.off, other.off)):
                assert mine.keys() == its.keys()
                assert all(np.array_equal(mine[row], its[row]) for row in mine), case
            for (name, box, part), (*_, its_part) in zip(one.gradients, other.gradients, strict=True):
                assert np.array_equal(part, its_part), (case, name, box)


def test_memory_is_about_one_byte_per_weight_as_planned_and_moves_to_the_host(tmp_path: Path) -> None:
    cases = [(family, layout, settings) for family, layout, settings in CASES if family == "qwen3_moe"]
    model, rounded = make_pair("qwen3_moe", tmp_path, torch.bfloat16)
    quantized = [case_of(model, layout, {"dtype": "bfloat16"}, FP8) for _, layout, _ in cases]
    plain = [case_of(rounded, layout, {"dtype": "bfloat16"}, LORA) for _, layout, _ in cases]
    for rank in run_distributed(2, inspect, [*quantized, *plain], timeout_s=LIMIT_S):
        for number in range(len(cases)):
            one, other = rank[number], rank[number + len(cases)]
            assert one["same"]
            assert one["away"] == 0
            assert one["bytes"] == one["planned"]
            assert one["bytes"] < 0.56 * other["bytes"], "embeddings, gates, norms and adapters are in bfloat16"
            assert one["digest"] == other["digest"]


def test_run_is_resumed_and_merged_with_the_values_in_fp8(tmp_path: Path) -> None:
    model, rounded = make_pair("qwen3", tmp_path)
    case = Case(model, "", Layout(tp=2, sequence_parallel=True), FP8)
    before = run_distributed(2, save, case, str(tmp_path / "saved"), timeout_s=LIMIT_S)
    other = replace(case, layout=Layout(pp=2))
    after = run_distributed(2, resume, other, str(tmp_path / "saved"), [replace(other, lora=LORA)], timeout_s=LIMIT_S)
    assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=2e-5)
    assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    assert "whose weights differ from those of" in after[0]["refused"][0], "the model in its own dtype is another"
    for source, lora in ((model, FP8), (rounded, LORA)):
        settings = settings_of(replace(case, lora=lora))
        export_merged(tmp_path / "saved", Path(source), settings, torch.float32, Path(f"{source}-merged"))
    one, its = (load_file(f"{source}-merged/model.safetensors") for source in (model, rounded))
    assert all(torch.equal(one[name], its[name]) for name in its)


def test_weight_exists_only_while_the_layer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, made = torch.nn.Linear(256, 128, bias=False), []
    layer.weight.requires_grad_(False)
    expected = rounded_to_fp8(layer.weight)
    make = fp8_base.from_fp8
    monkeypatch.setattr(fp8_base, "from_fp8", lambda *parts: made.append(1) or make(*parts))
    Fp8Weight(layer)
    x = torch.randn(3, 256, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, x @ expected.T)
    assert (len(made), layer.weight.device.type, [*layer.parameters()]) == (1, "meta", [])
    y.sum().backward()
    assert len(made) == 2, "backward makes the weight again"
    assert torch.allclose(x.grad, expected.sum(0).expand(3, -1))
