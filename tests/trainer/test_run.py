"""Files of a run, the choice of the best checkpoint, when it saves, and what it restores."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.algos.kl import KLController
from mrl.config.algorithm import KlConfig
from mrl.config.schema import Config
from mrl.errors import CheckpointError, ConfigError, MrlError, SetupError, WorkerDied, WorkerRaised
from mrl.events import Event, RunEnded, Warned, read_events
from mrl.observe.metrics import read_metrics
from mrl.trainer.checkpoint_score import CheckpointScore
from mrl.trainer.components import Components
from mrl.trainer.model_scores import ModelScores
from mrl.trainer.run import Run, describe_changes, open_run, resume_config
from tests.trainer.fakes import Prompts, Role, Screen, make_config, resolved


class Tracker:
    """A tracker that keeps its input."""

    def __init__(self) -> None:
        self.opened: tuple[Any, ...] = ()
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_closed = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def news(self) -> str:
        return "it is down" if len(self.logged) == 2 else ""

    def close(self) -> str:
        self.num_closed += 1
        return "2 steps did not arrive" if self.logged else ""


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """Opens the same tracker for every run."""
    opened = Tracker()

    def open_trackers(*arguments: Any) -> list[Tracker]:
        opened.opened = arguments
        return [opened]

    monkeypatch.setattr("mrl.trainer.run.open_trackers", open_trackers)
    return opened


Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path, tracker: Tracker) -> Iterator[Begin]:
    """Begin a run in the test's directory, or resume it."""
    runs: list[Run] = []

    def run(*warnings: str, **sections: Any) -> Run:
        config = make_config(tmp_path, **sections)
        runs.append(Run(resolved(config, *warnings), tmp_path, Screen([])))
        return runs[-1]

    yield run
    for each in runs:
        each.events.close()


def team_of(drawn: int = 0) -> Any:
    """One role, and prompts of which so many have been drawn."""
    prompts = Prompts()
    prompts.num_drawn = drawn
    nothing: Any = None
    role: Any = Role("actor", [])
    models, kl = ModelScores([]), KLController(0.1)
    return Components(role, None, models, nothing, nothing, prompts, nothing, nothing, kl, nothing)  # type: ignore[arg-type]


def events_of(run: Run) -> list[Event]:
    return [record.event for record in read_events(run.events.path)]


def best_after(run: Run, scores: dict[int, float | None]) -> list[str]:
    """Which checkpoint is the best after each save of these scores; None is a save without validation."""
    found = []
    for step, score in scores.items():
        run.save(team_of(), step, None if score is None else CheckpointScore(score, step))
        pointer = run.directory / "checkpoints" / "best"
        found.append(pointer.read_text() if pointer.exists() else "")
    return found


def test_the_best_checkpoint_is_the_best_of_all_also_after_a_resume(begin: Begin) -> None:
    first = begin()
    assert first.resume(team_of()) == 0
    scores = {1: None, 2: -3.0, 3: -1.0, 4: -2.0, 5: -1.5, 6: -1.0, 7: None}
    second, third = "step-000002", "step-000003"
    assert best_after(first, scores) == ["", second, third, third, third, third, third]
    again = begin()
    assert again.resume(team_of()) == 7
    assert best_after(again, {8: -1.1, 9: None, 10: 0.0}) == [third, third, "step-000010"]


def test_the_best_checkpoint_is_better_by_more_than_noise_between_prompts(begin: Begin) -> None:
    """Ten prompts. Step 2 wins four and loses three; step 4 wins six and loses none, also after a resume."""

    def score(step: int, *solved: int) -> CheckpointScore:
        by_prompt = {f"prompt {number}": float(number in solved) for number in range(10)}
        return CheckpointScore(len(solved) / 10, step, by_prompt)

    run = begin()
    run.best_by = "the max of val/score/mean@1"
    run.resume(team_of())
    scores = [score(1, 0, 1, 2), score(2, 3, 4, 5, 6), score(3, 0, 1, 2, 3, 4, 5, 6), score(4, *range(9))]
    noise = []
    for each in scores[:3]:
        noise.append(each.noise(run.best))
        run.save(team_of(), each.step, each)
    assert (run.directory / "checkpoints" / "best").read_text() == "step-000001"
    assert noise == [
        "",
        "better by 0.1, within noise (±0.626, 10 prompts): best stays at step 1; about 594 more "
        "prompts would distinguish them",
        "better by 0.4, but only 4 of 10 prompts differ: best stays at step 1; about 5 more "
        "prompts would distinguish them",
    ]
    again = begin()
    again.best_by = run.best_by
    again.resume(team_of())
    again.save(team_of(), 3, scores[1])
    assert (run.directory / "checkpoints" / "best").read_text() == "step-000001", "the prompts are remembered"
    again.save(team_of(), 4, scores[3])
    assert (run.directory / "checkpoints" / "best").read_text() == "step-000004"
    again.save(team_of(), 5, CheckpointScore(0.91, 5, {"another prompt": 0.91}))
    assert (run.directory / "checkpoints" / "best").read_text() == "step-000005", "other prompts are not paired"


def test_a_run_that_comes_back_puts_everything_where_it_was(begin: Begin, tracker: Tracker) -> None:
    first = begin()
    first.resume(team_of())
    first.save(team_of(6), 3)
    team = team_of()
    again = begin(training={"trackers": ["tensorboard", "wandb"]})
    assert again.resume(team) == 3
    path = again.directory / "checkpoints" / "step-000003"
    assert team.actor.loaded == [str(path / "actor")]
    assert team.prompts.num_drawn == 6
    assert again.console.said == [f"resumed from {path}"]  # type: ignore[attr-defined]
    which, name, directory, config, next_step = tracker.opened
    assert (which, name, directory, next_step) == (["tensorboard", "wandb"], "run", again.directory, 4)
    assert config["rollout"]["temperature"] == 0.7
    assert "training" not in config


def test_a_run_that_left_no_checkpoint_begins_again_and_says_so(begin: Begin) -> None:
    first = begin()
    first.resume(team_of())
    first.record(0, {"figure": 1})  # a validation before training
    again = begin()
    assert again.resume(team_of()) == 0
    (warning,) = [event for event in events_of(again) if isinstance(event, Warned)]
    assert warning == Warned(
        "resume", "an earlier start of this run left no checkpoint: training starts from the beginning"
    )
    assert again.console.said == [f"warning: resume: {warning.message}"]  # type: ignore[attr-defined]
    assert read_metrics(again.directory / "metrics.jsonl") == []


def test_a_run_that_is_never_to_resume_does_not(begin: Begin) -> None:
    first = begin()
    first.resume(team_of())
    first.save(team_of(6), 3)
    team = team_of()
    assert begin(training={"resume": "never"}).resume(team) == 0
    assert (team.actor.loaded, team.prompts.num_drawn) == ([], 0)


def test_a_configuration_that_learns_otherwise_is_warned_of(begin: Begin) -> None:
    first = begin()
    first.resume(team_of())
    first.save(team_of(), 3)
    again = begin(rollout={"temperature": 0.9}, training={"steps": 99})
    again.resume(team_of())
    said = "was 0.7 when this run began, is 0.9 from step 4 on"
    assert Warned("rollout.temperature", said) in events_of(again)
    assert again.console.said[0] == f"warning: rollout.temperature: {said}"  # type: ignore[attr-defined]
    assert len(again.console.said) == 2  # type: ignore[attr-defined]


def test_warnings_of_the_configuration_are_passed_on(begin: Begin) -> None:
    run = begin("no network here", "no device here")
    warned = [Warned("configuration", "no network here"), Warned("configuration", "no device here")]
    assert events_of(run)[1:] == warned
    assert run.console.said[1] == "warning: configuration: no device here"  # type: ignore[attr-defined]


def test_metrics_are_written_down_everywhere(begin: Begin, tracker: Tracker) -> None:
    run = begin()
    run.resume(team_of())
    assert tracker.opened[-1] == 1, "the first step that it gets"
    for step in (1, 2):
        run.record(step, {"figure": step / 2})
    assert read_metrics(run.directory / "metrics.jsonl") == [{"step": 1, "figure": 0.5}, {"step": 2, "figure": 1.0}]
    assert tracker.logged == [(1, {"figure": 0.5}), (2, {"figure": 1.0})]


def checkpoint_warnings(run: Run) -> list[str]:
    return [event.message for event in events_of(run) if isinstance(event, Warned) and event.about == "checkpoint"]


def test_training_goes_on_while_a_checkpoint_is_written(begin: Begin) -> None:
    run, team = begin(training={"keep": 2}), team_of(1)
    run.resume(team)
    run.publish_save()
    team.actor.is_written = [True, False, True, True]
    run.save(team, 1, CheckpointScore(1.0), wait=False)
    team.prompts.num_drawn = 2
    run.publish_save()
    assert run.checkpoints.steps() == [], "one rank still writes"
    team.actor.is_written = [True] * 4
    run.publish_save()
    assert run.checkpoints.steps() == [1]
    state = json.loads((run.directory / "checkpoints" / "step-000001" / "manifest.json").read_text())["state"]
    assert state["trained"]["prompts"] == {"drawn": 1}, "of the moment of the save"
    team.actor.is_written = [False] * 4
    run.save(team, 2, wait=False)
    run.save(team, 3, wait=False)
    assert run.checkpoints.steps() == [1, 2], "one at a time is under way"
    run.finish_save()
    assert run.checkpoints.steps() == [1, 2, 3], "two, and the best"
    plain = begin(training={"background_save": False, "keep": 2})
    plain.resume(team_of())
    plain.save(team, 4, wait=False)
    assert plain.checkpoints.steps() == [1, 3, 4]


def test_a_checkpoint_that_cannot_be_written_is_told_of_and_made_up(begin: Begin) -> None:
    run, team = begin(training={"save_every": 10, "max_failed_saves": 2}), team_of()
    run.resume(team)
    run.save(team, 10, CheckpointScore(1.0), wait=False)
    run.finish_save()
    team.actor.full_disk = True
    run.save(team, 20, CheckpointScore(5.0), wait=False)
    run.publish_save()
    assert len(checkpoint_warnings(run)) == 1
    assert "no space left on device" in checkpoint_warnings(run)[0]
    assert run.save_is_due(21), "at the next step already"
    team.actor.full_disk = False
    run.save(team, 21, CheckpointScore(3.0), wait=False)
    run.publish_save()
    assert not run.save_is_due(22)
    best = run.directory / "checkpoints" / "best"
    assert best.read_text() == "step-000021", "what was never written is not the best"
    team.actor.full_disk = True
    for step in (30, 31):
        run.save(team, step, wait=False)
        run.publish_save()
    run.save(team, 32, wait=False)
    with pytest.raises(WorkerRaised, match="no space left"):
        run.publish_save()
    assert run.checkpoints.steps() == [10, 21]


def test_a_last_checkpoint_that_cannot_even_begin_is_an_error(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    run, team = begin(training={"max_failed_saves": 5}), team_of()
    run.resume(team)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    monkeypatch.setattr(run.checkpoints, "begin", full)
    run.save(team, 1, wait=False)
    assert len(checkpoint_warnings(run)) == 1
    with pytest.raises(CheckpointError, match=r"/somewhere: cannot write a checkpoint: .*No space left"):
        run.save(team, 2)


def test_a_run_wants_to_stop_when_its_time_is_up(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    run, endless = begin(training={"time_limit_s": 60.0}), begin()
    assert not run.should_stop()
    now = SimpleNamespace(monotonic=lambda: run.stopping._began + 61)
    monkeypatch.setattr("mrl.trainer.run.time", now)
    assert run.should_stop()
    assert run.console.said == ["training.time_limit_s=60 is reached: saving and stopping"]  # type: ignore[attr-defined]
    assert not endless.should_stop()
    assert endless.console.said == []  # type: ignore[attr-defined]


def opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration that can be opened; how it is written is another test's."""
    monkeypatch.setattr("mrl.config.resolved.run_directory.render", lambda resolved: "text")
    return make_config(directory)


def test_an_open_run_hears_signals_and_closes_what_it_opened(
    tmp_path: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, before = opened(tmp_path, monkeypatch), signal.getsignal(signal.SIGTERM)
    with open_run(resolved(config), Screen([])) as run:
        assert run.directory == tmp_path / "run"
        run.resume(team_of())
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.should_stop()
        assert tracker.num_closed == 0
        for step in (1, 2):
            run.record(step, {"figure": 1.0})
    assert tracker.num_closed == 1
    said = [each.event for each in read_events(tmp_path / "run" / "events.jsonl")]
    assert [each.message for each in said if isinstance(each, Warned)] == ["it is down", "2 steps did not arrive"]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises((ValueError, OSError)):
        run.events.write(Warned("", "closed"))


@pytest.mark.parametrize(
    ("error", "cause", "why"),
    [
        (None, "done", ""),
        (MrlError("no model there", fix="model.path"), "failed", "no model there\n  fix: model.path"),
        (WorkerDied("rank 1 was killed"), "lost", "rank 1 was killed"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (ZeroDivisionError("a bug"), "failed", "ZeroDivisionError: a bug"),
    ],
)
def test_every_ending_is_the_last_event_of_a_run(
    error: BaseException | None, cause: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = opened(tmp_path, monkeypatch)
    with suppress(BaseException), open_run(resolved(config), Screen([])) as run:
        run.resume(team_of())
        run.record(4, {"figure": 1.0})
        if error is not None:
            raise error
    *_, last = [each.event for each in read_events(tmp_path / "run" / "events.jsonl")]
    assert isinstance(last, RunEnded)
    assert (last.cause, last.step) == (cause, 4)
    assert last.why.rstrip().endswith(why)


@pytest.mark.parametrize(("step", "cause"), [(1, "stopped"), (3, "done")], ids=["early", "in the last step"])
def test_a_run_that_a_signal_stopped_says_which(
    step: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = opened(tmp_path, monkeypatch)
    with open_run(resolved(replace(config, training=replace(config.training, steps=3))), Screen([])) as run:
        run.resume(team_of())
        os.kill(os.getpid(), signal.SIGTERM)
        run.record(step, {})
        assert run.should_stop()
    *_, last = [each.event for each in read_events(run.directory / "events.jsonl")]
    assert last == RunEnded(cause, "SIGTERM" if cause == "stopped" else "", step)


def test_whether_a_directory_may_go_on_is_the_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = opened(tmp_path, monkeypatch)
    with open_run(resolved(config), Screen([])):
        pass
    with open_run(resolved(config), Screen([])):
        pass
    never = replace(config, training=replace(config.training, resume="never"))
    with pytest.raises(ConfigError, match="this directory is not empty"), open_run(resolved(never), Screen([])):
        pass


def test_telemetry_that_cannot_be_written_is_said_once_and_ends_nothing(begin: Begin) -> None:
    run = begin()
    run.resume(team_of())
    path = run.directory / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    for step in (1, 2):
        run.record(step, {"figure": 1.0})
        with run.may_be_lost("samples"):
            raise OSError(errno.ENOSPC, "No space left on device", "samples/x")
    path.rmdir()
    run.record(3, {"figure": 2.0})
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3], "nothing is lost that can be kept"
    warned = [event.about for event in events_of(run) if isinstance(event, Warned)]
    assert [about for about in warned if about != "tracker"] == ["metrics", "samples"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_ends_a_run_with_one_cause(number: int, tmp_path: Path) -> None:
    file = str(tmp_path / "run" / "somewhere")
    config = resolved(make_config(tmp_path))
    with pytest.raises(SetupError) as caught, open_run(config, Screen([])):
        raise OSError(number, os.strerror(number), file)
    assert str(caught.value).startswith(
        f"{file}: the run cannot write: {os.strerror(number)}\n  fix: free space on that disk"
    )
    with pytest.raises(ConnectionResetError), open_run(config, Screen([])):
        raise ConnectionResetError(errno.ECONNRESET, "of no disk")


def test_a_full_disk_of_a_rank_is_one_sentence(begin: Begin) -> None:
    """The traceback adds nothing, and is in the log of the rank."""
    run, team = begin(training={"max_failed_saves": 5}), team_of(1)
    run.resume(team)
    where = "/runs/it/checkpoints/.saving-000001/rank-00000.safetensors"
    said = f"actor rank 2 raised in finish_checkpoint: saving failed on 1 of 4 ranks; rank 0: [Errno 28] {where}"

    def finish() -> None:
        raise WorkerRaised(f"{said}\n  traceback:\n  | Traceback (most recent call last):\n  its log: x", role="actor")

    team.actor.group.finish_checkpoint = finish
    run.save(team, 1, wait=False)
    run.publish_save()
    assert checkpoint_warnings(run) == [f"not saved, retrying after the next step: {said}"]
    with pytest.raises(CheckpointError) as caught:
        run.save(team, 2)
    assert str(caught.value) == (
        f"cannot write a checkpoint: {said}\n"
        "  fix: free space on that disk; the run resumes from the previous checkpoint"
    )


# --- changes of the configuration ---


LEARNT = {
    "model",
    "algorithm",
    "data",
    "batch",
    "actor",
    "critic",
    "reward_model",
    "reward_models",
    "teacher",
    "teachers",
}
LEARNT |= {"reference", "rollout", "agent", "asynchrony"}
MAY_CHANGE = {"run", "cluster", "deadlines", "placement", "training", "validation", "sync", "reward", "judge"}


def test_what_decides_what_is_learnt_is_held(tmp_path: Path) -> None:
    assert {each.name for each in fields(Config)} == LEARNT | MAY_CHANGE
    config = make_config(tmp_path)
    held = resume_config(config)
    assert set(held) == LEARNT
    assert held["actor"]["optimizer"] == {}
    assert held["batch"]["samples_per_update"] == 4
    assert json.loads(json.dumps(held)) == held


def test_secrets_are_not_held(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    source = replace(config.data.train["sums"], options={"api_key": "a-secret-value", "part": "train"})
    held = resume_config(replace(config, data=replace(config.data, train={"sums": source})))
    assert "a-secret-value" not in json.dumps(held)
    assert held["data"]["train"]["sums"]["options"]["part"] == "train"


def test_the_same_configuration_has_not_changed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    before = resume_config(config)
    assert describe_changes(before, config, 7) == {}
    other = replace(config, training=replace(config.training, steps=99, seed=1), deadlines=replace(config.deadlines))
    assert describe_changes(before, other, 7) == {}, "how long it runs is not what it learns"


def test_every_change_is_named_by_its_key_and_first_step(tmp_path: Path) -> None:
    before = resume_config(make_config(tmp_path, actor={"optimizer": {"lr": 1e-3, "gone": 1}}))
    now = make_config(
        tmp_path,
        actor={"optimizer": {"lr": 1e-4, "new": 2}},
        algorithm={"kl": KlConfig(coef=0.5)},
    )
    assert describe_changes(before, now, 7) == {
        "actor.optimizer.lr": "was 0.001 when this run began, is 0.0001 from step 8 on",
        "actor.optimizer.gone": "was 1 when this run began, is None from step 8 on",
        "actor.optimizer.new": "was None when this run began, is 2 from step 8 on",
        "algorithm.kl.coef": "was 0.001 when this run began, is 0.5 from step 8 on",
    }
