"""House rules as functions that return complaints about sources. `test_architecture.py` applies them.

A rule about single files takes a `Source`, a rule about the whole code takes all sources.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LAYERS = (  # lowest first; units on one line never import each other
    {"answers", "children", "errors", "files", "dtypes", "harmless", "rounding"},
    {"registry", "redaction", "hub", "libraries"},
    {"events", "spans"},
    {"config"},
    {"protocol"},
    {"controller"},
    {"algos", "data", "rewards", "observe"},
    {"models"},
    {"engine", "weight_sync"},
    {"fsdp"},
    {"rollout", "verify"},
    {"workers", "plan", "agents"},
    {"trainer"},
    {"preflight", "demo", "rehearse"},
    {"launch"},
    {"cli"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
LIBRARY_HOMES: dict[str, str | tuple[str, ...]] = {
    "omegaconf": "config",
    "yaml": "config",
    "tensordict": "protocol",
    "ray": "controller",
    "pyarrow": "data",
    "megatron": ("engine", "rehearse"),
    "transformer_engine": "engine",
    "vllm": ("rollout", "weight_sync", "rehearse"),
    "sglang": ("rollout", "weight_sync"),
    "huggingface_hub": "hub",
    "httpx": "hub",
}
WITHOUT_TORCH = {
    "answers",
    "errors",
    "files",
    "harmless",
    "rounding",
    "registry",
    "redaction",
    "hub",
    "libraries",
    "events",
    "spans",
    "config",
    "cli",
}
TORCH_ONLY = {"algos"}
HEAVY = {"torch", "transformers", "fla", "wandb", "mlflow", "swanlab", *LIBRARY_HOMES} - {"omegaconf", "yaml"}
"""Libraries that may be imported inside functions: slow to import, or an optional extra."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_METHODS, MAX_PARAMETERS = 400, 60, 16, 6
MEDIAN_FILE_LINES, SHORT_FUNCTION_LINES, SHORT_FUNCTIONS = 180, 35, 0.9
# Functions that may catch every exception: they report it as a worker's death, or as the failure of one sample in a
# separate process.
BROAD_EXCEPT_ALLOWED = {
    ("mrl/controller/worker_host.py", "WorkerHost.start"),
    ("mrl/data/chat.py", "load_tokenizer"),
    ("mrl/controller/worker_host.py", "WorkerHost.call"),
    ("mrl/controller/worker_host.py", "WorkerHost.call_on_shard"),
    ("mrl/verify/spawn.py", "_rank_main"),
    ("mrl/observe/trackers.py", "TrackerThread._succeeds"),
    ("mrl/trainer/step_metrics.py", "own_metrics"),
    ("mrl/agents/worker.py", "Environments.answer"),
    ("mrl/agents/worker.py", "run_worker"),
    ("mrl/rewards/contained.py", "_run_tests"),
    ("mrl/rewards/worker.py", "_load"),
    ("mrl/rewards/worker.py", "score_job"),
}

PICKLE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_CALLS = {
    **dict.fromkeys(("eval", "exec", "compile"), "runs text as code"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "runs a shell"),
    **dict.fromkeys(
        ("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"), "is not a safe loader"
    ),
}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}
MUST_BE_FALSE = {"shell", "allow_pickle", "trust_remote_code"}
NEEDS_SAFE_LOADER = {"yaml.load", "yaml.load_all", "yaml.compose", "yaml.compose_all"}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
MACHINE_PATH = re.compile(r"(?<![\w.~}/-])/(tmp|home/\w+|Users/\w+)(?![\w-])")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!: (\S+ ){4})")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is the full dotted path, `lazy` means inside a function."""

    module: str
    line: int
    lazy: bool

    @property
    def library(self) -> str:
        """Top-level name: `torch` for `torch.distributed`."""
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """A Python file: its path relative to the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Dotted name such as `mrl.config.load`; a package's `__init__` has the package's name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def unit(self) -> str:
        return unit_of(self.module)

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def imports(self) -> list[Import]:
        lazy = {id(inner) for function in self.functions for inner in ast.walk(function)}
        return [
            Import(module, node.lineno, id(node) in lazy)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in self._modules(node)
        ]

    def _modules(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            inside = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
            parents = inside.split(".")[: len(inside.split(".")) - node.level + 1]
            base = ".".join([*parents, *base.split(".")]).strip(".")
        return [f"{base}.{alias.name}" for alias in node.names]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full name of each imported local name, so that `from os import system` hides nothing."""
        known: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                known |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return known

    def full_name(self, node: ast.expr) -> str:
        """Return `numpy.load` for `np.load`, or an empty string for anything but a dotted name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def at(self, line: int, complaint: str) -> str:
        return f"{self.path}:{line}: {complaint}"


def unit_of(module: str) -> str:
    """Return the package or top-level module of mrl that contains a module. Layers consist of these units."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


# --- layers -----------------------------------------------------------------------------------------------------


def layers(source: Source) -> Iterator[str]:
    """A unit imports only from lower layers."""
    if not source.unit:
        yield from (
            source.at(imported.line, "mrl/__init__.py imports nothing of mrl")
            for imported in source.imports
            if imported.library == "mrl"
        )
        return
    if source.unit not in LEVEL:
        yield source.at(1, f'"{source.unit}" has no layer: add it to LAYERS')
        return
    for imported in source.imports:
        other = unit_of(imported.module) if imported.library == "mrl" else ""
        if other not in LEVEL or other == source.unit:
            continue
        if LEVEL[other] == LEVEL[source.unit]:
            yield source.at(imported.line, f"{source.unit} and {other} are siblings and never import each other")
        elif LEVEL[other] > LEVEL[source.unit]:
            yield source.at(imported.line, f"{source.unit} lies below {other} and must not import it")


def library_homes(source: Source) -> Iterator[str]:
    """Each heavy library has one home unit. Some units never import torch, or no library except torch."""
    for imported in source.imports:
        homes = LIBRARY_HOMES.get(imported.library, source.unit)
        homes = (homes,) if isinstance(homes, str) else homes
        if source.unit not in homes:
            yield source.at(
                imported.line, f"only {' and '.join(homes)} import{'s' * (len(homes) == 1)} {imported.library}"
            )
        if imported.library == "torch" and source.unit in WITHOUT_TORCH:
            yield source.at(imported.line, f"{source.unit} does without torch")
        foreign = imported.library not in {"mrl", "torch", *sys.stdlib_module_names}
        if source.unit in TORCH_ONLY and foreign:
            yield source.at(imported.line, f"{source.unit} imports torch alone, not {imported.library}")


def lazy_imports(source: Source) -> Iterator[str]:
    """An import inside a function must avoid loading a heavy library."""
    for imported in source.imports:
        spares = imported.library in HEAVY or (
            imported.library == "mrl" and unit_of(imported.module) not in WITHOUT_TORCH
        )
        if imported.lazy and not spares:
            yield source.at(
                imported.line, f"lazy import of {imported.module}, which is not heavy: import it at the top"
            )


def import_cycles(sources: Sequence[Source]) -> Iterator[str]:
    """No module imports itself through other modules, lazily or not."""
    graph = {source.module: set(_own_imports(source, sources)) for source in sources}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> Iterator[str]:
        if module in path:
            yield "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                yield from visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        yield from visit(module, ())


def two_way_packages(sources: Sequence[Source]) -> Iterator[str]:
    """Two packages never import each other, at any depth."""

    def package(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if parent in {"", "mrl"} or module in packages else parent

    packages = {source.module for source in sources if source.path.endswith("__init__.py")}
    pairs = {(package(source.module), package(other)) for source in sources for other in _own_imports(source, sources)}
    yield from (
        f"{one} and {other} import each other" for one, other in sorted(pairs) if one < other and (other, one) in pairs
    )


def _own_imports(source: Source, sources: Iterable[Source]) -> Iterator[str]:
    modules = {other.module for other in sources}
    for imported in source.imports:
        for name in (
            imported.module,
            imported.module.rpartition(".")[0],
        ):  # `from package import module`, or `... import name`
            if name in modules:
                yield name
                break


# --- budgets ----------------------------------------------------------------------------------------------------


def budgets(source: Source) -> Iterator[str]:
    """Files, functions, classes and parameter lists stay small."""
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield source.at(1, f"{lines} lines; a file has at most {MAX_FILE_LINES}")
    for function in source.functions:
        if _length(function) > MAX_FUNCTION_LINES:
            yield source.at(
                function.lineno,
                f"{function.name} has {_length(function)} lines; a function has at most {MAX_FUNCTION_LINES}",
            )
        count = len(_parameters(function))
        if count > MAX_PARAMETERS:
            yield source.at(function.lineno, f"{function.name} takes {count} parameters; at most {MAX_PARAMETERS}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, Function) for member in node.body)
            if methods > MAX_METHODS:
                yield source.at(node.lineno, f"{node.name} has {methods} methods; a class has at most {MAX_METHODS}")


def usual_sizes(sources: Sequence[Source]) -> Iterator[str]:
    """The median file is short, and nine of ten functions are short."""
    files = [len(source.text.splitlines()) for source in sources if not source.path.endswith("__init__.py")]
    if statistics.median(files) > MEDIAN_FILE_LINES:
        yield f"the median file has {statistics.median(files):g} lines; aim at {MEDIAN_FILE_LINES}"
    functions = [_length(function) for source in sources for function in source.functions]
    short = sum(length < SHORT_FUNCTION_LINES for length in functions)
    if short < SHORT_FUNCTIONS * len(functions):
        share = f"{short} of {len(functions)} functions"
        yield f"{share} are shorter than {SHORT_FUNCTION_LINES} lines; aim at {SHORT_FUNCTIONS:.0%}"


def type_names(sources: Sequence[Source]) -> Iterator[str]:
    """No two public classes share a name: `Row` must mean one class everywhere."""
    homes: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(source.path)
    for name, paths in homes.items():
        if len(paths) > 1:
            yield f"{name} is a class of {' and of '.join(paths)}: give one another name"


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    parameters = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        *filter(None, (arguments.vararg, arguments.kwarg)),
    ]
    return [parameter.arg for parameter in parameters if parameter.arg not in {"self", "cls"}]


# --- style ------------------------------------------------------------------------------------------------------


def broad_excepts(source: Source) -> Iterator[str]:
    """Only the functions of BROAD_EXCEPT_ALLOWED may catch everything."""
    for scope, line in _broad_handlers(source):
        if (source.path, scope) not in BROAD_EXCEPT_ALLOWED:
            yield source.at(line, f"{scope or 'the module'} catches everything: name the errors that you expect")


def stale_permissions(sources: Sequence[Source]) -> Iterator[str]:
    """Unused entries of BROAD_EXCEPT_ALLOWED must be removed."""
    used = {(source.path, scope) for source in sources for scope, _ in _broad_handlers(source)}
    for path, scope in sorted(BROAD_EXCEPT_ALLOWED - used):
        yield f"BROAD_EXCEPT_ALLOWED: {scope} of {path} catches nothing broad any more"


def _broad_handlers(source: Source) -> Iterator[tuple[str, int]]:
    """Yield function and line of each handler that catches everything."""
    for scope, node in _scoped(source.tree, ""):
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            caught = [*node.type.elts] if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and source.full_name(node.func) == "contextlib.suppress":
            caught = [*node.args]
        if any(kind is None or source.full_name(kind) in {"Exception", "BaseException"} for kind in caught):
            yield scope, node.lineno


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[str, Any]]:
    """Yield each node below `node` with the name of the function or class that contains it."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        named = isinstance(child, Function | ast.ClassDef)
        yield from _scoped(child, f"{scope}.{child.name}".strip(".") if named else scope)


def prints_and_asserts(source: Source) -> Iterator[str]:
    """Only the command line prints, and each assert has a message."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "print" and source.unit != "cli":
            yield source.at(node.lineno, "print outside cli/: return it, log it, or write an event")
        if isinstance(node, ast.Assert) and node.msg is None:
            yield source.at(node.lineno, "assert without a message")


def names_and_leftovers(source: Source) -> Iterator[str]:
    """No empty module names, no paths of one machine, no unfinished code without a reason."""
    for part in EMPTY_NAMES.intersection(source.module.split(".")):
        yield source.at(1, f'"{part}" is an empty name: name the module after its content')
    yield from machine_paths(source.path, source.text)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
            yield source.at(
                token.start[0], "unfinished, without a reason: finish it, or give the reason after the colon"
            )


def machine_paths(path: str, text: str) -> Iterator[str]:
    """Yield absolute paths that only exist on one machine, in any kind of text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        for path_match in MACHINE_PATH.finditer(line):
            yield f"{path}:{number}: {path_match.group()} is a path of one machine"


def wall_clock(source: Source) -> Iterator[str]:
    """Wall-clock time is for timestamps, not for durations: it jumps when the clock is corrected."""
    for node in ast.walk(source.tree):
        # A time that is stored, compared or subtracted is a measurement; one passed on directly is a timestamp.
        parts = [node.value] if isinstance(node, ast.Assign) else [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Assign | ast.BinOp | ast.Compare) and any(
            isinstance(part, ast.Call) and source.full_name(part.func) in WALL_CLOCKS for part in parts
        ):
            yield source.at(node.lineno, "measures by the time of day, which jumps: time.monotonic does not")


# --- security ---------------------------------------------------------------------------------------------------


def security(source: Source) -> Iterator[str]:
    """No code runs data as code."""
    for imported in source.imports:
        if imported.library in PICKLE_MODULES:
            yield source.at(imported.line, f"{imported.library} runs what it reads")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name | ast.Attribute) and source.full_name(node) in BANNED_CALLS:
            name = source.full_name(node)
            yield source.at(node.lineno, f"{name} {BANNED_CALLS[name]}")
        if isinstance(node, ast.Call):
            yield from (source.at(node.lineno, complaint) for complaint in _unsafe_call(source, node))


def _unsafe_call(source: Source, call: ast.Call) -> Iterator[str]:
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    for name in MUST_BE_FALSE & set(options):
        if not _is_constant(options[name], False):
            yield f"{name} is not False"
    weights_only, function = options.get("weights_only"), source.full_name(call.func)
    if "weights_only" in options and not _is_constant(weights_only, True):
        yield "weights_only is not True"
    if function == "torch.load" and "weights_only" not in options:
        yield "torch.load without weights_only=True runs what it reads"
    if function in NEEDS_SAFE_LOADER:
        loader = options.get("Loader") or (call.args[1] if len(call.args) > 1 else None)
        if loader is None or not source.full_name(loader).endswith("SafeLoader"):
            yield f"{function} without a safe loader"


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
