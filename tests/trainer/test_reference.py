"""A reference's log-probs that are computed once: of which rows, by which weights, and the file that keeps them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.data import ColumnsConfig, DataConfig, SourceConfig
from mrl.config.schema import ParallelConfig
from mrl.config.sft import DpoConfig, DpoLossConfig, SftTrainingConfig, SftValidationConfig
from mrl.data.sampler import Draw, PromptSampler
from mrl.errors import CheckpointError
from mrl.observe.metrics import read_metrics
from mrl.protocol import DataProto, Jagged
from mrl.protocol.columns import from_rows
from mrl.trainer.reference import FILE, ReferenceLogProbs
from mrl.workers.messages import UpdateReport
from tests.trainer.test_sft_run import Group as SftGroup
from tests.trainer.test_sft_run import Lab

NO_COLUMNS = ColumnsConfig(data_source=None, ability=None, extra_info=None)


def said(prompt: list[int], response: list[int]) -> list[float]:
    """Log-probs of the policy before training."""
    return [-(token + len(prompt) / 8 + sum(prompt) / 64 + at / 4) for at, token in enumerate(response)]


def rows_of(batch: DataProto) -> list[tuple[list[int], list[int]]]:
    columns = (batch["prompts"].rows(), batch["responses"].rows())
    return [(prompt.tolist(), response.tolist()) for prompt, response in zip(*columns, strict=True)]


class Group(SftGroup):
    """Two shards of a policy, which keep what is asked of them, and hold what comes with it against the reference."""

    is_trained = False

    def compute_ref_log_prob(self, shards: Any, sizes: Any) -> DataProto:
        assert not self.is_trained, "the weights are still those before training"
        self.journal.append(("reference", [shard.row_ids.tolist() for shard in shards], sizes))
        batch = DataProto.concat([shard.select("prompts", "responses") for shard in shards])
        column = from_rows([torch.tensor(said(*row), dtype=torch.float32) for row in rows_of(batch)])
        return DataProto.from_dict({"ref_log_probs": column}, row_ids=batch.row_ids)

    def update_dpo(self, shards: Any, sizes: Any) -> list[UpdateReport]:
        self.journal.append(("update", [shard.row_ids.tolist() for shard in shards], sizes))
        self.is_trained = True
        self._check(DataProto.concat(shards))
        return [UpdateReport({"loss": 0.5, "accuracy": 0.25}, 1.0, 0.1, applied=True)] * 2

    def score_dpo(self, shards: Any, sizes: Any) -> DataProto:
        batch = DataProto.concat(shards)
        self.journal.append(("validate", len(batch)))
        self._check(batch)
        sums = torch.arange(float(len(batch)))
        columns = {"sum_log_probs": sums, "sum_ref_log_probs": sums / 2, "num_tokens": torch.ones(len(batch)).long()}
        return DataProto.from_dict(columns, row_ids=batch.row_ids)

    def _check(self, batch: DataProto) -> None:
        if "ref_log_probs" in batch.columns():
            kept = [row.tolist() for row in batch["ref_log_probs"].rows()]
            assert kept == [torch.tensor(said(*row)).tolist() for row in rows_of(batch)]
        else:
            self.journal.append("in place")

    def load_checkpoint(self, directory: str) -> None:
        super().load_checkpoint(directory)
        self.is_trained = True

    def of(self, kind: str) -> list[Any]:
        return [entry[1:] for entry in self.journal if entry[0] == kind]

    def kinds(self) -> list[str]:
        kinds = [entry if isinstance(entry, str) else entry[0] for entry in self.journal]
        return [kind for kind in kinds if kind not in ("save", "export", "shutdown")]


class PairLab(Lab):
    """Trains on pairs."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, patch)
        (directory / "model-of-before" / "config.json").write_text("{}")
        (directory / "model-of-before" / "model.safetensors").write_bytes(bytes(range(200)) * 2000)
        base = self.config
        self.config: DpoConfig = DpoConfig(  # type: ignore[assignment]
            run=base.run,
            cluster=base.cluster,
            placement=base.placement,
            model=base.model,
            data=self.data(a=10),
            batch=base.batch,
            actor=replace(base.actor, max_tokens_per_device=100),
            training=SftTrainingConfig(steps=2, keep=9),
            preference=DpoLossConfig(reference="once"),
        )

    def data(self, validation: int = 0, **sizes: int) -> DataConfig:
        """Sources of so many pairs, all drawn as often."""
        weight = 1.0 if len(sizes) > 1 else None
        train = {name: replace(self.source(name, size), weight=weight) for name, size in sizes.items()}
        return DataConfig(train=train, validation={"held": self.source("held", validation)} if validation else {})

    def source(self, name: str, size: int) -> SourceConfig:
        rows = [
            {"prompt": [{"role": "user", "content": f"{name}{number}?"}], "chosen": "y" * number, "rejected": "no"}
            for number in range(1, size + 1)
        ]
        (self.directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SourceConfig(
            dataset=str(self.directory / f"{name}.jsonl"), columns=replace(NO_COLUMNS, rejected="rejected")
        )

    def change(self, **sections: Any) -> None:
        changed = {name: replace(getattr(self.config, name), **fields) for name, fields in sections.items()}
        self.config = replace(self.config, **changed)

    def kept(self) -> ReferenceLogProbs:
        return ReferenceLogProbs(self.directory, self.config)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairLab:
    lab = PairLab(tmp_path, monkeypatch)
    lab.change(batch={"max_response_tokens": 32})
    return lab


def trained(lab: PairLab, **training: Any) -> Group:
    lab.train(group := Group(), **training)  # type: ignore[arg-type]
    return group


def test_the_first_epoch_is_computed_as_it_is_trained(lab: PairLab) -> None:
    """In the same shards and micro-batches; validation comes first, the last of its rows once for each rank."""
    lab.config = replace(lab.config, data=lab.data(validation=5, a=10), validation=SftValidationConfig(every=2))
    group = trained(lab)
    assert group.kinds() == ["reference"] * 4 + ["validate"] * 2 + ["update"] * 2 + ["validate"] * 2
    assert group.of("reference")[2:] == group.of("update")
    assert [sum(map(len, rows)) for rows, _ in group.of("reference")[:2]] == [8, 2]
    ((*_, (setup, _), _),) = lab.workers
    assert not setup.keeps_reference
    assert lab.said[-1] == f"reference: stored 13 prompts with their responses in {lab.directory / FILE}"
    assert "reference: computed 4 of at most 13 prompts with their responses" in lab.said
    lines = read_metrics(lab.directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_in_place_nothing_is_computed_before(lab: PairLab) -> None:
    lab.change(preference={"reference": "in_place"})
    group = trained(lab)
    assert group.kinds() == ["update", "in place"] * 2
    ((*_, (setup, _), _),) = lab.workers
    assert setup.keeps_reference
    assert not (lab.directory / FILE).exists()


def test_the_rows_of_training_are_those_without_it(lab: PairLab) -> None:
    once = trained(lab, steps=7).of("update")
    (lab.directory / "checkpoints").rename(lab.directory / "elsewhere")
    lab.change(preference={"reference": "in_place"})
    assert trained(lab, steps=7).of("update") == once


@pytest.mark.parametrize(
    ("sizes", "training", "num_computed"),
    [
        ({"a": 10}, {"steps": 2}, 2),  # no more than are trained
        ({"a": 10}, {"steps": 9}, 3),  # each row once, in the batches of the first epoch, the last of which goes beyond
        ({"a": 12}, {"steps": None, "epochs": 1}, 3),
        ({"a": 4, "b": 20}, {"steps": None, "epochs": 2}, 10),  # the small source repeats while the large one continues
    ],
)
def test_each_row_that_is_trained_is_computed(
    sizes: dict[str, int], training: dict[str, Any], num_computed: int, lab: PairLab
) -> None:
    """`Group` holds what comes with each update against the reference."""
    lab.config = replace(lab.config, data=lab.data(**sizes))
    group = trained(lab, **training)
    assert len(group.of("reference")) == num_computed
    assert len(lab.kept()) == min(num_computed * 4, sum(sizes.values())) if len(sizes) == 1 else True
    assert "in place" not in group.journal


class LateSampler(PromptSampler):
    """Leaves out the second half of the rows until they have all been looked at thrice."""

    def draw(self) -> Draw:
        draw = super().draw()
        while draw.epoch < 3 and draw.row >= 5:
            draw = super().draw()
        return draw


def test_a_sampler_may_leave_rows_for_later_epochs(lab: PairLab) -> None:
    lab.change(data={"sampler": "tests.trainer.test_reference:LateSampler"})
    group = trained(lab, steps=7)
    assert len(lab.kept()) == 10
    assert len(group.of("update")) == 7


def test_a_resumed_run_reads_what_the_run_has_computed(lab: PairLab) -> None:
    trained(lab)
    before = (lab.directory / FILE).read_bytes()
    group = trained(lab, steps=4)
    assert group.kinds() == ["reference", "load", "update", "update"], "one batch more, before the checkpoint"
    assert trained(lab, steps=5).kinds() == ["load", "update"]
    assert (lab.directory / FILE).stat().st_size > len(before)
    (lab.directory / FILE).unlink()
    group = trained(lab, steps=6)
    assert group.kinds() == ["reference"] * 3 + ["load", "update"], "by the model's files, not by the checkpoint"


def test_a_run_that_is_told_to_stop_keeps_what_it_has_computed(lab: PairLab) -> None:
    whole = trained(lab, steps=3).of("reference")
    kept = (lab.directory / FILE).read_bytes()
    (lab.directory / FILE).unlink()
    (lab.directory / "checkpoints").rename(lab.directory / "elsewhere")
    lab.stop_after = 0
    first = trained(lab, steps=3)
    assert first.kinds() == ["reference"]
    assert lab.said[-1] == "stopped before the reference was computed; run the same command to resume"
    lab.stop_after = 99
    second = trained(lab, steps=3)
    assert first.of("reference") + second.of("reference") == whole
    assert len(second.of("update")) == 3
    assert (lab.directory / FILE).read_bytes() == kept


# --- the file ---------------------------------------------------------------------------------------------------------


def batch_of(*groups: tuple[list[int], list[list[int]]], first: int = 0) -> DataProto:
    rows = [(prompt, response, rank) for prompt, responses in groups for rank, response in enumerate(responses)]
    prompts, responses, ranks = zip(*rows, strict=True)
    columns = {
        "prompts": from_rows(list(prompts)),
        "responses": from_rows(list(responses)),
        "rank": torch.tensor(ranks),
    }
    uids = [f"a/0/{number}" for number, (_, of_prompt) in enumerate(groups) for _ in of_prompt]
    return DataProto.from_dict(columns, {"uid": uids}, row_ids=first + np.arange(len(rows)))


BATCH = batch_of(([5, 6], [[7, 8, 9], [1]]), ([5], [[6, 7], [3, 3, 3], [2]]))
LOG_PROBS = torch.tensor([-0.1, -1 / 3, -1e-30, -70.0, *(-torch.arange(6) / 7).tolist()])


def saved(lab: PairLab) -> Path:
    kept = lab.kept()
    kept.add(BATCH, Jagged(LOG_PROBS, BATCH.lengths("responses")))
    kept.num_read, kept.reader = 2, {"drawn": 3}
    kept.save()
    return lab.directory / FILE


def test_what_is_read_is_what_was_written(lab: PairLab) -> None:
    path = saved(lab)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(lab.directory.glob(f".{FILE}*"))
    kept = lab.kept()
    assert (len(kept), kept.num_read, kept.reader) == (2, 2, {"drawn": 3})
    assert not kept.lacks(BATCH)
    other = BATCH.take([2, 3, 4, 0, 1])
    found = kept.joined(other)
    assert found.values("ref_log_probs").tolist() == [*LOG_PROBS[4:].tolist(), *LOG_PROBS[:4].tolist()]
    assert found.lengths("ref_log_probs").tolist() == found.lengths("responses").tolist()
    kept.add(BATCH, Jagged(LOG_PROBS - 1, BATCH.lengths("responses")))
    assert torch.equal(kept.joined(other).values("ref_log_probs"), found.values("ref_log_probs")), "the first counts"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], lab: PairLab) -> None:
    path = saved(lab)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"cannot read the log-probs of the reference: .*\n  fix: move the file away"
    ) as caught:
        trained(lab)
    assert caught.value.where == str(path)


def test_what_is_no_file_is_refused(lab: PairLab) -> None:
    os.mkfifo(lab.directory / FILE)
    with pytest.raises(CheckpointError, match="is a FIFO, not a file"):
        lab.kept()


def test_a_file_that_cannot_be_written_is_an_error(lab: PairLab) -> None:
    (lab.directory / f".{FILE}.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*\n  fix: free space on that disk"):
        saved(lab)


def other_weights(lab: PairLab) -> None:
    weights = lab.directory / "model-of-before" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[77_777] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_weights, r"model.path was sha256 [0-9a-f]{64}, now sha256 "),
        (lambda lab: (lab.directory / "model-of-before" / "config.json").write_text("{ }"), "model.path was sha256 "),
        (lambda lab: lab.change(actor={"dtype": "float32"}), "actor.dtype was bfloat16, now float32"),
        (
            lambda lab: lab.change(actor={"megatron": {"bias_dropout_fusion": True}}),
            "actor.megatron was {}, now {'bias_dropout_fusion': True}",
        ),
    ],
)
def test_what_another_model_said_is_refused(change: Callable[[PairLab], None], what: str, lab: PairLab) -> None:
    trained(lab)
    change(lab)
    with pytest.raises(CheckpointError, match=what) as caught:
        trained(lab, steps=3)
    assert caught.value.where == str(lab.directory / FILE)
    assert caught.value.fix.startswith("undo the change, or move the file away: mrl recomputes it")


def test_the_commit_stands_for_a_model_of_the_hub(lab: PairLab) -> None:
    names = [f"some/model@{commit * 40}" for commit in "ab"]
    lab.change(model={"path": names[0]})
    saved(lab)
    assert len(lab.kept()) == 2
    lab.change(model={"path": names[1]})
    with pytest.raises(CheckpointError, match=f"model.path was {names[0]}, now {names[1]}"):
        lab.kept()


def test_another_layout_goes_on_and_says_so(lab: PairLab) -> None:
    """`training.fallback` has one; log-probs differ by what rounding does."""
    trained(lab)
    lab.change(actor={"parallel": ParallelConfig(pp=2), "megatron": {"recompute_granularity": "full"}})
    lab.change(placement={"pools": {"all": 4}})
    assert trained(lab, steps=3).kinds() == ["reference", "load", "update"]
    changes = "pp was 1, now 2; devices was 2, now 4"
    what = f"the log-probs were computed with another layout and round differently: {changes}"
    assert lab.said[0] == f"warning: preference.reference: {what}"


def test_other_tokens_are_refused(lab: PairLab) -> None:
    trained(lab, steps=3)
    lab.change(data={"overlong": "left"}, batch={"max_prompt_tokens": 4})
    with pytest.raises(CheckpointError) as caught:
        trained(lab, steps=4)
    assert caught.value.where == str(lab.directory / FILE)
    assert caught.value.what.startswith(
        "4 of 4 prompts with their responses are missing (source/epoch/row of the first: a/"
    )
    assert "chat template, limits and rows that it was computed with, or move the file away" in caught.value.fix


@pytest.mark.parametrize(
    "other",
    [
        ([5, 6], [[7, 8, 9], [2]]),  # another response
        ([5, 6], [[7, 8], [9, 1]]),  # the same tokens, cut elsewhere
        ([5], [[6, 7, 8, 9], [1]]),
        ([5, 6, 7], [[8, 9], [1]]),
        ([5, 6], [[1], [7, 8, 9]]),  # the other way round
        ([5, 6], [[7, 8, 9], [1], [4]]),  # one response more
        ([6, 6], [[7, 8, 9], [1]]),
    ],
)
def test_a_group_is_found_by_all_of_its_tokens(other: tuple[list[int], list[list[int]]], lab: PairLab) -> None:
    saved(lab)
    kept = lab.kept()
    assert kept.lacks(batch_of(other))
    with pytest.raises(CheckpointError, match="1 of 2 prompts with their responses are missing"):
        kept.joined(batch_of(([5, 6], [[7, 8, 9], [1]]), other))
