"""The report: one file, whatever a model wrote in it is text, and findings come with their figures."""

from __future__ import annotations

from typing import Any

from mrl.observe.report import findings, render_report


def line(step: int, **figures: float) -> dict[str, Any]:
    return {"step": step, "timing_s/step": 2.0, "timing_s/rollout": 1.5} | figures


def test_what_a_model_wrote_is_never_markup() -> None:
    sample = {"prompt": "<b>", "response": "<script>alert(1)</script>", "ground_truth": "&", "score": 1.0}
    page = render_report("<run>", [line(1, **{"critic/score/mean": 0.5})], [sample], "a: <b>")
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<title>&lt;run&gt;</title>" in page
    assert "http" not in page, "it needs nothing from anywhere"


def test_a_run_without_steps_has_a_report() -> None:
    assert "No step has been done" in render_report("run", [], [], "")


def test_phases_add_up_to_the_step() -> None:
    page = render_report("run", [line(step) for step in range(1, 11)], [], "")
    assert "rollout: 75.0 %" in page
    assert "nothing of these: 25.0 %" in page


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
