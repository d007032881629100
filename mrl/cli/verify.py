"""`mrl verify layout CONFIG`: whether the layouts of a configuration compute what one rank and transformers compute."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.cli.arguments import add_config, load_one
from mrl.config.arithmetic import role_mesh
from mrl.errors import SetupError
from mrl.libraries import TRANSFORMER_ENGINE_FIX, transformer_engine_fault
from mrl.models.table import Head
from mrl.plan.known_models import model_values

if TYPE_CHECKING:
    from mrl.verify.layout import Verified

EXAMPLE = "mrl verify layout configs/laptop-ppo.yaml actor.parallel.pp=2"
_WRONG, _TOO_LARGE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["layout"], help="what to verify")
    add_config(parser)
    parser.add_argument("--model", help="whose shape to take: a directory, or a published model; default: model.path")
    parser.add_argument(
        "--role", choices=["actor", "critic", "reference", "reward_model", "teacher"], help="this one alone"
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], help="what a rank runs on; default: cluster.device")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="default: the role's on GPUs, float32 on the CPU"
    )
    parser.add_argument("--max-ranks", type=int, default=16, help="processes to start at most (default 16)")


def run(arguments: argparse.Namespace) -> int:
    """Measure each role's layout on a small model of the same shape; return 1 where one is not the same model."""
    config = load_one(arguments.config).config
    device = arguments.device or config.cluster.device
    roles = {role: model for role, model in config.model_roles().items() if arguments.role in (None, role)}
    values = {role: model_values(arguments.model or config.model_of(role)[1]) for role in roles}
    # Here, so that a mistake in the configuration need not wait for torch and Megatron.
    from mrl.verify.layout import fewest_ranks, verify_layout
    from mrl.verify.spawn import num_gpus

    num_ranks = {role: fewest_ranks(model.parallel, role_mesh(config, role).dp) for role, model in roles.items()}
    gpus = num_gpus() if device == "gpu" else None
    if gpus and (fault := transformer_engine_fault()):
        raise SetupError(fault, fix=TRANSFORMER_ENGINE_FIX)
    refused = {role: why for role, num in num_ranks.items() if (why := _refusal(num, arguments.max_ranks, gpus))}
    for role, why in refused.items():
        pp = "a smaller pp shows the same, or " if roles[role].parallel.pp > 1 else ""
        print(f"{role}: not measured: this layout takes {num_ranks[role]} {why[0]}; {pp}{why[1]}")
    if device != config.cluster.device == "gpu":
        bfloat16 = "" if arguments.dtype == "bfloat16" else ", nor of bfloat16"
        print(
            f"over gloo on the CPU, which shows nothing of NCCL, of Transformer Engine and other GPU kernels{bfloat16}"
        )
    worst = _TOO_LARGE if refused else 0
    for role, settings in roles.items():
        if role in refused:
            continue
        dtype = arguments.dtype or (settings.dtype if device == "gpu" else "float32")
        with tempfile.TemporaryDirectory() as directory:
            head: Head = "lm" if role in ("actor", "reference", "teacher") else "score"
            measured = replace(settings, dtype=dtype)
            found = verify_layout(values[role], head, measured, num_ranks[role], Path(directory, "model"), device)
        print(f"{role}:", _verdict(found, f"a small {values[role]['model_type']} in {dtype}"))
        worst = max(worst, 0 if found.is_right else _WRONG)
    return worst


def _refusal(num_ranks: int, max_ranks: int, num_gpus: int | None) -> tuple[str, str] | None:
    """Return what so many ranks would be too many of, and what would do; nothing where they are not."""
    if num_gpus is not None and num_ranks > num_gpus:
        what = f"GPUs, one for each rank, and this machine has {num_gpus}"
        return what, "--device=cpu, without their kernels and NCCL"
    if num_ranks > max_ranks:
        return f"processes, and --max-ranks={max_ranks}", f"--max-ranks={num_ranks}"
    return None


def _verdict(found: Verified, what: str) -> str:
    limits = found.tolerance
    return (
        f"{'right' if found.is_right else 'WRONG'} on {found.num_ranks} ranks, {what}: "
        f"from transformers {found.transformers:.1e} (at most {limits.scores:.1e}); "
        f"from one rank: loss {found.loss:.1e} ({limits.loss:.1e}), "
        f"gradient norm {found.grad_norm:.1e} ({limits.grad_norm:.1e}), "
        f"parameters after three updates {found.parameters:.1e}"
    )
