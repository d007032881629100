"""A whole run from the driver's side: when it validates, saves, stops, and how it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import Config
from mrl.events import PhaseBegin, RunStarted, Warned, read_events
from mrl.observe.metrics import read_metrics
from tests.trainer.fakes import CRITIC, Hybrid, Scene, make_config, scene

SCORE = "val/score/mean@1"


def config_of(directory: Path, **sections: Any) -> Config:
    """Five steps, of which nothing is kept but the end."""
    training = {"steps": 5, "keep": 9} | sections.pop("training", {})
    return make_config(directory, training=training, **sections)


def happened(found: Scene) -> list[Any]:
    """Validations, and the phases that save and update."""
    return [what for what in found.journal if what in ("validation", ("phase", "save"), ("phase", "update_actor"))]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").glob("step-*"))


def lines(directory: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_metrics(directory / "metrics.jsonl")}


def test_validation_comes_first_every_so_often_and_last(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, validation={"every": 2}), tmp_path, validations=[0.1, 0.2, 0.4, 0.5]) as found:
        assert found.trainer.fit() == {SCORE: 0.5}, "the figures of the last validation"
    update, save = ("phase", "update_actor"), ("phase", "save")
    validate = "validation"
    assert happened(found) == [validate, update, update, validate, update, update, validate, update, validate, save]
    metrics = lines(tmp_path)
    assert list(metrics) == [0, 1, 2, 3, 4, 5]
    measured = {step: line[SCORE] for step, line in metrics.items() if SCORE in line}
    assert measured == {0: 0.1, 2: 0.2, 4: 0.4, 5: 0.5}, "at the step at which they were measured, and nowhere else"
    assert metrics[0] == {"step": 0, SCORE: 0.1}
    at = [index for index, what in enumerate(found.journal) if what == "validation"]
    for index in at:
        step = found.journal[index + 1][1]
        around = [("phase", "validation"), "awake", "validation", ("ask", step), "asleep"]
        assert found.journal[index - 2 : index + 3] == around
    assert [found.journal[index + 1] for index in at] == [("ask", step) for step in (0, 2, 4, 5)]
    assert saved_steps(tmp_path) == [5]


@pytest.mark.parametrize(
    ("validation", "times"),
    [({"every": 0}, 0), ({"every": 0, "first": True}, 0), ({"every": 5, "first": False}, 1), ({"every": 9}, 2)],
)
def test_validations_are_as_many_as_are_asked_for(validation: dict[str, Any], times: int, tmp_path: Path) -> None:
    with scene(config_of(tmp_path, validation=validation), tmp_path, validations=[0.5] * 9) as found:
        validated = found.trainer.fit()
    assert found.journal.count("validation") == times
    assert validated == ({SCORE: 0.5} if times else {})


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_checkpoints_are_written_every_so_often_and_last(every: int, steps: list[int], tmp_path: Path) -> None:
    with scene(config_of(tmp_path, training={"save_every": every}), tmp_path) as found:
        assert found.trainer.fit() == {}
    assert saved_steps(tmp_path) == steps
    saves = [index for index, what in enumerate(found.journal) if what == ("phase", "save")]
    assert [found.journal[index - 1] for index in saves] == [("shown", step) for step in steps], "recorded before saved"
    assert happened(found).count(("phase", "save")) == len(steps)


def test_a_checkpoint_holds_every_role_as_it_is_after_the_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, critic=CRITIC, training={"steps": 2, "save_every": 1}, validation={"every": 1})
    with scene(config, tmp_path, validations=[0.1, 0.5, 0.3]) as found:
        found.trainer.fit()
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        for role in ("actor", "critic"):
            assert json.loads((path / role / "manifest.json").read_text()) == {"updates": step}
        state = json.loads((path / "manifest.json").read_text())["state"]
        trained = {"prompts": {"drawn": 2 * step}, "kl": {"kind": "fixed"}, "model_scores": {}, "role_baselines": {}}
        assert state["trained"] == trained
        assert state["best"] == 0.5
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000001"


def test_a_checkpoint_is_the_best_only_by_a_validation_of_its_own(tmp_path: Path) -> None:
    """Step 3 comes between two validations, of which the one before scored highest."""
    config = config_of(tmp_path, training={"save_every": 3}, validation={"every": 2})
    with scene(config, tmp_path, validations=[0.1, 0.9, 0.3, 0.2]) as found:
        found.trainer.fit()
    assert saved_steps(tmp_path) == [3, 5]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000005"


def test_each_new_best_by_the_chosen_figure_and_direction_is_kept(tmp_path: Path) -> None:
    """The validation before training has no checkpoint to keep, a tie is not better, and the last step is saved."""
    easy, figures = "val/easy/solved/mean@1", (-1.0, 4.0, 1.0, 1.0, 0.0, 5.0)
    by = {"every": 1, "keep_best": True, "best_metric": easy, "best_mode": "min"}
    with scene(config_of(tmp_path, validation=by), tmp_path, validations=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]) as found:
        whole = found.components.validator.run
        found.components.validator.run = lambda step, models: {easy: figures[step]} | whole(step, models)
        found.trainer.fit()
    assert saved_steps(tmp_path) == [1, 2, 4, 5]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000004"


def test_the_best_is_lower_for_more_prompts_than_chance_explains(tmp_path: Path) -> None:
    """Four of eight prompts are lower in step 2, all in step 3."""
    by_step = [[5.0] * 8, [5.0] * 8, [4.0] * 4 + [5.0] * 4, [4.0] * 7 + [3.0]]
    validation = {"every": 1, "keep_best": True, "best_mode": "min"}
    config = config_of(tmp_path, training={"steps": 3}, validation=validation)
    with scene(config, tmp_path, validations=[sum(values) / 8 for values in by_step]) as found:
        validator = found.components.validator
        whole = validator.run

        def run(step: int, models: Any) -> dict[str, float]:
            validator.by_prompt[SCORE] = {f"p{number}": value for number, value in enumerate(by_step[step])}
            return {f"{SCORE}/low": 3.0, f"{SCORE}/high": 5.5} | dict(whole(step, models))

        validator.run = run
        found.trainer.fit()
    assert saved_steps(tmp_path) == [1, 3]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000003"
    assert found.screen.said[0] == f"validation after step 0: {SCORE} 5 (3 to 5.5)"
    noise = "is better by 0.5, but only 4 of 8 prompts differ: best stays at step 1"
    assert f"{SCORE} {noise}" in "".join(found.screen.said)


def test_a_figure_that_is_missing_makes_no_best_and_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, validation={"every": 5, "best_metric": "val/solved/maj@1"})
    with scene(config, tmp_path, validations=[0.1, 0.2]) as found:
        found.trainer.fit()
    said = "warning: validation: the figure val/solved/maj@1 is missing: this checkpoint cannot become the best"
    assert found.screen.said == [said] * 2
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_another_figure_is_not_compared_with_the_best_so_far(tmp_path: Path) -> None:
    """A run that resumes with another figure, whose values are far lower, finds its own best, and warns."""
    config = config_of(tmp_path, training={"steps": 2}, validation={"every": 1})
    with scene(config, tmp_path, validations=[0.1, 0.9, 0.8]) as found:
        found.trainer.fit()
    later = {"every": 1, "keep_best": True, "best_mode": "min"}
    with scene(config_of(tmp_path, validation=later), tmp_path, validations=[0.7, 0.8, 0.6]) as found:
        what = (
            "the best checkpoint was chosen by the max of val/score/mean@1; from now on, by the min of val/score/mean@1"
        )
        assert f"warning: validation: {what}" in found.screen.said
        found.trainer.fit()
    assert saved_steps(tmp_path) == [2, 3, 5]


def test_a_run_that_is_told_to_stop_records_saves_and_ends(tmp_path: Path) -> None:
    with scene(config_of(tmp_path, validation={"every": 3}), tmp_path, validations=[0.1, 0.3]) as found:
        found.run.stopping.reason = lambda: "SIGTERM" if found.trainer.num_steps_done == 2 else ""  # type: ignore[method-assign]
        assert found.trainer.fit() == {SCORE: 0.1}
        assert found.trainer.num_steps_done == 2
    assert saved_steps(tmp_path) == list(lines(tmp_path))[-1:] == [2]
    assert found.screen.said[-1] == "SIGTERM: saving and stopping"


def test_the_checkpoint_under_way_is_not_lost_with_the_step_that_fails(tmp_path: Path) -> None:
    def step() -> Any:
        if found.trainer.num_steps_done == 1:
            raise ValueError("no such prompt")
        return one_step()

    with scene(config_of(tmp_path, training={"save_every": 1}), tmp_path) as found:
        found.components.actor.is_written = [False] * 4  # type: ignore[attr-defined]
        one_step, found.trainer.step = found.trainer.step, step  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="no such prompt"):
            found.trainer.fit()
        assert saved_steps(tmp_path) == [], "it is under way"
    assert saved_steps(tmp_path) == [1]


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """It crashes after step 4, whose checkpoint is that of step 2: steps 3 and 4 are done again."""
    config = config_of(tmp_path, critic=CRITIC, training={"save_every": 2}, validation={"every": 5})
    batch = {"samples_per_update": 1}
    config = replace(config, batch=replace(config.batch, **batch))
    with scene(config, tmp_path, validations=[0.1, 0.5]) as whole:
        whole.trainer.fit()
    expected = lines(tmp_path)
    for step in (4, 5):
        (tmp_path / "checkpoints" / f"step-{step:06d}").rename(tmp_path / f"gone-{step}")

    with scene(config, tmp_path, validations=[0.5]) as again:
        assert again.trainer.num_steps_done == 2
        path = tmp_path / "checkpoints" / "step-000002"
        assert again.screen.said[-1] == f"resumed from {path}"
        for role in ("actor", "critic"):
            assert again.components.roles[role].loaded == [str(path / role)]
        assert again.trainer.fit() == {SCORE: 0.5}, "the first validation is not repeated"
    assert list(lines(tmp_path)) == [0, 1, 2, 3, 4, 5]
    for step in (3, 4, 5):
        same = ("critic/score/mean", "response_length/mean")
        assert {name: lines(tmp_path)[step][name] for name in same} == {name: expected[step][name] for name in same}
    seeds = [[request.seed for request in requests] for requests in again.hybrid.requests]
    assert seeds == [[request.seed for request in requests] for requests in whole.hybrid.requests[2:]]
    rows = [batch.row_ids.tolist() for batch in again.components.actor.batches["update_actor"]]
    assert rows == [batch.row_ids.tolist() for batch in whole.components.actor.batches["update_actor"]][2 * 4 :]


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, validation={"every": 1})
    with scene(config, tmp_path, validations=[0.5] * 6) as found:
        found.trainer.fit()
    with scene(config, tmp_path) as found:
        assert found.trainer.fit() == {}
    assert found.journal == []


def test_what_came_before_the_steps_is_in_none_of_them(tmp_path: Path) -> None:
    with scene(config_of(tmp_path), tmp_path) as found:
        with found.run.clock("start"):
            pass
        found.trainer.fit()
    assert all("timing_s/start" not in line for line in lines(tmp_path).values())
    assert all(line["timing_s/rollout"] < line["timing_s/step"] for line in lines(tmp_path).values())
    records = [record.event for record in read_events(tmp_path / "events.jsonl")]
    rollouts = [event.step for event in records if isinstance(event, PhaseBegin) and event.phase == "rollout"]
    assert rollouts == [1, 2, 3, 4, 5]
    assert [event.run for event in records if isinstance(event, RunStarted)] == ["run"]


def test_weights_that_travel_whole_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(config_of(tmp_path), tmp_path) as found:
        assert found.screen.said == []
    monkeypatch.setattr(Hybrid, "full_tensor_reason", "tp differs")
    (tmp_path / "other").mkdir()
    with scene(config_of(tmp_path), tmp_path / "other") as found:
        assert found.screen.said == ["warning: rollout: weights travel as whole tensors: tp differs"]
    warned = [record.event for record in read_events(tmp_path / "other" / "events.jsonl")]
    assert Warned("rollout", "weights travel as whole tensors: tp differs") in warned
