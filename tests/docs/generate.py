"""Generate the parts of the pages that follow from the code: `python -m tests.docs.generate` writes them.

These parts are between `<!-- made: NAME -->` and `<!-- end -->`. All other text is written by hand.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.everything import SIMULATED
from benchmarks.harness import shown
from mrl.algos.advantages import ADVANTAGES
from mrl.algos.aggregate import AGGREGATIONS
from mrl.algos.kl import KL_ESTIMATORS
from mrl.algos.losses import POLICY_LOSSES
from mrl.algos.preference import PREFERENCE_LOSSES
from mrl.algos.rollout_correction import RATIO_LEVELS
from mrl.config.arithmetic import num_engines, role_mesh
from mrl.config.catalog import Algorithm, algorithms
from mrl.config.keys import ENTRY, describe_type, fields_of
from mrl.config.proofs import STORED, Proof, find_proof
from mrl.config.proofs import shown as shown_difference
from mrl.config.resolved.load import load_any_config
from mrl.config.resolved.sources import read_chain
from mrl.config.rules.reward_options import reward_functions
from mrl.config.schema import Config
from mrl.config.sft import DpoLossConfig, RewardLossConfig, SftConfig
from mrl.config.step_calls import STEP
from mrl.config.values import KeyPath, dotted
from mrl.config.verl_keys import REASONS
from mrl.data.prompt_loader import SAMPLERS
from mrl.data.toy import TOY_TASKS
from mrl.launch.kubernetes import KubernetesSite
from mrl.launch.slurm import SiteConfig
from mrl.models.families import FAMILIES
from mrl.models.open_model import OpenSpec
from mrl.models.spec import ModelSpec
from mrl.observe.trackers import KNOWN
from mrl.plan.known_models import known_models, model_spec
from tests.docs import proofs
from tests.docs.blocks import ROOT, pages
from tests.docs.pictures import IMAGES, PICTURES, SOLVED, recorded
from tests.house_rules import (
    LAYERS,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_METHODS,
    MAX_PARAMETERS,
    MEDIAN_FILE_LINES,
    SHORT_FUNCTION_LINES,
    SHORT_FUNCTIONS,
)
from tests.sweep import RECORD

_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FROM_ELSEWHERE = {
    "response_mask": "conversations of environments, and the rows of `mrl sft`",
    "baseline_scores": "rollout and rewards, for a greedy answer",
    "position": "the trainer",
    "teacher_spans": "the trainer",
}

COLUMNS = {
    "prompts": ("tokens", "the prompt after encoding and truncation"),
    "responses": ("tokens", "the engine's tokens, including the end token"),
    "response_mask": ("tokens", "which response tokens the model wrote; if missing, all"),
    "rollout_log_probs": ("tokens", "log-prob of each response token by the engine that drew it"),
    "staleness": ("tokens", "age in updates of the weights that drew each token; present with asynchrony.ahead"),
    "old_log_probs": ("tokens", "log-prob of each response token by the trainer, before the first update of the step"),
    "score_norms": ("tokens", "squared norm of the gradient of that log-prob by the logits"),
    "ref_log_probs": ("tokens", "log-prob of each response token by the policy from before training"),
    "values": ("tokens", "the critic's value of the state before each response token"),
    "advantages": ("tokens", "how much better each token was than expected"),
    "returns": ("tokens", "the critic's training target"),
    "scores": ("one number", "the reward of the response: the weighted sum of the functions and the reward model"),
    "rm_scores": (
        "one number",
        "the reward model's score of the response; the driver scales it and adds it to `scores`",
    ),
    "teacher_log_probs": (
        "tokens",
        "log-prob of each response token by the teacher, at rollout.temperature",
    ),
    "teacher_spans": (
        "tokens",
        "with a teacher that has another tokenizer: 2 for the first token of a span of text, 1 for a later one, 0 "
        "without a teacher",
    ),
    "teacher_top_ids": ("tokens", "the teacher's most likely tokens at each response position"),
    "teacher_top_log_probs": ("tokens", "log-probs of `teacher_top_ids`; last, that of all other tokens together"),
    "teacher_hidden": ("tokens", "the teacher's hidden state that gives its distribution of each response token"),
    "sampling_mask": (
        "tokens",
        "ids of the tokens that each response token was drawn from; present with algorithm.keep_sampling_mask",
    ),
    "routes": ("tokens", "experts of each layer for each token but the last of prompt and response: by R3 or R2"),
    "baseline_scores": ("one number", "ReMax: the score of the greedy answer to the same prompt"),
    "position": ("one number", "the row's position in the batch, so that shards can be joined"),
}


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# --- concepts.md ------------------------------------------------------------------------------------------------


def calls() -> str:
    """Return the table of a step's calls."""

    def rows() -> Iterator[Sequence[str]]:
        for call in STEP:
            reads, optional, writes = (", ".join(names) for names in (call.reads, call.optional, call.writes))
            yield (
                f"`{call.role}.{call.method}`",
                f"{reads}; if present: {optional}" if optional else reads,
                writes,
                call.when,
            )

    return table(("call", "reads", "writes", "when"), rows())


def columns() -> str:
    """List every column that workers read or write, with its writers."""
    writers: dict[str, list[str]] = {}
    known = set()
    for call in STEP:
        known |= {*call.reads, *call.optional, *call.writes}
        for name in call.writes:
            writers.setdefault(name, []).append(f"`{call.role}.{call.method}`")
    assert known == COLUMNS.keys(), (
        f"COLUMNS must describe exactly the columns of STEP; difference: {known ^ COLUMNS.keys()}"
    )
    rows = (
        (f"`{name}`", *words, ", ".join(writers.get(name, [_FROM_ELSEWHERE.get(name, "rollout and rewards")])))
        for name, words in COLUMNS.items()
    )
    return table(("column", "per row", "content", "written by"), rows)


# --- configure.md -----------------------------------------------------------------------------------------------


def schema() -> str:
    """List every key of `mrl train`, section by section."""
    return "".join(_sections(Config, (), {}))


def sft_schema() -> str:
    """List the sections that only `mrl sft` has."""
    listed: dict[type, KeyPath] = {}
    list(_sections(Config, (), listed))
    return "".join(_sections(SftConfig, (), listed))


def preference_schema() -> str:
    """List the sections that distinguish `mrl rm` and `mrl dpo` from `mrl sft`."""
    return "".join(
        f"\n### `{name}`, for `mrl {verb}`\n\n{''.join(_sections(section, (name,), {})).lstrip()}"
        for name, verb, section in (("reward", "rm", RewardLossConfig), ("preference", "dpo", DpoLossConfig))
    )


def site_schema() -> str:
    """List every key of the cluster file."""
    return "".join(_sections(SiteConfig, (), {}))


def kubernetes_schema() -> str:
    """List every key of the cluster file of Kubernetes."""
    return "".join(_sections(KubernetesSite, (), {}))


def names() -> str:
    """List the names that each key accepts in addition to `package.module:attribute`."""
    known: dict[str, Iterable[str]] = {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss.policy": POLICY_LOSSES,
        "algorithm.loss.aggregation": AGGREGATIONS,
        "algorithm.kl.in_reward, in_loss": KL_ESTIMATORS,
        "algorithm.correction.level": RATIO_LEVELS,
        "reward.functions.NAME.name": reward_functions(),
        "data.train.NAME.dataset": [*(f"toy:{task}" for task in TOY_TASKS), "reasoning_gym:TASK"],
        "data.sampler": SAMPLERS,
        "preference.loss": PREFERENCE_LOSSES,
        "training.trackers": KNOWN,
        "rollout.engine": ["vllm", "transformers"],
    }
    return table(("key", "names"), ((f"`{key}`", ", ".join(f"`{name}`" for name in of)) for key, of in known.items()))


def algorithm_table() -> str:
    """List every algorithm with its paper, formula and options."""
    rows = (
        (
            ", ".join(f"`{name}`" for name in algorithm.names),
            algorithm.kind,
            algorithm.paper,
            algorithm.formula,
            ", ".join(f"`{option}`" for option in algorithm.options),
        )
        for algorithm in algorithms()
    )
    return table(("name", "kind", "paper (arXiv)", "formula", "options"), rows)


def algorithm_proofs() -> str:
    """List what each algorithm was compared with, and what it reached."""

    def cells(algorithm: Algorithm, proof: Proof) -> Iterator[str]:
        yield f"`{algorithm.names[0]}`"
        yield algorithm.kind
        of_peers = (proof.differences.get(peer) for peer in proofs.PEERS.values())
        yield from ("" if difference is None else shown_difference(difference) for difference in of_peers)
        step = proof.step_difference
        yield "" if step is None else f"{shown_difference(step)} in {proof.num_runs} runs"
        yield proof.score() if proof.scores else ""

    rows = (cells(algorithm, proof) for algorithm in algorithms() if (proof := find_proof(algorithm)) is not None)
    head = ("name", "kind", "formula", "verl", "TRL", "three steps", "demo's task")
    return table(head, (list(row) for row in rows))


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
            yield f"Same keys as `{dotted(listed[inner])}`.\n"
            continue
        listed[inner] = where
        yield from _sections(inner, where, listed)


def _default(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- files.md ---------------------------------------------------------------------------------------------------


def files() -> str:
    """Return a table per directory: each file with the first line of its docstring or comment."""
    text = ""
    for folder in ("mrl", "configs", "launch", "benchmarks"):
        directories = [ROOT / folder, *sorted(path for path in (ROOT / folder).rglob("*") if path.is_dir())]
        for directory in directories:
            text += _directory(directory)
    return text


def _directory(directory: Path) -> str:
    lines = {file.name: first_line(file) for file in sorted(directory.iterdir()) if file.suffix in (".py", ".yaml")}
    package_line = lines.pop("__init__.py", "")
    if not lines:
        return ""
    rows = ((f"`{name}`", line) for name, line in lines.items())
    head = f"{package_line}\n\n" if package_line else ""
    return f"\n## {directory.relative_to(ROOT)}/\n\n{head}{table(('file', ''), rows)}"


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or the first sentence of a configuration's comment."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comment = " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line[:2] == "# ", text.splitlines()))
    return re.split(r"(?<=\.) ", comment)[0]


# --- benchmarks.md ----------------------------------------------------------------------------------------------


def sweep() -> str:
    """List the dates on which the cases of the sweep last passed, by file, the oldest first."""
    by_file: dict[str, list[dict[str, Any]]] = {}
    for case, record in json.loads(RECORD.read_text(encoding="utf-8")).items():
        by_file.setdefault(case.partition("::")[0], []).append(record)
    rows = []
    for file, records in by_file.items():
        dates, failed = [record["date"] for record in records], sum("failed" in record for record in records)
        rows.append((f"`{file}`", f"{len(records)}", min(dates), max(dates), f"{failed or ''}"))
    columns = ("file", "cases that passed", "oldest", "newest", "have failed since")
    return table(columns, sorted(rows, key=lambda row: row[2]))


# --- CONTRIBUTING.md --------------------------------------------------------------------------------------------


def layers() -> str:
    """List the layers, lowest first."""
    rows = ((f"{number}", ", ".join(f"`{unit}`" for unit in sorted(units))) for number, units in enumerate(LAYERS, 1))
    return table(("from the bottom", ""), rows)


def budgets() -> str:
    """List the limits of files, functions, classes and parameters."""
    rows = (
        ("file", f"{MAX_FILE_LINES} lines", f"median {MEDIAN_FILE_LINES}"),
        ("function", f"{MAX_FUNCTION_LINES} lines", f"{SHORT_FUNCTIONS:.0%} under {SHORT_FUNCTION_LINES}"),
        ("class", f"{MAX_METHODS} methods", ""),
        ("parameters", f"{MAX_PARAMETERS}", ""),
    )
    return table(("", "at most", "usual"), iter(rows))


# --- scale.md ---------------------------------------------------------------------------------------------------


def presets() -> str:
    """List the presets: model, devices, layout of the actor, engines."""

    def rows() -> Iterator[Sequence[str]]:
        for file in sorted((ROOT / "configs").glob("*.yaml")):
            if "laptop" in file.name:
                continue
            config = load_any_config(str(file.relative_to(ROOT))).config
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
                f"{num_engines(config)} of tp {config.rollout.tp}" if isinstance(config, Config) else "none",
            )

    return table(("preset", "model", "GPUs", "actor", "engines"), rows())


def growth() -> str:
    """List what grows with the ranks, from the results of its benchmark."""
    report = json.loads((ROOT / "benchmarks/results/scale.json").read_text(encoding="utf-8"))
    columns = ("quantity", "64", "1,024", "4,096", "16,384", "by", "cost")
    return table(columns, ([shown(row[column]) for column in columns] for row in report["rows"]))


# --- docs/models.md ---------------------------------------------------------------------------------------------


def models() -> str:
    """List the model families: what their layers have, their roles, the models known by name, and their presets."""

    configs = [file for file in sorted((ROOT / "configs").glob("*.yaml")) if "laptop" not in file.name]
    paths = {file: load_any_config(str(file.relative_to(ROOT))).config.model.path for file in configs}
    trained = {file: model_spec(path).family for file, path in paths.items()}

    def rows() -> Iterator[Sequence[str]]:
        names = defaultdict(list)
        for name, its_family in known_models().items():
            names[its_family].append(name)
        for family in (FAMILIES[its_family] for its_family in names):  # tests add families to `FAMILIES`
            known = names[family.model_type]
            own = [file for file, its_family in trained.items() if its_family == family.model_type]
            yield (
                f"`{family.model_type}`",
                _parts(model_spec(known[0])),
                "all" if family.has_score_head else "policy, reference, teacher",
                ", ".join(known),
                ", ".join(f"`{file.stem}`" for file in own) or "none",
            )

    return table(("family", "layers", "roles", "known by name", "presets"), rows())


def _parts(spec: ModelSpec) -> str:
    """Describe what the layers of a family have in addition to those of Llama."""
    if isinstance(spec, OpenSpec):
        return "no table: only with `strategy: fsdp`"
    parts = {
        "bias of queries, keys and values": spec.qkv_bias,
        "norms of queries and keys": spec.qk_norm,
        "sliding window": spec.sliding_window and not spec.layers_without_window,
        "sliding window in every other layer": spec.layers_without_window,
        "sinks": spec.sinks,
        "multi-latent attention": spec.mla,
        "linear attention (gated delta rule)": spec.gdn,
        "gates of attention": spec.output_gate,
        "rotation of half of a head": not spec.mla and 2 * spec.rope.dim == spec.head_dim,
        "rotation of a quarter of a head": not spec.mla and 4 * spec.rope.dim == spec.head_dim,
        "experts": spec.moe and spec.moe.clamp is None,
        "experts with biases": spec.moe and spec.moe.clamp is not None,
        "first layers without experts": spec.moe and spec.moe.dense_layers,
        "shared expert": spec.moe and spec.moe.shared_ffn,
        "sigmoid router with a frozen bias": spec.moe and spec.moe.correction_bias,
    }
    return ", ".join(part for part, is_there in parts.items() if is_there) or "as Llama"


# --- README.md --------------------------------------------------------------------------------------------------

MEASURED = (
    ("largest difference of a log-prob from transformers, over all layouts and families", "parity", "transformers"),
    ("tensors that arrived wrong in an engine, over all tested pairs of layouts", "reshard", "wrong_tensors"),
    ("resumes that missed the newest checkpoint, after kills at random moments", "killed_runs", "resumes"),
    ("samples with the right outcome while rewards hang and crash", "rewards", "under fire: samples"),
    ("published runs, out of nine, whose step time `mrl plan` predicts within 25 %", "plan", "rows predicted"),
    ("samples per second relative to TRL, 30 million parameters, two cores", "end_to_end", "long: samples"),
    ("samples per second relative to TRL, 0.6 million parameters, two cores", "end_to_end", "tiny: samples"),
)
"""Text in the README, benchmark, and part of the name of the goal with the measured value."""


def demo() -> str:
    """Return the result of the recorded run of the demo."""
    run = recorded()
    before, after = (metrics for metrics in run["steps"] if SOLVED in metrics)
    return (
        f"`make demo` on {run['machine']}: {before[SOLVED]:.1%} -> {after[SOLVED]:.1%} correct answers to "
        f"{before['val/prompts']:.0f} problems outside\nthe training data, in {run['minutes']} minutes. "
        f"Both pictures show this run ({run['date']}, {run['commit']}).\n"
    )


def figures() -> str:
    """List the measured values of the README."""

    def rows() -> Iterator[Sequence[str]]:
        all_goals = list(_all_goals())
        for label, benchmark, words in MEASURED:
            ours = [goal for goal in all_goals if goal.benchmark == benchmark and words in goal.name]
            assert ours, f"no goal of {benchmark} has {words} in its name"
            yield label, ours[0].limit, ours[0].own or ours[0].in_bench, f"`benchmarks/{benchmark}.py`"

    return table(("figure", "goal", "measured", "measure it again"), rows())


PEERS = {
    "verl": ("1dda039", "2026-08-22", "111,000", "2,548", "466", "947", "not found", "not found"),
    "slime": ("624b824", "2026-08-21", "41,000", "3,184", "1,547", "203", "not found", "not found"),
    "prime-rl": ("559b447", "2026-08-21", "47,000", "1,616", "669", "29", "not found", "not found"),
    "TRL": ("f2cd577", "2026-07-24", "62,000", "3,374", "894", "-", "yes", "not found"),
}
"""Values of each peer's library without tests and examples. The README explains which keys are counted."""
COMPARED = (
    *("commit", "date", "lines of Python", "lines of the longest file", "lines of the longest function"),
    *("keys of a flagship run", "the whole loop on a laptop's CPU", "memory and step time before the job starts"),
)


def compare() -> str:
    """Compare mrl with its peers."""
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in (ROOT / "mrl").rglob("*.py"))
    keys = len(list(_leaves(read_chain(str(ROOT / "configs/ppo-llama3.1-70b-8n8g.yaml")).values)))
    longest = (f"<= {MAX_FILE_LINES}", f"<= {MAX_FUNCTION_LINES}")
    ours = ("this", "-", f"{round(lines, -3):,}", *longest, str(keys), "yes", "`mrl plan`")
    columns = {"mrl": ours} | PEERS
    rows = ((label, *(column[number] for column in columns.values())) for number, label in enumerate(COMPARED))
    return table(("", *columns), rows)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and value:
        for inner in value.values():
            yield from _leaves(inner)
    else:
        yield value


# --- docs/benchmarks.md -----------------------------------------------------------------------------------------

MAX_ROWS = 40


@dataclass(frozen=True)
class Goal:
    """A goal with its values from the benchmark's own command and from `make bench`."""

    benchmark: str
    command: str
    name: str
    limit: str
    own: str = ""
    in_bench: str = ""


def goals() -> str:
    """List each goal of each benchmark once."""

    def rows() -> Iterator[Sequence[str]]:
        last = ""
        for goal in _all_goals():
            called = goal.command if goal.command != last else ""
            yield called, f"{goal.name} {goal.limit}", goal.own, goal.in_bench
            last = goal.command

    return table(("benchmark", "goal", "its own command", "in `make bench`"), rows())


def _all_goals() -> Iterator[Goal]:
    own, in_bench = _measured(_long_runs()), _measured(_of_bench())
    # the goals of a benchmark keep their order
    for key in sorted(dict.fromkeys((*own, *in_bench)), key=lambda key: key[1]):
        yield Goal(*key, own.get(key, ""), in_bench.get(key, ""))


def _measured(reports: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str, str], str]:
    """Return the value, marked if it misses the goal, by benchmark, label, goal and limit."""
    measured = {}
    for report in reports:
        benchmark = report["benchmark"]
        label = f"`{benchmark}`" + (" (simulated)" if benchmark in SIMULATED else "")
        label += _lane(report)
        if "not_run" in report:
            measured[benchmark, label, "not run", ""] = report["not_run"]
        for goal in report.get("goals", ()):
            verdict = "" if goal["met"] else " **missed**"
            measured[benchmark, label, goal["name"], goal["goal"]] = f"{shown(goal['value'])}{verdict}"
    return measured


def _lane(report: dict[str, Any]) -> str:
    """Return the library whose version or presence distinguishes two results of one benchmark."""
    versions = report.get("versions", {})
    if report["benchmark"] == "parity" and versions:
        return f", megatron-core {versions['megatron-core']}"
    if report["benchmark"] == "gpu":
        name = "transformer-engine"
        return f", Transformer Engine {versions[name]}" if versions[name] else ", without Transformer Engine"
    return ""


def tables() -> str:
    """List the rows of every benchmark."""
    return "\n".join(part for report in (*_of_bench(), *_long_runs()) for part in _rows(report))


def _of_bench() -> Iterator[dict[str, Any]]:
    for file in sorted((ROOT / "benchmarks/results/machines").glob("*.json")):
        yield from json.loads(file.read_text(encoding="utf-8")).values()


def _long_runs() -> Iterator[dict[str, Any]]:
    for file in sorted((ROOT / "benchmarks/results").glob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _rows(report: dict[str, Any]) -> Iterator[str]:
    if "not_run" in report:
        return
    about, rows = report["machine"], report["rows"]
    yield f"### {_command(report)}\n"
    before, after = (about[f"load_average_{when}"][0] for when in ("before", "after"))
    gpus = "".join(f"{gpu['name']}, driver {gpu['driver']}; " for gpu in about.get("gpus", ()))
    yield f"{gpus}{about['cpu']}, {about['cores']} cores; load {before:.1f} before, {after:.1f} after.\n"
    for part in dict.fromkeys(row.get("part") for row in rows):  # each part has its own columns
        rows_of_part = [row for row in rows if row.get("part") == part]
        columns = list(dict.fromkeys(column for row in rows_of_part for column in row))
        yield table(columns, ([shown(row.get(column, "")) for column in columns] for row in rows_of_part[:MAX_ROWS]))
        if len(rows_of_part) > MAX_ROWS:
            yield f"{len(rows_of_part) - MAX_ROWS} more rows are in the results file.\n"


def _command(report: dict[str, Any]) -> str:
    label = f"`{report['command']}`"
    if "not_run" in report:
        return label
    return label + _lane(report) + (" (simulated)" if report["benchmark"] in SIMULATED else "")


# --- coming-from-verl.md ----------------------------------------------------------------------------------------


def verl_reasons() -> str:
    """List verl's keys that mrl does not have, by reason."""
    keys_of: dict[str, list[str]] = {}
    for key, reason in REASONS.items():
        keys_of.setdefault(reason, []).append(f"`{key}`")
    rows = sorted((", ".join(keys), reason.replace("ROLE", "actor")) for reason, keys in keys_of.items())
    return table(("verl", "reason"), iter(rows))


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (
        calls,
        columns,
        schema,
        sft_schema,
        preference_schema,
        site_schema,
        kubernetes_schema,
        names,
        algorithm_table,
        algorithm_proofs,
        files,
        layers,
        budgets,
        presets,
        growth,
        models,
        demo,
        figures,
        compare,
        goals,
        verl_reasons,
        tables,
        sweep,
    )
}


def renewed(text: str) -> str:
    """Return a page with all generated parts generated again."""
    return _MADE.sub(lambda match: match[1] + MAKERS[match[2]]() + match[3], text)


def names_in(text: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [match[2] for match in _MADE.finditer(text)]


if __name__ == "__main__":
    STORED.write_text(proofs.algorithm_proofs(), encoding="utf-8")  # pages read it
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := renewed(old)) != old:
            page.write_text(new, encoding="utf-8")
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
