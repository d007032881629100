"""`mrl report RUN [RUN ...]`: write one HTML file about a run, or a comparison of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mrl.cli.diff import comparison
from mrl.config.resolved.load import load_any_config
from mrl.config.resolved.render import render_difference
from mrl.errors import SetupError
from mrl.files import read_text
from mrl.redaction import redact_text

EXAMPLE = "mrl report runs/laptop-ppo"
_NUM_SAMPLES = 24
_MAX_RUNS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="+", help="directories of runs, ended or still running")
    parser.add_argument("--out", help="file to write (default RUN/report.html; for several runs, comparison.html)")


def run(arguments: argparse.Namespace) -> int:
    directories = [Path(path) for path in arguments.run]
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
    samples = {label: read_newest_samples(directory / "samples", _NUM_SAMPLES, kind) for label, kind in kinds.items()}
    lines = read_metrics(metrics) if metrics.is_file() else []  # a run may fail before its first step
    ending = redact_text(describe_ending(directory))
    page = render_report(directory.name, lines, samples, read_text(config), ending)
    print(f"{directory}: {ending}")
    out = out or directory / "report.html"
    out.write_text(page, encoding="utf-8")
    return out


def write_comparison(directories: Sequence[Path], out: Path | None = None) -> Path:
    if len(directories) > _MAX_RUNS:
        raise SetupError(f"{len(directories)} runs; at most {_MAX_RUNS} can be distinguished on one page")
    from mrl.observe.metrics import read_metrics
    from mrl.observe.report import render_comparison

    run_files = [_files(directory) for directory in directories]
    names = [directory.name for directory in directories]
    for directory, (metrics, _) in zip(directories, run_files, strict=True):
        if not metrics.is_file():
            raise SetupError(f"{directory} has no metrics.jsonl: the run has not finished a step")
    labels = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    first, *rest = (load_any_config(str(config)) for _, config in run_files)
    difference = "\n".join(filter(None, (render_difference(first, other) for other in rest)))
    parting = "\n".join(comparison(*directories)) if len(directories) == 2 else ""
    lines = {label: read_metrics(metrics) for label, (metrics, _) in zip(labels, run_files, strict=True)}
    out = out or Path("comparison.html")
    out.write_text(render_comparison(lines, difference, parting), encoding="utf-8")
    return out


def _files(directory: Path) -> tuple[Path, Path]:
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    if not config.is_file():
        raise SetupError(f"{directory} is not the directory of a run: it has no config.yaml")
    return metrics, config
