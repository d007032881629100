"""The light verbs answer at once and load nothing heavy: they run on login nodes where nothing else is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "tensordict", "pyarrow", "numpy")
CONFIG = "configs/laptop-ppo.yaml"
LIGHT = [
    (),
    ("--help",),
    ("--version",),
    ("show", "--help"),
    ("explain", "--help"),
    ("show", "--schema"),
    ("algorithms",),
    ("show", CONFIG),
    ("explain", CONFIG),
]

PROGRAM = """
import sys
from mrl.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
loaded = [name for name in HEAVY if sys.modules.get(name)]
sys.exit(f"loaded: {loaded}" if loaded else code)
"""
INSTALLED = f"HEAVY = {HEAVY!r}{PROGRAM}"
NOT_INSTALLED = f"import sys\nsys.modules.update(dict.fromkeys({HEAVY!r}))\n{INSTALLED}"  # None: importing it fails


def mrl(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_light_commands_load_and_need_no_heavy_library(arguments: tuple[str, ...]) -> None:
    for program in (NOT_INSTALLED, *[INSTALLED] * (CONFIG in arguments)):
        finished = mrl(program, *arguments)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.strip()


@pytest.mark.parametrize("arguments", LIGHT[:5], ids=" ".join)
def test_help_answers_soon(arguments: tuple[str, ...]) -> None:
    def is_soon() -> bool:
        begin = os.times()
        assert mrl(INSTALLED, *arguments).returncode == 0
        end = os.times()
        # CPU time: 0.2 s on a quiet machine, and more than twice as long on a core that other work shares.
        return end.children_user + end.children_system - begin.children_user - begin.children_system < 1.0

    assert any(is_soon() for _ in range(3))


@pytest.mark.parametrize(
    ("program", "message"), [(INSTALLED, "loaded: ['numpy']"), (NOT_INSTALLED, "ModuleNotFoundError")]
)
def test_a_heavy_import_would_be_noticed(program: str, message: str) -> None:
    finished = mrl(program.replace("import main\n", "import main\nimport numpy\n"), "--version")
    assert finished.returncode != 0
    assert message in finished.stderr
