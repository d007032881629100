"""Non-finite weights in a model's files."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from mrl.config.schema import ParallelConfig
from mrl.engine.parallel import model_parallel
from mrl.errors import ModelError
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
