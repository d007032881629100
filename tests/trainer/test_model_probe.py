"""Models that are not compared with an engine: if one differs from its files, the run stops before the first update."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.schema import TrainedModelConfig
from mrl.demo.model import make_model
from mrl.errors import AuditFailed
from mrl.events import EventLog, ModelCompared, read_events
from mrl.models.table import Head
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.model_probe import ModelProbe
from mrl.verify.transformers_model import answer
from mrl.workers.messages import PROBED, ModelSetup
from tests.apart import run_mrl
from tests.trainer.test_ppo import CONFIG as PPO
from tests.trainer.test_sft import COLUMNS, write_talks
from tests.trainer.test_sft import CONFIG as SFT

FEW = ("training.steps=2", "validation.every=0", "training.save_every=0")


def run(directory: Path, verb: str, *overrides: str, exit_code: int = 0) -> str:
    """Return the output of a run, which must end with this exit code."""
    model, config = make_model(directory / "model", seed=1), directory / "run.yaml"
    if verb == "sft":
        write_talks(directory / "train.jsonl", 0, 20)
        write_talks(directory / "held.jsonl", 20, 4)
        config.write_text(SFT.format(directory=directory, model=model, columns=COLUMNS))
    else:
        config.write_text(PPO.format(directory=directory, model=model))
    return run_mrl(verb, str(config), "run.name=run", *overrides, exit_code=exit_code)


def compared(directory: Path) -> dict[str, ModelCompared]:
    """Recorded comparisons, by role."""
    events = [each.event for each in read_events(directory / "run" / "events.jsonl")]
    return {event.role: event for event in events if isinstance(event, ModelCompared)}


class Client:
    """Workers that compute the model's files, with this relative error, and whose micro-batches hold 32 tokens."""

    device, longest_row = "cpu", 32

    def __init__(self, path: Path, head: Head, error: float) -> None:
        self._path, self._head, self._factor = path, head, 1 + error

    def score(self, method: str, batch: DataProto) -> DataProto:
        assert method == "probe"
        ids = torch.cat([batch[name].rows()[0] for name in ("prompts", "responses")])  # type: ignore[union-attr]
        answered = answer(self._path, self._head, ids)
        hidden_TH = answered.hidden_TH * self._factor
        scores_T = hidden_TH[:, 0] if answered.scores_T is None else answered.scores_T * self._factor
        return DataProto.from_dict(dict(zip(PROBED, (from_rows([hidden_TH]), from_rows([scores_T])), strict=True)))


def words(text: Any, *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
    return {"input_ids": [list(range(900, 960))]}  # beyond the vocabulary


@pytest.mark.parametrize(
    ("head", "dtype", "error"),
    [("lm", "float32", 1e-3), ("lm", "bfloat16", 0.2), ("score", "float32", 1e-3), ("score", "bfloat16", 0.1)],
)
def test_a_role_that_differs_from_its_files_by_more_than_rounding_stops_the_run(
    head: Head, dtype: Any, error: float, tmp_path: Path
) -> None:
    """The score head is new, so only hidden states are compared."""
    path, events = make_model(tmp_path / "model", seed=1), EventLog(tmp_path / "events.jsonl")
    settings = TrainedModelConfig(max_tokens_per_device=64, dtype=dtype)
    setups = {"critic": ModelSetup(str(path), head, settings, 1, 60.0)}
    with ModelProbe(setups, words, events, 60.0).asked() as probe:  # type: ignore[arg-type]
        nobody: Any = SimpleNamespace()
        probe.compare("actor", nobody)
        probe.compare("critic", Client(path, head, 0.0))  # type: ignore[arg-type]
        outputs = "log-probs" if head == "lm" else "hidden states or scores"
        with pytest.raises(AuditFailed, match=f"critic and transformers disagree on .* 32 tokens its {outputs}"):
            probe.compare("critic", Client(path, head, error))  # type: ignore[arg-type]
        with pytest.raises(AuditFailed, match="differ by nan"):
            probe.compare("critic", Client(path, head, float("nan")))  # type: ignore[arg-type]
    events.close()
    right, wrong, _ = [record.event for record in read_events(tmp_path / "events.jsonl")]
    assert isinstance(right, ModelCompared)
    assert isinstance(wrong, ModelCompared)
    assert right.difference < 1e-6 < right.limit == wrong.limit < wrong.difference


@pytest.mark.slow
def test_sft_does_not_train_another_model_than_the_files_hold(tmp_path: Path) -> None:
    said = run(tmp_path, "sft", "actor.worker=tests.trainer.wrong_models:WrongNorm", *FEW, exit_code=1)
    assert f"actor and transformers disagree on {tmp_path}/model: on a fixed text of 48 tokens its log-probs" in said
    event = compared(tmp_path)["actor"]
    assert event.difference > 10 * event.limit
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_critic_is_the_model_of_its_files(tmp_path: Path) -> None:
    engine = ("rollout.engine=transformers", "rollout.vllm={}")
    said = run(tmp_path, "train", "critic.worker=tests.trainer.wrong_models:WrongNormCritic", *engine, exit_code=1)
    assert f"critic and transformers disagree on {tmp_path}/model: on a fixed text of 48 tokens its hidden" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert compared(tmp_path).keys() == {"critic"}, "engines are compared with the actor"


RIGHT = [
    ("{tp: 2, sequence_parallel: true}", "bfloat16"),
    *(
        pytest.param(layout, dtype, marks=pytest.mark.on_demand)
        for layout, dtype in [
            ("{tp: 2, sequence_parallel: true}", "float32"),
            *product(("{pp: 2}", "{cp: 2}"), ("bfloat16", "float32")),
        ]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), RIGHT)
def test_a_right_model_is_trained_in_every_layout(layout: str, dtype: str, tmp_path: Path) -> None:
    run(tmp_path, "sft", f"actor={{parallel: {layout}, dtype: {dtype}}}", *FEW)
    event = compared(tmp_path)["actor"]
    assert 0 < event.difference < 0.5 * event.limit
    assert event.tokens == 48
