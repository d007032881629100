"""A checkpoint is complete or absent, does not depend on the layout, and training continues without a difference."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.parallel import model_parallel
from mrl.errors import EngineError
from mrl.models.table import Head
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, on_host, step, whole_losses

LIMIT_S = 300.0
EXTRA = {"step": 2, "best": 0.25, "sampler": {"epoch": 1, "order": [3, 1, 2]}}
NUM_BEFORE, NUM_AFTER = 2, 3


Steps = list[tuple[float, float]]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Model:
    path: str
    head: Head
    dtype: Dtype
    saved_by: Layout
    directory: str


def train_and_save(model: Model) -> Steps:
    """Train some steps, save a checkpoint, and train the steps after it."""
    with model_parallel(model.saved_by, seed=1) as groups:
        engine = build(model.path, model.saved_by, groups, head=model.head, dtype=model.dtype)
        for _ in range(NUM_BEFORE):
            step(engine)
        torch.manual_seed(100 + groups.at.rank)
        checkpoint.save(engine, model.directory, EXTRA)
        return [*[step(engine) for _ in range(NUM_AFTER)], (float(torch.rand(())), 0.0)]


def resume(model: Model, layout: Layout) -> tuple[Steps, list[str]]:
    """Train the same steps after the checkpoint in another layout. Also return the warnings."""
    with model_parallel(layout, seed=1) as groups, warnings.catch_warnings(record=True) as caught:
        engine = build(model.path, layout, groups, head=model.head, dtype=model.dtype)
        warnings.simplefilter("always")
        assert checkpoint.load(engine, model.directory) == EXTRA, "the caller's state came back changed"
        said = [str(warning.message) for warning in caught if "checkpoint" in str(warning.message)]
        return [*[step(engine) for _ in range(NUM_AFTER)], (float(torch.rand(())), 0.0)], said


def save_and_resume(cases: list[tuple[Model, list[Layout]]]) -> list[Any]:
    return [(train_and_save(model), [resume(model, layout) for layout in layouts]) for model, layouts in cases]


def everything(
    cases: list[tuple[Model, list[Layout]]], path: str, other: str, directory: str
) -> tuple[list[Any], dict[str, str], list[tuple[str, str]]]:
    return save_and_resume(cases), attempts(path, other, directory), agreeing()


def resume_all(cases: list[tuple[Model, Layout]]) -> list[tuple[Steps, list[str]]]:
    return [resume(model, layout) for model, layout in cases]


def assert_goes_on(expected: list[Steps], found: list[Steps], tolerance: float) -> None:
    expected, found = ([steps[:NUM_AFTER] for steps in ranks] for ranks in (expected, found))
    np.testing.assert_allclose(whole_losses(found), whole_losses(expected), rtol=tolerance)
    norms = [[norm for _, norm in ranks[0]] for ranks in (expected, found)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=tolerance)


@dataclass(frozen=True)
class Outcome:
    """Results of each rank: of each model, and of the attempts that must fail."""

    runs: list[tuple[Model, list[Layout], list[Any]]]
    refusals: list[dict[str, str]]
    agreed: list[list[tuple[str, str]]]
    directory: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Save each model in one layout of four ranks, and resume it in that layout and others."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    directory = tmp_path_factory.mktemp("checkpoints")

    def tiny(family: str, head: Head = "lm") -> str:
        return str(make_tiny(family, directory / f"{family}-{head}", 0, head))

    def model(family: str, layout: Layout, dtype: Dtype = "float32", head: Head = "lm") -> Model:
        return Model(tiny(family, head), head, dtype, layout, f"{directory}/{family}-2")

    cases = [
        (model("llama", Layout(tp=2, pp=2)), [Layout(tp=4), Layout(pp=4)]),
        (model("qwen2", Layout(pp=2), "bfloat16"), [Layout(tp=2, pp=2)]),  # tied embeddings
        (model("qwen3_moe", Layout(tp=2, ep=2, sequence_parallel=True)), [Layout(pp=2, vpp=2)]),
        (model("qwen3", Layout(tp=2, cp=2), head="score"), [Layout(pp=2, tp=2)]),
    ]
    with_own = [(model, [model.saved_by, *others]) for model, others in cases]
    (directory / "refused").mkdir()
    arguments = (with_own, tiny("qwen3"), tiny("mistral"), str(directory / "refused"))
    ranks = run_distributed(4, everything, *arguments, timeout_s=LIMIT_S)
    runs = [(model, layouts, [rank[0][number] for rank in ranks]) for number, (model, layouts) in enumerate(with_own)]
    return Outcome(runs, [rank[1] for rank in ranks], [rank[2] for rank in ranks], directory / "refused")


@pytest.mark.slow
def test_the_same_layout_goes_on_to_the_bit(outcome: Outcome) -> None:
    for _, _, ranks in outcome.runs:
        for expected, resumed in ranks:
            assert resumed[0] == (expected, [])  # losses, norms and the next random number


@pytest.mark.slow
def test_other_layouts_go_on_as_well(outcome: Outcome) -> None:
    for model, layouts, ranks in outcome.runs:
        tolerance = 1e-5 if model.dtype == "float32" else 2e-2
        for number in range(1, len(layouts)):
            found = [resumed[number][0] for _, resumed in ranks]
            assert_goes_on([expected for expected, _ in ranks], found, tolerance)
            said = [warning for _, resumed in ranks for warning in resumed[number][1]]
            assert said == ["the checkpoint has another layout: random states are not restored"] * 4


@pytest.mark.slow
def test_one_rank_goes_on_with_what_four_have_saved(outcome: Outcome) -> None:
    cases = [(model, Layout()) for model, _, _ in outcome.runs]
    (alone,) = run_distributed(1, resume_all, cases, timeout_s=LIMIT_S)
    for (model, _, ranks), (found, _) in zip(outcome.runs, alone, strict=True):
        tolerance = 1e-5 if model.dtype == "float32" else 2e-2
        assert_goes_on([expected for expected, _ in ranks], [found], tolerance)


@pytest.mark.slow
def test_the_manifest_says_what_is_there(outcome: Outcome) -> None:
    model = outcome.runs[0][0]
    directory = Path(model.directory)
    manifest = json.loads((directory / checkpoint.MANIFEST).read_text())
    assert manifest["layout"]["tp"] == manifest["layout"]["pp"] == 2
    assert manifest["num_steps"] == NUM_BEFORE
    assert {path.name for path in directory.iterdir()} == {checkpoint.MANIFEST, *manifest["files"]}
    assert all((directory / name).stat().st_size == of["bytes"] for name, of in manifest["files"].items())
    assert not list(directory.parent.glob(".*"))  # nothing staged is left


# --- what goes wrong --------------------------------------------------------------------------------------------------


def agreeing() -> list[tuple[str, str]]:
    """Return each rank's error if no rank, one rank or all ranks fail."""

    def told(errors: dict[int, Exception]) -> tuple[str, str]:
        try:
            with checkpoint.raise_on_all_ranks("the work"):
                if dist.get_rank() in errors:
                    raise errors[dist.get_rank()]
        except (EngineError, OSError) as error:
            return type(error).__name__, str(error)
        return "", ""

    cases: list[dict[int, Exception]] = [
        {},
        {1: EngineError("has no room", where="/disk")},
        {0: OSError("disk full")},
        {0: EngineError("here"), 1: EngineError("there")},
        {},
    ]
    return [told(errors) for errors in cases]


@pytest.mark.slow
def test_a_failure_of_one_rank_is_everybodys_and_its_own_is_its_own(outcome: Outcome) -> None:
    first, second, third, _ = outcome.agreed  # a rank without the error would wait forever
    assert third[1:3] == [first[1], second[2]]
    assert first[0] == second[0] == first[4] == second[4] == ("", "")
    assert second[1] == ("EngineError", "/disk: has no room")
    assert first[1] == ("EngineError", "the work failed on 1 of 4 ranks; rank 1: /disk: has no room")
    assert first[2] == ("OSError", "disk full")
    assert second[2] == ("EngineError", "the work failed on 1 of 4 ranks; rank 0: disk full")
    assert (first[3], second[3]) == (("EngineError", "here"), ("EngineError", "there"))


def attempts(path: str, other: str, directory: str) -> dict[str, str]:
    """Return this rank's error of each attempt."""
    target, layout = Path(directory), Layout(tp=2)
    said: dict[str, str] = {}
    with model_parallel(layout, seed=1) as groups, warnings.catch_warnings(record=True) as caught:
        engine = build(path, layout, groups)
        warnings.simplefilter("always")

        def attempt(name: str, action: Any, *arguments: Any) -> None:
            try:
                action(engine, *arguments)
                said[name] = ""
            except EngineError as error:
                said[name] = str(error)

        first = groups.at.rank == 0
        if first:
            (target / ".good.saving" / "half").mkdir(parents=True)
        torch.distributed.barrier()
        attempt("save before any step", checkpoint.save, target / "good", {})
        said["leftover"] = ", ".join(
            str(x.message) for x in caught if "was left by an interrupted save" in str(x.message)
        )
        attempt("load before any step", checkpoint.load, target / "good")
        attempt("save again", checkpoint.save, target / "good", {})
        attempt("extra", checkpoint.save, target / "extra", {"tensor": torch.ones(2)})
        attempt("nothing", checkpoint.load, target / "nothing")
        file = target / "good" / "rank-00001.safetensors"
        good = file.read_bytes()
        for name, content in {
            "removed": None,
            "changed": good[:-1] + bytes([good[-1] ^ 1]),
            "shortened": good[:-1],
            "restored": good,
        }.items():
            torch.distributed.barrier()
            if first and content is None:
                file.unlink()
            elif first:
                file.write_bytes(content)
            torch.distributed.barrier()
            attempt(name, checkpoint.load, target / "good")
        step(engine)
        attempt("save after a step", checkpoint.save, target / "better", {})
        with on_host(engine.memory, "parameters", "gradients", "optimizer"):  # all that was saved can still leave
            attempt("away", checkpoint.save, target / "away", {})
    with model_parallel(layout, seed=1) as groups:
        engine = build(other, layout, groups)
        attempt("other model", checkpoint.load, target / "good")
    return said


@pytest.mark.slow
def test_what_is_refused_is_refused_on_all_ranks(outcome: Outcome) -> None:
    first, second, *_ = outcome.refusals
    good = outcome.directory / "good"
    file = good / "rank-00001.safetensors"
    assert first["save before any step"] == first["load before any step"] == ""
    assert first["save again"].startswith(f"{good}: already exists")
    assert second["save again"] == f"saving failed on 1 of 4 ranks; rank 0: {first['save again']}"
    assert first["extra"] == "`extra` cannot be saved as JSON: Object of type Tensor is not JSON serializable"
    assert "is not a checkpoint" in first["nothing"]
    assert second["removed"] == f"{file}: is missing"
    assert second["changed"] == f"{file}: is damaged: its sha256 is wrong"
    assert first["changed"] == f"loading failed on 1 of 4 ranks; rank 1: {second['changed']}"
    size = file.stat().st_size
    assert second["shortened"] == f"{file}: has {size - 1} bytes instead of {size}"
    assert first["restored"] == second["restored"] == ""
    assert first["save after a step"] == ""
    assert first["away"].startswith("the model's parameters are not on the device")
    assert second["away"] == first["away"]
    assert first["leftover"] == f"{outcome.directory}/.good.saving was left by an interrupted save: it is removed"
    assert first["other model"].startswith(f"{good}: is a checkpoint of another model: ")
    assert {path.name for path in outcome.directory.iterdir()} == {"good", "better"}
