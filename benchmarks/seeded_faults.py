"""How many of a hundred mistakes in `mrl/algos/` the tests notice.

    python benchmarks/seeded_faults.py [--json FILE] [--only TEXT]

`mrl/algos/` and `tests/algos/` are copied to a temporary folder, one mistake (`algorithm_faults.py`) is put into the
copy, and the tests run on it until the first fails. The process that has torch loaded forks once per mistake. Exit
status 1 if fewer than 90 of 100 are caught.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import hypothesis  # noqa: F401  loaded before the forks
import pytest
import torch
import torch.distributed  # loaded before the forks
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.algorithm_faults import FAULTS
from benchmarks.harness import Benchmark, parser

REPOSITORY = Path(__file__).resolve().parent.parent
LEAST_CAUGHT_SHARE = 0.9
FEWEST_FAULTS = 100
TIMEOUT_S = 120
"""A fault that makes the tests hang is caught, too."""
CASES_PER_TEST = "25"
TEST_FILES = ("test_field_bugs.py", "test_reference_values.py", "test_against_float64.py", "test_properties.py")
PASSED, FAILED = int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED)


def copy_of_sources(folder: Path) -> None:
    """What the tests of the algorithms need, and nothing else."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "mrl" / "algos", folder / "mrl" / "algos", ignore=ignore)
    shutil.copytree(REPOSITORY / "tests" / "algos", folder / "tests" / "algos", ignore=ignore)
    for name in ("__init__.py", "errors.py", "registry.py"):
        shutil.copy(REPOSITORY / "mrl" / name, folder / "mrl" / name)


def run_tests(folder: Path) -> int:
    """pytest's exit code on the copy, in a fork; `FAILED` for a run that had to be stopped."""
    child = os.fork()
    if child == 0:
        _tests_in_child(folder)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return FAILED


def _tests_in_child(folder: Path) -> None:
    os.chdir(folder)
    os.environ["MRL_ALGO_CASES"] = CASES_PER_TEST
    sys.path[0] = str(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("mrl", "tests")]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", os.devnull]
        options.append(f"--rootdir={folder}")
        code = pytest.main([*options, *(str(folder / "tests" / "algos" / name) for name in TEST_FILES)])
    os._exit(int(code))


def apply(folder: Path, fault: tuple[str, str, str]) -> None:
    """Put the mistake into the copy."""
    name, old, new = fault
    path = folder / "mrl" / "algos" / name
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{name}: occurs {text.count(old)} times, not once: {old}")
    path.write_text(text.replace(old, new))


def main() -> int:
    """Check that the tests pass as they are, then count."""
    arguments_parser = parser("How many of a hundred mistakes in mrl/algos/ the tests notice.")
    arguments_parser.add_argument("--only", default="", help="only faults whose file or text contains this")
    arguments = arguments_parser.parse_args()
    torch.set_num_threads(1)
    chosen = [fault for fault in FAULTS if arguments.only in " ".join(fault)]
    bench = Benchmark("seeded_faults")
    begin = time.perf_counter()
    num_caught = 0
    for number, fault in enumerate([None, *chosen]):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy_of_sources(folder)
            if fault is not None:
                apply(folder, fault)
            code = run_tests(folder)
        if fault is None:
            if code != PASSED:
                raise SystemExit(f"the tests fail without any fault (pytest's exit code {code})")
            continue
        if code not in (PASSED, FAILED):
            raise SystemExit(f"not a fault that tests could judge (pytest's exit code {code}): {fault}")
        num_caught += code == FAILED
        bench.row(number=number, file=fault[0], caught=code == FAILED, fault=" ".join(fault[2].split())[:90])
    bench.row(file="all", caught=f"{num_caught} of {len(chosen)}", fault=f"{time.perf_counter() - begin:.0f} s")
    bench.goal("faults", len(chosen), at_least=FEWEST_FAULTS)
    bench.goal("share that the tests catch", num_caught / max(1, len(chosen)), at_least=LEAST_CAUGHT_SHARE)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
