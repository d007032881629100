"""`mrl verify layout`: the user's family and layout on a small model, and a verdict that can be bad."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from mrl.cli.main import main
from mrl.config.schema import ParallelConfig
from mrl.engine import verify
from mrl.models.families import spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.layout import Layout
from mrl.models.small import small_config
from mrl.plan.known_models import model_values

ROOT = Path(__file__).parents[2]
LAYOUTS = [
    ("Llama-3.1-70B", ParallelConfig(tp=8, pp=4)),
    ("Qwen2.5-7B", ParallelConfig(tp=4)),
    ("Qwen2.5-0.5B", ParallelConfig(pp=2, vpp=2)),
    ("Qwen3-30B-A3B", ParallelConfig(tp=4, ep=8, etp=2)),
    ("Mixtral-8x22B", ParallelConfig(tp=2, pp=4, ep=4)),
]


@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_a_small_model_is_divided_as_the_large_one(name: str, parallel: ParallelConfig) -> None:
    values = model_values(name)
    large = spec_of(HfConfig(values, name))
    small = spec_of(HfConfig(small_config(values, parallel), name))
    Layout.of(parallel).check(small)
    assert small.family == large.family
    assert small.tied == large.tied
    assert (small.num_kv_heads < parallel.tp) == (large.num_kv_heads < parallel.tp)
    assert (small.num_heads > small.num_kv_heads) == (large.num_heads > large.num_kv_heads)
    assert small.num_parameters < 2_000_000


def test_few_ranks_show_a_layout() -> None:
    assert verify.fewest_ranks(ParallelConfig(tp=2, pp=2), dp=16) == 8
    assert verify.fewest_ranks(ParallelConfig(tp=2), dp=1) == 2
    assert verify.fewest_ranks(ParallelConfig(tp=2, ep=8), dp=16) == 8


@pytest.mark.slow
def test_the_verdict_of_the_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["verify", "layout", "configs/laptop-ppo.yaml", "--role=critic", "--model=Qwen2.5-0.5B"]
    assert main(arguments) == 0
    assert "critic: right on 4 ranks" in capfd.readouterr().out
    with mock.patch.object(verify, "RELATIVE_GOAL", 0.0):
        assert main(arguments) == 1
    assert "critic: WRONG on 4 ranks" in capfd.readouterr().out


def test_a_layout_that_is_too_large_for_a_laptop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["verify", "layout", "configs/ppo-llama3.1-70b-8n8g.yaml"]) == 2
    said = capsys.readouterr().out
    assert "actor: not measured: this layout takes " in said
    assert "--most-ranks" in said
