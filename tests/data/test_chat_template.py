"""Templates that loop, recurse or allocate are errors that name the row. All others equal transformers' output."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.data import template_process
from mrl.data.chat import load_tokenizer
from mrl.data.chat_template import ChatTemplate, TemplateFailure
from mrl.data.conversation import prompt_encoder
from mrl.data.rlhf_dataset import Prompt, SkippedRow, open_dataset
from mrl.data.rows import PromptRow
from mrl.errors import DataError
from tests.data.chat_templates import TEMPLATES, save_tokenizer
from tests.data.conftest import data_config, good_row, jsonl

TALK = [
    {"role": "user", "content": "Is 1 < 2? Füße\n \t<b>"},
    {"role": "assistant", "content": "<think>\nx\n</think>Yes"},
]
ASKED = [*TALK, {"role": "user", "content": "And 2?"}]


@pytest.fixture(autouse=True)
def within_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def interrupt(_: int, __: FrameType | None) -> None:
        raise TimeoutError("it never stops rendering")

    monkeypatch.setattr(template_process, "COMPUTES_S", 0.3)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


HOSTILE = {
    # template: reported problem
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": (
        "rendering took more than 0.3 s of CPU time"
    ),
    "{% for i in range(10 ** 10) %}{% endfor %}": "Range too big",
    "{{ 'a' * 10 ** 10 }}": "needs more than 1024 MiB",
    "{{ 'a' * 5000000 }}": "writes 5000000 characters; at most 4194304",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth exceeded",
    "{{ 1 / 0 }}": "division by zero",
    "{{ " + "(" * 100_000: "recursion",
    "{{ messages.__class__.__mro__ }}": "unsafe",
}


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_is_a_message(template: str) -> None:
    made = ChatTemplate(template, "{}")
    for _ in range(2):  # it continues after its process was ended
        with pytest.raises(TemplateFailure, match=HOSTILE[template]):
            made.render(TALK, calls_for_answer=True)


def test_a_row_on_which_a_template_loops_is_a_bad_row_and_the_others_are_prompts(
    here: Path, tokenizer_directory: Path
) -> None:
    shutil.copytree(tokenizer_directory, "made")
    loop = "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    good = Path("made/chat_template.jinja").read_text()
    Path("made/chat_template.jinja").write_text(f"{loop}{{% endfor %}}{{% endif %}}{good}")
    Path("rows.jsonl").write_bytes(jsonl(good_row(1), good_row(prompt="loop"), good_row(2)))
    data = data_config("rows.jsonl")
    rollout = RolloutConfig(max_prompt_tokens=64, max_response_tokens=8)
    dataset = open_dataset(data.train, data, rollout, load_tokenizer("made"))
    first, looping, last = dataset.read(dataset.draws(0, 3))
    assert isinstance(first, Prompt)
    assert isinstance(last, Prompt)
    assert isinstance(looping, SkippedRow)
    what = "the chat template raised an error on this prompt: rendering took more than 0.3 s of CPU time"
    assert str(looping.error).startswith(f"rows.jsonl:2: {what}\n")


def test_a_template_that_loops_on_everything_is_found_when_it_is_loaded(here: Path, tokenizer_directory: Path) -> None:
    shutil.copytree(tokenizer_directory, "made")
    Path("made/chat_template.jinja").write_text("{{ 10 ** (10 ** 10) }}")
    with pytest.raises(
        DataError, match=r"made: cannot render the chat template: rendering took more than 0\.3 s of CPU time"
    ):
        load_tokenizer("made")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_rendered_is_what_transformers_renders(name: str, tmp_path: Path) -> None:
    tokenizer: Any = save_tokenizer(name, tmp_path)
    for messages, calls in ((TALK[:1], True), (ASKED, True), (TALK, False)):
        row = PromptRow(tuple(messages), "x", None, None, {}, None, "here")
        encoder = prompt_encoder(tokenizer, data_config("rows.jsonl", template={"enable_thinking": False}))
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=calls, enable_thinking=False
        )
        assert encoder._applied(row.messages, "here", calls_for_answer=calls) == expected


FEATURES = (
    "{{ tools | tojson }}{{ {'a': 'ü<&', 'b': [1.5, none]} | tojson(indent=2) }}",
    "{{ strftime_now('%d %b %Y') }}{{ bos_token }}{{ eos_token }}{{ documents is none }}{{ undefined_one }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n  {{ m.content | trim }}\n{% endfor %}\n",
    "{% generation %}{% set x = 3 %}{{ messages[0]['content'] }}{% endgeneration %}{{ x }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\r\nend",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}{{ '\ud83d' ~ 'é' }}",
)


@pytest.mark.parametrize("template", FEATURES)
def test_every_part_of_the_environment_is_that_of_transformers(template: str, tmp_path: Path) -> None:
    tokenizer: Any = save_tokenizer("qwen2.5", tmp_path)
    tokenizer.chat_template = template
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True, tools=tools)
    encoder = prompt_encoder(tokenizer, data_config("rows.jsonl"))
    encoder._options["tools"] = tools
    assert encoder._applied(TALK, "here", calls_for_answer=True) == expected


def test_the_process_knows_nothing_and_ends_with_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    made = ChatTemplate("{{ messages[0].content }}", "{}")
    assert made.render(TALK, calls_for_answer=True) == TALK[0]["content"]
    assert made._process is not None
    pid = made._process.pid
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == pid, "a signal to the run's group is not for it"
    del made
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
