"""A checkpoint of either strategy is continued by the other, in any layout."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.fsdp import FsdpConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.config.schema import TrainedModelConfig
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.engine.parallel import model_parallel
from mrl.fsdp.parallel import shard_groups
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.plan.sharded import role_weights
from mrl.verify.spawn import run_distributed
from tests.engine import tiny_training
from tests.engine.tiny_training import on_host, step, whole_losses
from tests.fsdp import training
from tests.models.tiny_models import make_tiny

FAMILIES = ("qwen3_moe", "glm4_moe", "llama_tied")
OTHERS = (Layout(), Layout(cp=2))
MEGATRONS = (Layout(tp=2, sequence_parallel=True), Layout(pp=2))
Steps = list[tuple[float, float]]


def with_fsdp(path: str, layout: Layout, directory: str, *, saves: bool) -> Steps:
    with shard_groups(layout, None, seed=1) as groups:
        engine = training.build(path, groups)
        if not saves:
            assert checkpoint.load(engine, directory) == {"step": 2}
            return [step(engine) for _ in range(2)]
        for _ in range(2):
            step(engine)
        torch.manual_seed(100 + groups.at.rank)
        checkpoint.save(engine, directory, {"step": 2})
        drawn = float(torch.rand(()))
        steps = [step(engine) for _ in range(2)]
    with shard_groups(layout, None, seed=1) as groups:
        engine = training.build(path, groups)
        checkpoint.load(engine, directory)
        assert float(torch.rand(())) == drawn, "the same layout draws the next number"
        assert [step(engine) for _ in range(2)] == steps, "the same layout goes on to the bit"
    return steps


def with_megatron(path: str, layout: Layout, directory: str, *, saves: bool) -> Steps:
    with model_parallel(layout, seed=1) as groups:
        engine = tiny_training.build(path, layout, groups)
        if not saves:
            assert checkpoint.load(engine, directory) == {"step": 2}
            return [step(engine) for _ in range(2)]
        for _ in range(2):
            step(engine)
        checkpoint.save(engine, directory, {"step": 2})
        return [step(engine) for _ in range(2)]


def exchange(models: dict[str, str], directory: str) -> list[list[Steps]]:
    """Return the steps after the checkpoint: of the strategy that saved it, and of each that loads it."""
    warnings.simplefilter("ignore")  # other layouts do not restore random states
    found = []
    for family, path in models.items():
        ours, theirs = f"{directory}/{family}-fsdp", f"{directory}/{family}-megatron"
        found.append([with_fsdp(path, Layout(), ours, saves=True)])
        found[-1] += [with_megatron(path, layout, ours, saves=False) for layout in MEGATRONS]
        found[-1] += [with_fsdp(path, Layout(cp=2), ours, saves=False)]
        found.append([with_megatron(path, MEGATRONS[0], theirs, saves=True)])
        found[-1] += [with_fsdp(path, layout, theirs, saves=False) for layout in OTHERS]
    return found


@pytest.mark.slow
def test_a_checkpoint_of_each_strategy_is_continued_by_the_other(tmp_path: Path) -> None:
    models = {family: str(make_tiny(family, tmp_path / family)) for family in FAMILIES}
    ranks = run_distributed(2, exchange, models, str(tmp_path), timeout_s=300)
    for cases in zip(*ranks, strict=True):
        expected, *others = zip(*cases, strict=True)
        for other in others:
            np.testing.assert_allclose(whole_losses(list(other)), whole_losses(list(expected)), rtol=1e-4)
            norms = [[norm for _, norm in steps[0]] for steps in (other, expected)]
            np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
    for family, path in models.items():
        saved = tmp_path / f"{family}-fsdp"
        manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
        assert manifest["layout"]["strategy"] == "fsdp"
        exported = tmp_path / f"{family}-exported"
        export_checkpoint(saved, Path(path), "lm", torch.float32, exported)
        before, after = HfReader(path), HfReader(exported)
        assert {*before} == {*after}
        changed = [name for name in before if not torch.equal(before.whole(name), after.whole(name))]
        assert len(changed) == len([name for name in before if "correction_bias" not in name])


def copies(path: str, directory: str) -> Steps:
    """Save two copies of the model, one on each rank, and load them."""
    with shard_groups(Layout(), 1, seed=1) as groups:
        engine = training.build(path, groups, fsdp=FsdpConfig(shard_size=1))
        step(engine)
        checkpoint.save(engine, directory, {})
        expected = step(engine)
        engine = training.build(path, groups, fsdp=FsdpConfig(shard_size=1))
        checkpoint.load(engine, directory)
        return [expected, step(engine)]


def test_one_of_several_copies_is_saved_and_all_are_loaded(tmp_path: Path) -> None:
    path = str(make_tiny("qwen3", tmp_path / "qwen3"))
    for expected, found in run_distributed(2, copies, path, str(tmp_path / "saved"), timeout_s=300):
        assert found == expected


def offloaded(path: str) -> list[Any]:
    with shard_groups(Layout(), None, seed=1) as groups:
        engine = training.build(path, groups)
        kept = engine.memory.copy_weights()
        first = tiny_training.log_probs(engine)
        step(engine)
        trained = tiny_training.log_probs(engine)
        with engine.memory.weights_of(kept):
            reference = tiny_training.log_probs(engine)
        parts: Any = ("parameters", "gradients", "optimizer")
        with on_host(engine.memory, *parts):
            held = sum(engine.memory.device_bytes.values())
        sizes = engine.memory.device_bytes
        again = tiny_training.log_probs(engine)
        whole = [type(parameter).__name__ for parameter in engine.model.parameters()]
        return [first, trained, reference, again, held, sizes, step(engine), set(whole)]


def test_reference_weights_and_offload_restore_the_model_to_the_bit(tmp_path: Path) -> None:
    path = str(make_tiny("qwen3", tmp_path / "qwen3"))
    settings = TrainedModelConfig(strategy="fsdp", max_tokens_per_device=1)
    planned = role_weights(read_spec(path), settings, Mesh(2), "lm", 0)
    for first, trained, reference, again, held, sizes, _, kinds in run_distributed(2, offloaded, path, timeout_s=300):
        assert reference == first
        assert again == trained
        assert trained != first
        assert held == 0
        assert sizes["parameters"] == planned.parameters, "what `mrl plan` says"
        assert 0.99 * planned.optimizer < sizes["optimizer"] <= planned.optimizer  # the last rank may have fewer rows
        assert kinds == {"DTensor"}, "after a forward pass no parameter stays whole"
