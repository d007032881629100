"""The pictures of the README, drawn from the measured values of a recorded `make demo`: `docs/images/demo.json`.

`python -m tests.docs.generate` writes them. To record another run, take its `metrics.jsonl`, and for `moment` the
content of its terminal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from mrl.observe.console import Console, Panel, SamplePreview
from tests.docs.blocks import DOCS

IMAGES = DOCS / "images"
SOLVED = "val/solved/mean@4"
SCORE = "critic/score/mean"
_COLUMNS, _ROW, _LETTER = 110, 17, 7.2
_WIDTH, _HEIGHT = 830, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 110, 34, 214
_FONT = 'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="12"'
_SANS = 'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="12"'


def recorded() -> dict[str, Any]:
    """Return the recorded run."""
    run: dict[str, Any] = json.loads((IMAGES / "demo.json").read_text(encoding="utf-8"))
    return run


def panel() -> str:
    """Draw a terminal in the middle of the run with the code of mrl's console."""
    run = recorded()
    moment, steps = run["moment"], run["steps"][1:]
    printed, drawn = io.StringIO(), Panel(len(steps))
    console, sample = Console(len(steps), printed), SamplePreview(**moment["sample"])
    for metrics in steps[: moment["after_step"]]:
        console.step(metrics["step"], metrics)
        drawn.finish(metrics["step"], metrics, sample)
    drawn.phase, drawn.done, drawn.total = moment["phase"], moment["done"], moment["total"]
    lines = [f"$ {run['command']}", *printed.getvalue().splitlines(), *drawn.lines(_COLUMNS)]
    width, height = round(_COLUMNS * _LETTER) + 32, len(lines) * _ROW + 28
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#16181d"/>', *_terminal(lines)]
    return _svg(width, height, "The panel of a run in a terminal", parts)


def demo() -> str:
    """Draw the mean score of each step, and the share of right answers before and after."""
    run = recorded()
    steps = run["steps"][1:]
    scores = [(metrics["step"], metrics[SCORE]) for metrics in steps]
    solved = [(metrics["step"], metrics[SOLVED]) for metrics in run["steps"] if SOLVED in metrics]
    last = scores[-1][0]

    def at(step: int, value: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last
        return round(across, 1), round(_BOTTOM - (_BOTTOM - _TOP) * value, 1)

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>', *_axes(last, at)]
    line = " ".join(f"{x},{y}" for x, y in (at(*point) for point in scores))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#4269d0" stroke-width="2"/>')
    for (x, y), (_, value) in zip((at(*point) for point in solved), solved, strict=True):
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#ff725c"/>')
        parts.append(_label(x + 9, y + 4, f"{value:.1%} correct", "#c2402b"))
    x, y = at(10, 0.68)
    parts.append(_label(x, y, "mean score of the step's samples", "#4269d0"))
    title = f"{run['command']}: PPO, {last} steps; {run['machine']}"
    return _svg(_WIDTH, _HEIGHT, title, [*parts, _label(_LEFT, 20, title, "#222222")])


PICTURES = {"panel.svg": panel, "demo.svg": demo}


def _terminal(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines whose width depends on their number of letters, not on the font."""
    for number, line in enumerate(lines):
        if line.strip():
            begin = len(line) - len(line.lstrip())
            x, y = 16 + begin * _LETTER, 24 + number * _ROW
            wide = f'x="{x:.1f}" y="{y}" textLength="{(len(line.rstrip()) - begin) * _LETTER:.1f}"'
            style = f'{_FONT} fill="#d6dae3" xml:space="preserve" lengthAdjust="spacingAndGlyphs"'
            yield f"<text {wide} {style}>{escape(line.strip())}</text>"


def _axes(last: int, at: Any) -> Iterator[str]:
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = at(0, value), at(last, value)
        yield f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e4e4e4"/>'
        yield _label(x - 8, y + 4, f"{value:g}", "#777777", "end")
    for step in range(0, last + 1, 10):
        x, y = at(step, 0)
        yield _label(x, y + 18, f"step {step}" if step == 0 else f"{step}", "#777777", "middle")


def _label(x: float, y: float, text: str, color: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {_SANS} fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'{head} role="img">', f"<title>{escape(title)}</title>", *parts, "</svg>", ""])
