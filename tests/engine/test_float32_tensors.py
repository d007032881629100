"""Float32 parameters and buffers of a bfloat16 model: in training, off the device, in checkpoints and in exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.engine.engine import MegatronEngine
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.engine.weights import held_tensors
from mrl.plan.weights import stage_weights
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, step
from tests.models import float32_family

LIMIT_S = 300.0
SAVED_BY, RESUMED_BY = Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2)
Tensors = dict[str, npt.NDArray[np.float32]]


def engine_of(path: str, layout: Layout, groups: ParallelGroups, trained: bool = True) -> MegatronEngine:
    return build(path, layout, groups, dtype="bfloat16", trained=trained, megatron=float32_family.MEGATRON)


def float32_held(engine: MegatronEngine) -> Tensors:
    """Return copies of this rank's float32 tensors, which it holds whole, by the names of the files."""
    shards = held_tensors(engine.models, engine.request.spec, "lm", engine.groups)
    return {
        shard.pieces[0].hf: tensor.detach().clone().numpy() for shard, tensor in shards if tensor.dtype == torch.float32
    }


def zero_buffers(engine: MegatronEngine) -> None:
    for shard, tensor in held_tensors(engine.models, engine.request.spec, "lm", engine.groups):
        if not shard.trained:
            tensor.zero_()
    engine.memory.changed()


def train_save_and_resume(path: str, directory: str) -> list[Tensors]:
    """Return the float32 tensors of this rank at each stage of a run."""
    found: list[Tensors] = []
    with model_parallel(SAVED_BY, seed=1) as groups:
        engine = engine_of(path, SAVED_BY, groups)
        found.append(float32_held(engine))
        step(engine)
        planned = stage_weights(engine.request.spec, engine.request.settings, groups.mesh, "lm", groups.at.pp)
        sizes = engine.memory.device_bytes
        assert (sizes["parameters"], sizes["gradients"]) == (planned.parameters, planned.gradients)
        assert sizes["optimizer"] == planned.optimizer
        engine.memory.offload("parameters", "gradients", "optimizer")
        assert set(engine.memory.device_bytes.values()) == {0}
        engine.memory.onload("parameters", "gradients", "optimizer")
        step(engine)
        found.append(float32_held(engine))
        checkpoint.save(engine, directory, {})
        weights = engine.memory.copy_weights()
        zero_buffers(engine)
        with engine.memory.weights_of(weights):
            found.append(float32_held(engine))
        assert not any(float32_held(engine)[name].any() for name in found[0] if name.endswith(float32_family.BIAS))
    with model_parallel(RESUMED_BY, seed=1) as groups:
        engine = engine_of(path, RESUMED_BY, groups)
        zero_buffers(engine)
        checkpoint.load(engine, directory)
        found.append(float32_held(engine))
        step(engine)
        found.append(float32_held(engine))
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


def is_rounded(values: npt.NDArray[np.float32]) -> bool:
    tensor = torch.from_numpy(values)
    return torch.equal(tensor, tensor.bfloat16().float())


def test_float32_tensors_are_trained_moved_saved_resumed_and_exported_as_they_are(tmp_path: Path) -> None:
    model, saved, exported = float32_family.make(tmp_path), tmp_path / "saved", tmp_path / "exported"
    first, second = run_distributed(2, train_save_and_resume, str(model), str(saved), timeout_s=LIMIT_S)
    in_files = {name: tensor.numpy() for name, tensor in float32_family.float32_tensors(model).items()}
    biases = {name for name in in_files if name.endswith(float32_family.BIAS)}
    for at_start, trained, in_copy, *resumed in (first, second):
        assert_same(at_start, in_files)
        assert_same(in_copy, trained)
        assert {name for name in trained if np.array_equal(trained[name], in_files[name])} == biases
        assert not any(is_rounded(values) for values in trained.values())
        assert all(len(held) < len(in_files) for held in resumed), "each stage has its own layers"
    assert_same(first[1], second[1])
    assert_same(first[3] | second[3], first[1])
    continued = first[4] | second[4]
    assert {name for name in continued if np.array_equal(continued[name], in_files[name])} == biases
    export_checkpoint(saved, model, "lm", torch.bfloat16, exported)
    written = load_file(exported / "model.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == in_files.keys()
    assert_same({name: written[name].numpy() for name in in_files}, first[1])
