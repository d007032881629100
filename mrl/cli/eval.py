"""`mrl eval CONFIG | RUN | MODEL`: validation without training, at several temperatures and k."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl.cli.arguments import aligned
from mrl.cli.export import export_role
from mrl.config.load import Resolved, load_config, rename_models, settle_models
from mrl.config.schema import Config
from mrl.errors import SetupError
from mrl.events import EventLog

EXAMPLE = "mrl eval runs/laptop-ppo --checkpoint best --temperatures 0,0.6,1 --k 1,8"
_SAMPLING = ("greedy", "temperature", "top_p", "top_k", "samples_per_prompt")
_MEASURED = [f"validation.{each}" for each in ("every=1", "best_metric=null", "keep_best=false", "save_samples=false")]
_GREEDY = ["greedy=true", "samples_per_prompt=1", "k=[]", "temperature=1", "top_p=1", "top_k=0"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a YAML file, the directory of a run, or that of a model (with --config)"
    parser.add_argument("what", metavar="CONFIG | RUN | MODEL", help=what)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that replace those of the file")
    parser.add_argument("--config", metavar="CONFIG", help="what a model is measured on and how")
    parser.add_argument("--checkpoint", metavar="latest | best | STEP", help="of a run (default latest)")
    parser.add_argument("--temperatures", metavar="0,0.6,1", help="0 is greedy; default: as validation has it")
    parser.add_argument("--k", metavar="1,8", help="for pass@k and maj@k; as many samples are drawn as the largest")
    parser.add_argument(
        "--output", metavar="FILE", help="(default eval.json, in the directory of a run where it is one)"
    )


def run(arguments: argparse.Namespace) -> int:
    what = Path(arguments.what)
    of_run = (what / "config.yaml").is_file()
    file, given = _source(arguments, of_run)
    chosen = [load_config(file, [*given, *each]) for each in _choices(arguments)]
    output = Path(arguments.output) if arguments.output else what / "eval.json" if of_run else Path("eval.json")
    _check_writable(output)
    with _private_directory(Path(chosen[0].config.run.dir)) as directory:
        model, checkpoint = directory / "model" if of_run else None, None
        if model is not None:
            checkpoint, _ = export_role(chosen[0].config, what, arguments.checkpoint or "latest", "actor", None, model)
        figures = _evaluate(chosen, directory, model)
    results = []
    for each, found in zip(chosen, figures, strict=True):
        sampling = {name: getattr(each.config.validation, name) for name in _SAMPLING}
        results.append({"sampling": sampling, "figures": found})
    report = {"model": arguments.what, "checkpoint": checkpoint, "results": results}
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n".join(aligned(_table(results))))
    print(output)
    return 0


def _check_writable(output: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured for it."""
    try:
        with output.open("ab"):
            pass
    except OSError as error:
        fix = "--output FILE, in a directory that exists and where you may write"
        raise SetupError(f"the figures cannot be written: {error.strerror}", where=str(output), fix=fix) from error
    if not output.stat().st_size:
        output.unlink()


def _source(arguments: argparse.Namespace, of_run: bool) -> tuple[str, list[str]]:
    """Return the configuration file, and the overrides that hold for all that is measured."""
    given, where = [*arguments.overrides, *_MEASURED], arguments.what
    if arguments.checkpoint and not of_run:
        raise SetupError(f"--checkpoint is of a run, and {where} is none")
    if of_run or not Path(where).is_dir():
        if arguments.config:
            raise SetupError(f"--config is for a model, and {where} brings its own")
        return (str(Path(where, "config.yaml")) if of_run else where), given
    if not arguments.config:
        raise SetupError(f"{where} does not say what it is to be measured on", fix="--config CONFIG")
    return arguments.config, [*given, f"model.path={json.dumps(where)}"]


def _choices(arguments: argparse.Namespace) -> Iterator[list[str]]:
    ks = _numbers("--k", arguments.k, int)
    several = [f"k={ks}", f"samples_per_prompt={max(ks)}"] if ks else []
    for temperature in _numbers("--temperatures", arguments.temperatures, float) or [None]:
        sampled = [] if temperature is None else ["greedy=false", f"temperature={temperature}"]
        yield [f"validation.{each}" for each in (_GREEDY if temperature == 0 else [*several, *sampled])]


def _numbers(name: str, text: str | None, kind: type[float]) -> list[Any]:
    try:
        return [kind(each) for each in text.split(",")] if text else []
    except ValueError as error:
        raise SetupError(f'{name} "{text}" is no list of numbers', fix=f"{name} 1,8") from error


@contextmanager
def _private_directory(runs: Path) -> Iterator[Path]:
    """A private directory where every node sees it; where something failed its logs stay."""
    runs.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".eval-", dir=runs))
    (directory / "logs").mkdir(mode=0o700)
    is_done = False
    try:
        yield directory
        is_done = True
    finally:
        shutil.rmtree(directory / "model", ignore_errors=True)
        if is_done or not any((directory / "logs").iterdir()):
            shutil.rmtree(directory)


def _evaluate(chosen: Sequence[Resolved[Config]], directory: Path, model: Path | None) -> list[dict[str, float]]:
    # These load torch and Ray, which a wrong configuration need not wait for.
    from mrl.trainer.evaluation import evaluate

    if model is not None:
        config = rename_models(chosen[0].config, {"model.path": str(model)})
    else:
        config = settle_models(chosen[0]).config
    events = EventLog(directory / "events.jsonl")
    try:
        settings = [each.config.validation for each in chosen]
        return evaluate(config, settings, directory, events, lambda text: print(text, file=sys.stderr))
    finally:
        events.close()


def _table(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each temperature and source, and a column for each figure."""
    columns = list(dict.fromkeys(_figure(name) for each in results for name in each["figures"]))
    yield ["temperature", "source", *columns]
    for each in results:
        sampling = each["sampling"]
        sources = dict.fromkeys(name[: -len(_figure(name)) - 1] for name in each["figures"])
        for source in sources:
            cells = [each["figures"].get(f"{source}/{column}") for column in columns]
            shown = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
            temperature = "greedy" if sampling["greedy"] else f"{sampling['temperature']:g}"
            yield [temperature, source.removeprefix("val").removeprefix("/") or "all", *shown]


def _figure(name: str) -> str:
    """Return the figure in `val/SOURCE/score/mean@4`; a source may have slashes too."""
    return name.rpartition("/")[2] if name.endswith("/prompts") else "/".join(name.rsplit("/", 2)[1:])
