"""Published data sets: their files on the hub, with hashes and numbers of rows, and how a row becomes a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mrl.answers import after_hashes, last_boxed
from mrl.config.data import ColumnsConfig
from mrl.data.rows import PromptRow, ReadRow, read_prompt
from mrl.errors import BadRow

BOXED = "Reason step by step, and put the final answer into \\boxed{}."
HASHES = "Reason step by step, and end with a line that has #### and then the answer as a number alone."
TAGGED = "Think first, and end with the expression alone between tags, as in <answer>(1 + 2) / 3</answer>."

SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {}\n"
)
"""Search-R1's prompt, for which its models and published figures hold. It is data: keep it unchanged, mistakes
included."""

_UNBRACED = re.compile(r"\\boxed ([^$]+)\$")  # two solutions of MATH end this way
_DAPO_FORM = re.compile(
    r'Solve the following math problem.*?\n\n(.+?)\s*Remember to put your answer on .*?"\.?', re.DOTALL
)


@dataclass(frozen=True)
class Exercise:
    """A published row in the form that mrl trains on."""

    question: str
    answer: str | list[str]
    """Ground truth for the reward function."""
    ability: str
    key: Hashable
    """Equal for rows that ask the same question."""
    extra: dict[str, Any] = field(default_factory=dict)
    data_source: str = ""
    """Data source of the row, if the data set consists of several. Otherwise empty."""


@dataclass(frozen=True)
class HubFile:
    path: str
    sha256: str
    num_rows: int


ReadExercise = Callable[[object, str], Exercise]


@dataclass(frozen=True)
class Published:
    """A data set at one commit."""

    repository: str
    revision: str
    files: Mapping[str, HubFile]
    """Part (train, test) -> its file."""
    columns: tuple[str, ...]
    read: ReadExercise
    """Converts a row and its place to an exercise, or raises `BadRow`."""
    repeats: bool = False
    """Keep one of the rows that ask the same question. If their answers differ, drop them all."""
    num_test: int = 0
    """Number of exercises at the end of `train` that become the test part, if the data set has none."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.files, "test") if self.num_test else tuple(self.files)


def _reads(prompt: str, truth: str, ability: str | None = None, source: str | None = None) -> ReadRow:
    """Return a reader that checks a published row the way a run checks its rows."""
    columns = ColumnsConfig(prompt=prompt, ground_truth=truth, ability=ability, data_source=source, extra_info=None)
    return partial(read_prompt, columns, "published")


_GSM8K = _reads("question", "answer")
_MATH = _reads("problem", "solution", "type")
_DAPO17K = _reads("prompt", "reward_model.ground_truth")
_NQ_HOTPOTQA = _reads("prompt", "reward_model.ground_truth.target", "ability", "data_source")


def _gsm8k(raw: object, where: str) -> Exercise:
    _, question, solution = _parsed(_GSM8K, raw, where)
    answer = after_hashes(solution)
    if not answer:
        raise BadRow("the solution has no answer after ####", where=where)
    return Exercise(f"{question}\n\n{HASHES}", answer.replace(",", ""), "math", question)


def _math(raw: object, where: str) -> Exercise:
    row, question, solution = _parsed(_MATH, raw, where)
    answer = last_boxed(solution)
    if answer is None and (unbraced := _UNBRACED.findall(solution)):
        answer = unbraced[-1].strip()
    if not answer:
        raise BadRow(
            "the solution has no boxed answer" if answer is None else "the solution's box is empty", where=where
        )
    return Exercise(f"{question}\n\n{BOXED}", answer, row.ability or "math", question)


def _dapo17k(raw: object, where: str) -> Exercise:
    _, question, answer = _parsed(_DAPO17K, raw, where)
    inner = _DAPO_FORM.fullmatch(question.strip())
    if not inner:
        raise BadRow("the prompt does not use the published wording", where=where)
    return Exercise(f"{inner[1].strip()}\n\n{BOXED}", answer.strip(), "math", question)


def _search_r1(raw: object, where: str) -> Exercise:
    row = _NQ_HOTPOTQA(raw, where)
    texts = [message["content"] for message in row.messages]
    before, after = SEARCH_R1.split("{}")
    if len(texts) != 1 or not texts[0].startswith(before) or not texts[0].endswith(after):
        raise BadRow("the prompt does not use the wording of Search-R1", where=where)
    truth = row.ground_truth
    accepted = truth if isinstance(truth, list) else [str(truth)]
    key = (row.data_source, texts[0])
    return Exercise(texts[0], accepted, row.ability or "fact-reasoning", key, data_source=row.data_source)


def _countdown(raw: object, where: str) -> Exercise:
    match raw:
        case {"nums": list(numbers), "target": target} if (
            all(type(number) is int for number in (target, *numbers)) and len(numbers) > 1
        ):
            listed = ", ".join(map(str, numbers))
            question = f"Make {target} of the numbers {listed}, each used exactly once, with +, -, *, / and ()."
            key = (target, *sorted(numbers))
            return Exercise(f"{question} {TAGGED}", str(target), "arithmetic", key, {"numbers": numbers})
    raise BadRow("a row must have `nums` with two or more whole numbers, and `target` with one", where=where)


def _parsed(read: ReadRow, raw: object, where: str) -> tuple[PromptRow, str, str]:
    """Return the row, the text of its only message, and its ground truth."""
    row = read(raw, where)
    if len(row.messages) != 1:
        raise BadRow("the prompt must be one message", where=where)
    if not isinstance(row.ground_truth, str):
        raise BadRow("the answer must be one text", where=where)
    return row, row.messages[0]["content"], row.ground_truth


_FILES = """
gsm8k train ea82612ea9582142387730c793eb67d3b12849002bc0b7fa6f8efafa7351419d 7473 main/train-00000-of-00001
gsm8k test ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59 1319 main/test-00000-of-00001
math train eca6e667f4305dd5e5ba09b4fd55e7f3174a0fbe361cdfd4c44758b593a76933 7500 data/train-00000-of-00001
math test 7dca8d6e41af88ecf82f2b5f36eb5530e083aaaa86ee325f62bd5c31535178c6 5000 data/test-00000-of-00001
dapo17k train 534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941 1791700 data/dapo-math-17k
countdown train a1b37bea0f439c858b11b908daa682e521f13f9592f1866b08650f58b730d126 490364 data/train-00000-of-00001
search-r1 train c3cc21e862a8469105de666101578cbff23cdc77e91a803cef102622c89cc4f6 169615 train
search-r1 test 30aa887b6d47e06e8c0f6f5307c88fe4e13461ac25a20ec0a5433ad7a4fe25dc 51713 test
"""
"""Part, sha256, number of rows, and path in the repository without `.parquet`, for each data set."""


def _files(name: str) -> dict[str, HubFile]:
    rows = (line.split() for line in _FILES.strip().splitlines())
    return {
        part: HubFile(f"{path}.parquet", sha256, int(num))
        for dataset, part, sha256, num, path in rows
        if dataset == name
    }


PUBLISHED: Mapping[str, Published] = {
    "gsm8k": Published(
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", _files("gsm8k"), ("question", "answer"), _gsm8k
    ),
    "math": Published(
        "DigitalLearningGmbH/MATH-lighteval",
        "0530c78699ea5e8eb5530600900e1f328b48acad",
        _files("math"),
        ("problem", "solution", "type"),
        _math,
    ),
    "dapo17k": Published(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
        _files("dapo17k"),
        ("prompt", "reward_model.ground_truth"),
        _dapo17k,
        repeats=True,
    ),
    "countdown": Published(
        "Jiayi-Pan/Countdown-Tasks-3to4",
        "408f70d177020686d34a56bba5952feb45aaaee4",
        _files("countdown"),
        ("nums", "target"),
        _countdown,
        repeats=True,
        num_test=1_024,
    ),
    "search-r1": Published(
        "PeterJinGo/nq_hotpotqa_train",
        "b7d80abfee334a7a91cb377544f09180d58b34f6",
        _files("search-r1"),
        ("prompt", "data_source", "ability", "reward_model.ground_truth.target"),
        _search_r1,
    ),
}
