"""Figures of one run, or of several over each other, as drawings that need nothing but the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Lines = Sequence[Mapping[str, Any]]
"""The lines of a run's `metrics.jsonl`."""
Points = list[tuple[int, float]]

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
_TITLES = {
    "critic/score/mean": "score",
    "reward/model/mean": "score of the reward model",
    "response_length/mean": "response length",
    "response_length/solved/mean": "response length where solved",
    "response_length/unsolved/mean": "response length where not solved",
    "reward/kl": "KL to the reference",
    "actor/kl_loss": "KL in the loss",
    "actor/entropy_mean": "entropy",
    "actor/grad_norm": "gradient norm",
    "actor/pg_clipfrac": "share clipped above",
    "actor/pg_clipfrac_lower": "share clipped below",
    "groups/uniform_share": "prompts that teach nothing",
    "mismatch/log_prob_abs_diff_mean": "engine mismatch",
    "mismatch/rollout_is_eff_sample_size": "effective sample size",
    "critic/vf_loss": "value loss",
    "critic/vf_explained_var": "explained variance",
    "perf/throughput": "tokens per second and device",
}
"""What is drawn, beside all that validation measures."""
_WIDTH, _HEIGHT, _MARGIN = 340, 140, 34


def curves(runs: Mapping[str, Lines]) -> str:
    """Draw what changes; what is the same in every step of every run stands in one line below."""
    drawn, constant = [], []
    for name in _names(runs):
        points = {run: _points(lines, name) for run, lines in runs.items()}
        values = {value for of_run in points.values() for _, value in of_run}
        title = _TITLES.get(name, name)
        if len(values) > 1 or any(len(of_run) == 1 for of_run in points.values()):
            drawn.append(_curve(title, points))
        elif values:
            constant.append(f"{title} {values.pop():.4g}")
    same = f"<p>The same in every step: {escape(', '.join(constant))}.</p>" if constant else ""
    return f'<div class="curves">{"".join(drawn)}</div>{same}'


def _names(runs: Mapping[str, Lines]) -> list[str]:
    measured = dict.fromkeys(name for lines in runs.values() for line in lines for name in line)
    return [*_TITLES, *(name for name in measured if name.startswith("val/") and not name.endswith("/prompts"))]


def _points(lines: Lines, name: str) -> Points:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _curve(title: str, runs: Mapping[str, Points]) -> str:
    everything = [point for points in runs.values() for point in points]
    steps, values = [step for step, _ in everything], [value for _, value in everything]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    per_step = (_WIDTH - _MARGIN) / max(last - first, 1)
    up = (_HEIGHT - 24) / (high - low) if high > low else 0.0

    def drawn(points: Points, color: str) -> str:
        places = [(_MARGIN + (step - first) * per_step, _HEIGHT - 16 - (value - low) * up) for step, value in points]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        (x, y), is_one = places[0], len(places) == 1
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' if is_one else ""
        return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>{dot}'

    labels = "".join(
        f'<text x="0" y="{y}" font-size="10" fill="#777">{value:.3g}</text>'
        for y, value in ((12, high), (_HEIGHT - 14, low))
    )
    steps_at = f'<text x="{_MARGIN}" y="{_HEIGHT - 2}" font-size="10" fill="#777">step {first} to {last}</text>'
    lines = "".join(drawn(points, color) for points, color in zip(runs.values(), COLORS, strict=False) if points)
    newest = ", ".join(f"{points[-1][1]:.4g}" for points in runs.values() if points)
    caption = f"<figcaption>{escape(title)}: {newest}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{labels}{steps_at}{lines}</svg></figure>'
