"""A conversation in Search-R1's tags equals that of its authors' code, from the first token to the last."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mrl.agents.conversation import Conversation
from mrl.agents.environment import Done, Environment, Observation, Turn, from_json, to_json
from mrl.agents.formats import calls_of, load_format, search_r1_documents
from mrl.agents.observation import Speaker
from mrl.data.chat import ChatTokenizer
from tests.data.chat_templates import save_tokenizer

PROMPT = "Answer: <answer> Beijing </answer>. Question: Who wrote it?\n"
SCRIPT = [
    "<think> I look. </think>\n<search> who wrote it </search>\n",
    "It is Ada.",
    "<think> I know. </think> <answer> Ada </answer>",
]
CORPUS = {"who wrote it": ['"It"\nIt is a book of Ada. <answer> Eve </answer>', '"Ada"\nShe writes.']}
GOLDEN = (
    "<think> I look. </think>\n<search> who wrote it </search>\n"
    '\n\n<information>Doc 1(Title: "It") It is a book of Ada. <answer> Eve </answer>\nDoc 2(Title: "Ada") She writes.'
    "</information>\n\n"
    "It is Ada."
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
    "<think> I know. </think> <answer> Ada </answer>"
)


class Search(Environment):
    """Answers from the corpus, and scores the last text that the model wrote."""

    def step(self, turn: Turn) -> Observation | Done:
        (call,) = turn.calls
        if call.arguments is None:
            return Observation(results=[call.problem])
        if call.name == "answer":
            return Done(score=float(call.arguments["answer"] == "Ada"))
        return Observation(results=[search_r1_documents(CORPUS[call.arguments["query"]])])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return save_tokenizer("qwen2.5", Path(tmp_path_factory.mktemp("qwen")) / "made")


def rollout(
    tokenizer: ChatTokenizer, script: list[str], *, max_tokens: int = 100_000
) -> tuple[Conversation, float | None]:
    """Drive a conversation with a model that follows a script."""
    form, world = load_format("search_r1"), Search()
    encoder = Speaker(tokenizer, form, None, max_tokens=500)
    prompt, *turns = tokenizer([PROMPT, *script], add_special_tokens=False)["input_ids"]
    talk = Conversation("0", "a", np.array(prompt, np.int32), max_tokens=max_tokens, seed=1)
    for number, ids in enumerate(turns):
        limit = talk.request(500).max_tokens
        written, finish = np.array(ids[:limit], np.int32), "stop" if len(ids) <= limit else "length"
        talk.write(written, np.full(len(written), -1.0, np.float32), finish)  # type: ignore[arg-type]
        text = tokenizer.decode(written.tolist())
        calls = calls_of(form, text, finish)
        turn = Turn(number=number, text=text, calls=calls, ended=finish, left_turns=9, left_tokens=talk.room)  # type: ignore[arg-type]
        answer = from_json(to_json(world.step(from_json(to_json(turn)))))  # type: ignore[arg-type]
        if isinstance(answer, Done):
            talk.end("done")
            return talk, answer.score
        encoded = encoder.encode(talk, calls, answer)  # type: ignore[arg-type]
        assert encoded is not None
        talk.observe(encoded.ids)
        if talk.ended:
            break
    return talk, None


def test_a_rollout_reads_as_search_r1_writes_it_byte_for_byte(tokenizer: ChatTokenizer) -> None:
    talk, score = rollout(tokenizer, SCRIPT)
    assert tokenizer.decode(talk.response_ids.tolist()) == GOLDEN
    assert (score, talk.ended) == (1.0, "done")
    written = ["".join(tokenizer.decode(talk.response_ids[t.start : t.start + t.length].tolist())) for t in talk.turns]
    assert written == SCRIPT
    assert talk.mask.sum() == sum(len(ids) for ids in tokenizer(SCRIPT, add_special_tokens=False)["input_ids"])
    assert re.findall("<answer>", tokenizer.decode(talk.response_ids[talk.mask].tolist())) == ["<answer>"]


def test_who_answers_nothing_has_no_answer_though_prompt_and_documents_show_some(tokenizer: ChatTokenizer) -> None:
    talk, score = rollout(tokenizer, SCRIPT[:2])
    assert score is None
    assert "<answer>" in tokenizer.decode(talk.context_ids.tolist())
    assert rollout(tokenizer, ["<answer></answer>"])[1] == 0.0


def test_a_conversation_ends_where_its_room_does_wherever_that_is(tokenizer: ChatTokenizer) -> None:
    whole, _ = rollout(tokenizer, SCRIPT)
    for max_tokens in range(1, len(whole.response_ids) + 1):
        talk, score = rollout(tokenizer, SCRIPT, max_tokens=max_tokens)
        assert talk.ended == ("done" if score is not None else "length")
        assert (score is not None) == (max_tokens == len(whole.response_ids))
        assert len(talk.response_ids) <= max_tokens
        same = whole.response_ids[: len(talk.response_ids)].tolist()
        assert talk.response_ids.tolist() == same
        assert talk.mask[-1]
