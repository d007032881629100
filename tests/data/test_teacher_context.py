"""Prompts of a teacher that reads more than the policy."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.resolved.load import load_config
from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.data.rlhf_dataset import open_dataset
from mrl.data.teacher_context import TeacherContext, Untaught, check_context, teacher_context
from mrl.demo.model import make_model
from mrl.errors import BadRow, DataError
from mrl.protocol import DataProto

CONTEXT = "{prompt} The answer is {ground_truth}."
SUCCESS = "{prompt} Right: {success}."
USER = {"role": "user", "content": "3+4="}
Column = list[Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_tokenizer(str(make_model(tmp_path_factory.mktemp("made") / "model", seed=1)))


def context_and_rows(
    tokenizer: ChatTokenizer, context: str, messages: Column, truths: Column, *overrides: str
) -> tuple[TeacherContext, DataProto]:
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
    return made, rows


def read(tokenizer: ChatTokenizer, context: str, messages: Column, truths: Column, *overrides: str) -> list[str]:
    """Return the texts of the teacher's prompts."""
    made, rows = context_and_rows(tokenizer, context, messages, truths, *overrides)
    return [tokenizer.decode(ids) for ids in made.prompts_of_rows(rows)]


def read_samples(
    tokenizer: ChatTokenizer, samples: list[tuple[str, str, float]], *more: str, overlong: str = "error"
) -> list[str | Untaught]:
    """Return the texts of the teacher's prompts of samples: uid, response and score. The context shows a success."""
    overrides = [f"algorithm.distillation.{name}" for name in ("success_at=1", *more)] + [f"data.overlong={overlong}"]
    messages = [({"role": "user", "content": f"{uid}+4="},) for uid, _, _ in samples]
    made, rows = context_and_rows(tokenizer, SUCCESS, messages, [None] * len(samples), *overrides)
    columns = zip(*samples, strict=True)
    uids, responses, scores = (list(column) for column in columns)
    rows = rows.with_column("uid", np.array(uids, object)).with_column("response_text", np.array(responses, object))
    prompts = made.prompts(rows.with_column("scores", torch.tensor(scores, dtype=torch.float64)))
    return [prompt if isinstance(prompt, Untaught) else tokenizer.decode(prompt) for prompt in prompts]


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


def test_the_context_shows_another_sample_that_is_a_success(tokenizer: ChatTokenizer) -> None:
    samples = [("3", "8", 0.0), ("5", "9", 1.0), ("3", "7", 1.0), ("5", "9!", 1.0), ("3", "{prompt}", 1.0)]
    shown = [("3", "7"), ("5", "9!"), ("3", "{prompt}"), ("5", "9"), ("3", "7")]
    assert read_samples(tokenizer, samples) == [
        f"<|user|>{number}+4= Right: {said}.<|end|><|assistant|>" for number, said in shown
    ]


def test_samples_without_a_success_that_can_be_shown_have_no_teacher(tokenizer: ChatTokenizer) -> None:
    samples = [("3", "7", 0.9), ("3", "8", 0.0), ("5", "9" * 100, 1.0), ("5", "1", 0.0), ("6", "x<|end|>", 1.0)]
    none = Untaught.NO_SUCCESS
    assert read_samples(tokenizer, [*samples, ("6", "y", 0.0)]) == [
        *(none, none, none, Untaught.TOO_LONG, none),
        Untaught.CONTROL_TOKEN,
    ]


def test_a_success_is_shown_after_the_last_end_of_its_thinking(tokenizer: ChatTokenizer) -> None:
    samples = [("3", "thought</t>more</t> 7", 1.0), ("3", "plain", 1.0)]
    texts = read_samples(tokenizer, samples, "success_after='</t>'")
    assert texts == [f"<|user|>3+4= Right: {said}.<|end|><|assistant|>" for said in ("plain", " 7")]


def test_a_success_that_is_too_long_is_shortened_if_prompts_are(tokenizer: ChatTokenizer) -> None:
    samples = [("3", "9" * 100, 1.0), ("3", "1", 0.0)]
    lone, text = read_samples(tokenizer, samples, overlong="left")
    assert lone is Untaught.NO_SUCCESS
    assert isinstance(text, str)
    assert text.endswith("9.<|end|><|assistant|>")


def test_a_prompt_is_checked_without_a_success_before_there_are_samples(tokenizer: ChatTokenizer) -> None:
    made, rows = context_and_rows(tokenizer, SUCCESS, [(USER,)], [None], "algorithm.distillation.success_at=1")
    assert [tokenizer.decode(ids) for ids in made.prompts_of_rows(rows)] == [
        "<|user|>3+4= Right: .<|end|><|assistant|>"
    ]


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
