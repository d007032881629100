"""The demo's search: its facts, its teacher's text, and conversations in its real processes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mrl.agents.conversation import Ids
from mrl.agents.loop import Dialog, Dialogs, Opening, open_dialogs
from mrl.config.resolved.load import load_config, load_config_of
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.data.rlhf_dataset import open_sft_dataset
from mrl.demo.demo import CONFIGS, DemoSettings, demo_yaml
from mrl.demo.facts import HOPS, KEYS, Facts, Lessons, QuestionMark, part_of, questions
from mrl.demo.model import make_model
from mrl.demo.tasks import SEARCH
from mrl.rollout.requests import Generated
from tests.data.conftest import batch_of

ASKED = "<|user|>{}<|end|><|assistant|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("search") / "model", seed=3, num_layers=SEARCH.num_layers)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return load_tokenizer(str(model))


@pytest.mark.parametrize(("part", "num"), [("train", 507), ("validation", 169)])
def test_keys_are_asked_for_in_one_part_and_found_in_no_other(part: str, num: int) -> None:
    rows = questions(part)  # type: ignore[arg-type]
    asked = Counter((row["prompt"][0]["content"], row["data_source"]) for row in rows)
    assert abs(len(asked) - 2 * num) < 80, "about three quarters are trained on"
    assert set(asked.values()) == {1}
    for row in rows[:200]:
        path = Facts(row["prompt"][0]["content"], HOPS[row["data_source"]], seed=5).path
        assert {part_of(key) for key in path} == {part}
        assert len(set(path)) == HOPS[row["data_source"]]


def test_what_a_key_stands_for_is_drawn_anew_in_each_conversation() -> None:
    answers = Counter(Facts("ab", 1, seed).answer for seed in range(1000))
    assert len(answers) == 100
    assert max(answers.values()) < 25, "a guess is right in one of a hundred"
    assert len({Facts("ab", 2, seed).path[1] for seed in range(100)}) > 60


def test_a_wrong_key_stands_for_a_number_too_and_always_for_the_same() -> None:
    facts = Facts("ab", 2, seed=1)
    others = [key for key in KEYS if key not in facts.path]
    found = [facts.look_up(key) for key in others]
    assert found == [facts.look_up(key) for key in others]
    assert all(len(number) == 2 and number.isdecimal() for number in found)
    assert found.count(facts.answer) < 20
    assert len(set(found)) > 90


@pytest.mark.parametrize(
    ("text", "key"),
    [("?ab", "ab"), ("?a", None), ("?abc", None), ("?a1", None), ("?", None), ("? ab", None)],
)
def test_a_question_mark_looks_up(text: str, key: str | None) -> None:
    (call,) = QuestionMark().parse(text)
    assert call.arguments == (None if key is None else {"key": key})
    assert bool(call.problem) == (key is None)


def test_text_that_begins_otherwise_is_an_answer() -> None:
    assert [QuestionMark().parse(text) for text in ("47", "", "ab", "4?ab")] == [[]] * 4


def test_a_third_of_the_lessons_is_right() -> None:
    rows, dice = Lessons(), random.Random(1)
    right, num_searches = 0, 0
    drawn = [rows[index] for index in dice.sample(range(len(rows)), 900)]
    for row in drawn:
        said = row["messages"][1:]
        searches = [message["content"][1:] for message in said if message["content"].startswith("?")]
        num_searches += len(searches)
        assert all(part_of(key) == "train" for key in searches), "the keys of the validation are new"
        right += bool(searches) and searches[0] == row["messages"][0]["content"]
        if searches:
            assert said[-1]["content"] == said[-2]["content"], "it believes what it finds"
    assert right / len(drawn) == pytest.approx(1 / 3, abs=0.05)
    assert num_searches / len(drawn) == pytest.approx(5 / 6, abs=0.1)


def test_the_warm_up_learns_what_the_teacher_says_and_not_what_is_found(tokenizer: ChatTokenizer, model: Path) -> None:
    values = [f"run.dir={model}", f"model.path={model}", "cluster.devices_per_node=1", "placement.pools.laptop=1"]
    config = load_config_of("sft", str(CONFIGS / SEARCH.warm_up), values).config
    rows = open_sft_dataset(config.data.train, config, tokenizer)
    batch = batch_of(rows, range(0, len(rows), 997))
    responses, masks = batch["responses"].rows(), batch["response_mask"].rows()
    for index, ids, mask in zip(range(0, len(rows), 997), responses, masks, strict=True):
        said = Lessons()[index]["messages"][1:]
        learned = "".join(f"{message['content']}<|end|>" for message in said if message["role"] == "assistant")
        assert tokenizer.decode(ids[mask].tolist()) == learned
        found = "".join(
            f"<|tool|>{message['content']}<|end|><|assistant|>" for message in said if message["role"] == "tool"
        )
        assert tokenizer.decode(ids[~mask].tolist()) == found


def config_of(directory: Path, model: Path) -> Config:
    settings = DemoSettings(directory, seed=7, algorithm="grpo", tp=1, steps=3, task=SEARCH)
    path = directory / "demo.yaml"
    path.write_text(demo_yaml(settings, model, path))
    return load_config(str(path)).config


def test_the_search_has_a_configuration(model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model)
    assert config.run.name == "search"
    assert config.algorithm.advantage == "grpo"
    assert config.algorithm.kl.where == "none"
    assert config.batch.prompts_per_step * config.batch.samples_per_prompt == SEARCH.samples_per_step
    assert SEARCH.samples_per_step // config.batch.samples_per_update == SEARCH.updates_per_step
    assert SEARCH.solved == f"val/solved/mean@{config.validation.samples_per_prompt}"
    assert [source.options for source in (config.data.train["facts"], config.data.validation["facts"])] == [
        {"part": "train"},
        {"part": "validation"},
    ]


Player = Callable[[str, Facts], str]
"""The model's continuation of a context, without the end token."""


class Conversations:
    """The demo's environment in its processes, with its format and template, and an engine driven by a script."""

    def __init__(self, config: Config, tokenizer: ChatTokenizer, stack: ExitStack) -> None:
        dialogs = open_dialogs(config, tokenizer, lambda event: None, stack)
        assert dialogs is not None
        self.dialogs: Dialogs = dialogs
        self._tokenizer = tokenizer
        self._room = config.rollout.max_response_tokens

    def ids(self, text: str) -> Ids:
        return np.array(self._tokenizer([text], add_special_tokens=False)["input_ids"][0], np.int32)

    def play(self, player: Player, source: str, key: str, seed: int) -> tuple[Dialog, Facts]:
        """Return a conversation, and the values of its keys."""
        opening = Opening(
            row=0,
            key="0",
            uid="p",
            sample=0,
            data_source=source,
            prompt_ids=self.ids(ASKED.format(key)),
            seed=seed,
            max_tokens=self._room,
            messages=[{"role": "user", "content": key}],
        )
        facts = Facts(key, HOPS[source], opening.task().seed)
        (dialog,) = self.dialogs.begin([opening])
        while not dialog.failure and not (dialog.segments and dialog.begun.ended):
            for request in self.dialogs.take():
                text = player(self._tokenizer.decode(request.prompt_ids.tolist()), facts)
                ids = self.ids(f"{text}<|end|>")
                finish = "stop" if len(ids) <= request.max_tokens else "length"
                ids = ids[: request.max_tokens]
                log_probs = np.full(len(ids), -0.5, np.float32)
                self.dialogs.written(Generated(request.key, ids, log_probs, finish, 1, replica=0))  # type: ignore[arg-type]
            if (arriving := self.dialogs.arriving()) is not None:
                arriving.result(60)
        return dialog, facts


@pytest.fixture(scope="module")
def conversations(
    model: Path, tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Conversations]:
    with _conversations(config_of(tmp_path_factory.mktemp("run"), model), tokenizer) as made:
        yield made


@contextmanager
def _conversations(config: Config, tokenizer: ChatTokenizer) -> Iterator[Conversations]:
    with ExitStack() as stack:
        yield Conversations(config, tokenizer, stack)


def searching(context: str, facts: Facts) -> str:
    """Look up the key of the question, then the key in each result, until the result is a number."""
    last = context.removesuffix("<|end|><|assistant|>").rpartition("|>")[2]
    return f"?{last}" if last.isalpha() else last


@pytest.mark.parametrize("source", HOPS)
def test_who_looks_up_all_keys_is_right(source: str, conversations: Conversations, tokenizer: ChatTokenizer) -> None:
    dialog, facts = conversations.play(searching, source, "kq", seed=11)
    ids, mask = dialog.ended_conversation.response_ids, dialog.ended_conversation.mask
    found = [*facts.path[1:], facts.answer]
    looked_up = zip(facts.path, found, strict=True)
    turns = "".join(f"?{key}<|end|><|tool|>{next_}<|end|><|assistant|>" for key, next_ in looked_up)
    assert tokenizer.decode(ids.tolist()) == f"{turns}{facts.answer}<|end|>"
    written = "".join(f"?{key}<|end|>" for key in facts.path)
    assert tokenizer.decode(ids[mask].tolist()) == f"{written}{facts.answer}<|end|>"
    assert (dialog.score, dialog.parts) == (1.0, {"searches": HOPS[source]})


def test_who_guesses_or_looks_elsewhere_or_never_answers_is_wrong(conversations: Conversations) -> None:
    guessed, _ = conversations.play(lambda context, facts: "1", "one_hop", "kq", seed=11)
    assert (guessed.score, guessed.parts) == (0.0, {"searches": 0})

    def elsewhere(context: str, facts: Facts) -> str:
        return searching(context, facts) if "<|tool|>" in context else "?zz"

    assert conversations.play(elsewhere, "one_hop", "kq", seed=11)[0].score == 0.0
    half, _ = conversations.play(lambda context, facts: facts.answer + "0", "one_hop", "kq", seed=11)
    assert half.score == 0.0
    endless, _ = conversations.play(lambda context, facts: "?kq", "one_hop", "kq", seed=11)
    assert (endless.score, endless.ended_conversation.ended) == (None, "turns"), "the trainer takes it for wrong"
    cut_off, _ = conversations.play(lambda context, facts: facts.answer + "zzzzzzzz", "one_hop", "kq", seed=11)
    assert (cut_off.score, cut_off.ended_conversation.ended) == (0.0, "length")
