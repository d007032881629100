"""The templates of the tests give the same output as the published ones, which was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.data.chat_template import TemplateFailure, chat_template
from tests.data.chat_templates import TEMPLATES, as_published

RECORDED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("published_templates.yaml").read_text("utf-8")
)


def written(template: str, name: str, case: dict[str, Any]) -> str:
    _, control, begin = TEMPLATES[name]
    variables = {"tools": None, "documents": None, "eos_token": control[0], "bos_token": begin}
    made = chat_template(template, json.dumps(variables | case.get("options", {})))
    try:
        return made.render(case["messages"], calls_for_answer=case["calls_for_answer"])
    except TemplateFailure as refusal:
        return f"refused: {refusal}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rebuilt_templates_write_what_the_published_ones_write(name: str) -> None:
    cases = {case: found for case, found in RECORDED.items() if name in found["texts"]}
    for template in (as_published(TEMPLATES[name][0]), TEMPLATES[name][0]):
        texts = {case: written(template, name, found) for case, found in cases.items()}
        assert texts == {case: found["texts"][name] for case, found in cases.items()}
