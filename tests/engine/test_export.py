"""HF -> Megatron -> HF is the same bits, whatever the family, the head and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.export import export
from mrl.engine.parallel import model_parallel
from mrl.errors import EngineError, ModelError
from mrl.models.families import read_spec
from mrl.models.table import Head
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build

LIMIT_S = 300.0
LAYOUTS = [Layout(tp=4), Layout(tp=2, pp=2), Layout(pp=2, vpp=2)]
MOE_LAYOUTS = [Layout(ep=2), Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2, ep=2)]
OTHER_LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(pp=4), Layout(tp=2, cp=2)]
OTHER_MOE_LAYOUTS = [Layout(ep=4), Layout(tp=2, etp=2), Layout(tp=2, pp=2, ep=2, sequence_parallel=True)]


@dataclass(frozen=True)
class Case:
    source: str
    target: str
    head: Head
    layout: Layout
    trained: bool = False


def go_through_megatron(case: Case) -> str:
    """The error, if there was one."""
    with model_parallel(case.layout, seed=1) as groups:
        engine = build(case.source, case.layout, groups, head=case.head, trained=case.trained)
        try:
            export(engine, case.target, case.source, max_file_bytes=200_000)
        except (EngineError, ModelError) as error:
            return str(error)
    return ""


def all_of(cases: list[Case]) -> list[str]:
    return [go_through_megatron(case) for case in cases]


@dataclass(frozen=True)
class Outcome:
    cases: list[Case]
    errors_of_rank: list[list[str]]


def make_cases(directory: Path, layouts: list[Layout], moe_layouts: list[Layout]) -> list[Case]:
    """Every family, and two with a score head, in every layout; a third of them trained."""
    # Not above: transformers is not for the ranks, which import this module.
    from tests.models.tiny_models import MOE_FAMILIES, TINY_FAMILIES, make_tiny

    models: list[tuple[str, Head]] = [(family, "lm") for family in TINY_FAMILIES]
    cases: list[Case] = []
    for family, head in [*models, ("llama", "score"), ("qwen2", "score")]:
        source = make_tiny(family, directory / f"{family}-{head}", 0, head)
        for layout in layouts + (moe_layouts if family in MOE_FAMILIES else []):
            number = len(cases)
            cases.append(Case(str(source), f"{source}-{number}", head, layout, trained=number % 3 == 0))
    return cases


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All cases, and last a target that exists, in one world of ranks."""
    directory = tmp_path_factory.mktemp("export")
    cases = make_cases(directory, LAYOUTS, MOE_LAYOUTS)
    (directory / "mine").mkdir()
    cases.append(Case(cases[0].source, str(directory / "mine"), "lm", Layout(tp=2)))
    return Outcome(cases, run_distributed(4, all_of, cases, timeout_s=LIMIT_S))


def weights(path: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(case: Case) -> None:
    before, after = weights(case.source), weights(case.target)
    assert before.keys() == after.keys(), case
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), case
    assert read_spec(case.target) == read_spec(case.source)


def test_what_comes_out_is_what_went_in(outcome: Outcome) -> None:
    for case in outcome.cases[:-1]:
        assert_same_weights(case)


@pytest.mark.slow
def test_so_it_is_for_the_other_layouts(tmp_path: Path) -> None:
    cases = make_cases(tmp_path, OTHER_LAYOUTS, OTHER_MOE_LAYOUTS)
    run_distributed(4, all_of, cases, timeout_s=LIMIT_S)
    for case in cases:
        assert_same_weights(case)


def test_transformers_loads_an_export(outcome: Outcome) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    last = {(case.source, case.head): case for case in outcome.cases[:-1]}
    for case in last.values():
        kind = AutoModelForCausalLM if case.head == "lm" else AutoModelForSequenceClassification
        after, report = kind.from_pretrained(case.target, output_loading_info=True)
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), case
        tokens = torch.arange(3, 40)[None]
        with torch.no_grad():
            assert torch.equal(after(tokens).logits, kind.from_pretrained(case.source)(tokens).logits), case


def test_what_rank_0_cannot_write_fails_on_all_ranks(outcome: Outcome) -> None:
    target = Path(outcome.cases[-1].target)
    first, *others = [errors[-1] for errors in outcome.errors_of_rank]
    assert first.startswith(f"{target}: exists already")
    assert others == [f"the export failed on 1 of 4 ranks; rank 0: {first}"] * 3
    assert not any(any(errors[:-1]) for errors in outcome.errors_of_rank)
    assert list(target.iterdir()) == []
    assert not list(target.parent.glob(".*"))  # nothing staged is left
