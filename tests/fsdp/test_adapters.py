"""Adapters of models that torch shards, against peft: log-probs, gradients, updates, checkpoints, merged weights."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.lora import LoraConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import FsdpConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.adapter_files import export_adapters, export_merged
from mrl.engine.checkpoint_files import SavedFiles
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.merging import MergedWeights
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.errors import EngineError, ModelError
from mrl.fsdp.engine import FsdpEngine
from mrl.fsdp.parallel import shard_groups
from mrl.models.adapters import check_sharded_targets
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.regions import Region, is_exact_cover, slices
from mrl.plan.sharded import role_weights
from mrl.verify.spawn import run_distributed
from tests.engine import adapter_training as megatron
from tests.engine.adapter_training import Floats, log_probs_by_row, peft_log_probs, with_peft
from tests.engine.test_adapter_updates import LOSSES, NUM_UPDATES, NUMBERS, OPTIMIZER, train_with_peft
from tests.engine.test_adapters import ALL, SOME, largest_difference
from tests.engine.tiny_training import LENGTHS, share, step
from tests.fsdp.adapter_training import Case, engine_of, fresh, measure, settings_of
from tests.fsdp.open_models import make_open
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
TOLERANCE = 2e-5
RECOMPUTED = FsdpConfig(recompute=True)
LATENT = {"rank": 4, "alpha": 8.0, "targets": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}
ONE = {**ALL, "rank": 1}
"""The only row of each A is on the first rank."""
CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: [("qwen3", ALL, {}), ("llama", SOME, {"fsdp": RECOMPUTED})],
    2: [
        ("qwen3", ALL, {"fsdp": RECOMPUTED}),
        ("qwen3", ALL, {"layout": Layout(cp=2)}),
        ("qwen3", ALL, {"fsdp": FsdpConfig(shard_size=1)}),
        ("qwen3", ALL, {"dtype": "bfloat16"}),
        ("qwen3", ONE, {}),
        ("llama", SOME, {"fsdp": RECOMPUTED}),
        ("deepseek_v3", LATENT, {}),
        ("olmo3", ALL, {}),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_adapters_equal_peft(world_size: int, tmp_path: Path) -> None:
    cases, oracles = [], []
    for number, (family, lora, changes) in enumerate(CASES[world_size]):
        model, adapters = tmp_path / family, tmp_path / f"adapters-{number}"
        if not model.exists():
            (make_open if family == "olmo3" else make_tiny)(family, model)
        oracles.append(with_peft(str(model), adapters, LoraConfig(**lora)))
        cases.append(Case(str(model), str(adapters), lora, **changes))
    by_rank = run_distributed(world_size, measure, cases, timeout_s=LIMIT_S)
    for case, oracle, ranks in zip(cases, oracles, zip(*by_rank, strict=True), strict=True):
        differences = largest_difference(list(ranks), oracle)
        assert all(rank.num_buffered == 0 for rank in ranks), "the frozen model has no gradients"
        if case.dtype == "bfloat16":
            assert differences["loss"] < 0.002, differences
            assert differences["norm"] < 0.02, differences
            continue
        assert max(differences.values()) < TOLERANCE, (case, differences)


# --- updates ----------------------------------------------------------------------------------------------------------


def train(case: Case, losses: list[str]) -> list[list[tuple[str, Region, Floats]]]:
    with shard_groups(case.layout, None, seed=1) as groups:
        return [_train(engine_of(case, groups, **OPTIMIZER), loss) for loss in losses]


def _train(engine: Any, loss: str) -> list[tuple[str, Region, Floats]]:
    """Return this rank's parts of the adapters after the updates. Both context ranks have all rows."""

    def output(batch: LossInput) -> LossOutput:
        assert batch.scores.log_probs_T is not None
        sizes = batch.response_lengths.tolist()
        parts, numbers = batch.scores.log_probs_T.split(sizes), batch.columns["number"].split(sizes)
        order = sorted(range(len(parts)), key=lambda place: int(numbers[place][0]))
        value = LOSSES[loss][0](torch.cat([parts[place] for place in order]))
        return LossOutput(value, {"loss": value.detach()})

    rows = replace(share(engine)[0], columns={"number": torch.arange(len(LENGTHS)).repeat_interleave(NUMBERS)})
    for _ in range(NUM_UPDATES):
        engine.update(rows, [np.arange(len(LENGTHS))], output, ScoreRequest())
    return [(s.name, s.pieces[0].source, x.numpy().copy()) for s, x in engine.adapters.held()]


def test_adapters_after_five_updates_equal_those_of_peft(tmp_path: Path) -> None:
    model, adapters = str(make_tiny("qwen3", tmp_path / "model")), tmp_path / "adapters"
    with_peft(model, adapters, LoraConfig(**ALL))
    case = Case(model, str(adapters), ALL, Layout(cp=2), RECOMPUTED)
    by_rank = run_distributed(2, train, case, list(LOSSES), timeout_s=LIMIT_S)
    first = load_file(adapters / "adapter_model.safetensors")
    for loss, ranks in zip(LOSSES, zip(*by_rank, strict=True), strict=True):
        expected = train_with_peft(model, adapters, loss)
        boxes: dict[str, list[Region]] = {name: [] for name in expected}
        for name, box, part in (x for rank in ranks for x in rank):
            difference = float(np.abs(expected[name][slices(box)].numpy() - part).max())
            assert difference < TOLERANCE, (loss, name, difference)
            boxes[name].append(box)
        assert all(is_exact_cover(tuple(expected[name].shape), found) for name, found in boxes.items())
        moved = max(float((x - first[name]).abs().max()) for name, x in expected.items())
        assert moved > 100 * TOLERANCE, "nothing was learned"


# --- checkpoints, files and merged weights ----------------------------------------------------------------------------


def with_fsdp(case: Case, directory: str, *, saves: bool) -> dict[str, Any]:
    """Train two steps and save, or load; then train the third step."""
    with shard_groups(case.layout, case.fsdp.shard_size, seed=1) as groups:
        engine = fresh(case, groups, seed=1 if saves else 2)
        assert engine.adapters is not None
        weights = engine.adapters.merged(engine.weights_to_send(), torch.float32)
        read_merged(engine, weights, -1)  # it keeps the last ones
        if saves:
            found = {"first": log_probs_by_row(engine)}
            step(engine)
            step(engine)
            checkpoint.save(engine, directory, {"note": 7})
        else:
            found = {"extra": checkpoint.load(engine, directory)}
        found |= {"saved": log_probs_by_row(engine), "merged": read_merged(engine, weights)}
        return found | {"third": step(engine)}


def read_merged(engine: FsdpEngine, weights: MergedWeights, order: int = 1) -> list[tuple[str, Region, Floats]]:
    """Return the rank's parts of the weights as engines get them merged."""
    weights.begin()
    shards = [shard for shard, _ in engine.held_tensors()][::order]
    found = [(x.name, x.pieces[0].source, weights[0, x.name].float().numpy().copy()) for x in shards]
    weights.forget()
    return found


def with_megatron(case: megatron.Case, directory: str, *, saves: bool) -> dict[str, Any]:
    with model_parallel(case.layout, seed=1) as groups:
        request = EngineRequest(read_spec(case.model), case.head, megatron.settings_of(case), seed=1 if saves else 2)
        engine = MegatronEngine(request, groups)
        engine.load(HfReader(case.model))
        first = log_probs_by_row(engine)
        if saves:
            step(engine)
            step(engine)
            checkpoint.save(engine, directory, {"note": 7})
        else:
            checkpoint.load(engine, directory)
        return {"first": first, "saved": log_probs_by_row(engine), "third": step(engine)}


def exchange(case: Case, directory: str) -> dict[str, list[dict[str, Any]]]:
    """Save with each strategy, and continue with the other."""
    warnings.simplefilter("ignore")  # other layouts do not restore random states
    ours, theirs = f"{directory}/fsdp", f"{directory}/megatron"
    other = megatron.Case(case.model, "", Layout(tp=2, sequence_parallel=True), case.lora, head=case.head)
    copies = replace(case, fsdp=FsdpConfig(shard_size=1))
    return {
        "fsdp": [
            with_fsdp(case, ours, saves=True),
            with_fsdp(copies, ours, saves=False),
            with_megatron(other, ours, saves=False),
        ],
        "megatron": [with_megatron(other, theirs, saves=True), with_fsdp(case, theirs, saves=False)],
    }


def rows_of(ranks: Any, name: str) -> torch.Tensor:
    rows = {number: x for rank in ranks for number, x in rank[name].items()}
    return torch.from_numpy(np.concatenate([rows[number] for number in sorted(rows)]))


@pytest.mark.slow
def test_each_strategy_continues_adapters_of_the_other_and_peft_reads_them(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = make_tiny("qwen3", tmp_path / "model")
    case = Case(str(model), "", ALL)
    by_rank = run_distributed(2, exchange, case, str(tmp_path), timeout_s=LIMIT_S)
    firsts = []
    for strategy in ("fsdp", "megatron"):
        before, *others = zip(*(rank[strategy] for rank in by_rank), strict=True)
        firsts.append(rows_of(before, "first"))
        assert not torch.allclose(rows_of(before, "first"), rows_of(before, "saved"), atol=1e-2), "nothing was learned"
        for after in others:
            assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=TOLERANCE)
            losses = [sum(rank["third"][0] for rank in ranks) for ranks in (before, after)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-5)
            assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    assert torch.allclose(*firsts, atol=TOLERANCE), "the first adapters depend on the seed only"
    saved = tmp_path / "fsdp"
    assert all(name.startswith("base_model.model.") for name in SavedFiles(saved).manifest["tensors"])
    settings = settings_of(case)
    export_adapters(saved, model, case.model, settings, torch.float32, tmp_path / "peft")
    export_merged(saved, model, settings, torch.float32, tmp_path / "merged")
    expected = rows_of([rank["fsdp"][0] for rank in by_rank], "saved")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for adapted in (PeftModel.from_pretrained(base, tmp_path / "peft"), whole):
        with torch.no_grad():
            assert torch.allclose(torch.cat(peft_log_probs(adapted)), expected, atol=TOLERANCE)
    files = HfReader(tmp_path / "merged")
    boxes: dict[str, list[Region]] = {name: [] for name in files}
    for name, box, values in (x for rank in by_rank for x in rank["fsdp"][0]["merged"]):
        assert np.abs(files.whole(name)[slices(box)].numpy() - values).max() < 1e-6, name
        boxes[name].append(box)
    assert all(is_exact_cover(tuple(files.whole(name).shape), found) for name, found in boxes.items())
    other = make_tiny("qwen3", tmp_path / "other", seed=1)
    with pytest.raises(EngineError, match="whose weights differ"):
        export_merged(saved, other, settings, torch.float32, tmp_path / "never")


@pytest.mark.slow
def test_a_score_head_is_trained_whole_with_the_adapters(tmp_path: Path) -> None:
    case = Case(str(make_tiny("llama", tmp_path / "model", head="score")), "", ALL, head="score")
    by_rank = run_distributed(2, exchange, case, str(tmp_path), timeout_s=LIMIT_S)
    for strategy in ("fsdp", "megatron"):
        before, *others = zip(*(rank[strategy] for rank in by_rank), strict=True)
        for after in others:
            assert torch.allclose(rows_of(after, "saved"), rows_of(before, "saved"), atol=TOLERANCE)
            assert after[0]["third"][1] == pytest.approx(before[0]["third"][1], rel=1e-4)
    assert "score.weight" in SavedFiles(tmp_path / "fsdp").manifest["tensors"]


def offloaded(case: Case) -> dict[str, Any]:
    """Move all memory to the host and back, before and after a step."""
    with shard_groups(case.layout, None, seed=1) as groups:
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
        found["sizes"] = memory.device_bytes
        found["frozen"] = sum(tensor.nbytes for _, tensor in engine.held_tensors())
        found["dtypes"] = {str(tensor.dtype) for _, tensor in engine.held_tensors()}
        found["trained"] = {str(x.dtype) for x in engine.training_state.trained.values()}
        assert engine.adapters is not None
        with engine.adapters.off():
            try:
                step(engine)
            except EngineError as error:
                found["refused"] = error.what
        return found


def test_frozen_weights_stay_in_their_dtype_and_are_copied_to_the_host_once(tmp_path: Path) -> None:
    case = Case(str(make_tiny("qwen3", tmp_path / "model")), "", ALL, dtype="bfloat16")
    planned = role_weights(read_spec(case.model), settings_of(case), Mesh(2), "lm", 0)
    for found in run_distributed(2, offloaded, case, timeout_s=LIMIT_S):
        assert found["away"] == 0
        assert torch.equal(rows_of([found], "before"), rows_of([found], "again"))
        first, second = found["copied"]
        assert first > found["frozen"] > 100_000
        moved = sum(found["sizes"].values()) - found["frozen"]
        assert second == pytest.approx(moved, rel=0.01), "after a step only adapters and their optimizer state move"
        assert found["dtypes"] == {"torch.bfloat16"}
        assert found["trained"] == {"torch.float32"}
        assert found["sizes"]["parameters"] == pytest.approx(planned.parameters, rel=0.01)
        assert found["sizes"]["optimizer"] == pytest.approx(planned.optimizer, rel=0.01)
        assert "the adapters are off" in found["refused"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_modules_that_cannot_have_adapters_are_refused_by_name(tmp_path: Path) -> None:
    fused = read_spec(make_open("gpt_neox", tmp_path / "gpt_neox"))
    with pytest.raises(ModelError, match="all-linear includes dense, dense_4h_to_h, dense_h_to_4h, query_key_value of"):
        check_sharded_targets(fused, LoraConfig(rank=1, alpha=1))
    check_sharded_targets(read_spec(make_open("olmo3", tmp_path / "olmo3")), LoraConfig(rank=1, alpha=1))
    mixture = read_spec(make_tiny("qwen3_moe", tmp_path / "moe"))
    for targets in (["all-linear"], ["q_proj", "up_proj"]):
        with pytest.raises(ModelError, match="stacks the experts of qwen3_moe"):
            check_sharded_targets(mixture, LoraConfig(rank=1, alpha=1, targets=targets))
    check_sharded_targets(mixture, LoraConfig(rank=1, alpha=1, targets=["q_proj"]))
