"""Models of families without a table: two ranks equal one rank, and the scores are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.cli.main import main
from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.engine import checkpoint
from mrl.engine.checkpoint_files import export_checkpoint
from mrl.errors import ModelError
from mrl.fsdp.parallel import shard_groups
from mrl.models.families import FAMILIES, read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.open_model import OpenSpec, require_table
from mrl.models.rollout_table import EngineSizes
from mrl.verify.parity import Difference, ParityCase, transformers_scores
from mrl.verify.spawn import run_distributed
from mrl.weight_sync.row_planner import RowPlanner
from tests.engine.tiny_training import step
from tests.fsdp import training
from tests.fsdp.open_models import OWN, make_open
from tests.fsdp.test_parity import results
from tests.trainer.test_ranked_run import CONFIG as RANKED
from tests.weight_sync.test_planner import SIZES, rollout_of

QUICK = ("gemma3_text", "hunyuan_v1_moe")


def compare(families: Sequence[str], directory: Path) -> None:
    models = {family: str(make_open(family, directory / family)) for family in families}
    alone = [ParityCase(model, "lm", Layout(), 1000, strategy="fsdp") for model in models.values()]
    pairs = [replace(case, max_tokens=64, parallel=layout) for case in alone for layout in (Layout(), Layout(cp=2))]
    ones, others = results(1, alone), results(2, pairs)
    for number, (one, case) in enumerate(zip(ones, alone, strict=True)):
        assert np.abs(one.scores - transformers_scores(case.model, case)).max() < 2e-5, case
        for other in others[2 * number : 2 * number + 2]:
            difference = Difference.between(one, other)
            assert difference.scores < 2e-5, (case, difference)
            assert difference.loss < 1e-5, (case, difference)
            # Norms of small outputs amplify rounding, most in gemma4_text.
            assert max(difference.grad_norm, difference.parameters) < 1e-4, (case, difference)


def test_two_ranks_equal_one_rank_and_transformers(tmp_path: Path) -> None:
    compare(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.on_demand
def test_two_ranks_equal_one_rank_and_transformers_in_many_families(tmp_path: Path) -> None:
    compare([family for family in OWN if family not in QUICK], tmp_path)


def saved(paths: list[str], directory: str) -> list[float]:
    norms = []
    for number, path in enumerate(paths):
        with shard_groups(Layout(), None, seed=1) as groups:
            engine = training.build(path, groups)
            step(engine)
            checkpoint.save(engine, f"{directory}/{number}", {})
            norms.append(step(engine)[1])
            again = training.build(path, groups)
            checkpoint.load(again, f"{directory}/{number}")
            assert step(again)[1] == norms[-1]
    return norms


def test_a_checkpoint_is_continued_and_exported_in_the_form_of_the_files(tmp_path: Path) -> None:
    paths = [make_open(family, tmp_path / family) for family in ("gpt2", "apertus", "minimax_m2")]
    run_distributed(2, saved, [str(path) for path in paths], str(tmp_path / "saved"), timeout_s=300)
    for number, path in enumerate(paths):
        target = tmp_path / f"exported-{number}"
        export_checkpoint(tmp_path / "saved" / str(number), path, "lm", torch.float32, target)
        before, after = HfReader(path), HfReader(target)
        assert {*before} == {*after}
        assert (target / "config.json").read_text().count("architectures") == 1
        changed = [name for name in before if not torch.equal(before.whole(name), after.whole(name))]
        assert len(changed) > len([*before]) * 0.8


@pytest.mark.parametrize("family", ["gpt2", "gemma4_text", "apertus", "deepseek_v2"])
def test_whole_tensors_reach_every_engine(family: str, tmp_path: Path) -> None:
    spec = read_spec(make_open(family, tmp_path / family))
    assert isinstance(spec, OpenSpec)
    planner = RowPlanner(spec, 3, 3, rollout_of(Mesh(3), EngineSizes(1, whole=True)))
    for rank in range(3):
        plan = planner.plan(rank, SIZES)
        sent = {tensor.name: tensor.fused.shape for bucket in plan.buckets for tensor in bucket.tensors}
        assert sent == dict(spec.weights)
        assert plan.num_received() == planner.least_received(rank)


def test_sizes_come_from_headers_and_a_table_is_asked_for_by_name(tmp_path: Path) -> None:
    spec = read_spec(make_open("hunyuan_v1_moe", tmp_path / "model"))
    assert isinstance(spec, OpenSpec)
    assert (spec.family, spec.num_layers, spec.vocab, spec.tied) == ("hunyuan_v1_moe", 4, 131, False)
    held = sum(int(np.prod(HfReader(tmp_path / "model").shape(name))) for name, _ in spec.weights)
    assert spec.num_parameters == held
    assert 0 < spec.flops_per_token < 2 * held + 2 * spec.vocab * spec.hidden
    with pytest.raises(ModelError, match='"hunyuan_v1_moe" has no table, which strategy=megatron needs') as raised:
        require_table(spec, "actor", FAMILIES)
    assert "strategy=fsdp" in raised.value.fix
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        read_spec(tmp_path / "model")


def test_commands_that_need_a_table_refuse_such_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_open("granite", tmp_path / "model")
    config = tmp_path / "run.yaml"
    config.write_text(RANKED.format(directory=tmp_path, model=model).replace("tp: 2", "tp: 1"))
    assert main(["plan", str(config)]) != 0
    said = capsys.readouterr().err
    assert '"granite" has no table, which strategy=megatron needs' in said
    assert "set strategy=fsdp for actor" in said
    assert main(["plan", str(config), "actor.strategy=fsdp"]) == 0
