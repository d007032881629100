"""`mrl report RUN`: a run as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.errors import SetupError

EXAMPLE = "mrl report runs/laptop-ppo"
_NUM_SAMPLES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, whether it has ended or not")
    parser.add_argument("--out", help="the file to write (default RUN/report.html)")


def run(arguments: argparse.Namespace) -> int:
    print(write_report(Path(arguments.run), Path(arguments.out) if arguments.out else None))
    return 0


def write_report(directory: Path, out: Path | None = None) -> Path:
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    if not metrics.is_file() or not config.is_file():
        raise SetupError(f"{directory} is not the directory of a run: it lacks metrics.jsonl or config.yaml")
    from mrl.data.sample_files import read_newest_samples
    from mrl.observe.metrics import read_metrics
    from mrl.observe.report import render_report

    samples = read_newest_samples(directory / "samples", _NUM_SAMPLES)
    page = render_report(directory.name, read_metrics(metrics), samples, config.read_text(encoding="utf-8"))
    out = out or directory / "report.html"
    out.write_text(page, encoding="utf-8")
    return out
