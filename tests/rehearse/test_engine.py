"""Ranks of engines: vLLM's own models and loaders next to the reshard's plan, and faults in the plan."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.resolved.load import load_any_config
from mrl.config.schema import Config
from mrl.models.families import read_spec
from mrl.models.regions import Region
from mrl.models.rollout_table import EngineSizes, Fused, rollout_tensors
from mrl.rehearse.engine_weights import (
    EngineRanks,
    EngineReport,
    ParameterDifference,
    PlannedWeights,
    RehearsalError,
    differences,
)
from mrl.weight_sync import intersections
from tests.models.conftest import Tiny
from tests.models.tiny_models import make_tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DOWN = "model.layers.2.mlp.down_proj.weight"
QKV = "model.layers.1.self_attn.qkv_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def config(model: Path | str, *overrides: str) -> Config:
    """Return a configuration of four trainer ranks in two stages with engines of two workers."""
    loaded = load_any_config(
        str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"),
        [
            f"model.path={model}",
            *("cluster.devices_per_node=4", "placement.pools.all=4", "actor.parallel={tp: 2, pp: 2}", "rollout.tp=2"),
            *("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"),
            *overrides,
        ],
    ).config
    assert isinstance(loaded, Config)
    return loaded


# --- without vLLM: the table in its place -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "sizes"),
    [
        ("qwen3", [], EngineSizes(2)),
        ("llama_tied", ["rollout.tp=4"], EngineSizes(4)),
        (
            "mixtral",
            ["actor.parallel={tp: 1, pp: 2, ep: 2}", "rollout.vllm={enable_expert_parallel: true}"],
            EngineSizes(2, 2),
        ),
        (
            "gpt_oss",
            ["actor.parallel={tp: 2, pp: 2, ep: 2, sequence_parallel: true}", "rollout.tp=2"],
            EngineSizes(2),
        ),
        ("llama_tied", ["rollout.tp=2", "rollout.pp=2"], EngineSizes(2, pp=2)),
        (
            "qwen2",
            ["cluster.devices_per_node=6", "placement.pools={all: 4, own: 2}", "placement.roles.rollout=own"],
            EngineSizes(2),
        ),
    ],
)
def test_the_plan_of_a_configuration_brings_the_table(
    tiny: Tiny, family: str, overrides: list[str], sizes: EngineSizes
) -> None:
    spec = read_spec(tiny(family))
    planned = PlannedWeights(config(tiny(family), *overrides), spec, "bfloat16")
    for rank in range(sizes.num_workers):
        assert list(differences(rank, planned.of(rank), rollout_tensors(spec, sizes, rank))) == []


def changed(tensors: list[Fused], name: str, **changes: object) -> list[Fused]:
    return [replace(one, **changes) if one.name == name else one for one in tensors]


def test_each_kind_of_difference_is_named(tiny: Tiny) -> None:
    spec = read_spec(tiny("qwen3"))
    right = rollout_tensors(spec, EngineSizes(2), 1)
    by_name = {tensor.name: tensor for tensor in right}

    def found(planned: list[Fused]) -> list[tuple[str, str, str]]:
        return [(one.parameter, one.planned, one.vllm) for one in differences(1, planned, right)]

    assert found(right) == []
    assert found([tensor for tensor in right if tensor.name != DOWN]) == [(DOWN, "nothing", "shape [64, 48]")]
    assert found([*right, by_name[DOWN]]) == [(DOWN, "shape [64, 48]", "no parameter that is still to be filled")], (
        "a tensor that comes twice"
    )
    assert found(changed(right, DOWN, shape=(48, 64))) == [(DOWN, "shape [48, 64]", "shape [64, 48]")]
    (missing,) = found(changed(right, QKV, pieces=by_name[QKV].pieces[:-1]))
    assert missing == (
        QKV,
        "no exact cover: [96:128, 0:64] of [128, 64] is covered 0 times",
        "a value for each element",
    )
    (piece,) = by_name[DOWN].pieces
    of_rank_0 = replace(piece, source=((0, 64), (0, 48)))
    ((name, here, there),) = found(changed(right, DOWN, pieces=(of_rank_0,)))
    assert (name, here) == (DOWN, f"{DOWN} [(0, 64), (0, 48)] at [(0, 64), (0, 48)]")
    assert there == f"{DOWN} [(0, 64), (48, 96)] at [(0, 64), (0, 48)]"
    of_another = replace(piece, hf=DOWN.replace("2", "3"))
    assert found(changed(right, DOWN, pieces=(of_another,)))[0][2] == f"nothing of {of_another.hf}"


def test_padding_with_other_rows_is_named(tiny: Tiny) -> None:
    spec = read_spec(tiny("qwen3"))
    right = rollout_tensors(spec, EngineSizes(2), 1)
    (padding,) = next(tensor.padding for tensor in right if tensor.name == EMBEDDING)
    rows: Region = ((padding[0][0] + 1, padding[0][1]), padding[1])
    (found,) = differences(1, right, changed(right, EMBEDDING, padding=(rows,)))
    assert (found.parameter, found.planned, found.vllm) == (
        EMBEDDING,
        f"zeros at {list(padding)}",
        f"zeros at {[rows]}",
    )


def report(*found: ParameterDifference, not_compared: str = "") -> EngineReport:
    return EngineReport("LlamaForCausalLM", (EngineRanks((0, 1), 9, 3 << 30, found),), not_compared, 12.0)


def test_the_reader_sees_ranks_differences_and_what_was_not_compared() -> None:
    assert list(report().lines()) == [
        "rollout, ranks 0, 1 of an engine: LlamaForCausalLM, 9 parameters, 3.0 GiB, no differences",
        "  12 s",
    ]
    report().check()
    wrong = report(ParameterDifference(1, DOWN, "shape [2, 3]", "shape [3, 2]"))
    assert next(wrong.lines()).endswith(", 1 difference")
    with pytest.raises(
        RehearsalError, match=r"rank 1, .*down_proj.*: the plan has shape \[2, 3\], vLLM has shape \[3, 2\]"
    ):
        wrong.check()
    first, reason, _ = report(not_compared="it is stored by Fp8").lines()
    assert first.endswith("3.0 GiB, not compared")
    assert reason == "rollout: not compared: it is stored by Fp8"


def test_a_difference_ends_the_verb_with_an_error_after_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = report(ParameterDifference(1, DOWN, "shape [2, 3]", "shape [3, 2]"))
    monkeypatch.setattr("mrl.rehearse.processes.rehearse_engine", lambda *_: wrong)
    figures = tmp_path / "figures.json"
    arguments = [str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"), "--role", "rollout", "--json", str(figures)]
    assert main(["rehearse", *arguments]) == 1
    assert f"rank 1, {DOWN}: the plan has shape [2, 3]" in capsys.readouterr().err
    (engine,) = json.loads(figures.read_text())
    assert engine["kinds"][0]["differences"][0]["vllm"] == "shape [3, 2]"


def test_another_engine_is_named_and_not_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"), "rollout.engine=transformers", "--role", "rollout"]
    assert main(["rehearse", *arguments]) == 0
    assert "rollout: not compared: `rollout.engine` is transformers" in capsys.readouterr().out


# --- with vLLM ----------------------------------------------------------------------------------------------


def without_a_piece(tensor: Fused) -> Fused:
    return replace(tensor, pieces=tensor.pieces[:-1]) if tensor.name.endswith("w13_weight") else tensor


def with_a_wrong_shape(tensor: Fused) -> Fused:
    return replace(tensor, shape=(96, 32)) if tensor.name.endswith("down_proj.weight") else tensor


def with_keys_and_values_exchanged(tensor: Fused) -> Fused:
    if not tensor.name.endswith("qkv_proj.weight"):
        return tensor
    q, k, v = tensor.pieces
    return replace(tensor, pieces=(q, replace(k, target=v.target), replace(v, target=k.target)))


FAULTS: dict[str, tuple[str, Callable[[Fused], Fused]]] = {
    "missing piece": ("mixtral", without_a_piece),
    "wrong shape": ("qwen3", with_a_wrong_shape),
    "exchanged": ("qwen3", with_keys_and_values_exchanged),
}
LAYOUTS = {
    "qwen3_moe": ["actor.parallel={tp: 1, pp: 2, ep: 2}"],
    "glm4_moe": ["actor.parallel={tp: 1, pp: 2, ep: 2}"],
    "mixtral": ["actor.parallel={tp: 1, pp: 1, ep: 4}"],
    "gpt_oss": ["actor.parallel={tp: 1, pp: 2, ep: 2}"],
}


def rehearse_all(directory: Path) -> dict[str, EngineReport]:
    """Rehearse engines of tiny models in one process, which loads vLLM once."""
    from mrl.rehearse.vllm_ranks import rehearse_engine

    def of(family: str, tp: int, vllm: str = "{}", pp: int = 1) -> EngineReport:
        model = str(make_tiny(family, directory / family))
        options = [
            f"rollout.tp={tp}",
            f"rollout.pp={pp}",
            f"rollout.vllm={vllm}",
            "algorithm.correction={}",
            *LAYOUTS.get(family, []),
        ]
        return rehearse_engine(config(model, *options), model)

    made = {
        "tied": of("qwen2", 1),
        "dense": of("qwen3", 2),
        "split experts": of("mixtral", 2),
        "whole experts": of("qwen3_moe", 2, "{enable_expert_parallel: true}"),
        "shared experts": of("glm4_moe", 2, "{enable_expert_parallel: true}"),
        "transposed experts": of("gpt_oss", 2),
        "quantized": of("qwen3", 2, "{quantization: fp8}"),
        "for GPUs": of("mixtral", 2, "{moe_backend: triton}"),
        "tied stages": of("llama_tied", 1, pp=2),
        "stages of stages": of("qwen3_moe", 2, pp=2),
    }
    layers = intersections.layer_tensors
    for name, (family, fault) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(intersections, "layer_tensors", lambda *given, fault=fault: map(fault, layers(*given)))
            made[name] = of(family, 2)
    return made


@pytest.mark.needs
@pytest.mark.slow
@pytest.mark.on_demand
def test_vllms_models_have_the_parameters_of_the_plan(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as process:  # vLLM's groups and torch's are global
        made = process.apply_async(rehearse_all, (tmp_path,)).get(300)
    classes = {"tied": "Qwen2", "dense": "Qwen3", "split experts": "Mixtral", "whole experts": "Qwen3Moe"}
    classes["shared experts"] = "Glm4Moe"
    for name, model in classes.items():
        assert (made[name].model_class, made[name].not_compared) == (f"{model}ForCausalLM", "")
        (kind,) = made[name].kinds
        assert (kind.ranks, kind.differences) == ((0,) if name == "tied" else (0, 1), ()), name
    stages = {name: [kind.ranks for kind in made[name].kinds] for name in ("tied stages", "stages of stages")}
    assert stages == {"tied stages": [(0,), (1,)], "stages of stages": [(0, 1), (2, 3)]}
    assert not [one for name in stages for kind in made[name].kinds for one in kind.differences]
    (kind,) = made["whole experts"].kinds
    assert (kind.num_parameters, kind.num_bytes) == (38, 255_104)
    transposed = made["transposed experts"]
    assert "transposes experts while it loads them: only names and shapes are compared" in transposed.not_compared
    assert [kind.differences for kind in transposed.kinds] == [()]

    quantized, for_gpus = made["quantized"], made["for GPUs"]
    assert "quantizes weights to FP8 while it loads them: only names and shapes are compared" in quantized.not_compared
    assert [(kind.ranks, kind.differences) for kind in quantized.kinds] == [((0, 1), ())]
    assert for_gpus.not_compared.startswith("MixtralForCausalLM cannot be built on a CPU as rank 0: ValueError: ")
    assert not for_gpus.kinds

    found = {name: [one for kind in made[name].kinds for one in kind.differences] for name in FAULTS}
    assert [(one.rank, one.parameter.partition("experts.")[2]) for one in found["missing piece"]] == [
        (rank, "routed_experts.w13_weight") for rank in (0, 1) for _ in range(4)
    ]
    assert "of [384, 64] is covered 0 times" in found["missing piece"][0].planned
    assert {(one.planned, one.vllm) for one in found["wrong shape"]} == {("shape [96, 32]", "shape [64, 48]")}
    assert len(found["wrong shape"]) == 8
    key = found["exchanged"][0]
    assert key.planned == "model.layers.0.self_attn.k_proj.weight [(0, 32), (0, 64)] at [(96, 128), (0, 64)]"
    assert key.vllm == "model.layers.0.self_attn.k_proj.weight [(0, 32), (0, 64)] at [(64, 96), (0, 64)]"
    assert len(found["exchanged"]) == 16


@pytest.mark.needs
@pytest.mark.slow
def test_the_verb_rehearses_an_engine_of_a_published_model(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = [str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"), "--role", "rollout", "--json", str(figures)]
    assert main(["rehearse", *arguments]) == 0
    (engine,) = json.loads(figures.read_text())
    (kind,) = engine["kinds"]
    assert engine["model_class"] == "Qwen2ForCausalLM"
    assert engine["not_compared"] == ""
    assert (kind["ranks"], kind["num_parameters"], kind["num_bytes"]) == ([0], 170, 988_065_536)
    assert kind["differences"] == []


def test_a_class_of_vllm_that_cannot_be_imported_has_the_reason() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from mrl.rehearse.vllm_ranks import _import_error

    ModelRegistry.register_model("NeedsMore", "a_package_that_is_missing:NeedsMore")
    try:
        assert str(_import_error("NeedsMore")) == "No module named 'a_package_that_is_missing'"
    finally:
        del ModelRegistry.models["NeedsMore"]
    assert _import_error("Qwen3ForCausalLM") is None
    assert _import_error("UnknownForCausalLM") is None
