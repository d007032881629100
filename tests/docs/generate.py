"""What the pages say of the code, made from the code: `python -m tests.docs.generate` writes it into them.

It stands between `<!-- made: NAME -->` and `<!-- end -->`; what stands outside is written by hand.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.everything import SIMULATED
from benchmarks.harness import shown
from mrl.algos.core_algos import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, RATIO_LEVELS
from mrl.config.arithmetic import num_engines, role_mesh
from mrl.config.keys import ENTRY, KeyPath, describe_type, dotted, fields_of
from mrl.config.load import load_config
from mrl.config.reward_rules import BUILT_IN
from mrl.config.schema import Config
from mrl.config.sft import SftConfig
from mrl.data.toy import TOY_TASKS
from mrl.launch.site import SiteConfig
from mrl.plan.preflight_columns import declared_columns, stages
from tests.docs.blocks import ROOT, pages

_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_EVERYTHING_ON = (
    *("algorithm.kl.where=both", "algorithm.correction={}"),
    *("reward_model={path: some/model, max_tokens_per_device: 512}", "placement.roles.reward_model=laptop"),
)
_FROM_ELSEWHERE = {
    "response_mask": "nothing in mrl today",
    "baseline_scores": "rollout and rewards, of a greedy answer",
    "position": "the trainer",
}

WHEN = {
    "compute_rm_score": "there is a reward model",
    "compute_log_prob": "several updates a step, KL in the reward, or a correction",
    "compute_ref_log_prob": "`algorithm.kl.where` is not `none`",
    "compute_values": "there is a critic",
    "compute_advantages": "always; on the critic where there is one, else on the actor",
    "update_critic": "there is a critic; once per update",
    "update_actor": "always, after `training.critic_warmup_steps`; once per update",
}
COLUMNS = {
    "prompts": ("tokens", "the prompt as it was encoded and cut"),
    "responses": ("tokens", "what the engine wrote, its end token included"),
    "response_mask": ("tokens", "which response tokens the model wrote; without it, all"),
    "rollout_log_probs": ("tokens", "log-prob of each response token by the engine that drew it"),
    "old_log_probs": ("tokens", "the same by the trainer, before the first update of the step"),
    "ref_log_probs": ("tokens", "the same by the policy as it was before training"),
    "values": ("tokens", "the critic's value of the state before each response token"),
    "advantages": ("tokens", "how much better each token did than expected"),
    "returns": ("tokens", "what the critic is trained towards"),
    "scores": ("one number", "the reward of the response: the weighted sum of the functions and the reward model"),
    "rm_scores": ("one number", "what the reward model says of the response; the driver adds it to the scores"),
    "baseline_scores": ("one number", "ReMax: the score of the greedy answer to the same prompt"),
    "position": ("one number", "where the row stands in the batch, so that shards can be put together"),
}


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# --- concepts.md ------------------------------------------------------------------------------------------------


def calls() -> str:
    """The calls of a step with everything switched on, from what the workers' methods declare."""

    def rows() -> Iterator[Sequence[str]]:
        for stage in stages(load_config(str(ROOT / "configs/laptop-ppo.yaml"), _EVERYTHING_ON).config):
            declared = declared_columns(stage.role)[stage.method]
            columns = (", ".join(names) for names in (declared.reads, declared.optional, declared.writes))
            yield f"`{stage.role}.{stage.method}`", *columns, WHEN[stage.method]

    return table(("call", "reads", "reads where it is there", "writes", "when"), rows())


def columns() -> str:
    """Every column that workers read or write, with who writes it."""
    writers: dict[str, list[str]] = {}
    known = set()
    for role in ("reward_model", "actor", "critic"):
        for method, declared in declared_columns(role).items():
            known |= {*declared.reads, *declared.optional, *declared.writes}
            for name in declared.writes:
                writers.setdefault(name, []).append(f"`{role}.{method}`")
    assert known == COLUMNS.keys(), f"COLUMNS has words for every column and no other: {known ^ COLUMNS.keys()}"
    rows = (
        (f"`{name}`", *words, ", ".join(writers.get(name, [_FROM_ELSEWHERE.get(name, "rollout and rewards")])))
        for name, words in COLUMNS.items()
    )
    return table(("column", "per row", "what it is", "written by"), rows)


# --- configure.md -----------------------------------------------------------------------------------------------


def schema() -> str:
    """Every key of `mrl train`, section by section."""
    return "".join(_sections(Config, (), {}))


def sft_schema() -> str:
    """The sections of `mrl sft` that are its own."""
    listed: dict[type, KeyPath] = {}
    list(_sections(Config, (), listed))
    return "".join(_sections(SftConfig, (), listed))


def site_schema() -> str:
    """Every key of the cluster file."""
    return "".join(_sections(SiteConfig, (), {}))


def names() -> str:
    """Every name that a key knows beside `package.module:attribute`."""
    known: dict[str, Iterable[str]] = {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss.policy": POLICY_LOSSES,
        "algorithm.loss.aggregation": AGGREGATIONS,
        "algorithm.kl.in_reward, in_loss": KL_ESTIMATORS,
        "algorithm.correction.level": RATIO_LEVELS,
        "reward.functions.NAME.name": BUILT_IN,
        "data.train.NAME.dataset": [*(f"toy:{task}" for task in TOY_TASKS), "reasoning_gym:TASK"],
        "rollout.engine": ["vllm", "transformers"],
    }
    return table(("key", "names"), ((f"`{key}`", ", ".join(f"`{name}`" for name in of)) for key, of in known.items()))


def _sections(section: type, path: KeyPath, listed: dict[type, KeyPath]) -> Iterator[str]:
    fields = fields_of(section)
    values = {name: key for name, key in fields.items() if key.section is None}
    if values:
        rows = (
            (
                f"`{name}`",
                describe_type(key.annotation),
                "required" if key.required else f"`{_default(key.default)}`",
                " ".join(key.doc.split()),
            )
            for name, key in values.items()
        )
        yield table(("key", "type", "default", "meaning"), rows)
    for name, key in fields.items():
        inner = key.section or key.entries
        if inner is None:
            continue
        where = (*path, name) if key.section else (*path, name, ENTRY)
        if listed.get(inner) == where:
            continue  # the same as on the page above
        yield f"\n### `{dotted(where)}`\n\n"
        if key.section:
            optional = " Default null." if key.default is None and not key.required else ""
            yield f"{' '.join(key.doc.split())}{optional}\n\n"
        if inner in listed:
            yield f"Its keys are those of `{dotted(listed[inner])}`.\n"
            continue
        listed[inner] = where
        yield from _sections(inner, where, listed)


def _default(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- files.md ---------------------------------------------------------------------------------------------------


def files() -> str:
    """A table per directory: each file with the first line of its docstring, or of its comment."""
    text = ""
    for folder in ("mrl", "configs", "launch", "benchmarks"):
        directories = [ROOT / folder, *sorted(path for path in (ROOT / folder).rglob("*") if path.is_dir())]
        for directory in directories:
            text += _directory(directory)
    return text


def _directory(directory: Path) -> str:
    found = {file.name: first_line(file) for file in sorted(directory.iterdir()) if file.suffix in (".py", ".yaml")}
    about = found.pop("__init__.py", "")
    if not found:
        return ""
    rows = ((f"`{name}`", line) for name, line in found.items())
    return f"\n## {directory.relative_to(ROOT)}/\n\n{about}{chr(10) * 2 if about else ''}{table(('file', ''), rows)}"


def first_line(file: Path) -> str:
    """What a file says of itself first."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return text.partition("\n")[0].removeprefix("# ") if text.startswith("# ") else ""


# --- README.md --------------------------------------------------------------------------------------------------


def presets() -> str:
    """The presets: model, devices, layout of the actor, engines."""

    def rows() -> Iterator[Sequence[str]]:
        for file in sorted((ROOT / "configs").glob("*.yaml")):
            if "laptop" in file.name:
                continue
            config = load_config(str(file.relative_to(ROOT))).config
            cluster, mesh = config.cluster, role_mesh(config, "actor")
            sizes = {**vars(config.actor.parallel), "dp": mesh.dp}
            shown = (
                f"{axis} {sizes[axis]}" for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp") if sizes[axis] > 1
            )
            yield (
                f"`{file.name}`",
                config.model.path.partition("/")[2],
                f"{cluster.nodes} x {cluster.devices_per_node}",
                ", ".join(shown) or "one device",
                f"{num_engines(config)} of tp {config.rollout.tp}",
            )

    return table(("preset", "model", "GPUs", "actor", "engines"), rows())


def bench() -> str:
    """Every goal of the benchmarks as `make bench` measured it last."""
    return table(("command", "goal", "value", ""), (row for report in _of_bench() for row in _goals(report)))


# --- docs/benchmarks.md -----------------------------------------------------------------------------------------

MOST_ROWS = 40


def long_runs() -> str:
    """Every goal of what takes longer than `make bench` does."""
    return table(("command", "goal", "value", ""), (row for report in _long_runs() for row in _goals(report)))


def tables() -> str:
    """The rows of every benchmark."""
    return "\n".join(part for report in (*_of_bench(), *_long_runs()) for part in _rows(report))


def _of_bench() -> Iterator[dict[str, Any]]:
    for file in sorted((ROOT / "benchmarks/results/machines").glob("*.json")):
        yield from json.loads(file.read_text(encoding="utf-8")).values()


def _long_runs() -> Iterator[dict[str, Any]]:
    for file in sorted((ROOT / "benchmarks/results").glob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _goals(report: dict[str, Any]) -> Iterator[Sequence[str]]:
    said = _command(report)
    if "not_run" in report:
        yield said, "not run", report["not_run"], ""
        return
    for goal in report["goals"]:
        verdict = "met" if goal["met"] else "**missed**"
        yield said, f"{goal['name']} {goal['goal']}", shown(goal["value"]), verdict
        said = ""


def _rows(report: dict[str, Any]) -> Iterator[str]:
    if "not_run" in report:
        return
    about, rows = report["machine"], report["rows"]
    yield f"### {_command(report)}\n"
    before, after = (about[f"load_average_{when}"][0] for when in ("before", "after"))
    yield f"{about['cpu']}, {about['cores']} cores; load {before:.1f} before, {after:.1f} after.\n"
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield table(columns, ([shown(row.get(column, "")) for column in columns] for row in rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        yield f"{len(rows) - MOST_ROWS} more rows are in the file of results.\n"


def _command(report: dict[str, Any]) -> str:
    said = f"`{report['command']}`"
    if "not_run" in report:
        return said
    if report["benchmark"] == "parity":
        said += f", megatron-core {report['versions']['megatron-core']}"
    return said + (" (simulated)" if report["benchmark"] in SIMULATED else "")


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (calls, columns, schema, sft_schema, site_schema, names, files, presets, bench, long_runs, tables)
}


def renewed(text: str) -> str:
    """A page with everything that is made from the code made anew."""
    return _MADE.sub(lambda found: found[1] + MAKERS[found[2]]() + found[3], text)


def names_in(text: str) -> list[str]:
    """What a page has made from the code."""
    return [found[2] for found in _MADE.finditer(text)]


if __name__ == "__main__":
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := renewed(old)) != old:
            page.write_text(new, encoding="utf-8")
