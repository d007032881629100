"""Rows that are not ranked responses, each with its exact message in bad_pairs.yaml."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config.data import ColumnsConfig, SourceConfig
from mrl.config.resolved.load import load_config_of
from mrl.data.chat import load_tokenizer
from mrl.data.learned_rows import read_labeled, read_ranked
from mrl.data.rlhf_dataset import open_sft_dataset
from mrl.errors import BadRow, DataError
from tests.data.conftest import batch_of, jsonl

MESSAGES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("bad_pairs.yaml").read_text())
LAPTOP_RM = Path(__file__).parents[2] / "configs" / "laptop-rm.yaml"


def talk(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


ASKED = ("user", "1+1?")
FOUR, TWO = talk(ASKED, ("assistant", "4")), talk(ASKED, ("assistant", "2"))


def pair(**changes: Any) -> dict[str, Any]:
    """Return a correct row with some columns changed."""
    return {"prompt": "1+1?", "chosen": "2", "rejected": "4", "margin": 1.5} | changes


def without(column: str) -> dict[str, Any]:
    return {name: value for name, value in pair().items() if name != column}


BAD_PAIRS: dict[str, object] = {
    # case: row
    "text instead of a row": "2 is better than 4",
    "no chosen": without("chosen"),
    "chosen null": pair(chosen=None),
    "chosen a number": pair(chosen=2),
    "chosen a list of texts": pair(chosen=["2", "two"]),
    "rejected an empty list": pair(rejected=[]),
    "rejected a list with a number": pair(rejected=["4", 3]),
    "the same text": pair(rejected="2"),
    "the same text in a list": pair(rejected=["4", "5", "4"]),
    "no prompt": without("prompt"),
    "chosen text, rejected messages": pair(rejected=FOUR),
    "chosen messages, rejected texts": pair(chosen=TWO, rejected=["4", "5"]),
    "rejected of texts and messages": pair(chosen=TWO, rejected=["4", FOUR[0]]),
    "chosen an empty conversation": pair(chosen=[], rejected=FOUR),
    "rejected an empty conversation": pair(chosen=TWO, rejected=[]),
    "conversations of other prompts": pair(chosen=TWO, rejected=talk(("user", "2+2?"), ("assistant", "4"))),
    "chosen ends with the user": pair(chosen=TWO[:1], rejected=FOUR),
    "no question": pair(chosen=[*talk(("system", "Add.")), TWO[1]], rejected=[*talk(("system", "Add.")), FOUR[1]]),
    "the assistant twice": pair(chosen=[*TWO, *talk(("assistant", "2!"))], rejected=[*TWO, *talk(("assistant", "4"))]),
    "label true": pair(margin=True),
    "label NaN": pair(margin=float("nan")),
    "label of hundreds of digits": pair(margin=10**400),
    "label beyond float32": pair(margin=1e39),
    "labels for fewer responses": pair(margin=[1.0]),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pair(case: str) -> None:
    columns = ColumnsConfig(data_source=None, ability=None, ground_truth=None, extra_info=None, label="margin")
    with pytest.raises(BadRow) as caught:
        read_ranked(columns, "pairs", BAD_PAIRS[case], "rows.jsonl:2")
    assert str(caught.value) == MESSAGES[case].rstrip("\n")


@pytest.mark.parametrize("label", [None, "yes", 0.5, 2, [True]])
def test_a_label_is_true_or_false(label: object) -> None:
    columns = ColumnsConfig(data_source=None, ability=None, rejected=None, label="good")
    with pytest.raises(BadRow) as caught:
        read_labeled(columns, "answers", {"prompt": "1+1?", "chosen": "2", "good": label}, "rows.jsonl:2")
    said = str(caught.value)
    assert said.startswith("rows.jsonl:2: column `good` must be true (desirable) or false (undesirable), not "), said


# A template that trims texts and ends the prompt with the role of the answer.
TRIMMED = "{% for each in messages %}<|{{ each.role }}|>{{ each.content | trim }}<|end|>{% endfor %}"
TRIMMED += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
BAD_TOKENS: dict[str, dict[str, Any]] = {
    # case: row, for a template that trims, and at most 8 tokens of a response
    "the same tokens": pair(rejected="2 "),
    "chosen too long": pair(chosen="2 " * 20),
    "one rejected too long": pair(rejected=["4", "5 " * 20]),
}


@pytest.fixture(scope="module")
def config() -> Any:
    """Return a configuration of `mrl rm` that allows 8 tokens per response."""
    return load_config_of("rm", str(LAPTOP_RM), ["batch={max_prompt_tokens: 64, max_response_tokens: 8}"]).config


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_bad_tokens(case: str, here: Path, tokenizer_directory: Path, config: Any) -> None:
    shutil.copytree(tokenizer_directory, "made")
    Path("made/chat_template.jinja").write_text(TRIMMED)
    Path("rows.jsonl").write_bytes(jsonl(BAD_TOKENS[case]))
    sources = {"s": SourceConfig(dataset="rows.jsonl", columns=ColumnsConfig(data_source=None, ability=None))}
    with pytest.raises(DataError) as caught:
        batch_of(open_sft_dataset(sources, config, load_tokenizer("made")), [0])
    assert str(caught.value) == MESSAGES[case].rstrip("\n")
