"""Sample answers of SFT: their prompts, tokens and ends, and how they are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mrl.data.chat import load_tokenizer
from mrl.protocol import DataProto
from mrl.trainer.sft import first_by_source
from tests.trainer.test_sft_run import END, Group, Lab, measured


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def sampled(lab: Lab) -> dict[str, list[dict[str, Any]]]:
    files = sorted((lab.directory / "samples").iterdir())
    return {file.name: pq.read_table(file).to_pylist() for file in files}


def test_samples_are_what_the_model_writes_token_by_token(lab: Lab) -> None:
    lab.validate_on(5, every=2, samples=3, max_response_tokens=6)
    held = lab.directory / "held.jsonl"
    held.write_text("".join(line.replace("1+1?", f"{n}+n?") for n, line in enumerate(held.open())))
    group = Group()
    lab.train(group)
    tokenizer = load_tokenizer(lab.config.model.path)
    assert tokenizer.eos_token_id == END
    texts = [f"<|user|>{number}+n?<|end|><|assistant|>" for number in range(3)]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found, group.rows = sampled(lab), []
    assert list(found) == [f"validation-{step:06d}.parquet" for step in (0, 2, 4, 5)]
    for step, rows in zip((0, 2, 4, 5), found.values(), strict=True):
        for number, (row, text, prompt) in enumerate(zip(rows, texts, prompts, strict=True)):
            said: list[int] = []
            while len(said) < 6 and said[-1:] != [END]:
                said.append(group.next_token(prompt, said))
            ended = said[-1] == END
            assert ended == (step < 4), "two, four, and then no room for six and the end"
            assert row == {
                "uid": f"held/0/{number}",
                "data_source": "held",
                "prompt": text,
                "response": tokenizer.decode(said[:-1] if ended else said),
                "ground_truth": f"{number % 2}",
                "num_tokens": len(said),
                "truncated": not ended,
            }
        group.rows += [[]] * (2 if step < 4 else 1)
    assert [line.partition(": ")[0] for line in lab.said] == [f"sample of step {step}" for step in (0, 2, 4, 5)]
    assert lab.said[0].startswith(f"sample of step 0: {texts[0]} -> ")
    assert {call[1] for call in group.journal if call[0] == "predict"} == {4}, "two rows for each rank"
    assert sum(call[0] == "predict" for call in group.journal) <= 4 + 3 * 6, "a pass a token, and one to see it"


def test_a_resumed_run_writes_the_samples_of_an_undisturbed_one(lab: Lab) -> None:
    lab.validate_on(3, every=2)
    lab.train(Group(), steps=4)
    whole, figures = sampled(lab), measured(lab)
    (lab.directory / "samples" / "validation-000004.parquet").unlink()
    (lab.directory / "checkpoints").rename(lab.directory / "elsewhere")
    lab.stop_after = 2
    lab.train(stopped := Group(), steps=4)
    lab.stop_after = 99
    group = Group()
    group.rows += stopped.rows
    lab.train(group, steps=4)
    assert sampled(lab) == whole
    assert measured(lab) == figures
    assert [call for call in group.journal if call[0] == "predict"] != []
    assert len(whole) == 3


def test_the_first_answer_of_a_conversation_is_what_is_asked_for(lab: Lab) -> None:
    lab.validate_on(1, every=9, samples=1)
    says = (("user", "1+1="), ("assistant", "2"), ("user", "+3="), ("assistant", "5"))
    talk = [{"role": role, "content": text} for role, text in says]
    (lab.directory / "held.jsonl").write_text(2 * f"{json.dumps({'talk': talk})}\n")
    batch = replace(lab.config.batch, messages="talk", loss_on="all", max_response_tokens=16)
    train = {"sums": lab.config.data.validation["held"]}
    lab.config = replace(
        lab.config, batch=replace(batch, rows_per_update=2), data=replace(lab.config.data, train=train)
    )
    lab.train(Group(), steps=1)
    for (row,) in sampled(lab).values():
        assert (row["prompt"], row["ground_truth"]) == ("<|user|>1+1=<|end|><|assistant|>", "2")


def test_an_answer_is_no_longer_than_a_micro_batch_has_room_for(lab: Lab) -> None:
    lab.validate_on(4, every=9)
    data = replace(lab.config.data, train=lab.config.data.validation)
    lab.config = replace(lab.config, data=data, actor=replace(lab.config.actor, max_tokens_per_device=10))
    lab.train(Group(), steps=1)
    lengths = {file: {(row["num_tokens"], row["truncated"]) for row in rows} for file, rows in sampled(lab).items()}
    assert lengths == {"validation-000000.parquet": {(3, False)}, "validation-000001.parquet": {(3, True)}}


def test_no_samples_are_made_where_none_are_wanted(lab: Lab) -> None:
    lab.validate_on(3, every=2, samples=0)
    group = Group()
    lab.train(group)
    assert not [call for call in group.journal if call[0] == "predict"]
    assert not (lab.directory / "samples").exists()
    assert lab.said == []


def test_samples_that_cannot_be_written_stop_nothing(lab: Lab) -> None:
    lab.validate_on(3, every=2)
    (lab.directory / "samples").write_text("a file")
    assert lab.train(Group()) == lab.directory / "model"
    assert len([line for line in lab.said if line.startswith("warning: samples: cannot write")]) == 1


def test_an_answer_is_printed_without_what_a_terminal_would_obey(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.validate_on(3, every=9)
    columns = {"prompt": ["p" * 99 + "\x1b[2J?\n"], "response": ["one\ntwo" + "r" * 99]}
    monkeypatch.setattr("mrl.trainer.sft._SftComponents.sample", lambda self: columns)
    lab.train(Group(), steps=1)
    assert lab.said[0] == f"sample of step 0: {'p' * 55}·[2J? -> one·two{'r' * 53}"


def test_prompts_are_of_each_source_in_turn() -> None:
    rows = DataProto.from_dict(non_tensors={"data_source": ["a", "a", "a", "b", "c", "c"]})
    assert [first_by_source(rows, num).row_ids.tolist() for num in (2, 4, 9)] == [
        [0, 3],
        [0, 3, 4, 1],
        [0, 3, 4, 1, 5, 2],
    ]
