"""Which steps a run records, what a record holds, and training on recorded samples; with fake workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.schema import Config, PlacementConfig
from mrl.config.training import MetricRangeConfig, RecordConfig
from mrl.errors import SetupError, WireError
from mrl.protocol import DataProto, Jagged
from mrl.protocol.step_record import AFTER, BEFORE, StepRecord, recorded_steps
from mrl.trainer.recorded_samples import NoEngines, RecordedSamples, check_recorded, without_engines
from mrl.trainer.recorder import outside
from tests.trainer.fakes import CRITIC, Scene, make_config, scene

BEYOND = "more than 0.5 from 1.5, the mean of the 2 steps before"


def config_of(directory: Path, **sections: Any) -> Config:
    training = {"steps": 5, "keep": 9} | sections.pop("training", {})
    return make_config(directory, training=training, **sections)


def warnings_of(found: Scene) -> list[str]:
    return [line for line in found.screen.said if line.startswith("warning: ")]


def test_the_chosen_steps_and_every_nth_are_recorded(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, training={"record": RecordConfig(steps=[1], every=2)}), tmp_path) as found:
        found.trainer.fit()
    assert recorded_steps(tmp_path) == [1, 2, 4]
    one_step = [("begin_record", False, False), ("end_record",), ("drop_record",)]
    assert found.roles["actor"].recorded == 3 * one_step, "the other steps cost nothing"


def test_a_record_repeats_the_step(tmp_path: Path) -> None:
    """Samples with their texts, every column of the update, micro-batches, seeds, figures, and prints on both sides."""
    batch = {"samples_per_update": 2}
    config = config_of(tmp_path, critic=CRITIC, batch=batch, training={"steps": 2, "record": RecordConfig(every=1)})
    with scene(config, tmp_path) as found:
        found.trainer.fit()
    record = StepRecord.read(tmp_path, 2)
    facts = record.facts
    trained = found.roles["actor"].batches["update_actor"][2:]
    assert [update["rows"] for update in facts["updates"]["actor"]] == [part.row_ids.tolist() for part in trained]
    assert facts["updates"]["critic"][0]["micro_batches"] == [[facts["updates"]["critic"][0]["rows"]]]
    assert facts["updates"]["actor"][1]["figures"]["loss"] == 4.0
    assert {"prompts", "responses", "rollout_log_probs", "scores", "values", "advantages", "returns"} <= set(
        record.batch.columns()
    )
    for part in trained:
        index = [record.batch.row_ids.tolist().index(row) for row in part.row_ids]
        written = record.batch.take(index)
        assert written["advantages"].values.tolist() == part["advantages"].values.tolist()
    assert all(record.samples["response_text"])
    assert facts["seeds"] == {"training": 5, "data": config.data.seed, "orders": [[5, 1, 0]]}
    assert facts["weights_version"] == 2
    assert facts["figures"]["actor/grad_norm"] == 1.0
    assert facts["config"]["rollout"]["temperature"] == 0.7
    assert facts["reasons"] == ["configured"]
    weights = {(role, moment): part.digest for role, moment, _, part in record.prints}
    assert weights == {("actor", BEFORE): 2, ("actor", AFTER): 4, ("critic", BEFORE): 2, ("critic", AFTER): 4}


def test_the_documented_lines_read_a_record(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, training={"record": RecordConfig(steps=[3])}), tmp_path) as found:
        found.trainer.fit()
    batch = DataProto.load_from_disk(tmp_path / "record" / "step-000003" / "batch.mrl")
    assert batch.meta_info["step"] == 3
    assert len(batch["advantages"].rows()) == 4


@pytest.mark.parametrize(
    ("usual", "value", "earlier", "reason"),
    [
        (MetricRangeConfig(max=1.0), 1.0, [], ""),
        (MetricRangeConfig(max=1.0), 1.5, [], "above 1"),
        (MetricRangeConfig(min=-1.0), -1.5, [], "below -1"),
        (MetricRangeConfig(max=1.0), float("nan"), [], "which is not finite"),
        (MetricRangeConfig(jump=0.5), 9.0, [1.0], ""),
        (MetricRangeConfig(jump=0.5), 2.1, [1.0, 2.0], BEYOND),
        (MetricRangeConfig(jump=0.5), 1.0, [1.0, 2.0], ""),
        (MetricRangeConfig(jump=0.5), 0.9, [1.0, 2.0, float("nan")], BEYOND),
    ],
)
def test_a_metric_leaves_its_range(usual: MetricRangeConfig, value: float, earlier: list[float], reason: str) -> None:
    assert outside(value, usual, earlier) == reason


def test_a_step_with_an_unusual_metric_is_recorded_and_named(tmp_path: Path) -> None:
    """The fake critic's loss is the number of its updates."""
    training = {"record_when": {"critic/loss": MetricRangeConfig(max=3.5)}}
    with scene(config_of(tmp_path, critic=CRITIC, training=training), tmp_path) as found:
        found.trainer.fit()
    assert recorded_steps(tmp_path) == [4, 5]
    said = "warning: record: step 4 is recorded: critic/loss is 4, above 3.5"
    assert said in warnings_of(found)
    assert StepRecord.read(tmp_path, 4).facts["reasons"] == ["critic/loss is 4, above 3.5"]
    assert [what for what, *_ in found.roles["critic"].recorded].count("drop_record") == 5, "no watch is left"


def test_a_jump_is_measured_from_the_steps_before(tmp_path: Path) -> None:
    """The loss is 1, 2, 3, ...: step 3 is 1.5 from the mean of the steps before it, and step 2 has only one before."""
    training = {"steps": 3, "record_when": {"critic/loss": MetricRangeConfig(jump=1.2)}}
    with scene(config_of(tmp_path, critic=CRITIC, training=training), tmp_path) as found:
        found.trainer.fit()
    assert recorded_steps(tmp_path) == [3]


def test_a_misspelt_metric_is_reported_once(tmp_path: Path) -> None:
    training = {"record_when": {"actor/grad_nrm": MetricRangeConfig(max=3.5)}}
    with scene(config_of(tmp_path, training=training), tmp_path) as found:
        found.trainer.fit()
    (said,) = warnings_of(found)
    assert "this step has no metric actor/grad_nrm" in said
    assert "actor/grad_norm" in said
    assert recorded_steps(tmp_path) == []


def test_records_stay_below_their_limit(tmp_path: Path) -> None:
    for name in ("free", "bounded"):
        (tmp_path / name).mkdir()
    with scene(config_of(tmp_path, training={"record": RecordConfig(every=1)}), tmp_path / "free") as found:
        found.trainer.fit()
    files = [p for p in (tmp_path / "free" / "record").rglob("*") if p.is_file()]
    one = max(sum(f.stat().st_size for f in files if f.parent.name == f"step-00000{n}") for n in range(1, 6))
    record = RecordConfig(every=1, max_bytes=2 * one + one // 2)
    with scene(config_of(tmp_path, training={"record": record}), tmp_path / "bounded") as found:
        found.trainer.fit()
    assert recorded_steps(tmp_path / "bounded") == [1, 2]
    (said,) = warnings_of(found)
    assert "step 3 is not recorded: with it, the records would exceed training.record.max_bytes=" in said


def test_a_full_disk_loses_records_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mrl.trainer.recorder.write_record", full)
    with scene(config_of(tmp_path, training={"record": RecordConfig(every=1)}), tmp_path) as found:
        found.trainer.fit()
        assert found.trainer.num_steps_done == 5
    (said,) = warnings_of(found)
    assert "step 1 is not recorded, the run continues" in said


def test_recorded_samples_come_back_with_the_version_of_their_weights(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, training={"record": RecordConfig(every=1)}), tmp_path) as found:
        report = found.trainer.step()
        again, engines = found.trainer.step(), NoEngines()
        scored, answers = RecordedSamples(tmp_path, engines, found.run.clock).next(2)
    assert engines.version == 2
    assert answers == {}
    assert scored.batch.row_ids.tolist() == again.batch.row_ids.tolist() != report.batch.row_ids.tolist()
    for name, column in again.batch.columns().items():
        recorded = scored.batch[name]
        if isinstance(column, np.ndarray):
            assert recorded.tolist() == column.tolist(), name
        else:
            values = [side.values if isinstance(side, Jagged) else side for side in (column, recorded)]
            assert values[0].tolist() == values[1].tolist(), name


def test_missing_and_damaged_records_are_named(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, training={"record": RecordConfig(steps=[1, 3])}), tmp_path) as found:
        found.trainer.fit()
    with pytest.raises(SetupError, match="step 2 was not recorded; recorded steps: 1, 3"):
        StepRecord.read(tmp_path, 2)
    with pytest.raises(SetupError, match=r"step 2 was not recorded.*\n*.*training.steps=1"):
        check_recorded(tmp_path, 1, 3)
    check_recorded(tmp_path, 3, 3)
    path = tmp_path / "record" / "step-000003" / "batch.mrl"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WireError, match="the file is damaged"):
        StepRecord.read(tmp_path, 3)


def test_without_engines_only_the_pools_of_other_roles_are_needed(tmp_path: Path) -> None:
    roles = {"actor": "a", "critic": "a", "rollout": "e", "reward_model": "m", "judge": "m"}
    placement = PlacementConfig(pools={"a": 2, "e": 4, "m": 1}, roles=roles)
    config = without_engines(make_config(tmp_path, critic=CRITIC, placement=placement))
    assert config.placement.pools == {"a": 2}
    assert config.placement.roles == {"actor": "a", "critic": "a"}
