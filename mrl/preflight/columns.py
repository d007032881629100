"""The data flow of a step, proven without running it: every column that a worker's method reads is written before.

What the methods read and write stands in their `register` decorators, which are read from the sources: importing
the workers would load Megatron.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mrl.config.arithmetic import needs_old_log_probs, updates_per_step
from mrl.config.schema import Config

_ROOT = Path(__file__).parents[2]
_WORKERS = {
    "actor": ("mrl/workers/actor.py", "ActorRolloutRefWorker"),
    "critic": ("mrl/workers/critic.py", "CriticWorker"),
    "reward_model": ("mrl/workers/reward_model.py", "RewardModelWorker"),
}
_TRAINER = "mrl/trainer/ppo.py"


@dataclass(frozen=True)
class Stage:
    """A call of a step, and the optional columns without which it cannot do what this configuration asks for."""

    role: str
    method: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """What a method declares."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    optional: tuple[str, ...]


def stages(config: Config) -> list[Stage]:
    """The calls of `RayPPOTrainer.step` that this configuration makes, in their order."""
    algorithm, has_critic = config.algorithm, config.critic is not None
    in_reward, in_loss = (algorithm.kl.where in (where, "both") for where in ("reward", "loss"))
    estimator = {"gae": ("values",), "remax": ("baseline_scores",)}.get(algorithm.advantage, ())
    actor = ("old_log_probs",) * (updates_per_step(config.batch) > 1) + ("ref_log_probs",) * in_loss
    actor += ("rollout_log_probs",) * (algorithm.correction is not None)
    found = [
        (config.reward_model is not None, Stage("reward_model", "compute_rm_score")),
        (needs_old_log_probs(config), Stage("actor", "compute_log_prob")),
        (algorithm.kl.where != "none", Stage("actor", "compute_ref_log_prob")),
        (has_critic, Stage("critic", "compute_values")),
        (
            True,
            Stage(
                "critic" if has_critic else "actor",
                "compute_advantages",
                estimator + ("old_log_probs", "ref_log_probs") * in_reward,
            ),
        ),
        (has_critic, Stage("critic", "update_critic")),
        (True, Stage("actor", "update_actor", actor)),
    ]
    return [stage for is_made, stage in found if is_made]


def column_problems(config: Config) -> list[str]:
    """The columns that a call of a step would miss."""
    # `position` goes along with the call itself; ReMax's baselines come with the scores.
    there = {*_tuple_of(_TRAINER, "TRAIN_COLUMNS"), "position"}
    there |= {"baseline_scores"} if config.algorithm.advantage == "remax" else set()
    problems = []
    for stage in stages(config):
        declared = declared_columns(stage.role)[stage.method]
        for column in dict.fromkeys(declared.reads + stage.needs):
            if column not in there:
                now = ", ".join(sorted(there))
                problems.append(f"{stage.method} needs `{column}`; nobody has written it; columns then: {now}")
            elif column not in declared.reads + declared.optional:
                problems.append(f"{stage.method} needs `{column}`, but does not declare that it reads it")
        there |= set(declared.writes)
    return problems


@cache
def declared_columns(role: str) -> dict[str, Columns]:
    """The methods of a role's worker that take a batch, with their columns."""
    file, name = _WORKERS[role]
    tree = _parsed(file)
    (worker,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for method in (node for node in worker.body if isinstance(node, ast.FunctionDef)):
        for decorator in method.decorator_list:
            if isinstance(decorator, ast.Call):
                given = {word.arg: _names(tree, word.value) for word in decorator.keywords if word.arg}
                found[method.name] = Columns(*(given.get(key, ()) for key in ("reads", "writes", "optional")))
    return found


def _names(tree: ast.Module, node: ast.expr) -> tuple[str, ...]:
    """A tuple of names as it is written, or as the module that is named before the dot has it."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _tuple_of(next(_files_of(tree, node.value.id)), node.attr)
    return tuple(ast.literal_eval(node))


def _files_of(tree: ast.Module, name: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            yield f"{node.module.replace('.', '/')}/{name}.py"


def _tuple_of(file: str, name: str) -> tuple[str, ...]:
    """The tuple that a module assigns to a name."""
    for node in _parsed(file).body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and target.id == name:
            return tuple(ast.literal_eval(node.value))
    raise AssertionError(f"{file} assigns {name}")


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((_ROOT / file).read_text(encoding="utf-8"))
