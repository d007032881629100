"""Float32 parameters and buffers of a bfloat16 model: in training, off the device, in checkpoints and in exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.engine.engine import MegatronEngine
from mrl.engine.parallel import model_parallel
from mrl.engine.weights import held_tensors
from mrl.models.decoder import Family
from mrl.models.families import FAMILIES
from mrl.models.parameters import Parameter
from mrl.models.spec import ModelSpec
from mrl.plan.weights import stage_weights
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, step
from tests.models.tiny_models import CORRECTION_BIAS, make_tiny

LIMIT_S = 300.0
FAMILY = "glm4_moe"
SAVED_BY, RESUMED_BY = Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2)
Tensors = dict[str, npt.NDArray[np.float32]]


class Float32Routers(Family):
    """A family whose routers are float32 in the trainer too. No family of mrl has a trained float32 parameter yet."""

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        for parameter in super().parameters(spec, layer):
            yield replace(parameter, dtype="float32") if parameter.name == "mlp.router.weight" else parameter


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


def train_save_and_resume(path: str, saved: str, exported: str) -> list[Tensors]:
    """Return the float32 tensors of this rank at each stage of a run, and export its checkpoint."""
    FAMILIES[FAMILY] = Float32Routers(**vars(FAMILIES[FAMILY]))  # only in this process, which ends with the run
    found: list[Tensors] = []
    with model_parallel(SAVED_BY, seed=1) as groups:
        engine = build(path, SAVED_BY, groups, dtype="bfloat16")
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
        checkpoint.save(engine, saved, {})
        weights = engine.memory.copy_weights()
        zero_buffers(engine)
        with engine.memory.weights_of(weights):
            found.append(float32_held(engine))
        assert not any(float32_held(engine)[name].any() for name in found[0] if name.endswith(CORRECTION_BIAS))
    with model_parallel(RESUMED_BY, seed=1) as groups:
        engine = build(path, RESUMED_BY, groups, dtype="bfloat16")
        zero_buffers(engine)
        checkpoint.load(engine, saved)
        found.append(float32_held(engine))
        step(engine)
        found.append(float32_held(engine))
        if groups.at.rank == 0:
            export_checkpoint(Path(saved), Path(path), "lm", torch.bfloat16, Path(exported))
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


def is_rounded(values: npt.NDArray[np.float32]) -> bool:
    tensor = torch.from_numpy(values)
    return torch.equal(tensor, tensor.bfloat16().float())


def test_float32_tensors_are_trained_moved_saved_resumed_and_exported_as_they_are(tmp_path: Path) -> None:
    model, exported = make_tiny(FAMILY, tmp_path / "model"), tmp_path / "exported"
    paths = (str(model), str(tmp_path / "saved"), str(exported))
    first, second = run_distributed(2, train_save_and_resume, *paths, timeout_s=LIMIT_S)
    tensors = load_file(model / "model.safetensors")
    in_files = {n: tensor.numpy() for n, tensor in tensors.items() if n.endswith(("mlp.gate.weight", CORRECTION_BIAS))}
    biases = {name for name in in_files if name.endswith(CORRECTION_BIAS)}
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
    written = load_file(exported / "model.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == in_files.keys()
    assert_same({name: written[name].numpy() for name in in_files}, first[1])
