"""The report: one file, a model's output in it is escaped, and findings include their figures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mrl.observe.health import findings
from mrl.observe.report import COLORS, render_comparison, render_report


def line(step: int, **figures: float) -> dict[str, Any]:
    return {"step": step, "timing_s/step": 2.0, "timing_s/rollout": 1.5} | figures


def test_what_a_model_wrote_is_never_markup() -> None:
    sample = {"prompt": "<b>", "response": "<script>alert(1)</script>", "ground_truth": "&", "score": 1.0}
    page = render_report(
        "<run>",
        [line(1, **{"critic/score/mean": 0.5})],
        {"<step>": [sample], "a validation": [{"response": "<i>"}]},
        "a: <b>",
    )
    assert "<script>" not in page
    assert "<h2>Samples of a validation</h2><table><tr><th>response</th></tr><tr><td><pre>&lt;i&gt;</pre>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<title>&lt;run&gt;</title>" in page
    assert "http" not in page, "it needs nothing from anywhere"


def test_a_sample_of_several_turns_is_shown_as_a_conversation() -> None:
    said = {"response": "...", "turns": ["<search>x</search>", "<b>it</b>", "y"], "ended": "done"}
    page = render_report("run", [], {"step 1": [said, {"response": "alone", "turns": ["alone"], "ended": "turns"}]}, "")
    spoken = [
        ("model", "&lt;search&gt;x&lt;/search&gt;"),
        ("environment", "&lt;b&gt;it&lt;/b&gt;"),
        ("model", "y"),
    ]
    boxes = "".join(f'<div class="{who}"><i>{who}</i><pre>{text}</pre></div>' for who, text in spoken)
    assert f"<td>{boxes}</td><td><pre>done</pre></td>" in page
    assert "<td><pre>alone</pre></td><td><pre>turns</pre></td>" in page, "a single turn is no conversation"


def test_a_run_without_steps_has_a_report() -> None:
    assert "No step has been done" in render_report("run", [], {}, "")


def test_phases_add_up_to_the_step() -> None:
    page = render_report("run", [line(step) for step in range(1, 11)], {}, "")
    assert "rollout: 75.0 %" in page
    assert "other: 25.0 %" in page


def test_a_healthy_run_has_no_findings() -> None:
    lines = [line(step, **{"actor/entropy_mean": 1.0, "groups/uniform_share": 0.2}) for step in range(1, 30)]
    assert findings(lines) == []


def test_each_finding_names_its_evidence() -> None:
    sick: dict[str, tuple[float, float]] = {  # at the beginning, at the end
        "groups/uniform_share": (0.1, 0.9),
        "response_length/clip_ratio": (0.0, 0.5),
        "actor/pg_clipfrac": (0.1, 0.5),
        "reward/failed_share": (0.0, 0.04),
        "actor/entropy_mean": (2.0, 0.1),
        "mismatch/log_prob_abs_diff_mean": (1e-3, 1e-2),
        "actor/skipped": (0.0, 1.0),
    }
    for name, (first, last) in sick.items():
        lines = [line(step, **{name: first if step <= 20 else last}) for step in range(1, 41)]
        (found,) = findings(lines)
        assert name in found.evidence or "optimizer steps" in found.evidence, name


def test_what_never_changes_is_named_and_not_drawn() -> None:
    lines = [line(step, **{"critic/score/mean": step / 2, "reward/kl": 0.0}) for step in (1, 2, 3)]
    page = render_report("run", lines, {}, "")
    assert "<figcaption>score: 1.5</figcaption>" in page
    assert "<figcaption>KL to the reference" not in page
    assert "Equal in every step: KL to the reference 0." in page
    assert "explained variance" not in page, "it was not measured"


def test_layers_with_other_experts_are_a_table() -> None:
    lines = [
        line(1, **{"mismatch/other_experts/layer_10": 0.5, "mismatch/other_experts/layer_9": 0.25}),
        line(2, **{"mismatch/other_experts/layer_10": 0.0, "actor/other_experts/layer_10": 0.125}),
    ]
    page = render_report("run", lines, {}, "")
    head = "<tr><th>layer</th><th>old log-probs</th><th>updates</th></tr>"
    rows = "<tr><td>9</td><td>25.00 %</td><td></td></tr><tr><td>10</td><td>25.00 %</td><td>12.50 %</td></tr>"
    assert f"<h2>Tokens with other experts, by layer</h2><table>{head}{rows}</table>" in page
    assert "other experts" not in render_report("run", [line(1)], {}, "")


def test_validation_is_drawn_where_it_was_measured() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "val/score/mean@4": 0.25}, line(1), line(2, **{"val/score/mean@4": 0.5})]
    page = render_report("run", lines, {}, "")
    assert "<figcaption>val/score/mean@4: 0.5</figcaption>" in page
    assert "step 0 to 2" in page
    assert "<line" not in page
    lines[0] |= {"val/score/mean@4/low": 0.125, "val/score/mean@4/high": 0.375}
    lines[2] |= {"val/score/mean@4/low": 0.25, "val/score/mean@4/high": 0.75}
    page = render_report("run", lines, {}, "")
    assert "<figcaption>val/score/mean@4: 0.5 (0.25 to 0.75)</figcaption>" in page
    assert (page.count("val/score"), page.count("<line")) == (1, 2), "the bounds are no curves"


def test_runs_lie_over_each_other() -> None:
    runs = {
        "without": [line(1)],
        "<a>": [line(step, **{"critic/score/mean": step / 10}) for step in (1, 2, 3)],
        "b": [line(step, **{"critic/score/mean": 0.3}) for step in (1, 2, 3, 4)],
    }
    page = render_comparison(runs, "- actor.optimizer.lr: 1e-6\n+ actor.optimizer.lr: <2e-6>\n")
    assert page.count("<polyline") == 2
    assert "<figcaption>score: 0.3, 0.3</figcaption>" in page
    assert "actor.optimizer.lr: &lt;2e-6&gt;" in page
    assert "<title>without and &lt;a&gt; and b</title>" in page
    points = [part.split('"')[0] for part in page.split('<polyline points="')[1:]]
    expected = ["34.0,124.0 136.0,66.0 238.0,8.0", "34.0,8.0 136.0,8.0 238.0,8.0 340.0,8.0"]
    assert points == expected, "on the same axes"
    assert re.findall('<polyline .*?stroke="(.*?)"', page) == list(COLORS[1:3]), "each run keeps its color"


def test_what_names_a_run_or_a_phase_is_never_markup() -> None:
    lines = [line(step, **{"timing_s/<b>phase": 0.5, "val/<i>/solved/mean@1": 0.1 * step}) for step in (1, 2)]
    page = render_report("<run>", lines, {}, "")
    assert "<b>phase" not in page
    assert "<i>" not in page
    assert "&lt;b&gt;phase" in page


def validated(step: int, solved: float, model: float, **more: float) -> dict[str, Any]:
    figures = {"val/prompts": 160.0, "val/solved/mean@4": solved, "val/score/mean@4": 0.5, "val/model/mean@4": model}
    return line(step, **figures, **more)


def test_a_reward_model_that_is_gamed_is_named_from_its_evidence() -> None:
    lines = [validated(0, 0.31, -1.0), validated(5, 0.68, 1.2), line(6), validated(20, 0.55, 1.5)]
    (found,) = findings(lines)
    assert found.title == "The reward model is over-optimized"
    assert "val/model/mean@4 rose from 1.2 to 1.5 between steps 5 and 20" in found.evidence
    assert "val/solved/mean@4 fell from 0.68 to 0.55, by 4.8 standard errors: step 5 was better" in found.evidence
    (from_the_start,) = findings([validated(0, 0.31, -1.0), validated(5, 0.14, 0.5)])
    assert "between steps 0 and 5" in from_the_start.evidence
    assert "step 5 was better" in render_report("run", lines, {}, "")
    assert "step 5 was better" in render_comparison({"one": lines, "two": lines[:2]}, "")
    assert findings([validated(0, 1.0, 0.0), validated(5, 0.0, 1.0)]), "no error at all is no reason to divide by it"


def test_a_fall_is_no_over_optimization_by_itself() -> None:
    best = validated(5, 0.68, 1.2)
    assert findings([best, validated(20, 0.64, 1.5)]) == [], "two standard errors are 0.05 here"
    assert findings([best, validated(20, 0.4, 1.1)]) == [], "the model has seen it too"
    without = [
        {name: value for name, value in each.items() if "model" not in name} for each in (best, validated(9, 0.1, 2))
    ]
    assert findings(without) == [], "there is no reward model"
    assert findings([validated(5, 0.3, 1.0), validated(20, 0.7, 2.0)]) == []


def test_one_curve_has_all_names_of_the_same_figures() -> None:
    names = ["val/score/mean@1", "val/solved/mean@1", "val/sums/score/mean@1"]
    other = "val/other/score/mean@1"
    lines = [line(step, **dict.fromkeys(names, step / 8), **{other: step / 4}) for step in (0, 1, 2, 3)]
    page = render_report("run", lines, {}, "")
    assert page.count("<figure>") == 2
    assert f"<figcaption>{' = '.join(names)}: 0.375</figcaption>" in page
    assert f"<figcaption>{other}: 0.75</figcaption>" in page


@pytest.mark.parametrize(("num", "num_lines", "num_dots"), [(1, 0, 1), (2, 0, 2), (3, 1, 3), (20, 1, 20), (21, 1, 0)])
def test_two_points_are_no_line_and_few_are_shown_as_what_was_measured(num: int, num_lines: int, num_dots: int) -> None:
    page = render_report("run", [line(step, **{"critic/score/mean": step / 2}) for step in range(1, num + 1)], {}, "")
    assert (page.count("<polyline"), page.count("<circle")) == (num_lines, num_dots)


def test_what_all_prompts_begin_with_is_shown_once() -> None:
    system = "system\nYou solve <sums>. " + "Think first. " * 20 + "\n"
    samples = [{"prompt": f"{system}user\n1 + {number}?", "response": str(number)} for number in range(3)]
    page = render_report("run", [], {"step 1": samples}, "")
    assert page.count("You solve &lt;sums&gt;.") == 1
    assert "<p>Every prompt begins with:</p><pre>system\nYou solve" in page
    assert "<td><pre>[...] 1 + 2?</pre></td>" in page
    alike = [{"prompt": system, "response": "a"}, {"prompt": system, "response": "b"}]
    assert render_report("run", [], {"step 1": alike}, "").count("You solve") == 1
    short = [{"prompt": "1 + 1?", "response": "2"}] * 2
    assert render_report("run", [], {"step 1": short}, "").count("1 + 1?") == 2
    assert render_report("run", [], {"step 1": samples[:1]}, "").count("[...]") == 0
