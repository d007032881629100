"""`mrl export RUN OUT`: write a checkpoint of a run as a model directory for transformers and vLLM."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from mrl.config.resolved.load import load_any_config
from mrl.config.sft import AnyConfig, RmConfig
from mrl.dtypes import torch_dtype
from mrl.errors import EngineError, SetupError
from mrl.hub import local_files, model_directory

EXAMPLE = "mrl export runs/laptop-ppo my-model --checkpoint best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, ended or still running")
    parser.add_argument("out", metavar="OUT", help="the model directory to create")
    parser.add_argument("--checkpoint", default="latest", metavar="latest | best | STEP", help="(default latest)")
    parser.add_argument(
        "--role", choices=("actor", "critic"), default="actor", help="role whose model to export (default actor)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="add the adapters of a run with `lora` to the model; default: PEFT's files"
    )
    parser.add_argument(
        "--keep-mtp",
        action="store_true",
        help="copy the layers of GLM and DeepSeek-V3 that predict more tokens from the model before training",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="type of the weights; default: as trained")


def run(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.run)
    if not (directory / "config.yaml").is_file():
        raise SetupError(f"{directory} is not the directory of a run: it has no config.yaml")
    config = load_any_config(str(directory / "config.yaml")).config
    form, out = ExportForm(arguments.dtype, arguments.merge, arguments.keep_mtp), Path(arguments.out)
    step, number, remark = export_role(config, directory, arguments.checkpoint, arguments.role, form, out)
    print(f"{arguments.out}: {number} tensors of {step}{remark}")
    return 0


@dataclass(frozen=True)
class ExportForm:
    """Dtype of the exported weights, by default as trained; whether adapters are merged into the model; and whether the
    model's untrained layers that predict more tokens (MTP) are copied."""

    dtype: str | None = None
    merge: bool = False
    keeps_mtp: bool = False


def export_role(
    config: AnyConfig, directory: Path, which: str, role: str, form: ExportForm, out: Path
) -> tuple[str, int, str]:
    """Write a role's model from a checkpoint of a run. Return the checkpoint's name, the number of tensors, and a
    remark."""
    roles = config.trained_roles()
    if role not in roles:
        raise SetupError(f"this run has no {role}", where=str(directory))
    if form.merge and roles[role].lora is None:
        problem = "this run trains all weights: it has no adapters to merge"
        raise SetupError(problem, where=str(directory), fix="leave --merge out")
    if form.keeps_mtp and roles[role].lora is not None and not form.merge:
        problem = "PEFT's files hold adapters only, so --keep-mtp has nothing to copy"
        raise SetupError(problem, where=str(directory), fix="add --merge, or leave --keep-mtp out")
    # These load torch.
    from mrl.engine.adapter_files import export_adapters, export_merged
    from mrl.engine.checkpoint_files import export_checkpoint
    from mrl.models.table import Head
    from mrl.trainer.checkpoints import find_checkpoint

    checkpoint = find_checkpoint(directory / "checkpoints", which)
    name = config.model_of(role)[1]
    # The weights of a hub snapshot are needed only for what training has left out.
    here = None if form.keeps_mtp else local_files(name)
    source = here or model_directory(name, download=True)
    head: Head = "score" if role != "actor" or isinstance(config, RmConfig) else "lm"
    try:
        saved, kind, remark = checkpoint / role, torch_dtype(form.dtype or roles[role].dtype), ""
        if roles[role].lora is None:
            number = export_checkpoint(saved, source, head, kind, out, keeps_mtp=form.keeps_mtp)
        elif form.merge:
            number, loss = export_merged(saved, source, roles[role], kind, out, keeps_mtp=form.keeps_mtp)
            remark = f", merged: {loss}"
        else:
            number = export_adapters(saved, source, name, roles[role], kind, out)
            remark = ", PEFT's files; --merge writes a whole model"
    except (EngineError, OSError) as error:
        if checkpoint.is_dir() and isinstance(error, OSError):
            where, fix = str(error.filename or out), "choose an OUT that you can write to, with enough free space"
            raise SetupError(f"cannot export the model: {error.strerror}", where=where, fix=fix) from error
        if checkpoint.is_dir():
            raise
        what = "the run, which is still running, has removed this checkpoint"
        raise SetupError(
            what, where=str(checkpoint), fix="--checkpoint latest or best; a larger training.keep"
        ) from error
    return checkpoint.name, number, remark
