"""Weights from a model's files: which ranks read them, and numbers that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mrl.config.schema import ParallelConfig
from mrl.engine.parallel import model_parallel
from mrl.errors import ModelError
from mrl.models.hf_reader import HfReader
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build
from tests.models.tiny_models import make_tiny


def loaded(path: str) -> list[str]:
    """Return the error of each model in a directory."""
    said = []
    with model_parallel(ParallelConfig(), seed=1) as groups:
        for model in sorted(Path(path).iterdir()):
            try:
                build(str(model), ParallelConfig(), groups, dtype="bfloat16", trained=False)
                said.append("")
            except ModelError as error:
                said.append(str(error))
    return said


def test_a_tensor_that_holds_what_is_no_number_is_named_before_the_first_step(tmp_path: Path) -> None:
    spoilt = {"model.layers.2.mlp.up_proj.weight": math.nan, "model.layers.1.self_attn.v_proj.weight": -math.inf}
    for number, name in enumerate(["", *spoilt]):
        model = make_tiny("qwen3", tmp_path / "models" / str(number))
        tensors = load_file(Path(model) / "model.safetensors")
        if name:
            tensors[name].view(-1)[[3, 70]] = spoilt[name]
            save_file(tensors, Path(model) / "model.safetensors", metadata={"format": "pt"})
    good, *bad = run_distributed(1, loaded, str(tmp_path / "models"), timeout_s=120.0)[0]
    assert good == ""
    for number, (name, message) in enumerate(zip(spoilt, bad, strict=True), start=1):
        assert f"{number}: 2 numbers of {name} are NaN or infinite\n" in message


def read_by(path: str, ep: int) -> tuple[set[str], float]:
    """Return the tensors that a rank reads, and the sum of its parameters."""
    names: set[str] = set()
    read = HfReader.read
    with pytest.MonkeyPatch.context() as patch, model_parallel(ParallelConfig(ep=ep), seed=1) as groups:
        patch.setattr(HfReader, "read", lambda reader, name, box: (names.add(name), read(reader, name, box))[1])
        engine = build(path, ParallelConfig(ep=ep), groups, trained=False)
        total = sum(float(parameter.abs().sum()) for parameter in engine.models[0].parameters())
    return names, total


@pytest.mark.parametrize("ep", [1, 2])
def test_one_of_the_ranks_with_a_copy_of_weights_reads_them(ep: int, tmp_path: Path) -> None:
    path = str(make_tiny("qwen3_moe", tmp_path / "model"))
    (first, first_total), (second, second_total) = run_distributed(2, read_by, path, ep, timeout_s=120.0)
    experts = {name for name in first | second if ".experts." in name}
    assert experts
    if ep == 1:  # the second rank holds what the first holds
        assert (second, second_total) == (set(), first_total)
    else:
        assert second == {name for name in experts if name not in first}
        assert len(second) == len(experts) / 2
