"""Share of several hundred seeded faults in mrl that the tests detect, by package.

    python benchmarks/seeded_faults.py [--json FILE] [--only TEXT] [--slow] [--jobs N] [--verdicts FILE]

`benchmarks/faults/` has the faults, one file per package, and `tests.toml`, which lists the tests for changes of a
file. The sources are copied to a temporary folder, one fault is put into the copy, and the tests run on it until the
first failure, in a process that has already loaded the heavy libraries; without the fault, the failing test must pass.
With `--slow`, the slow tests run if the quick ones miss a fault. With `--verdicts`, each verdict is written
immediately, and faults with a verdict are skipped: all faults take hours, which can be split. A verdict is valid while
its fault is unchanged. `further.toml` has faults that were added after the tests had been finished.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser

REPOSITORY = Path(__file__).resolve().parent.parent
FAULTS = REPOSITORY / "benchmarks" / "faults"
FURTHER = "further"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
COPIED = ("mrl", "tests", "benchmarks", "configs", "launch", "docs", *PAGES, "pyproject.toml")
LIMITS_S = {"quick": 300.0, "slow": 600.0}
"""Time limit of one call of pytest. Tests that are still running have not detected the fault."""
CASES_PER_TEST = "25"
MIN_SHARES = {"all": 0.95, "package": 0.9, FURTHER: 0.9}
PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's exit codes
DEADLY = [-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGUSR1, -signal.SIGSEGV, -signal.SIGABRT]
"""Exit codes by which a fault may end the tests themselves. SIGKILL may come from the machine, when memory runs out."""


@dataclass(frozen=True)
class Fault:
    """One change of one file."""

    id: str
    file: str
    old: str
    new: str
    what: str = ""
    group: str = ""
    """Package of the fault, or `further`."""


@dataclass(frozen=True)
class Verdict:
    """Result of the tests for a fault."""

    fault: Fault
    caught: str
    """`quick`, `slow`, `no`, or `invalid` if no test could be collected."""
    by: str
    seconds: float


def read_faults() -> list[Fault]:
    """Return all faults, after checking that each text occurs once in its file."""
    faults = []
    for path in sorted(FAULTS.glob("*.toml")):
        if path.stem != "tests":
            faults += [Fault(**entry, group=path.stem) for entry in tomllib.loads(path.read_text())["fault"]]
    for fault in faults:
        if (count := (REPOSITORY / fault.file).read_text().count(fault.old)) != 1:
            raise SystemExit(f"{fault.id}: {fault.file} has this text {count} times, not once: {fault.old}")
    order = list(table()["quick"])
    return sorted(faults, key=lambda fault: order.index(package_of(fault.file)))


def table() -> dict[str, Any]:
    """Return the content of `tests.toml`."""
    return tomllib.loads((FAULTS / "tests.toml").read_text())


def package_of(file: str) -> str:
    """Return the package of a file: `mrl/trainer` for `mrl/trainer/ppo.py`."""
    return "/".join(file.split("/")[:2])


def tests_of(file: str, speed: str) -> list[str]:
    """Return the tests for a change of a file, one call of pytest each: its own tests first, then its package's."""
    own_tests = Path("tests", *Path(file).parts[1:-1], f"test_{Path(file).stem}.py")
    chosen: list[str] = table()[speed].get(package_of(file), [])
    return [str(own_tests), *chosen] if (REPOSITORY / own_tests).exists() else chosen


def copy_of_sources(folder: Path) -> None:
    """Copy everything that the tests need."""
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


class FirstFailure:
    """A pytest plugin that records the first failing test, or the first test that cannot be collected."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = str(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"not collected: {report.nodeid}"


def run_tests(folder: Path, tests: str, speed: str) -> tuple[int, str]:
    """Return pytest's exit code on the copy, in a fork, and the first failing test; PASSED if time is up."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _tests_in_child(folder, tests, speed, writing)
    os.close(writing)
    deadline, status = time.monotonic() + LIMITS_S[speed], None
    while status is None and time.monotonic() < deadline:
        done, wait_status = os.waitpid(child, os.WNOHANG)
        status = wait_status if done else None
        time.sleep(0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return PASSED, "out of time"
    with os.fdopen(reading) as file:
        code, first = os.waitstatus_to_exitcode(status), file.read()
    return PASSED if code == NO_TESTS else code, first


def _tests_in_child(folder: Path, tests: str, speed: str, writing: int) -> None:
    import pytest

    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ |= {"MRL_ALGO_CASES": CASES_PER_TEST, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    sys.path[0] = str(folder)
    del sys.modules["__main__"].__file__  # otherwise processes spawned by tests would import this file's mrl
    for name in [name for name in sys.modules if name.split(".")[0] in ("mrl", "tests", "benchmarks")]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        first = FirstFailure()
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--basetemp={folder}/tmp"]
        options += ["-m", "slow" if speed == "slow" else "not slow", "-W", "ignore"]
        options += [f"--deselect={test}" for test in table()["deselected"]]
        code = pytest.main([*options, tests], plugins=[first])
    os.write(writing, first.name.encode())
    os._exit(int(code))


class Judge:
    """Puts faults into a copy of the sources and runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: dict[str, bool] = {}
        copy_of_sources(folder)

    def judge(self, fault: Fault, speeds: Sequence[str]) -> Verdict:
        """Run the fault's tests, its own module's first, until one fails that passes without the fault."""
        began, path = time.monotonic(), self.folder / fault.file
        original, notes = path.read_text(), []
        for speed in speeds:
            for tests in tests_of(fault.file, speed):
                path.write_text(original.replace(fault.old, fault.new))
                code, by = run_tests(self.folder, tests, speed)
                path.write_text(original)
                if code == PASSED or (by and not self._is_sound(by, speed)):
                    notes += [by] if by else []
                    continue
                caught = speed if code in (FAILED, *DEADLY) else "invalid"
                return Verdict(fault, caught, by or f"pytest's exit code {code}", time.monotonic() - began)
        return Verdict(fault, "no", ", ".join(notes), time.monotonic() - began)

    def _is_sound(self, test: str, speed: str) -> bool:
        """Return whether a test passes without any fault; otherwise its failure means nothing."""
        if test not in self._sound:
            self._sound[test] = run_tests(self.folder, test, speed)[0] == PASSED
        return self._sound[test]


def _work(faults: Sequence[Fault], speeds: Sequence[str], waiting: Queue[int | None], done: Queue[Verdict]) -> None:
    """Judge faults until none is waiting."""
    _preload()
    with tempfile.TemporaryDirectory() as temporary:
        judge = Judge(Path(temporary))
        while (number := waiting.get()) is not None:
            done.put(judge.judge(faults[number], speeds))


def _preload() -> None:
    """Load what most tests load first, so that forks have it immediately."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.multiprocessing

    import tests.conftest  # noqa: F401  # it sets variables that libraries read on import

    importlib.import_module("transformers.models.auto.modeling_auto")

    torch.set_num_threads(1)


def verdicts(faults: Sequence[Fault], speeds: Sequence[str], jobs: int) -> Iterator[Verdict]:
    """Yield the verdict of every fault, in order of completion."""
    context = multiprocessing.get_context("fork")
    waiting: Queue[int | None] = context.Queue()
    done: Queue[Verdict] = context.Queue()
    for number in [*range(len(faults)), *[None] * jobs]:
        waiting.put(number)
    workers = [context.Process(target=_work, args=(faults, speeds, waiting, done)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for _ in faults:
            yield done.get()
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def known_verdicts(path: Path, faults: Sequence[Fault]) -> list[Verdict]:
    """Return the verdicts of an earlier call on these faults, without faults that have changed since."""
    by_text = {(fault.id, fault.old, fault.new): fault for fault in faults}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    texts = [(line["id"], line["old"], line["new"]) for line in lines]
    return [
        Verdict(by_text[text], line["caught"], line["by"], line["seconds"])
        for text, line in zip(texts, lines, strict=True)
        if text in by_text
    ]


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Append one line."""
    fault = verdict.fault
    line = {"id": fault.id, "old": fault.old, "new": fault.new, "caught": verdict.caught, "by": verdict.by}
    with path.open("a") as file:
        file.write(json.dumps(line | {"seconds": round(verdict.seconds, 1)}) + "\n")


def summarize(bench: Benchmark, judged: Sequence[Verdict]) -> None:
    """Add a row per package, the undetected faults, and the goals."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in judged:
        groups.setdefault(verdict.fault.group, []).append(verdict)
    planted = [verdict for group, of_group in groups.items() for verdict in of_group if group != FURTHER]
    for group, of_group in [*sorted(groups.items()), ("all", planted)]:
        counts = {
            kind: sum(verdict_of_group.caught == kind for verdict_of_group in of_group)
            for kind in ("quick", "slow", "no", "invalid")
        }
        bench.row(group=group, faults=len(of_group), **counts)
    for verdict in judged:
        if verdict.caught in ("no", "invalid"):
            bench.row(group=verdict.fault.group, fault=verdict.fault.id, what=verdict.fault.what or verdict.fault.new)
    bench.goal("faults", len(judged), at_least=200)
    bench.goal("share caught, all", share(planted), at_least=MIN_SHARES["all"])
    for group, of_group in sorted(groups.items()):
        bench.goal(f"share caught, {group}", share(of_group), at_least=MIN_SHARES["package"])


def share(found: Sequence[Verdict]) -> float:
    """Return the share of valid faults that were detected."""
    valid = [verdict for verdict in found if verdict.caught != "invalid"]
    return sum(verdict.caught != "no" for verdict in valid) / max(1, len(valid))


def main() -> int:
    """Judge the chosen faults, and count."""
    arguments_parser = parser("Share of several hundred seeded faults in mrl that the tests detect.")
    arguments_parser.add_argument(
        "--only", default="", help="only faults with this id, or whose file contains this text"
    )
    arguments_parser.add_argument("--slow", action="store_true", help="also run slow tests, if no quick test fails")
    arguments_parser.add_argument("--jobs", type=int, default=1, help="faults that are judged at the same time")
    arguments_parser.add_argument("--verdicts", type=Path, help="a file of verdicts to read and continue")
    arguments = arguments_parser.parse_args()
    only = arguments.only.split(",")
    faults = [
        fault
        for fault in read_faults()
        if not arguments.only or fault.id in only or any("/" in text and text in fault.file for text in only)
    ]
    bench, found = Benchmark("seeded_faults"), []
    if arguments.verdicts:
        found += known_verdicts(arguments.verdicts, faults)
    judged = {verdict.fault.id for verdict in found}
    waiting = [fault for fault in faults if fault.id not in judged]
    for verdict in verdicts(waiting, ("quick", "slow") if arguments.slow else ("quick",), arguments.jobs):
        found.append(verdict)
        if arguments.verdicts:
            write_verdict(arguments.verdicts, verdict)
        line = f"{len(found)}/{len(faults)} {verdict.fault.id} {verdict.fault.file} {verdict.caught}"
        print(f"{line} {verdict.seconds:.0f} s {verdict.by}", flush=True)
    summarize(bench, found)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
