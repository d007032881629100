"""Code that a model wrote cannot leave its process: programs of each kind, the kernel's filter, and the remains."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.reward import RewardFunctionConfig
from mrl.errors import RewardError, SetupError
from mrl.rewards import confinement, contained, sandbox
from mrl.rewards.functions.programs import code, warm_up
from mrl.rewards.outcome import Score
from mrl.rewards.sandbox import ContainedProgram, Limits, ProgramEnded
from tests.rewards.conftest import Bench
from tests.rewards.programs import ATTACKS, ENDLESS, HUNGRY, LIMITS, RIGHT, TOTAL, WRONG, Case, Outside, hostile

MOST = ("inherited files", "its environment", "rights of root", "signal to the parent", "environment of the parent")
CHOSEN = {
    "right": RIGHT[::6],
    "wrong": WRONG[1::4],
    "endless": ENDLESS[1::8],
    "hungry": [*HUNGRY[:12:4], *HUNGRY[12:17:2]],
    "hostile": [hostile(name, ATTACKS[name], is_caught=True) for name in dict.fromkeys([*list(ATTACKS)[::3], *MOST])],
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    outside = Outside(tmp_path_factory.mktemp("outside"))
    yield outside
    outside.close()


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in CHOSEN for case in CHOSEN[kind]],
    ids=lambda part: getattr(part, "name", ""),
)
def test_programs(kind: str, case: Case, outside: Outside) -> None:
    limits = LIMITS if kind in ("endless", "hungry") else {}
    assert code(case.sample(7, outside), limits=limits)["score"] == case.score
    assert not list(outside.changes())


FORGERIES = {
    "object equal to all": "class E:\n    __eq__ = __gt__ = lambda self, other: True\ndef f(x):\n    return E()",
    "number equal to all": "class E(int):\n    __eq__ = lambda self, other: True\ndef f(x):\n    return E(0)",
    "constants of the test": (
        "import sys\ndef f(x):\n    return max(c for c in sys._getframe(1).f_code.co_consts if type(c) is int)"
    ),
    "tests replaced": "import sys\ndef f(x):\n    for n in range(9):\n"
    "        vars(sys.modules['program'])[f'mrl_test_{n}'] = lambda: None\n    return 0",
    "answers written": "import os\ndef f(x):\n    for n in range(1, 32):\n        try:\n"
    "            os.write(n, b'x 42\\nx 43\\n')\n        except OSError: pass\n    os._exit(0)",
    "leaves well": "import os\ndef f(x):\n    os._exit(0)",
    "error that is caught": "import sys, os\nsys.excepthook = lambda *_: os._exit(0)\ndef f(x):\n    raise ValueError",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name: str, outside: Outside) -> None:
    """This holds if a test is `call == literal`. For other asserts, see docs/recipes.md for the remaining gap."""
    truth = "def check(f):\n    assert f(1) == 42\n    assert 43 == f(2)\n"
    sample = Case(name, FORGERIES[name]).sample(0, outside)
    sample = dataclasses.replace(sample, ground_truth=truth, extra_info={"entry_point": "f"})
    assert code(sample)["passed"] == 0


@pytest.mark.parametrize(
    "program",
    [
        FORGERIES["tests replaced"],
        FORGERIES["answers written"].replace("x 42\\nx 43", "x null\\nx null"),
        "try:\n    open('tests.py')\n    f = lambda x: 42\nexcept OSError:\n    f = lambda x: 0",
    ],
)
def test_nor_easily_where_the_assert_runs_beside_the_program(program: str, outside: Outside) -> None:
    sample = Case("", program).sample(0, outside)
    sample = dataclasses.replace(sample, ground_truth=["assert f(1) > 41", "assert f(2) > 41"])
    assert code(sample)["passed"] == 0


def ended_by(program: str) -> str:
    try:
        with ContainedProgram({"program.py": program}, "", range(0), Limits(**LIMITS)) as process:
            return str(process.rest(LIMITS["test_s"])[0])
    except ProgramEnded as ended:
        return ended.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "time"),
        ("while True: print('x' * 99)", "output"),
        ("for n in range(10 ** 6): open(str(n), 'w').close()", "files"),
        ("for n in range(40): open(str(n), 'wb').write(bytes(1 << 18))\nwhile True: pass", "files"),
        (HUNGRY[16].program, "threads"),
        ("x = bytes(1 << 30)", "1"),
        ("open('a', 'wb').truncate(1 << 21)", "1"),
        ("import signal\nsignal.raise_signal(9)", "1"),
        ("import ctypes\nctypes.string_at(0)", str(-signal.SIGSEGV)),
        ("(", str(contained.NO_PROGRAM)),
    ],
)
def test_what_ends_a_program(program: str, reason: str) -> None:
    assert ended_by(program) == reason


def test_a_program_leaves_no_descriptor_open() -> None:
    warm_up()
    before = len(os.listdir("/proc/self/fd"))
    assert [ended_by(program) for program in ("print(1)", "while True: pass")] == ["0", "time"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_a_processor_costs_a_program_nothing() -> None:
    """It gets a sixth of one processor, so by wall clock it takes longer than its limit."""
    program = "import time\nwhile time.process_time() < 0.4: pass\nprint('done')"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(5)]
    own = os.sched_getaffinity(0)
    try:
        for pid in [0, *(process.pid for process in busy)]:
            os.sched_setaffinity(pid, {min(own)})
        begin = time.monotonic()
        with ContainedProgram({"program.py": program}, "", range(0), Limits()) as process:
            assert process.rest(1.0) == (0, b"done\n")
        assert time.monotonic() - begin > 1
        assert process.used_s < 1
    finally:
        os.sched_setaffinity(0, own)
        for process_ in busy:
            process_.kill()
            process_.wait()


def test_a_worker_that_is_killed_leaves_a_directory_to_the_next(bench: Bench, outside: Outside) -> None:
    """The sample's limit is shorter than the program's. The program ends with the worker."""
    function = {"code": RewardFunctionConfig(name="code", options={"limits": {"test_s": 6}})}
    manager = bench.manager(functions=function, num_workers=1, limit_s=0.6, memory_bytes=1 << 30)
    endless, right = ENDLESS[0].sample(1, outside), Case("right", TOTAL, score=1.0).sample(1, outside)
    first, second = manager.score([endless, right])
    assert not isinstance(first, Score)
    assert first.kind == "timeout"
    assert isinstance(second, Score)
    assert second.parts["code/passed"] == 2
    assert len(bench.settle(2)) == 2, "the supervisor and a worker"
    assert not [change for change in outside.changes() if not change.startswith("children")]


def test_a_program_ends_with_who_started_it() -> None:
    """This holds even if the worker is killed and no other process looks for its children."""
    read, write = os.pipe()
    starter = os.fork()
    if starter == 0:
        with ContainedProgram({"program.py": ENDLESS[0].program}, "", range(0), Limits()) as process:
            os.write(write, f"{process._process.pid} {process._directory}".encode())
            time.sleep(60)
        os._exit(0)
    pid, directory = os.read(read, 1000).decode().split(" ", 1)
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    deadline = time.monotonic() + 2
    while os.path.exists(f"/proc/{pid}/fd/1") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}/fd/1"), "at most its status waits for init"
    sandbox._remove_stale.cache_clear()
    sandbox._remove_stale(os.path.dirname(directory))
    assert not os.path.exists(directory)
    for descriptor in (read, write):
        os.close(descriptor)


def test_directories_in_use_and_those_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale, other = tmp_path / f"{sandbox._PREFIX}stale", tmp_path / "other"
    for directory in (stale, other):
        directory.mkdir()
        (directory / "file").write_text("x")
    (tmp_path / f"{sandbox._PREFIX}link").symlink_to(other)
    foreign = tmp_path / f"{sandbox._PREFIX}foreign"
    foreign.mkdir()
    if os.getuid() == 0:
        os.chown(foreign, 65534, 65534)
    else:
        foreign.rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ContainedProgram({"program.py": "input()"}, "", range(0), Limits()) as process:
        sandbox._remove_stale.cache_clear()
        sandbox._remove_stale(str(tmp_path))
        assert process._directory.exists()
        assert not stale.exists()
    assert not process._directory.exists()
    assert (other / "file").exists()
    assert foreign.exists() == (os.getuid() == 0)


def test_a_kernel_without_the_means_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_landlock_version", lambda: -1)
    confinement.check_confinement.cache_clear()
    with pytest.raises(SetupError, match=r"which has no Landlock \(Linux 5.13") as raised:
        warm_up()
    assert "http" in raised.value.fix
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="no list of system calls for riscv64, only for x86_64 and aarch64, and no L"):
        confinement.check_confinement()


def test_a_process_that_cannot_be_contained_runs_nothing(monkeypatch: pytest.MonkeyPatch, outside: Outside) -> None:
    monkeypatch.setattr(sandbox, "seccomp_filter", lambda: struct.pack("=HBBI", 0xFFFF, 0, 0, 0))
    with pytest.raises(RewardError, match=r"cannot start a contained process: .*prctl\(22, 2\): Invalid argument"):
        warm_up()
    assert not list(outside.changes())


def verdict(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """Return the filter's verdict on a system call."""
    given = b"".join(struct.pack("=Q", argument) for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6])
    data = struct.pack("=IIQ", number, architecture, 0) + given
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        else:
            assert code == 0x15, "no other instruction is used"
            at += if_true if accumulator == operand else if_false


X86, ARM = ("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)
ALLOW, REFUSE, NONE, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        (X86, 0, (), ALLOW),  # read
        (ARM, 63, (), ALLOW),
        (X86, 57, (), REFUSE),  # fork
        (X86, 59, (), REFUSE),  # execve
        (ARM, 221, (), REFUSE),
        (X86, 41, (2, 1, 0), REFUSE),  # socket
        (ARM, 198, (2, 1, 0), REFUSE),
        (X86, 62, (1, 9), REFUSE),  # kill
        (ARM, 129, (1, 9), REFUSE),
        (ARM, 117, (16, 1), REFUSE),  # ptrace
        (X86, 56, (0x3D0F00,), ALLOW),  # clone of a thread
        (ARM, 220, (0x3D0F00,), ALLOW),
        (ARM, 220, (17,), REFUSE),
        (X86, 56, (0x3D0F00 | 0x10000000,), REFUSE),
        (ARM, 435, (), NONE),  # clone3
        (X86, 257, (0, 0, 0o101), ALLOW),  # openat: Landlock decides
        (X86, 257, (0, 0, 0o1000), REFUSE),
        (ARM, 56, (0, 0, 0o1000), REFUSE),
        (ARM, 56, (0, 0, 0o1001), ALLOW),
        (X86, 2, (0, 0o1000), REFUSE),
        (ARM, 2, (), REFUSE),
        (ARM, 29, (0, 0x5401), ALLOW),  # ioctl
        (ARM, 29, (0, 0x5412), REFUSE),
        (ARM, 25, (3, 1), ALLOW),  # fcntl
        (ARM, 25, (3, 8), REFUSE),
        (ARM, 167, (1,), REFUSE),  # prctl
        (ARM, 261, (0,), ALLOW),  # prlimit64
        (ARM, 261, (1,), REFUSE),
        (X86, 0x40000000, (), REFUSE),
        (X86, 9999, (), REFUSE),
    ],
)
def test_the_filter(machine: tuple[str, int], number: int, arguments: tuple[int, ...], expected: int) -> None:
    name, architecture = machine
    program = confinement.seccomp_filter(name)
    assert verdict(program, number, *arguments, architecture=architecture) == expected
    assert verdict(program, number, *arguments, architecture=0x40000003) == KILL
