"""`mrl report RUN [RUN ...]`: a run as one HTML file, or several over each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mrl.config.load import load_any_config
from mrl.config.render import render_difference
from mrl.errors import SetupError
from mrl.files import read_text
from mrl.redaction import redact_text

EXAMPLE = "mrl report runs/laptop-ppo"
_NUM_SAMPLES = 24
_MAX_RUNS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="+", help="directories of runs, whether they have ended or not")
    parser.add_argument("--out", help="the file to write (default RUN/report.html; of several, comparison.html)")


def run(arguments: argparse.Namespace) -> int:
    directories = [Path(each) for each in arguments.run]
    out = Path(arguments.out) if arguments.out else None
    print(write_report(directories[0], out) if len(directories) == 1 else write_comparison(directories, out))
    return 0


def write_report(directory: Path, out: Path | None = None) -> Path:
    metrics, config = _files(directory)
    from mrl.data.row_files import read_newest_samples
    from mrl.observe.ending import describe_ending
    from mrl.observe.metrics import read_metrics
    from mrl.observe.report import render_report

    kinds = {"the last recorded step": "step", "the last validation": "validation"}
    samples = {of: read_newest_samples(directory / "samples", _NUM_SAMPLES, kind) for of, kind in kinds.items()}
    lines = read_metrics(metrics) if metrics.is_file() else []  # a run may fail before its first step
    ending = redact_text(describe_ending(directory))
    page = render_report(directory.name, lines, samples, read_text(config), ending)
    print(f"{directory}: {ending}")
    out = out or directory / "report.html"
    out.write_text(page, encoding="utf-8")
    return out


def write_comparison(directories: Sequence[Path], out: Path | None = None) -> Path:
    if len(directories) > _MAX_RUNS:
        raise SetupError(f"{len(directories)} runs; at most {_MAX_RUNS} can be told apart on one page")
    from mrl.observe.metrics import read_metrics
    from mrl.observe.report import render_comparison

    found = [_files(directory) for directory in directories]
    names = [each.name for each in directories]
    for directory, (metrics, _) in zip(directories, found, strict=True):
        if not metrics.is_file():
            raise SetupError(f"{directory} has no metrics.jsonl: the run has done no step")
    labels = names if len(set(names)) == len(names) else [str(each) for each in directories]
    first, *others = (load_any_config(str(config)) for _, config in found)
    difference = "\n".join(filter(None, (render_difference(first, other) for other in others)))
    lines = {label: read_metrics(metrics) for label, (metrics, _) in zip(labels, found, strict=True)}
    out = out or Path("comparison.html")
    out.write_text(render_comparison(lines, difference), encoding="utf-8")
    return out


def _files(directory: Path) -> tuple[Path, Path]:
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    if not config.is_file():
        raise SetupError(f"{directory} is not the directory of a run: it has no config.yaml")
    return metrics, config
