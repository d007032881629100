"""`mrl export RUN OUT`: a checkpoint of a run as a model directory that transformers and vLLM load."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.config.load import load_any_config
from mrl.config.sft import AnyConfig, RmConfig
from mrl.dtypes import torch_dtype
from mrl.errors import EngineError, SetupError
from mrl.hub import local_files, model_directory

EXAMPLE = "mrl export runs/laptop-ppo my-model --checkpoint best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, whether it has ended or not")
    parser.add_argument("out", metavar="OUT", help="the model directory to be made")
    parser.add_argument("--checkpoint", default="latest", metavar="latest | best | STEP", help="(default latest)")
    parser.add_argument("--role", choices=("actor", "critic"), default="actor", help="whose model (default actor)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights; default: as trained")


def run(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.run)
    if not (directory / "config.yaml").is_file():
        raise SetupError(f"{directory} is not the directory of a run: it lacks config.yaml")
    config = load_any_config(str(directory / "config.yaml")).config
    role, dtype, out = arguments.role, arguments.dtype, Path(arguments.out)
    step, number = export_role(config, directory, arguments.checkpoint, role, dtype, out)
    print(f"{arguments.out}: {number} tensors of {step}")
    return 0


def export_role(
    config: AnyConfig, directory: Path, which: str, role: str, dtype: str | None, out: Path
) -> tuple[str, int]:
    """Write a role's model as it was at a checkpoint of a run; the checkpoint's name, and the number of tensors."""
    roles = config.trained_roles()
    if role not in roles:
        raise SetupError(f"this run has no {role}", where=str(directory))
    # These load torch.
    from mrl.engine.checkpoint_files import export_checkpoint
    from mrl.models.table import Head
    from mrl.trainer.checkpoints import find_checkpoint

    found = find_checkpoint(directory / "checkpoints", which)
    name = config.model_of(role)[1]
    source = local_files(name) or model_directory(name, download=True)  # of a snapshot, its weights are not needed
    head: Head = "score" if role != "actor" or isinstance(config, RmConfig) else "lm"
    try:
        number = export_checkpoint(found / role, source, head, torch_dtype(dtype or roles[role].dtype), out)
    except (EngineError, OSError) as error:
        if found.is_dir() and isinstance(error, OSError):
            where, fix = str(error.filename or out), "choose an OUT where you may write and that has room"
            raise SetupError(f"the model cannot be exported: {error.strerror}", where=where, fix=fix) from error
        if found.is_dir():
            raise
        what = "the run that goes on has removed this checkpoint meanwhile"
        raise SetupError(what, where=str(found), fix="--checkpoint latest or best; a larger training.keep") from error
    return found.name, number
