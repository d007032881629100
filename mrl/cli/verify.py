"""`mrl verify layout CONFIG`: whether the layouts of a configuration compute what one rank and transformers compute."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mrl.cli.show import split_arguments
from mrl.config.arithmetic import role_mesh
from mrl.config.load import load_config
from mrl.plan.known_models import model_values

EXAMPLE = "mrl verify layout configs/laptop-ppo.yaml actor.parallel.pp=2"
_WRONG, _TOO_LARGE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mrl verify`."""
    parser.add_argument("what", choices=["layout"], help="what to verify")
    parser.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="a file, and overrides")
    parser.add_argument("--model", help="whose shape to take: a directory, or a published model; default: model.path")
    parser.add_argument("--role", choices=["actor", "critic", "reward_model"], help="this one alone")
    parser.add_argument("--most-ranks", type=int, default=16, help="processes to start at most (default 16)")


def run(arguments: argparse.Namespace) -> int:
    """Measure each role's layout on a small model of the same shape; 1 where one is not the same model."""
    (path,), overrides = split_arguments(arguments.config, most_files=1)
    config = load_config(path, overrides).config
    roles = {role: model for role, model in config.model_roles().items() if arguments.role in (None, role)}
    values = {role: model_values(arguments.model or config.model_of(role)[1]) for role in roles}
    families = ", ".join(dict.fromkeys(of_role["model_type"] for of_role in values.values()))
    # Here, so that a mistake in the configuration need not wait for torch and Megatron.
    from mrl.engine.verify import RELATIVE_GOAL, SCORES_GOAL, fewest_ranks, verify_layout

    print(f"a small {families} in float32; goals: transformers {SCORES_GOAL:g}, others {RELATIVE_GOAL:g}")
    worst = 0
    for role, settings in roles.items():
        num_ranks = fewest_ranks(settings.parallel, role_mesh(config, role).dp)
        if num_ranks > arguments.most_ranks:
            limit = f"--most-ranks={arguments.most_ranks}; a smaller pp shows the same, or --most-ranks={num_ranks}"
            print(f"{role}: not measured: this layout takes {num_ranks} processes, and {limit}")
            worst = max(worst, _TOO_LARGE)
            continue
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory, "model")
            found = verify_layout(values[role], "lm" if role == "actor" else "score", settings, num_ranks, model)
        print(
            f"{role}: {'right' if found.is_right else 'WRONG'} on {found.num_ranks} ranks: "
            f"from transformers {found.transformers:.1e}; from one rank: loss {found.loss:.1e}, "
            f"gradient norm {found.grad_norm:.1e}, parameters after three updates {found.parameters:.1e}"
        )
        worst = max(worst, 0 if found.is_right else _WRONG)
    return worst
