"""`mrl verify layout CONFIG`: check that the layouts of a configuration compute the same as one rank and as
transformers. `mrl verify algorithm CONFIG`: check its advantage and its policy loss."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.cli import verify_algorithm
from mrl.cli.arguments import add_config, load_one
from mrl.config.arithmetic import role_mesh
from mrl.config.role_kinds import writes_tokens
from mrl.errors import SetupError
from mrl.libraries import TRANSFORMER_ENGINE_FIX, transformer_engine_fault
from mrl.models.table import Head
from mrl.plan.known_models import model_values

if TYPE_CHECKING:
    from mrl.verify.layout import Verified

EXAMPLE = "mrl verify layout configs/laptop-ppo.yaml actor.parallel.pp=2"
_WRONG, _TOO_LARGE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["layout", "algorithm"], help="what to verify")
    add_config(parser)
    parser.add_argument(
        "--model", help="model whose shape to use: a directory, or a published model; default: model.path"
    )
    parser.add_argument(
        "--role", choices=["actor", "critic", "reference", "reward_model", "teacher"], help="check only this role"
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], help="device of each rank; default: cluster.device")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="default: the dtype of the role on GPUs, float32 on the CPU"
    )
    parser.add_argument("--max-ranks", type=int, default=16, help="largest number of processes (default 16)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "algorithm":
        return verify_algorithm.run(arguments)
    return _verify_layouts(arguments)


def _verify_layouts(arguments: argparse.Namespace) -> int:
    """Check each role's layout on a small model of the same shape. Return 1 if any of them computes another result."""
    config = load_one(arguments.config).config
    device = arguments.device or config.cluster.device
    roles = {role: model for role, model in config.model_roles().items() if arguments.role in (None, role)}
    values = {role: model_values(arguments.model or config.model_of(role)[1]) for role in roles}
    # Import late: a wrong configuration fails before torch and Megatron load.
    from mrl.verify.layout import fewest_ranks, verify_layout
    from mrl.verify.spawn import num_gpus

    num_ranks = {role: fewest_ranks(model.parallel, role_mesh(config, role).dp) for role, model in roles.items()}
    gpus = num_gpus() if device == "gpu" else None
    if gpus and (fault := transformer_engine_fault()):
        raise SetupError(fault, fix=TRANSFORMER_ENGINE_FIX)
    refused = {role: reason for role, num in num_ranks.items() if (reason := _refusal(num, arguments.max_ranks, gpus))}
    for role, reason in refused.items():
        pp = "use a smaller pp, which checks the same, or " if roles[role].parallel.pp > 1 else ""
        print(f"{role}: not checked: this layout needs {num_ranks[role]} {reason[0]}; {pp}{reason[1]}")
    if device != config.cluster.device == "gpu":
        bfloat16 = "" if arguments.dtype == "bfloat16" else ", or bfloat16"
        print(f"checked with gloo on the CPU, without NCCL, Transformer Engine or other GPU kernels{bfloat16}")
    worst = _TOO_LARGE if refused else 0
    for role, settings in roles.items():
        if role in refused:
            continue
        dtype = arguments.dtype or (settings.dtype if device == "gpu" else "float32")
        with tempfile.TemporaryDirectory() as directory:
            head: Head = "lm" if writes_tokens(role) else "score"
            measured = replace(settings, dtype=dtype)
            verified = verify_layout(values[role], head, measured, num_ranks[role], Path(directory, "model"), device)
        print(f"{role}:", _verdict(verified, f"a small {values[role]['model_type']} in {dtype}"))
        worst = max(worst, 0 if verified.is_right else _WRONG)
    return worst


def _refusal(num_ranks: int, max_ranks: int, num_gpus: int | None) -> tuple[str, str] | None:
    """Return the resource that is too small for this many ranks and a fix, or None if there is enough."""
    if num_gpus is not None and num_ranks > num_gpus:
        what = f"GPUs, one for each rank, but this machine has {num_gpus}"
        return what, "--device=cpu, without their kernels and NCCL"
    if num_ranks > max_ranks:
        return f"processes, but --max-ranks is {max_ranks}", f"--max-ranks={num_ranks}"
    return None


def _verdict(verified: Verified, model: str) -> str:
    limits = verified.tolerance
    return (
        f"{'right' if verified.is_right else 'WRONG'} on {verified.num_ranks} ranks, {model}: "
        f"from transformers {verified.transformers:.1e} (at most {limits.scores:.1e}); "
        f"from one rank: loss {verified.loss:.1e} ({limits.loss:.1e}), "
        f"gradient norm {verified.grad_norm:.1e} ({limits.grad_norm:.1e}), "
        f"parameters after three updates {verified.parameters:.1e}"
    )
