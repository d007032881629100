"""The driver's side of supervised training: which rows, when it saves, when it ends, and how it resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.data import ColumnsConfig, DataConfig, SourceConfig
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import Resolved
from mrl.config.schema import ClusterConfig, ModelConfig, PlacementConfig, RunConfig, ScheduleConfig, TrainedModelConfig
from mrl.config.sft import SftBatchConfig, SftConfig, SftTrainingConfig, SftValidationConfig
from mrl.config.values import ConfigLayer, Secrets
from mrl.data.chat import load_tokenizer
from mrl.data.packing import PackingRules, RowCost
from mrl.demo.model import save_toy_tokenizer
from mrl.errors import DataError
from mrl.events import Warned, read_events
from mrl.observe.metrics import read_metrics
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.run import Run
from mrl.trainer.sft import train_sft
from mrl.workers.messages import ModelFacts, ModelSetup, UpdateReport
from tests.trainer.fakes import Screen

LR = 0.5
END = 256


class Group:
    """Two shards that lose a tenth with each update, and keep the rows and what is asked of them."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.mesh = Mesh(2)
        self.losses = losses
        self.rows: list[list[int]] = []
        self.tokens: list[dict[int, str]] = []
        self.journal: list[Any] = []

    def init_model(self) -> list[ModelFacts]:
        return [ModelFacts(PackingRules(RowCost(1.0, 0.0)), 1, 1.0, "cpu")] * 2

    def update_sft(self, shards: Any, sizes: Any) -> list[UpdateReport]:
        self.sizes = sizes
        self.tokens_of_shards = [
            int(shard.lengths("prompts").sum() + shard.lengths("responses").sum()) for shard in shards
        ]
        self.rows.append(sorted(int(row) for shard in shards for row in shard.row_ids))
        number = len(self.rows) - 1
        loss = self.losses[number] if number < len(self.losses) else 1.0
        self.journal.append("update")
        return [UpdateReport({"loss": loss / 2}, 1.0, LR, applied=True)] * 2

    def score_sft(self, shards: Any, sizes: Any) -> DataProto:
        """Log-probs that rise with each update, those of an answer by its first token."""
        batch = DataProto.concat([shard.select("prompts", "responses") for shard in shards])
        self.journal.append(("validate", len(batch)))
        nums = torch.from_numpy(batch.lengths("responses").astype("int64"))
        first = torch.stack([row[0] for row in batch["responses"].rows()])
        sums = -nums.double() / (1 + len(self.rows)) * first
        return DataProto.from_dict({"sum_log_probs": sums, "num_learned": nums}, row_ids=batch.row_ids)

    def predict_sft(self, shards: Any, sizes: Any) -> DataProto:
        """The likeliest tokens of a model whose every next one depends on all before it."""
        batch = DataProto.concat([shard.select("prompts", "responses") for shard in shards])
        self.journal.append(("predict", len(batch)))
        rows = zip(*([row.tolist() for row in batch[name].rows()] for name in batch.columns()), strict=True)
        tokens = [[self.next_token(prompt, guess[:at]) for at in range(len(guess))] for prompt, guess in rows]
        return DataProto.from_dict({"greedy_tokens": from_rows(tokens)}, row_ids=batch.row_ids)

    def next_token(self, prompt: list[int], said: list[int]) -> int:
        """An answer ends after two tokens, and after one more with each update."""
        weighted = sum(place * token for place, token in enumerate([*prompt, *said], start=1))
        return END if len(said) == 2 + len(self.rows) else weighted % 200

    def begin_checkpoint(self, directory: str) -> None:
        self.saving = Path(directory), len(self.rows)
        self.journal.append("save")

    def checkpoint_is_written(self) -> list[bool]:
        return [True]

    def finish_checkpoint(self) -> None:
        directory, num_updates = self.saving
        directory.mkdir()
        (directory / "manifest.json").write_text(json.dumps({"updates": num_updates}))

    def load_checkpoint(self, directory: str) -> None:
        self.journal.append(("load", directory))

    def shutdown(self) -> None:
        self.journal.append("shutdown")


class Lab:
    """Trains in a directory with fake workers; everything else is real."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        (directory / "model-of-before").mkdir()
        save_toy_tokenizer(directory / "model-of-before")
        self.config = SftConfig(
            run=RunConfig(name="run", dir=str(directory)),
            cluster=ClusterConfig(devices_per_node=2, device="cpu"),
            placement=PlacementConfig(pools={"all": 2}, roles={"actor": "all"}),
            model=ModelConfig(path=str(directory / "model-of-before"), verify=False),
            data=DataConfig(train={"sums": SourceConfig(dataset="toy:addition", options={"part": "train"})}),
            batch=SftBatchConfig(rows_per_update=4, max_prompt_tokens=32, max_response_tokens=8),
            actor=TrainedModelConfig(max_tokens_per_device=256, schedule=ScheduleConfig(warmup_steps=2)),
            training=SftTrainingConfig(steps=5, seed=9, keep=9),
        )
        self.said: list[str] = []
        self.steps: list[tuple[int, float]] = []
        self.workers: list[Any] = []
        self.reason = ""
        self.stop_after = 99
        resources = SimpleNamespace(create=lambda *where: None, release=lambda: None)
        patch.setattr("mrl.trainer.nodes.ray_cluster", lambda cluster: nullcontext())
        patch.setattr("mrl.trainer.nodes.ResourcePoolManager", lambda *arguments: resources)
        patch.setattr("mrl.trainer.sft.RayWorkerGroup", self._group)
        patch.setattr("mrl.engine.checkpoint_files.export_checkpoint", self._export)

    def _export(self, saved: Path, source: Path, head: str, dtype: torch.dtype, target: Path) -> None:
        target.mkdir()
        self.group.journal.append(("export", saved.relative_to(self.directory), source.name, head, dtype, target))

    def _group(self, role: str, worker: Any, mesh: Mesh, context: Any) -> Group:
        self.workers.append((role, worker.worker_class, worker.args, mesh))
        return self.group

    def validate_on(self, num_rows: int, **validation: Any) -> None:
        rows = [
            {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": f"{number % 2}"}}
            for number in range(num_rows)
        ]
        (self.directory / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = ColumnsConfig(data_source=None, ability=None, extra_info=None)
        sources = {"held": SourceConfig(dataset=str(self.directory / "held.jsonl"), columns=columns)}
        data = replace(self.config.data, validation=sources)
        self.config = replace(self.config, data=data, validation=SftValidationConfig(**validation))

    def train(self, group: Group, **training: Any) -> Path | None:
        """From the newest checkpoint on."""
        self.group, self.steps = group, []
        config = replace(self.config, training=replace(self.config.training, **training))
        screen = Screen([])
        self.said = screen.said
        run: Run[SftConfig] = Run(Resolved("run.yaml", config, (), Secrets(), ConfigLayer()), self.directory, screen)
        reason = lambda: "SIGTERM" if len(self.steps) >= self.stop_after else ""  # noqa: E731
        run.stopping.reason = reason  # type: ignore[method-assign]
        try:
            return train_sft(run, self._on_update)
        finally:
            run.events.close()

    def _on_update(self, number: int, metrics: dict[str, float]) -> None:
        self.steps.append((number, metrics["loss"]))

    def state(self, step: int) -> Any:
        return json.loads((self.directory / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())["state"][
            "trained"
        ]

    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.directory / "checkpoints").glob("step-*"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.mark.parametrize(("prompt", "leaks"), [("1+1?", True), ("1+1? ", False)])
def test_prompts_of_validation_that_are_trained_on_are_warned_of_once(prompt: str, leaks: bool, lab: Lab) -> None:
    """Through other answers, as data are that were split by row."""
    lab.validate_on(3, every=2)
    rows = [
        {"prompt": [{"role": "user", "content": prompt if number == 6 else f"{number}?"}], "answer": "7"}
        for number in range(8)
    ]
    (lab.directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ColumnsConfig(data_source=None, ability=None, extra_info=None, ground_truth="answer")
    source = SourceConfig(dataset=str(lab.directory / "train.jsonl"), columns=columns)
    lab.config = replace(lab.config, data=replace(lab.config.data, train={"rows": source}))
    lab.train(Group(), steps=4)
    warned = [record.event for record in read_events(lab.directory / "events.jsonl")]
    said = [each.message for each in warned if isinstance(each, Warned) and each.about == "data.validation"]
    assert len(said) == leaks, "in two epochs"
    assert all(message.startswith("some of its prompts are also trained on") for message in said)


def test_a_run_trains_saves_and_exports(lab: Lab) -> None:
    group = Group(losses=[5.0, 4.0, 3.0, 2.0, 1.0])
    model = lab.train(group, save_every=2)
    assert model == lab.directory / "model"
    assert lab.steps == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0)]
    lines = read_metrics(lab.directory / "metrics.jsonl")
    assert [(line["step"], line["loss"], line["lr"]) for line in lines] == [(*step, LR) for step in lab.steps]
    update, save = "update", "save"
    saved = Path("checkpoints", "step-000005", "actor")
    exported = ("export", saved, "model-of-before", "lm", torch.bfloat16, model)
    calls = [update, update, save, update, update, save, update, save, "shutdown", exported]
    assert group.journal == calls
    assert [len(rows) for rows in group.rows] == [4] * 5
    assert len({row for rows in group.rows for row in rows}) == 20, "row ids count the draws"
    ((role, worker, (setup,), mesh),) = lab.workers
    assert (role, worker, mesh) == ("actor", "mrl.workers.supervised:SftWorker", Mesh(2))
    assert setup == ModelSetup(lab.config.model.path, "lm", lab.config.actor, 9, lab.config.deadlines.call_s)
    assert not (lab.directory / "checkpoints" / "best").exists()


def test_a_checkpoint_stands_after_its_own_rows_not_after_those_read_ahead(lab: Lab) -> None:
    lab.train(Group(losses=[5.0, 4.0]), save_every=1)
    drawn = [lab.state(step)["rows"]["sampler"] for step in range(1, 6)]
    assert len({json.dumps(state) for state in drawn}) == 5
    assert [lab.state(step)["losses"] for step in (1, 2)] == [[5.0], [5.0, 4.0]]
    assert [state["drawn"]["sums"] for state in drawn] == [4, 8, 12, 16, 20]


def test_a_run_that_was_stopped_goes_on_with_the_next_rows(lab: Lab) -> None:
    whole = Group()
    lab.train(whole, steps=5)
    (lab.directory / "checkpoints").rename(lab.directory / "elsewhere")
    lab.stop_after = 2
    stopped = Group(losses=[7.0, 6.0])
    assert lab.train(stopped) is None
    stopped_after = "stopped after 2 updates; run the same command to resume"
    assert lab.said[-2:] == ["SIGTERM: saving and stopping", stopped_after]
    assert (lab.saved(), stopped.journal) == ([2], ["update", "update", "save", "shutdown"])
    lab.stop_after = 99
    group = Group()
    assert lab.train(group) == lab.directory / "model"
    path = lab.directory / "checkpoints" / "step-000002"
    assert group.journal[0] == ("load", str(path / "actor"))
    assert lab.said == [f"resumed from {path}"]
    assert [number for number, _ in lab.steps] == [3, 4, 5]
    assert stopped.rows + group.rows == whole.rows
    assert [line["step"] for line in read_metrics(lab.directory / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert lab.state(5)["losses"] == [7.0, 6.0, 1.0, 1.0, 1.0]
    assert (lab.directory / "model").is_dir(), "that of the shorter run gave way"


def test_a_signal_in_the_last_update_changes_nothing(lab: Lab) -> None:
    lab.stop_after = 5
    assert lab.train(Group()) == lab.directory / "model"
    assert lab.said == []


@pytest.mark.parametrize(
    ("losses", "num_updates"),
    [
        ([0.5] * 30, 10),  # the limit itself is low, but not before there are ten
        ([1.0] * 5 + [0.4] * 30, 14),  # one 1.0 among nine 0.4 makes 0.46, and two make 0.52
        ([9.0] + [0.4] * 30, 11),  # the first is forgotten
    ],
)
def test_a_run_ends_when_the_last_ten_losses_are_low(losses: list[float], num_updates: int, lab: Lab) -> None:
    assert lab.train(Group(losses), steps=30, until_loss=0.5)
    assert len(lab.steps) == num_updates
    assert lab.saved() == [num_updates], "the end is saved"


def test_losses_of_before_count_after_a_resume(lab: Lab) -> None:
    lab.stop_after = 6
    assert lab.train(Group([0.1] * 6), steps=30, until_loss=0.5) is None
    lab.stop_after = 99
    lab.train(Group([0.1] * 30), steps=30, until_loss=0.5)
    assert [number for number, _ in lab.steps] == [7, 8, 9, 10]


def measured(lab: Lab) -> dict[int, float]:
    lines = read_metrics(lab.directory / "metrics.jsonl")
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def test_validation_stands_where_it_was_measured(lab: Lab) -> None:
    lab.validate_on(5, every=2)
    group = Group()
    lab.train(group)
    zero, one = (
        load_tokenizer(lab.config.model.path)([text], add_special_tokens=False)["input_ids"][0][0] for text in "01"
    )
    of_rows = (3 * zero + 2 * one) / 5  # all are equally long, and none counts twice
    assert measured(lab) == pytest.approx({0: of_rows, 2: of_rows / 3, 4: of_rows / 5, 5: of_rows / 6})
    lines = {line["step"]: line for line in read_metrics(lab.directory / "metrics.jsonl")}
    names = ("val/loss", "val/held/loss")
    assert set(lines[0]) == {"step", *names, *(f"{name}/{end}" for name in names for end in ("low", "high"))}
    assert [call[1] for call in group.journal if call[0] == "validate"] == [4, 2] * 4, "the last row once for each rank"


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_is_that_of_the_lowest_loss(keep_best: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.validate_on(2, every=1, keep_best=keep_best)
    losses = iter([9.0, 3.0, 1.0, 2.0, 1.5, 4.0])
    monkeypatch.setattr(
        "mrl.trainer.supervised_tasks.measure_loss", lambda *_: {"val/loss": next(losses), "val/held/loss": 0.0}
    )
    lab.train(Group(), save_every=4)
    assert lab.saved() == ([1, 2, 4, 5] if keep_best else [4, 5])
    best = (lab.directory / "checkpoints" / "best").read_text()
    assert best == ("step-000002" if keep_best else "step-000004")


def test_validation_rows_that_are_all_bad_are_an_error(lab: Lab) -> None:
    lab.validate_on(1, every=1)
    lab.config = replace(lab.config, data=replace(lab.config.data, max_bad_rows=1))
    (lab.directory / "held.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"^data.validation: none of its rows is usable"):
        lab.train(Group())


def test_epochs_end_when_all_rows_were_drawn(lab: Lab) -> None:
    lab.validate_on(10, every=0)
    data = replace(lab.config.data, train=lab.config.data.validation)
    lab.config = replace(lab.config, data=data)
    group = Group()
    lab.train(group, steps=None, epochs=2)
    assert len(group.rows) == 5, "of 4 rows, two times 10"
    assert [line["epoch"] for line in read_metrics(lab.directory / "metrics.jsonl")] == [0.4, 0.8, 1.2, 1.6, 2.0]
    lab.train(group, steps=None, epochs=3)
    assert len(group.rows) == 8, "the last update goes into the next"


def test_metrics_say_how_full_micro_batches_are(lab: Lab) -> None:
    lab.train(group := Group(), steps=1)
    (line,) = read_metrics(lab.directory / "metrics.jsonl")
    assert line["packing/micro_batches"] == sum(map(len, group.sizes))
    assert line["packing/tokens"] == sum(group.tokens_of_shards) / line["packing/micro_batches"]
    assert line["packing/fill"] == line["packing/tokens"] / 256
