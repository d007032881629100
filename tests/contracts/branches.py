"""Find code of mrl that only runs on CUDA. No test without a GPU runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MRL = Path(__file__).parents[2] / "mrl"
_CUDA_WORD = re.compile(r"cuda|cumem|transformer_engine(?!_fault)|ProcessGroupNCCL|TRITON|is_cpu")
STAND_IN = "engine/cpu_shim.py"  # replaces CUDA on a CPU; installing it on a machine with CUDA is an error


def cuda_branches() -> set[str]:
    """Return `file.py:function` of each function of mrl that uses a name of CUDA."""
    files = sorted(file for file in MRL.rglob("*.py") if str(file.relative_to(MRL)) != STAND_IN)
    return {f"{file.relative_to(MRL)}:{name}" for file in files for name in cuda_scopes(file.read_text())}


def cuda_scopes(source: str) -> set[str]:
    """Return the functions that use a name of CUDA, compare a value with `"cuda"`, or pass `"cuda"` as an argument.

    An import alone does not count, because the imported name is found where it is used. Code outside of functions
    counts as `<module>`.
    """
    return {name or "<module>" for name, node in _scoped(ast.parse(source), "") if _is_cuda(node)}


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        yield scope, child
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _scoped(child, f"{scope}.{child.name}".removeprefix(".") if named else scope)


def _is_cuda(node: ast.AST) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)):
        return bool(_CUDA_WORD.search(node.id if isinstance(node, ast.Name) else node.attr))
    parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    parts += node.args if isinstance(node, ast.Call) else []
    return any(isinstance(part, ast.Constant) and part.value == "cuda" for part in parts)
