"""A rehearsal of whole configurations: what it measures, next to the plan, and what it reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.cli.main import main
from mrl.config.resolved.load import load_any_config
from mrl.plan.memory import role_stages
from mrl.plan.plan_input import Planned, make_plan_input
from mrl.rehearse.engine_weights import RehearsalError
from mrl.rehearse.rank_kinds import rank_kinds
from mrl.rehearse.stand_ins import Routing
from mrl.rehearse.transfer import _check_inside
from tests.models.tiny_models import make_tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml")
GIB = 1 << 30


def preset(name: str, *overrides: str) -> Planned[Any]:
    return make_plan_input(load_any_config(str(CONFIGS / name), list(overrides)), None)


def rehearsed(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main(["rehearse", *arguments, "--json", str(directory / "figures.json")]) == 0
    kinds: list[dict[str, Any]] = json.loads((directory / "figures.json").read_text())
    return kinds


@pytest.mark.parametrize(
    ("name", "role", "stages"),
    [
        ("ppo-llama3.1-70b-8n8g.yaml", "actor", [(0,), (1, 2, 3, 4, 5, 6), (7,)]),
        ("grpo-qwen2.5-7b-1n8g.yaml", "actor", [(0,), (1,)]),
        ("grpo-llama3.1-405b-18n8g.yaml", "actor", [(0,), tuple(range(1, 8)), (8,)]),
    ],
)
def test_stages_with_equal_layers_are_one_kind(name: str, role: str, stages: list[tuple[int, ...]]) -> None:
    subject = preset(name)
    kinds = list(rank_kinds(subject.config, role, subject.specs[role]))
    assert [kind.stages for kind in kinds] == stages
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(range(subject.config.placement.pools["all"]))


def test_tokens_are_routed_evenly_or_with_a_skew() -> None:
    even = Routing(range(0), 1.0).experts_of(num_tokens=96, num_experts=8, topk=2)
    assert even.sum(1).unique().tolist() == [2]
    assert even.sum(0).tolist() == [24] * 8
    skewed = Routing(range(2, 4), 1.25).experts_of(num_tokens=96, num_experts=8, topk=2)
    assert skewed.sum(1).unique().tolist() == [2]
    assert skewed.sum(0).tolist() == [22, 22, 30, 30, 22, 22, 22, 22]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo-qwen3-8b-32k-4n8g.yaml", ["--ranks", "0"]),
        ("rm-llama3.1-8b-1n8g.yaml", []),
    ],
    ids=["context parallelism", "reward model"],
)
def test_the_plan_is_within_3_percent(
    name: str, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in rehearsed(tmp_path, str(CONFIGS / name), *overrides):
        planned = [phase for phase in kind["phases"] if phase["planned"] is not None]
        assert {phase["name"].split()[0] for phase in planned} >= {"build", "train"}
        for phase in planned:
            tolerance = max(0.03 * phase["planned"], 0.3 * GIB)
            assert phase["peak"] == pytest.approx(phase["planned"], abs=tolerance), phase["name"]
    shown = capsys.readouterr()
    assert "Every role fits on h100-80gb" in shown.out
    assert "  megatron/core/distributed/param_and_grad_buffer.py:" in shown.out
    assert "rehearsing" in shown.err


@pytest.mark.slow
def test_a_mixture_holds_nothing_between_its_updates(tmp_path: Path) -> None:
    recompute = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    (kind,) = rehearsed(
        tmp_path,
        str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"),
        f"model.path={make_tiny('gpt_oss', tmp_path / 'model')}",
        *("cluster.devices_per_node=2", "placement.pools.all=2", "batch.samples_per_update=64"),
        *("actor.parallel={ep: 2}", f"actor.megatron={recompute}", "actor.max_tokens_per_device=2048"),
        *("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"),
        *("--role", "actor"),
    )
    train = next(phase for phase in kind["phases"] if phase["name"] == "train actor")
    assert train["after"] == pytest.approx(train["before"], rel=0.01)


def test_a_loss_of_ones_own_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(CONFIGS / "grpo-qwen2.5-0.5b-1n1g.yaml"),
        "algorithm.loss.policy=tests.rehearse.losses:with_wrong_shape",
    ]
    assert main(["rehearse", *arguments]) == 1
    error = capsys.readouterr().err
    assert "actor, rank 0 for the 1 rank of stage 0: RuntimeError" in error
    assert "tests/rehearse/losses.py:" in error
    assert "with_wrong_shape" in error


@pytest.mark.slow
def test_numbers_for_the_whole_vocabulary_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [SMALL, "algorithm.loss.policy=tests.rehearse.losses:with_logits", "--role", "actor"]
    assert main(["rehearse", *arguments, "--phase", "train actor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"GiB +tests/rehearse/losses.py:\d+ \(with_logits\)", shown)
    assert re.search(r"`train actor` differs from the plan by \+\d", shown)


@pytest.mark.slow
def test_operations_are_the_models_and_buckets_are_planned(tmp_path: Path) -> None:
    spec = preset("grpo-qwen2.5-0.5b-1n1g.yaml").specs["actor"]
    (kind,) = rehearsed(tmp_path, SMALL, "--role", "actor")
    phases = {phase["name"]: phase for phase in kind["phases"]}
    tokens, scored = kind["tokens"], kind["tokens"] - kind["num_rows"]
    head = 2 * spec.vocab * spec.hidden
    assert phases["log-probs"]["flops"] == tokens * (spec.flops_per_token - head) + scored * head
    assert phases["send weights"]["peak"] == pytest.approx(phases["send weights"]["planned"], rel=0.03)


@pytest.mark.slow
@pytest.mark.on_demand
def test_the_budget_found_is_the_largest_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = preset("grpo-qwen2.5-0.5b-1n1g.yaml")
    memory_bytes = subject.hardware.memory_bytes
    rehearsed(tmp_path, SMALL, "--role", "actor", "--headroom")
    found = re.search(r"max_tokens_per_device` may be about ([\d,]+)", capsys.readouterr().out)
    assert found is not None
    budget = found.group(1).replace(",", "")
    (fullest,) = rehearsed(tmp_path, SMALL, "--role", "actor", f"actor.max_tokens_per_device={budget}")
    peak = max(phase["peak"] for phase in fullest["phases"]) + role_stages(subject, "actor")[0].process
    assert 0.96 * memory_bytes < peak <= memory_bytes


@pytest.mark.slow
def test_what_does_not_fit_comes_with_the_keys_that_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", SMALL, "--role", "actor", "actor.max_tokens_per_device=131072"]) == 2
    fix = capsys.readouterr().out.partition("It fits with:\n  ")[2]
    assert "actor.megatron.recompute_granularity=" in fix or "actor.max_tokens_per_device=" in fix


@pytest.mark.slow
def test_the_sizes_of_another_model_are_rehearsed(tmp_path: Path) -> None:
    larger = ("--model", "Qwen2.5-1.5B", "actor.max_tokens_per_device=2048")
    (kind,) = rehearsed(tmp_path, SMALL, "--role", "actor", *larger)
    assert 1.54e9 < kind["num_parameters"] < 1.55e9


def test_an_unknown_role_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(CONFIGS / "grpo-qwen2.5-7b-1n8g.yaml"), "--role", "critik"]) == 2
    assert "its roles are actor" in capsys.readouterr().err


def test_a_process_that_does_not_end_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mrl.rehearse.processes.LIMIT_S", 0.01)
    assert main(["rehearse", SMALL, "--role", "rollout"]) == 1
    assert "rollout: it has not ended after 0 s\n  fix: rehearse one --role at a time" in capsys.readouterr().err


def test_a_piece_outside_of_its_tensor_is_named() -> None:
    """Pieces of weights are not copied in a rehearsal, so their places are checked."""
    _check_inside(((0, 4), (1, 3)), torch.empty(4, 3), "w")
    with pytest.raises(RehearsalError, match=r"\(1, 4\)\) is outside of w with the shape \(4, 3\)"):
        _check_inside(((0, 4), (1, 4)), torch.empty(4, 3), "w")
