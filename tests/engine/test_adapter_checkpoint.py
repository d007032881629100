"""Adapters saved by one layout, resumed on another, and exported for peft and transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.lora import ALL_LINEAR, LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.adapter_files import export_adapters, export_merged, merge_peft
from mrl.engine.checkpoint_files import SavedFiles
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.parallel import model_parallel
from mrl.errors import EngineError, ModelError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.peft_reader import PeftReader
from mrl.verify.spawn import run_distributed
from tests.engine.adapter_training import Case, log_probs_by_row, peft_log_probs, settings_of
from tests.engine.tiny_training import refusal, step
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
LORA = {"rank": 4, "alpha": 8.0, "targets": [ALL_LINEAR]}


def fresh(case: Case, groups: Any, seed: int = 1) -> MegatronEngine:
    engine = MegatronEngine(EngineRequest(read_spec(case.model), case.head, settings_of(case), seed=seed), groups)
    engine.load(HfReader(case.model))
    return engine


def save(case: Case, directory: str) -> dict[str, Any]:
    """Train two steps, save, and train the third."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = fresh(case, groups)
        first = log_probs_by_row(engine)
        step(engine)
        step(engine)
        checkpoint.save(engine, directory, {"note": 7})
        return {"first": first, "saved": log_probs_by_row(engine), "third": step(engine)}


def resume(case: Case, directory: str, others: list[Case]) -> dict[str, Any]:
    """Load the checkpoint into an engine with other initial adapters, train the third step, and load it wrongly."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = fresh(case, groups, seed=2)
        extra = checkpoint.load(engine, directory)
        found = {"extra": extra, "saved": log_probs_by_row(engine), "third": step(engine)}
        wrong = [fresh(other, groups) for other in others]
        found["refused"] = [refusal(lambda: checkpoint.load(other, directory)) for other in wrong]  # noqa: B023
        return found


def start(case: Case) -> dict[str, Any]:
    """Build an engine whose adapters come from PEFT's files, and train a step."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = fresh(case, groups, seed=3)
        return {"started": log_probs_by_row(engine), "first": step(engine)}


def move(case: Case) -> dict[str, Any]:
    """Move all memory to the host and back, before and after a step."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = fresh(case, groups)
        memory, found = engine.memory, {"before": log_probs_by_row(engine), "copied": []}
        for _ in range(2):
            memory.traffic.to_host_bytes = 0
            memory.offload("parameters", "gradients", "optimizer")
            found["copied"].append(memory.traffic.to_host_bytes)
            found["away"] = sum(memory.device_bytes.values())
            memory.onload("parameters", "gradients", "optimizer")
            found.setdefault("again", log_probs_by_row(engine))
            step(engine)
        found["frozen"] = sum(x.nbytes for model in engine.models for x in model.parameters() if not x.requires_grad)
        assert engine.adapters is not None
        with engine.adapters.off():
            found["refused"] = refusal(lambda: step(engine))
        return found


def test_frozen_weights_are_copied_to_the_host_once(tmp_path: Path) -> None:
    case = Case(str(make_tiny("qwen3", tmp_path / "model")), "", Layout(), LORA)
    (found,) = run_distributed(1, move, case, timeout_s=LIMIT_S)
    assert found["away"] == 0
    assert torch.equal(rows_of([found], "before"), rows_of([found], "again"))
    first, second = found["copied"]
    assert first > found["frozen"] > 500_000
    assert second < found["frozen"] / 2, "after a step only the adapters and their optimizer state are copied"
    assert "the adapters are off" in found["refused"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("adapters")
    model = make_tiny("qwen3", directory / "model")
    case = Case(str(model), "", Layout(tp=2, pp=2, sequence_parallel=True), LORA)
    return case, directory, run_distributed(4, save, case, str(directory / "saved"), timeout_s=LIMIT_S)


def rows_of(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
    rows = {number: x for rank in ranks for number, x in rank[name].items()}
    return torch.from_numpy(np.concatenate([rows[number] for number in sorted(rows)]))


def test_adapters_are_resumed_on_another_layout_and_on_the_same_model(
    saved: tuple[Case, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    case, directory, before = saved
    names = SavedFiles(directory / "saved").manifest["tensors"]
    assert all(name.startswith("base_model.model.") for name in names)
    others = [
        replace(case, layout=Layout(), model=str(make_tiny("qwen3", tmp_path / "other", seed=1))),
        replace(case, layout=Layout(), lora={**LORA, "alpha": 4.0}),
    ]
    after = run_distributed(
        2, resume, replace(case, layout=Layout()), str(directory / "saved"), others, timeout_s=LIMIT_S
    )
    assert after[0]["extra"] == {"note": 7}
    assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=2e-5)
    assert not torch.allclose(rows_of(before, "first"), rows_of(before, "saved"), atol=1e-2), "nothing was learned"
    losses = [sum(rank["third"][0] for rank in ranks) for ranks in (before, after)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    other_base, other_scale = after[0]["refused"]
    assert "whose weights differ from those of" in other_base
    assert "is a checkpoint of adapters with rank=4, alpha=8.0" in other_scale


def test_export_gives_the_same_log_probs_in_peft_and_merged_in_transformers(
    saved: tuple[Case, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case, directory, before = saved
    settings, source = settings_of(case), Path(case.model)
    export_adapters(directory / "saved", source, case.model, settings, torch.float32, tmp_path / "peft")
    number, loss = export_merged(directory / "saved", source, settings, torch.float32, tmp_path / "merged")
    assert number == len(list(HfReader(source)))
    assert loss.share < 1e-6
    base = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (PeftModel.from_pretrained(base, tmp_path / "peft"), merged):
        with torch.no_grad():
            assert torch.allclose(torch.cat(peft_log_probs(model)), rows_of(before, "saved"), atol=2e-5)
    merge_peft(str(tmp_path / "peft"), source, torch.float32, tmp_path / "again")
    exported, again = HfReader(tmp_path / "merged"), HfReader(tmp_path / "again")
    assert all(torch.equal(exported.whole(name), again.whole(name)) for name in exported)
    path = {**LORA, "path": str(tmp_path / "peft")}
    first = replace(case, layout=Layout(tp=2, sequence_parallel=True), lora=path)
    started = run_distributed(2, start, first, timeout_s=LIMIT_S)
    assert torch.allclose(rows_of(started, "started"), rows_of(before, "saved"), atol=2e-5)
    assert started[0]["first"][1] == pytest.approx(before[0]["third"][1], rel=1e-4), "gradients of the same adapters"
    other = LoraConfig(**{**LORA, "targets": ["q_proj", "v_proj"]})
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.lora_A\.weight belongs to no target"):
        PeftReader(str(tmp_path / "peft")).check(read_spec(source), other)
    _, loss = export_merged(directory / "saved", source, settings, torch.bfloat16, tmp_path / "rounded")
    assert loss.share > 1e-3, "rounding to bfloat16 removes a part of the update"
    other = make_tiny("qwen3", tmp_path / "other", seed=1)
    with pytest.raises(EngineError, match="whose weights differ"):
        export_merged(directory / "saved", other, settings, torch.float32, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_adapters_of_experts_are_resumed_on_other_ranks_and_read_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shared = Layout(tp=2, etp=2, sequence_parallel=True)
    case = Case(str(make_tiny("mixtral", tmp_path / "model")), "", shared, LORA)
    before = run_distributed(2, save, case, str(tmp_path / "saved"), timeout_s=LIMIT_S)
    other = replace(case, layout=Layout(ep=2))
    after = run_distributed(2, resume, other, str(tmp_path / "saved"), [], timeout_s=LIMIT_S)
    assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=2e-5)
    assert sum(rank["third"][0] for rank in after) == pytest.approx(sum(x["third"][0] for x in before), rel=1e-5)
    assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    settings, source = settings_of(case), Path(case.model)
    export_adapters(tmp_path / "saved", source, case.model, settings, torch.float32, tmp_path / "peft")
    export_merged(tmp_path / "saved", source, settings, torch.float32, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (PeftModel.from_pretrained(base, tmp_path / "peft"), merged):
        with torch.no_grad():
            assert torch.allclose(torch.cat(peft_log_probs(model)), rows_of(before, "saved"), atol=2e-5)


def test_score_head_is_trained_whole_and_saved_with_the_adapters(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    case = Case(str(make_tiny("qwen3", tmp_path / "model", head="score")), "", Layout(pp=2), LORA, head="score")
    before = run_distributed(2, save, case, str(tmp_path / "saved"), timeout_s=LIMIT_S)
    other = replace(case, layout=Layout(tp=2, sequence_parallel=True))
    after = run_distributed(2, resume, other, str(tmp_path / "saved"), [], timeout_s=LIMIT_S)
    assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=2e-5)
    assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    settings, source = settings_of(case), Path(case.model)
    export_adapters(tmp_path / "saved", source, case.model, settings, torch.float32, tmp_path / "peft")
    export_merged(tmp_path / "saved", source, settings, torch.float32, tmp_path / "merged")
    held = load_file(tmp_path / "peft" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert not torch.allclose(held, HfReader(source).whole("score.weight"), atol=1e-3), "the head was not trained"
    base = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        found = [model(tokens).logits for model in (PeftModel.from_pretrained(base, tmp_path / "peft"), merged)]
    assert torch.allclose(*found, atol=2e-5)


def test_first_adapters_depend_on_seed_and_name_only(saved: tuple[Case, Path, list[dict[str, Any]]]) -> None:
    from mrl.engine.first_adapters import initial_value

    name, lora = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", LoraConfig(rank=4, alpha=8.0)
    first = initial_value(name, (4, 64), lora, 1)
    assert torch.equal(first, initial_value(name, (4, 64), lora, 1))
    assert not torch.equal(first, initial_value(name, (4, 64), lora, 2))
    assert not torch.equal(first, initial_value(name.replace("up", "gate"), (4, 64), lora, 1))
    assert 0.1 < float(first.abs().max()) <= 1 / 8
    gaussian = initial_value(name, (64, 64), replace(lora, rank=64, init="gaussian"), 1)
    assert float(gaussian.std()) == pytest.approx(1 / 64, rel=0.1)
    assert not initial_value(name.replace("lora_A", "lora_B"), (96, 4), lora, 1).any()
