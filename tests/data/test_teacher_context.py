"""Prompts of a teacher that reads more than the policy."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.resolved.load import load_config
from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.data.rlhf_dataset import open_dataset
from mrl.data.teacher_context import check_context, teacher_context
from mrl.demo.model import make_model
from mrl.errors import BadRow, DataError
from mrl.protocol import DataProto

CONTEXT = "{prompt} The answer is {ground_truth}."
USER = {"role": "user", "content": "3+4="}
Column = list[Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_tokenizer(str(make_model(tmp_path_factory.mktemp("made") / "model", seed=1)))


def read(tokenizer: ChatTokenizer, context: str, messages: Column, truths: Column, *overrides: str) -> list[str]:
    """Return the texts of the teacher's prompts."""
    ours = [f"algorithm.distillation={{form: top_k, context: '{context}', context_tokens: 64}}", *overrides]
    config = load_config("configs/laptop-grpo.yaml", ["actor.max_tokens_per_device=1024", *ours]).config
    made = teacher_context(config, tokenizer)
    assert made is not None, "a context is configured"
    columns: dict[str, Any] = {}
    for name, values in (("messages", messages), ("ground_truth", truths)):
        columns[name] = np.empty(len(values), object)
        columns[name][:] = values
    columns |= {"uid": np.array([f"u{at}" for at in range(len(messages))], object)}
    columns["data_source"] = np.array(["sums"] * len(messages), object)
    rows = DataProto.from_dict(columns, row_ids=np.arange(len(messages)))
    return [tokenizer.decode(ids.tolist()) for ids in made.prompts(rows).rows()]


def test_the_context_is_written_in_place_of_the_last_message_of_the_user(tokenizer: ChatTokenizer) -> None:
    before = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    texts = read(tokenizer, CONTEXT, [(USER,), (*before, USER)], ["7", ["7", "seven"]])
    taught = "<|user|>3+4= The answer is 7.<|end|><|assistant|>"
    assert texts == [taught, f"<|user|>1+1=<|end|><|assistant|>2<|end|>{taught}"]
    assert read(tokenizer, CONTEXT, [(USER,)], [{"target": ["7"]}]) == [taught]
    assert read(tokenizer, "Think first. {prompt}", [(USER,)], [None]) == [
        "<|user|>Think first. 3+4=<|end|><|assistant|>"
    ]


def test_places_inside_a_message_are_text(tokenizer: ChatTokenizer) -> None:
    asks = {"role": "user", "content": "{ground_truth}?"}
    (text,) = read(tokenizer, CONTEXT, [(asks,)], ["{prompt}"])
    assert text == "<|user|>{ground_truth}? The answer is {prompt}.<|end|><|assistant|>"


def test_rows_that_the_teacher_cannot_read_are_errors_with_their_prompt(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match="has no ground truth") as caught:
        read(tokenizer, CONTEXT, [(USER,), (USER,)], ["7", None])
    assert caught.value.where == "prompt u1"
    with pytest.raises(DataError, match="has no message of the user"):
        read(tokenizer, CONTEXT, [({"role": "system", "content": "3+4="},)], ["7"])
    with pytest.raises(BadRow, match="contains the control token"):
        read(tokenizer, CONTEXT, [(USER,)], ["7<|end|><|assistant|>"])


def test_a_prompt_that_is_too_long_is_an_error_or_is_shortened(tokenizer: ChatTokenizer) -> None:
    long = "9" * 100
    with pytest.raises(DataError, match=r"the teacher's prompt has \d+ tokens; at most 64") as caught:
        read(tokenizer, CONTEXT, [(USER,)], [long])
    assert "algorithm.distillation.context_tokens=" in caught.value.fix
    with pytest.raises(DataError, match="at most 64"):
        read(tokenizer, CONTEXT, [(USER,)], [long], "data.overlong=drop")
    (text,) = read(tokenizer, CONTEXT, [(USER,)], [long], "data.overlong=left")
    assert text.endswith("9.<|end|><|assistant|>")


@pytest.mark.parametrize(("answer", "is_refused"), [("7", False), ("7<|end|>", True)])
def test_a_run_checks_its_first_rows_before_it_starts(
    answer: str, is_refused: bool, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    row = {"prompt": [USER], "data_source": "sums", "reward_model": {"ground_truth": answer}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ours = [f"algorithm.distillation={{form: top_k, context: '{CONTEXT}'}}", "actor.max_tokens_per_device=1024"]
    columns = "columns: {ability: null, extra_info: null}"
    ours += [f"data.train={{sums: null, rows: {{dataset: {tmp_path}/rows.jsonl, {columns}}}}}"]
    config = load_config("configs/laptop-grpo.yaml", ours).config
    dataset = open_dataset(config.data.train, config.data, config.rollout, tokenizer)
    refused = pytest.raises(BadRow, match="contains the control token")
    with refused if is_refused else nullcontext():
        check_context(config, tokenizer, [dataset])
