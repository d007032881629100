"""`mrl eval CONFIG | RUN | MODEL`: validate without training, at several temperatures and k."""

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
from mrl.cli.export import ExportForm, export_role
from mrl.config.peft_settings import read_peft_settings
from mrl.config.resolved.load import Resolved, load_config, rename_models, settle_models
from mrl.config.schema import Config
from mrl.errors import SetupError
from mrl.events import EventLog
from mrl.hub import model_directory
from mrl.observe.figures import is_bound, shown_figure

EXAMPLE = "mrl eval runs/laptop-ppo --checkpoint best --temperatures 0,0.6,1 --k 1,8"
_SAMPLING = ("greedy", "temperature", "top_p", "top_k", "samples_per_prompt")
_MEASURED = [
    f"validation.{setting}" for setting in ("every=1", "best_metric=null", "keep_best=false", "save_samples=false")
]
_GREEDY = ["greedy=true", "samples_per_prompt=1", "k=[]", "temperature=1", "top_p=1", "top_k=0"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described = "a YAML file, the directory of a run, or the directory of a model (with --config)"
    parser.add_argument("what", metavar="CONFIG | RUN | MODEL", help=described)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that override those of the file")
    parser.add_argument("--config", metavar="CONFIG", help="configuration to evaluate a model with")
    parser.add_argument("--adapter", metavar="DIR", help="evaluate the model with the adapters in PEFT's files")
    parser.add_argument("--checkpoint", metavar="latest | best | STEP", help="checkpoint of a run (default latest)")
    parser.add_argument(
        "--temperatures", metavar="0,0.6,1", help="0 is greedy; default: the temperature in section validation"
    )
    parser.add_argument("--k", metavar="1,8", help="k of pass@k and maj@k; the largest is the number of samples")
    parser.add_argument("--output", metavar="FILE", help="(default eval.json, in the run directory if there is one)")


def run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.what)
    is_run = (target / "config.yaml").is_file()
    file, shared = _source(arguments, is_run)
    chosen = [load_config(file, [*shared, *choice]) for choice in _choices(arguments)]
    output = Path(arguments.output) if arguments.output else target / "eval.json" if is_run else Path("eval.json")
    _check_writable(output)
    with _private_directory(Path(chosen[0].config.run.dir)) as directory:
        model, checkpoint, made = None, None, directory / "model"
        if arguments.adapter:
            model = made
            _merge(chosen[0], arguments.adapter, made)
        elif is_run:
            model = made
            config, which = chosen[0].config, arguments.checkpoint or "latest"
            form = ExportForm(merge=config.actor.lora is not None)
            checkpoint, *_ = export_role(config, target, which, "actor", form, made)
        figures = _evaluate(chosen, directory, model)
    results = []
    for resolved, measured in zip(chosen, figures, strict=True):
        sampling = {name: getattr(resolved.config.validation, name) for name in _SAMPLING}
        results.append({"sampling": sampling, "figures": measured})
    report = {"model": arguments.what, "checkpoint": checkpoint, "results": results}
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n".join(aligned(_table(results))))
    print(output)
    return 0


def _merge(resolved: Resolved[Config], adapter: str, out: Path) -> None:
    """Write the model of a configuration with the adapters in PEFT's files."""
    settings, config = read_peft_settings(adapter), settle_models(resolved).config
    name = config.model.path
    for _, problem, fix in settings.base_differences("actor", name):
        raise SetupError(problem, where=adapter, fix=fix)
    # These load torch.
    from mrl.dtypes import torch_dtype
    from mrl.engine.adapter_files import merge_peft

    lora, dtype = config.actor.lora, torch_dtype(config.actor.dtype)
    quantization = None if lora is None else lora.base_quantization
    source = model_directory(name, download=True)
    loss = merge_peft(adapter, source, dtype, out, base_quantization=quantization)
    print(f"{adapter}, merged: {loss}", file=sys.stderr)


def _check_writable(output: Path) -> None:
    """Check that the output file can be written, before the evaluation starts."""
    try:
        with output.open("ab"):
            pass
    except OSError as error:
        fix = "--output FILE in an existing directory that you can write to"
        raise SetupError(f"cannot write the metrics: {error.strerror}", where=str(output), fix=fix) from error
    if not output.stat().st_size:
        output.unlink()


def _source(arguments: argparse.Namespace, is_run: bool) -> tuple[str, list[str]]:
    """Return the configuration file, and the overrides for all evaluations."""
    shared, where = [*arguments.overrides, *_MEASURED], arguments.what
    if arguments.adapter and is_run:
        fix = "mrl export RUN OUT --merge, and then mrl eval on a model"
        raise SetupError(f"--adapter needs a model or a configuration, but {where} is a run", fix=fix)
    if arguments.checkpoint and not is_run:
        raise SetupError(f"--checkpoint needs a run, but {where} is not a run")
    if is_run or not Path(where).is_dir():
        if arguments.config:
            raise SetupError(f"--config is only for a model, but {where} has its own configuration")
        return (str(Path(where, "config.yaml")) if is_run else where), shared
    if not arguments.config:
        raise SetupError(f"{where} is a model without a configuration to evaluate it with", fix="--config CONFIG")
    return arguments.config, [*shared, f"model.path={json.dumps(where)}"]


def _choices(arguments: argparse.Namespace) -> Iterator[list[str]]:
    ks = _numbers("--k", arguments.k, int)
    several = [f"k={ks}", f"samples_per_prompt={max(ks)}"] if ks else []
    for temperature in _numbers("--temperatures", arguments.temperatures, float) or [None]:
        sampled = [] if temperature is None else ["greedy=false", f"temperature={temperature}"]
        yield [f"validation.{setting}" for setting in (_GREEDY if temperature == 0 else [*several, *sampled])]


def _numbers(name: str, text: str | None, kind: type[float]) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")] if text else []
    except ValueError as error:
        raise SetupError(f'{name} "{text}" is not a list of numbers', fix=f"{name} 1,8") from error


@contextmanager
def _private_directory(runs: Path) -> Iterator[Path]:
    """Make a private directory that every node can see. Remove it at the end, but keep logs if something failed."""
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
    # These load torch and Ray. A wrong configuration fails before.
    from mrl.trainer.evaluation import evaluate

    if model is not None:
        config = rename_models(chosen[0].config, {"model.path": str(model)})
    else:
        config = settle_models(chosen[0]).config
    events = EventLog(directory / "events.jsonl")
    try:
        settings = [resolved.config.validation for resolved in chosen]
        return evaluate(config, settings, directory, events, lambda text: print(text, file=sys.stderr))
    finally:
        events.close()


def _table(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each temperature and source, with a column for each metric."""
    names = [name for result in results for name in result["figures"] if not is_bound(name)]
    columns = list(dict.fromkeys(map(_figure, names)))
    yield ["temperature", "source", *columns]
    for result in results:
        sampling = result["sampling"]
        sources = dict.fromkeys(name[: -len(_figure(name)) - 1] for name in result["figures"] if not is_bound(name))
        for source in sources:
            shown = [shown_figure(result["figures"], f"{source}/{column}") for column in columns]
            temperature = "greedy" if sampling["greedy"] else f"{sampling['temperature']:g}"
            yield [temperature, source.removeprefix("val").removeprefix("/") or "all", *shown]


def _figure(name: str) -> str:
    """Return the metric of `val/SOURCE/score/mean@4`. The source may also contain slashes."""
    return name.rpartition("/")[2] if name.endswith("/prompts") else "/".join(name.rsplit("/", 2)[1:])
