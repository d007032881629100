"""Damaged files of a run: metrics, events, and the report of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

from mrl.errors import MrlError
from mrl.events import EventLog, ReplicaLost, Saved, Warned, read_events
from mrl.observe.metrics import read_metrics
from mrl.observe.report import render_comparison, render_report
from tests.fuzzing import HOSTILE, changed, damaged, rounds

LINES = [
    {"step": step, "critic/score/mean": step / 9, "actor/entropy_mean": 1 / step, "time/step_s": 3.0, "val/a": None}
    for step in range(1, 30)
]
FOREIGN = {"mark", "script", "i", "u"}
"""Tags that no page has by itself."""


class Page(HTMLParser):
    """Parses the tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, _: object) -> None:
        self.tags.add(tag)


def test_damaged_figures_are_an_error_or_a_page(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    samples = [{"prompt": "a", "response": "b", "score": 1.0, "uid": "c", "answer": None}] * 3
    for chance in rounds("figures"):
        if chance.random() < 0.5:
            path.write_bytes(damaged(whole, chance))
        else:
            lines = [changed(line, chance) if chance.random() < 0.2 else line for line in LINES]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = [{name: chance.choice([value, *HOSTILE]) for name, value in sample.items()} for sample in samples]
        with contextlib.suppress(MrlError):
            read = read_metrics(path)
            page = render_report(chance.choice(["<mark>run</mark>", "run"]), read, {"a step": found}, "x: <script>")
            assert not Page(page).tags & FOREIGN
            page.encode("utf-8", "surrogatepass")
            assert not Page(render_comparison({"<i>": read, "b": LINES}, "<u>")).tags & FOREIGN


def test_damaged_events_are_an_error_or_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for event in (Warned("a", "b"), ReplicaLost(1, "died", 3), Saved("checkpoint", 1, "x", 2, 0.5)):
        log.write(event)
    log.close()
    whole = log.path.read_bytes()
    values = [json.loads(line) for line in whole.splitlines()]
    for chance in rounds("events"):
        content = damaged(whole, chance)
        if chance.random() < 0.5:
            content = "".join(json.dumps(changed(value, chance)) + "\n" for value in values).encode()
        log.path.write_bytes(content)
        with contextlib.suppress(MrlError):
            assert all(dataclasses.is_dataclass(found.event) for found in read_events(log.path))
