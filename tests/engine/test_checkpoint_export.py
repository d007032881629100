"""HF -> Megatron -> checkpoint -> HF returns the same bits for every family, head and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.engine.parallel import model_parallel
from mrl.models.families import read_spec
from mrl.models.table import Head
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build

LIMIT_S = 300.0
LAYOUTS = [Layout(tp=4), Layout(pp=2, vpp=2)]
MOE_LAYOUTS = [Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2, ep=2)]
OTHER_LAYOUTS = [Layout(tp=2, pp=2), Layout(pp=4), Layout(tp=2, cp=2)]
OTHER_MOE_LAYOUTS = [Layout(ep=4), Layout(tp=2, etp=2), Layout(tp=2, pp=2, ep=2, sequence_parallel=True)]


@dataclass(frozen=True)
class Case:
    source: str
    target: str
    head: Head
    layout: Layout


def save_all(cases: list[Case]) -> None:
    for case in cases:
        with model_parallel(case.layout, seed=1) as groups:
            checkpoint.save(build(case.source, case.layout, groups, head=case.head), f"{case.target}-saved", {})


def go_through_megatron(cases: list[Case]) -> list[Case]:
    run_distributed(4, save_all, cases, timeout_s=LIMIT_S)
    for case in cases:
        saved, target = Path(f"{case.target}-saved"), Path(case.target)
        assert export_checkpoint(saved, Path(case.source), case.head, torch.float32, target) > 0
    return cases


def make_cases(directory: Path, layouts: list[Layout], moe_layouts: list[Layout]) -> list[Case]:
    """Return every family, and two with a score head, in every layout."""
    # Not above: transformers is not for the ranks, which import this module.
    from tests.models.tiny_models import DELTA_FAMILIES, MOE_FAMILIES, TINY_FAMILIES, make_tiny

    models: list[tuple[str, Head]] = [(family, "lm") for family in TINY_FAMILIES]
    cases: list[Case] = []
    for family, head in [*models, ("llama", "score"), ("qwen2", "score")]:
        source = make_tiny(family, directory / f"{family}-{head}", 0, head)
        for layout in layouts + (moe_layouts if family in MOE_FAMILIES else []):
            if (family == "gpt_oss" and layout.etp > 1) or (family in DELTA_FAMILIES and layout.cp > 1):
                continue  # refused
            number = len(cases)
            cases.append(Case(str(source), f"{source}-{number}", head, layout))
    return cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return go_through_megatron(make_cases(tmp_path_factory.mktemp("export"), LAYOUTS, MOE_LAYOUTS))


def weights(path: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(case: Case) -> None:
    before, after = weights(case.source), weights(case.target)
    assert before.keys() == after.keys(), case
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), case
    assert read_spec(case.target) == replace(read_spec(case.source), num_predicting_layers=0)


@pytest.mark.slow
def test_what_comes_out_is_what_went_in(cases: list[Case]) -> None:
    for case in cases:
        assert_same_weights(case)


@pytest.mark.slow
@pytest.mark.on_demand
def test_so_it_is_for_the_other_layouts(tmp_path: Path) -> None:
    for case in go_through_megatron(make_cases(tmp_path, OTHER_LAYOUTS, OTHER_MOE_LAYOUTS)):
        assert_same_weights(case)


@pytest.mark.slow
def test_transformers_loads_an_export(cases: list[Case]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    last = {(case.source, case.head): case for case in cases}
    for case in last.values():
        kind = AutoModelForCausalLM if case.head == "lm" else AutoModelForSequenceClassification
        after, report = kind.from_pretrained(case.target, output_loading_info=True)
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), case
        tokens = torch.arange(3, 40)[None]
        with torch.no_grad():
            assert torch.equal(after(tokens).logits, kind.from_pretrained(case.source)(tokens).logits), case
