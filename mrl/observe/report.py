"""A run as one self-contained HTML file: curves, timing, samples, health."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from statistics import fmean
from typing import Any

from mrl.observe.figures import bounds_of, is_bound, shown_figure
from mrl.observe.health import Lines, findings

Points = list[tuple[int, float, float, float]]
"""Steps with a value and the bounds of its interval, which are the value itself if it has no interval."""

_LEAST_SHARED = 80
"""Smallest length of a common prompt prefix that is shown only once."""

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
_TITLES = {
    "critic/score/mean": "score",
    "reward/model/mean": "score of the reward model",
    "response_length/mean": "response length",
    "response_length/solved/mean": "response length where solved",
    "response_length/unsolved/mean": "response length where not solved",
    "reward/kl": "KL to the reference",
    "reward/kl_coef": "coefficient of the KL in the reward",
    "actor/kl_loss": "KL in the loss",
    "actor/entropy_mean": "entropy",
    "actor/grad_norm": "gradient norm",
    "actor/experts/busiest": "load of the busiest expert",
    "actor/pg_clipfrac": "share clipped above",
    "actor/pg_clipfrac_lower": "share clipped below",
    "groups/uniform_share": "prompts that teach nothing",
    "mismatch/log_prob_abs_diff_mean": "engine mismatch",
    "mismatch/other_experts": "tokens with other experts",
    "mismatch/rollout_is_eff_sample_size": "effective sample size",
    "critic/vf_loss": "value loss",
    "critic/vf_explained_var": "explained variance",
    "perf/throughput": "tokens per second and device",
}
"""Figures that are drawn, besides the score of each reward function and all validation metrics."""
_LAYER = re.compile(r"(mismatch|actor)/other_experts/layer_(\d+)")
_WIDTH, _HEIGHT, _MARGIN = 340, 140, 34
_LEAST_OF_A_LINE, _MOST_WITH_DOTS = 3, 20
"""Numbers of points. A line through two points would suggest measurements in between."""


def _curves(runs: Mapping[str, Lines], colors: Sequence[str] = COLORS) -> str:
    """Draw metrics that change, equal ones as one curve. List constant metrics below the curves.

    With one data source, each validation metric appears twice; and with scores of 0 or 1, score and solved share are
    equal.
    """
    titles: dict[str, list[str]] = defaultdict(list)
    changing, constant = dict[str, Mapping[str, Points]](), []
    measured = dict.fromkeys(name for lines in runs.values() for line in lines for name in line)
    validated = [
        name for name in measured if name.startswith("val/") and not name.endswith("/prompts") and not is_bound(name)
    ]
    rewards = [
        name for name in measured if re.fullmatch("reward/.+/(mean|uniform_share)", name) and name not in _TITLES
    ]
    for name in [*_TITLES, *rewards, *validated]:
        points = {
            run: [
                (line["step"], line[name], *(bounds_of(line, name) or [line[name]] * 2))
                for line in lines
                if line.get(name) is not None
            ]
            for run, lines in runs.items()
        }
        values = {point[1] for run_points in points.values() for point in run_points}
        title = _TITLES.get(name, name)
        if len(values) > 1 or any(len(run_points) == 1 for run_points in points.values()):
            titles[repr(points)].append(title)
            changing[repr(points)] = points
        elif values:
            constant.append(f"{title} {values.pop():.4g}")
    drawn = [_curve(" = ".join(titles[key]), points, colors) for key, points in changing.items()]
    constants = f"<p>Equal in every step: {escape(', '.join(constant))}.</p>" if constant else ""
    return f'<div class="curves">{"".join(drawn)}</div>{constants}'


def _curve(title: str, runs: Mapping[str, Points], colors: Sequence[str]) -> str:
    all_points = [point for points in runs.values() for point in points]
    steps, values = [point[0] for point in all_points], [value for point in all_points for value in point[1:]]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    per_step = (_WIDTH - _MARGIN) / max(last - first, 1)
    up = (_HEIGHT - 24) / (high - low) if high > low else 0.0

    def drawn(points: Points, color: str) -> str:
        places = [
            (_MARGIN + (step - first) * per_step, *(_HEIGHT - 16 - (value - low) * up for value in values))
            for step, *values in points
        ]
        bars = "".join(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{top:.1f}" stroke="{color}" opacity="0.35"/>'
            for x, _, bottom, top in places
            if bottom != top
        )
        dots = bars + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y, *_ in places)
        if len(places) < _LEAST_OF_A_LINE:
            return dots
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down, *_ in places)
        line = f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        return line + (dots if len(places) <= _MOST_WITH_DOTS else bars)

    labels = "".join(
        f'<text x="0" y="{y}" font-size="10" fill="#777">{value:.3g}</text>'
        for y, value in ((12, high), (_HEIGHT - 14, low))
    )
    steps_at = f'<text x="{_MARGIN}" y="{_HEIGHT - 2}" font-size="10" fill="#777">step {first} to {last}</text>'
    lines = "".join(drawn(points, color) for points, color in zip(runs.values(), colors, strict=False) if points)
    newest = ", ".join(_newest(points[-1]) for points in runs.values() if points)
    caption = f"<figcaption>{escape(title)}: {newest}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{labels}{steps_at}{lines}</svg></figure>'


def _newest(point: tuple[int, float, float, float]) -> str:
    _, value, low, high = point
    return f"{value:.4g}" + (f" ({low:.3g} to {high:.3g})" if low != high else "")


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { font-weight: 600 } h2 { margin-top: 2.2rem }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-size: 13px; color: #555 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem }
tr { border-bottom: 1px solid #e4e4e4 } pre { margin: 0; white-space: pre-wrap; font-size: 13px }
.finding { border-left: 4px solid #ff725c; padding: .2rem .8rem; margin: .6rem 0 } .well { border-color: #3ca951 }
.model, .environment { border-left: 4px solid #4269d0; padding: .1rem .6rem; margin: .3rem 0 }
.environment { border-color: #999; background: #f4f4f4; margin-left: 1.5rem } i { font-size: 12px; color: #555 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""


def render_report(
    name: str,
    lines: Lines,
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    configuration: str,
    ending: str = "",
) -> str:
    """Return the report page. Text from models and data sets is escaped, so that a sample is never markup."""
    steps = [line for line in lines if line["step"] > 0]  # line 0 is only a validation
    sections = [
        f"<h1>{escape(name)}</h1><p>{_summary(lines, len(steps))}</p>{_ended(ending)}",
        f"<h2>Health</h2>{_health(lines)}",
        f"<h2>Curves</h2>{_curves({name: lines})}",
        *_routed(steps),
        f"<h2>Where the seconds of a step went</h2>{_phases(steps)}",
        *(f"<h2>Samples of {escape(step_name)}</h2>{_samples(rows)}" for step_name, rows in samples.items()),
        f"<h2>Configuration</h2><pre>{escape(configuration)}</pre>",
    ]
    return page(name, sections)


def _ended(ending: str) -> str:
    if not ending:
        return ""
    verdict, *rest = ending.splitlines()
    details = f"<pre>{escape(chr(10).join(rest))}</pre>" if rest else ""
    return f"<p>How it ended: {escape(verdict)}.</p>{details}"


def render_comparison(runs: Mapping[str, Lines], difference: str, parting: str = "") -> str:
    """Return a page that overlays these runs, with their configurations' differences and where two runs part."""
    title = " and ".join(runs)
    steps = {name: [line for line in lines if line["step"] > 0] for name, lines in runs.items()}
    summaries = "".join(
        f'<p><span class="key" style="background:{color}"></span>{escape(name)}: '
        f"{_summary(lines, len(steps[name]))}</p>"
        for (name, lines), color in zip(runs.items(), COLORS, strict=False)
    )
    health = "".join(f"<h3>{escape(name)}</h3>{_health(run_lines)}" for name, run_lines in runs.items())
    sections = [
        f"<h1>{escape(title)}</h1>{summaries}",
        f"<h2>Difference of the configurations</h2><pre>{escape(difference or 'None.')}</pre>",
        *([f"<h2>Where they part</h2><pre>{escape(parting)}</pre>"] if parting else []),
        f"<h2>Curves</h2>{_curves(runs)}",
        f"<h2>Health</h2>{health}",
    ]
    return page(title, sections)


def render_seeds(
    name: str, verdict: str, figure: str, pairs: Sequence[tuple[float, float]], runs: Mapping[str, Lines], changed: str
) -> str:
    """Return the page of a comparison of two configurations. `runs` has a run of A and one of B in turn."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{a:.4g}</td><td>{b:.4g}</td><td>{b - a:+.4g}</td></tr>"
        for number, (a, b) in enumerate(pairs, start=1)
    )
    key = "".join(
        f'<span class="key" style="background:{color}"></span>{side}' for side, color in zip("AB", COLORS, strict=False)
    )
    sections = [
        f"<h1>{escape(name)}</h1><p>{escape(verdict)}</p>",
        f"<table><tr><th>pair</th><th>A: {escape(figure)}</th><th>B</th><th>B - A</th></tr>{rows}</table>",
        f"<h2>Difference of the configurations</h2><pre>{escape(changed or 'None.')}</pre>",
        f"<h2>Curves</h2><p>{key}</p>{_curves(runs, COLORS[:2] * len(pairs))}",
    ]
    return page(name, sections)


def page(title: str, sections: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _summary(lines: Lines, num_steps: int) -> str:
    if not num_steps:
        return "No step has been done."
    seconds = sum(line.get("timing_s/step") or 0.0 for line in lines)
    validated = {key: value for line in lines for key, value in line.items() if key.startswith("val/")}
    shown = [key for key in validated if key.startswith("val/solved/") and not is_bound(key)]
    figures = "".join(f"; {escape(key)} = {shown_figure(validated, key)}" for key in shown)
    return f"{num_steps} steps in {seconds / 60:.1f} minutes{figures}"


def _health(lines: Lines) -> str:
    problems = findings(lines)
    if not problems:
        return '<div class="finding well">Nothing looks wrong.</div>'
    boxes = (
        f'<div class="finding"><b>{escape(problem.title)}.</b> {escape(problem.evidence)}</div>' for problem in problems
    )
    return "".join(boxes)


def _phases(lines: Lines) -> str:
    """Draw one bar per part of the run, divided into the phases' shares of the mean step and the rest."""
    if not lines:
        return ""
    names = list(dict.fromkeys(key for line in lines for key in line if key.startswith("timing_s/")))
    phases = [name for name in names if name != "timing_s/step"]
    rows = []
    size = max(1, len(lines) // 5)
    for begin in range(0, len(lines), size):
        part = lines[begin : begin + size]
        whole = sum(line.get("timing_s/step") or 0.0 for line in part)
        shares = {name: sum(line.get(name) or 0.0 for line in part) / whole for name in phases} if whole else {}
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        rows.append((f"{part[0]['step']} to {part[-1]['step']}", whole / len(part), shares))
    keys = list(rows[0][2])
    colors = {key: COLORS[number % len(COLORS)] for number, key in enumerate(keys)}
    legend = "".join(
        f'<span class="key" style="background:{colors[key]}"></span>{escape(key.removeprefix("timing_s/"))}'
        for key in keys
    )
    bars = "".join(
        f"<tr><td>{label}</td><td>{seconds:.2f} s</td><td style='width:75%'>{_bar(shares, colors)}</td></tr>"
        for label, seconds, shares in rows
    )
    return f"<p>{legend}</p><table><tr><th>steps</th><th>mean</th><th></th></tr>{bars}</table>"


def _bar(shares: Mapping[str, float], colors: Mapping[str, str]) -> str:
    parts = []
    left = 0.0
    for key, share in shares.items():
        label = f"<title>{escape(key.removeprefix('timing_s/'))}: {100 * share:.1f} %</title>"
        box = f'x="{1000 * left:.1f}" width="{1000 * share:.1f}" height="20" fill="{colors[key]}"'
        parts.append(f"<rect {box}>{label}</rect>")
        left += share
    return f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" width="100%" height="20">{"".join(parts)}</svg>'


def _routed(lines: Lines) -> Iterator[str]:
    """Yield a section of a run with router replay: each layer's share of tokens with other experts, over all steps."""
    shares = defaultdict[int, dict[str, list[float]]](dict)
    for line in lines:
        for name, share in line.items():
            if (match := _LAYER.fullmatch(name)) is not None and share is not None:
                shares[int(match[2])].setdefault(match[1], []).append(share)
    if not shares:
        return
    columns = {"mismatch": "old log-probs", "actor": "updates"}
    head = "".join(f"<th>{title}</th>" for title in columns.values())
    rows = ""
    for layer, of_layer in sorted(shares.items()):
        means = [fmean(of_layer[part]) if part in of_layer else None for part in columns]
        cells = "".join("<td></td>" if mean is None else f"<td>{100 * mean:.2f} %</td>" for mean in means)
        rows += f"<tr><td>{layer}</td>{cells}</tr>"
    yield f"<h2>Tokens with other experts, by layer</h2><table><tr><th>layer</th>{head}</tr>{rows}</table>"


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return "<p>None were recorded.</p>"
    known = ("prompt", "response", "ground_truth", "score", "num_tokens", "ended")
    names = [name for name in known if name in samples[0]]
    shared, samples = _without_shared(samples)
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(sample, name)}</td>" for name in names) + "</tr>" for sample in samples
    )
    above = f"<p>Every prompt begins with:</p><pre>{escape(shared)}</pre>" if shared else ""
    return f"{above}<table><tr>{head}</tr>{rows}</table>"


def _without_shared(samples: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the common first lines of all prompts, such as a system prompt, and the samples without them."""
    prompts = [str(sample.get("prompt", "")) for sample in samples]
    first, last = min(prompts), max(prompts)  # a prefix of both is a prefix of all
    length = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    shared = first[:length] if len(prompts) > 1 else ""
    if any(prompt != shared for prompt in prompts):
        shared = shared[: shared.rfind("\n") + 1]
    if len(shared) < _LEAST_SHARED:
        return "", samples
    pairs = zip(samples, prompts, strict=True)
    return shared, [{**sample, "prompt": f"[...] {prompt[len(shared) :]}"} for sample, prompt in pairs]


def _cell(sample: Mapping[str, Any], name: str) -> str:
    """Return the HTML of a value. A response with several turns is a conversation that the model begins."""
    turns = sample.get("turns") or ()
    if name != "response" or len(turns) < 2:
        return f"<pre>{escape(str(sample[name]))}</pre>"
    return "".join(
        f'<div class="{speaker}"><i>{speaker}</i><pre>{escape(str(text))}</pre></div>'
        for speaker, text in zip(cycle(("model", "environment")), turns, strict=False)
    )
