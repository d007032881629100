"""Programs as models write them, right, wrong, endless, hungry and hostile, each with its tests and its score.

A hostile program tries something and prints the right answer only where that was refused with an error: a score of 1
says from within that it was contained, and `Outside` says the same from without. The others let the refusal end them.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.rewards.sample import Sample

LIMITS = {"test_s": 0.3, "program_s": 5.0, "memory_bytes": 1 << 29, "output_bytes": 1 << 16, "file_bytes": 1 << 20}
SECRET = "canary-5up3r-hidden"
READ = "a, b = map(int, input().split())\n"
TOTAL = READ + "print(a + b + @N)\n"
DEFINE = "def total(a, b):\n    return a + b + @N\n"


@dataclass(frozen=True)
class Case:
    """A program, the form of its tests (`printed`, `called`, `asserted`, `checked`), and its score."""

    name: str
    program: str
    form: str = "printed"
    score: float = 0.0

    def sample(self, number: int, outside: Outside) -> Sample:
        """Return the sample of the task with this number, which adds it to two others."""
        words = {"@N": str(number), "@CANARY": str(outside.canary), "@PORT": str(outside.port)}
        program = self.program
        for word, meant in words.items():
            program = program.replace(word, meant)
        truth = tests_of(self.form, number)
        return Sample(
            prompt="?",
            response=f"Let me see.\n```python\n{program}\n```\nDone.",
            num_response_tokens=9,
            ground_truth=truth,
            data_source="sums",
            extra_info={"entry_point": "total"},
            uid=self.name,
            row_id=number,
        )


def tests_of(form: str, number: int) -> Any:
    """Return two tests of the task in one of the forms."""
    pairs = [(1, 2), (number + 2, -40)]
    totals = [a + b + number for a, b in pairs]
    match form:
        case "printed":
            return {"inputs": [f"{a} {b}\n" for a, b in pairs], "outputs": [f"{total}\n" for total in totals]}
        case "called":
            return {"fn_name": "total", "inputs": [list(pair) for pair in pairs], "outputs": totals}
        case "asserted":
            return {"test_list": [f"assert total{pair} == {total}" for pair, total in zip(pairs, totals, strict=True)]}
    lines = [f"    assert candidate{pair} - {total} == 0, 'no'" for pair, total in zip(pairs, totals, strict=True)]
    return "\n".join(["def check(candidate):", *lines])


RIGHT = [
    Case("input", TOTAL, score=1),
    Case("read all", "import sys\na, b = map(int, sys.stdin.read().split())\nprint(f'\\n {a + b + @N}  ')\n", score=1),
    Case("line by line", "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())) + @N)\n", score=1),
    Case("guard", f"def main():\n    {READ}    print(a + b + @N)\nif __name__ == '__main__':\n    main()\n", score=1),
    Case(
        "deep recursion in a thread",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def deep(n):\n    return n and deep(n - 1)\n"
        f"def main():\n    deep(20000)\n    {READ}    print(a + b + @N)\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()\n",
        score=1,
    ),
    Case("numpy", "import numpy\n" + READ + "print(numpy.add(a, b) + @N)\n", score=1),
    Case("exit 0", TOTAL + "import sys\nsys.exit(0)\n", score=1),
    Case("noise on stderr", "import sys\nprint('x' * 100000, file=sys.stderr)\n" + TOTAL, score=1),
    Case("own file", READ + "open('a', 'w').write(str(a + b + @N))\nprint(open('a').read())\n", score=1),
    Case(
        "temporary file",
        "import tempfile\n" + READ + "with tempfile.TemporaryFile('w+') as file:\n"
        "    file.write(str(a + b + @N))\n    file.seek(0)\n    print(file.read())\n",
        score=1,
    ),
    Case("raised limits", "import resource\nresource.getrlimit(resource.RLIMIT_AS)\n" + TOTAL, score=1),
    Case("class", "class Solution:\n    def total(self, a, b):\n        return a + b + @N\n", "called", 1),
    Case("function", DEFINE, "called", 1),
    Case("numpy scalar", "import numpy\ndef total(a, b):\n    return numpy.int64(a + b + @N)\n", "called", 1),
    Case("in a list", "def total(a, b):\n    return (a + b + @N)\n", "called", 1),
    Case("asserts", DEFINE, "asserted", 1),
    Case(
        "dataclass", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n" + DEFINE, "asserted", 1
    ),
    Case("prints as well", "print('hello')\ndef total(a, b):\n    print(a)\n    return a + b + @N\n", "asserted", 1),
    Case("check", DEFINE, "checked", 1),
    Case("sleeps a little", "import time\ntime.sleep(0.02)\n" + DEFINE, "checked", 1),
]
ALWAYS_EQUAL = "class E(int):\n    def __eq__(self, other): return True\n    __sub__ = __eq__\n"
WRONG = [
    Case("off by one", READ + "print(a + b + @N + 1)\n"),
    Case("half right", READ + "print(a + b + @N if a == 1 else 'no')\n", score=0.5),
    Case("silent", READ),
    Case("one line more", TOTAL + "print('done')\n"),
    Case("right, then raises", TOTAL + "raise ValueError\n"),
    Case("right, then status 3", TOTAL + "import sys\nsys.exit(3)\n"),
    Case("no Python", "print(\n"),
    Case("null byte", "print('\0')\n"),
    Case("unknown name", READ + "print(a + c)\n"),
    Case("verdict printed", "import sys\nprint('ready')\nprint('passed')\nsys.exit(0)\n"),
    Case("output closed", "import os\nos.close(1)\n"),
    Case("other name", "def sum_of(a, b):\n    return a + b + @N\n", "called"),
    Case("a text", "def total(a, b):\n    return str(a + b + @N)\n", "called"),
    Case("raises", "def total(a, b):\n    raise KeyboardInterrupt\n", "called"),
    Case("leaves at once", "import os\nos._exit(0)\n", "asserted"),
    Case("leaves in the call", "import os\ndef total(a, b):\n    os._exit(0)\n", "checked"),
    Case("always equal", ALWAYS_EQUAL + "def total(a, b):\n    return E()\n", "asserted"),
    Case(
        "answers instead of the driver",
        "import os\nfor n in range(3, 32):\n    try:\n        os.write(n, b' loaded\\n @N\\n null\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)\n",
        "checked",
    ),
    Case("builtins replaced", "import builtins\nbuiltins.vars = builtins.map = lambda *_: 'null'\n", "checked"),
    Case("exits", "import sys\ndef total(a, b):\n    sys.exit(0)\n", "checked"),
]
ENDLESS = [
    Case("loop", "while True:\n    pass\n"),
    Case("sleep", "import time\ntime.sleep(1000)\n"),
    Case("right, then a loop", TOTAL + "while True:\n    pass\n"),
    Case("right and flushed, then sleep", TOTAL.replace(")\n", ", flush=True)\n", 1) + "import time\ntime.sleep(99)\n"),
    Case("regex", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n"),
    Case("power", "len(str(10 ** 10 ** 9))\n"),
    Case("generator", "import itertools\nsum(1 for _ in itertools.count())\n"),
    Case("waits for input", "import os\nr, w = os.pipe()\nos.read(r, 1)\n"),
    Case("lock", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n"),
    Case(
        "thread that stays", "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n" + TOTAL
    ),
    Case(
        "spinning threads",
        "import threading\ndef f():\n    while 1: pass\nfor _ in range(4): threading.Thread(target=f).start()\n",
    ),
    Case("at exit", "import atexit, time\natexit.register(time.sleep, 99)\n" + TOTAL),
    Case("signals ignored", "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass\n"),
    Case("exceptions caught", "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"),
    Case("closed files", "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(99)\n"),
    Case("loop in the call", "def total(a, b):\n    while True: pass\n", "called"),
    Case("loop in one call", "def total(a, b):\n    while a != 1: pass\n    return a + b + @N\n", "called", 0.5),
    Case("loop while loaded", "while True: pass\n", "asserted"),
    Case("loop in the assert", "def total(a, b):\n    while True: pass\n", "checked"),
    Case("lazy result", "import itertools\ndef total(a, b):\n    return list(itertools.repeat(a))\n", "called"),
]
HUNGRY = [
    Case("list", "x = []\nwhile True:\n    x.append(bytes(1 << 22))\n"),
    Case("one block", "x = bytearray(1 << 40)\n"),
    Case("text", "x = 'x'\nwhile True:\n    x += x\n"),
    Case("shared memory", "import mmap\nx = mmap.mmap(-1, 1 << 34)\n"),
    Case("recursion", "import sys\nsys.setrecursionlimit(10 ** 9)\n"
         "def f(x):\n    return f([x, bytes(1 << 16)])\nf(1)\n"),
    Case("memory caught", "x = []\nwhile True:\n    try:\n        x.append(bytes(1 << 20))\n    except MemoryError:\n"
         "        pass\n"),
    Case("lines", "while True:\n    print('x' * 1000)\n"),
    Case("one long line", "import sys\nwhile True:\n    sys.stdout.write('x' * 65536)\n"),
    Case("right, then lines", TOTAL + "while True:\n    print()\n"),
    Case("stderr", "import sys\nwhile True:\n    sys.stderr.write('x' * 65536)\n"),
    Case("large file", "with open('a', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))\n"),
    Case("hole in a file", "with open('a', 'wb') as file:\n    file.truncate(1 << 40)\n"),
    Case("several files", "import itertools\nfor n in itertools.count():\n"
         "    open(str(n), 'wb').write(bytes(1 << 18))\n"),
    Case("empty files", "import itertools\nfor n in itertools.count():\n    open(str(n), 'wb').close()\n"),
    Case("descriptors", "import os\nx = []\nwhile True:\n    x.append(os.open('.', os.O_RDONLY))\n"),
    Case("pipes", "import os\nwhile True:\n    os.pipe()\n"),
    Case("threads", "import threading, time\nthreading.stack_size(1 << 16)\n"
         "while True:\n    threading.Thread(target=time.sleep, args=(99,)).start()\n"),
    Case("huge result", "def total(a, b):\n    return [a] * 1000000\n", "called"),
    Case("nested result", "def total(a, b):\n"
         "    x = []\n    for _ in range(900):\n        x = [x]\n    return x\n", "called"),
    Case("memory in the call", "def total(a, b):\n    return bytes(1 << 40)\n", "asserted"),
]  # fmt: skip

SYSCALL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number[platform.machine() == 'aarch64'], *map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return result
kept = []
def text(value):
    kept.append(ctypes.create_string_buffer(value))
    return ctypes.addressof(kept[-1])
"""
# Attempts, in Python or as a system call with its number on x86_64 and aarch64.
ATTACKS = {
    "fork": "os.fork()",
    "fork by libc": "0 <= ctypes.CDLL(None).fork() or refuse()",
    "vfork": "call((58, 220), 0x4111)",
    "clone": "call((56, 220), 17, 0, 0, 0, 0)",
    "clone3": "call((435, 435), text(bytes(32) + bytes([17]) + bytes(55)), 88)",
    "fork of another ABI": "call((0x40000000 + 57, 1000), 0)",
    "subprocess": "subprocess.run(['sleep', '1000'])",
    "shell": "os.posix_spawn('/bin/sh', ['sh', '-c', 'sleep 1000'], {})",
    "exec": "os.execv('/bin/true', ['true'])",
    "tcp": "socket.create_connection(('127.0.0.1', @PORT), 1)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT))",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "socket pair": "socket.socketpair()",
    "netlink": "socket.socket(socket.AF_NETLINK)",
    "signal to the parent": "os.kill(os.getppid(), signal.SIGUSR1)",
    "signal to its group": "os.killpg(os.getpgid(os.getppid()), signal.SIGUSR1)",
    "signal to a thread of the parent": "call((234, 131), os.getppid(), os.getppid(), signal.SIGUSR1)",
    "queued signal to the parent": "call((129, 138), os.getppid(), signal.SIGUSR1, text(bytes(128)))",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGUSR1)",
    "signal by a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "write outside": "open('@CANARY.new', 'w')",
    "write above": "open('../new', 'w')",
    "overwrite": "open('@CANARY', 'w')",
    "append": "open('@CANARY', 'a')",
    "cut by name": "os.truncate('@CANARY', 0)",
    "cut while opened to read": "os.open('@CANARY', os.O_RDONLY | os.O_TRUNC)",
    "cut a library while opened to read": "os.open('own', os.O_RDONLY | os.O_CREAT | os.O_TRUNC)",
    "change a library": "os.open(os.__file__, os.O_WRONLY)",
    "remove": "os.unlink('@CANARY')",
    "rename": "os.rename('@CANARY', 'mine')",
    "put in its place": "open('a', 'w').close() or os.rename('a', '@CANARY')",
    "rights": "os.chmod('@CANARY', 0o777)",
    "owner": "os.chown('@CANARY', 1, 1)",
    "times": "os.utime('@CANARY', (1, 1))",
    "attribute": "os.setxattr('@CANARY', 'user.x', b'x')",
    "symbolic link": "os.symlink('@CANARY', 'link') or open('link').read()",
    "hard link": "os.link('@CANARY', 'link') or open('link').read()",
    "directory": "os.mkdir('directory')",
    "fifo": "os.mkfifo('fifo')",
    "read a file": "open('@CANARY').read()",
    "read through another name": "os.chdir('..') or open('@CANARY').read()",
    "list files": "os.listdir('/')",
    "accounts": "open('/etc/passwd').read()",
    "environment of the parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "files of the parent": "os.listdir(f'/proc/{os.getppid()}/fd')",
    "memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "memory of the parent by call": "call((310, 270), os.getppid(), 0, 0, 0, 0, 0)",
    "trace the parent": "call((101, 117), 16, os.getppid(), 0, 0)",
    "be traced": "call((101, 117), 0, 0, 0, 0)",
    "its environment": "os.environ['MRL_TEST_SECRET']",
    "inherited files": "[n for n in range(3, 32) if is_open(n)] or refuse()",
    "outlive the parent": "call((157, 167), 1, 0, 0, 0, 0)",
    "namespace": "call((272, 97), 0x10000000)",
    "other namespace": "call((308, 268), 0, 0)",
    "mount": "call((165, 40), text(b'none'), text(b'.'), text(b'tmpfs'), 0, 0)",
    "root directory": "os.chroot('.')",
    "user": "os.setuid(0)",
    "rights of root": "os.close(os.open('own', os.O_CREAT | os.O_WRONLY, 0)) or open('own').read()",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "limits of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (64, 64))",
    "processors of the parent": "os.sched_setaffinity(os.getppid(), {0})",
    "priority of the parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "session": "os.setsid()",
    "file in memory": "os.memfd_create('x')",
    "shared memory": "call((29, 194), 0, 4096, 0o1600)",
    "rings": "call((425, 425), 8, text(bytes(120)))",
    "kernel programs": "call((321, 280), 0, text(bytes(128)), 128)",
    "counters of the kernel": "call((298, 241), text(bytes(128)), 0, -1, -1, 0)",
    "keys": "call((250, 219), 0, -3, 1)",
    "page faults": "call((323, 282), 0)",
    "handles": "call((304, 265), -100, text(bytes(16)), 0)",
    "terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "log of the kernel": "call((103, 116), 3, text(bytes(64)), 64)",
    "host name": "socket.sethostname('x')",
    "loaded library": "ctypes.CDLL(os.path.join(os.path.dirname('@CANARY'), 'library.so'))",
}
HOSTILE_IMPORTS = "import ctypes, fcntl, mmap, os, resource, signal, socket, subprocess, sys\n"


def hostile(name: str, attack: str, *, is_caught: bool) -> Case:
    """Return a program that answers if it was refused, or that lets the refusal end it."""
    caught = "\ntry:\n    print('escaped', {})\nexcept (OSError, ValueError, KeyError):\n    print(a + b + @N)\n"
    refuse = "def refuse():\n    raise OSError\n"
    refuse += "def is_open(n):\n    try:\n        return os.fstat(n)\n    except OSError:\n        return None\n"
    form = caught if is_caught else "\nprint({})\nprint(a + b + @N)\n"
    return Case(name, HOSTILE_IMPORTS + SYSCALL + refuse + READ + form.format(attack), score=float(is_caught))


@dataclass
class Outside:
    """Things that a contained program must not reach: a file, a port, this process, and the temporary directory."""

    directory: Path
    canary: Path = field(init=False)
    signals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canary = self.directory / "canary"
        self.canary.write_text(SECRET)
        self.canary.chmod(0o600)
        self.temporary = self.directory / "temporary"
        self.temporary.mkdir()
        self._given = {name: os.environ.get(name) for name in ("TMPDIR", "MRL_TEST_SECRET")}
        os.environ |= {"TMPDIR": str(self.temporary), "MRL_TEST_SECRET": SECRET}
        tempfile.tempdir = None  # so that it is looked up again
        signal.signal(signal.SIGUSR1, lambda number, frame: self.signals.append(number))
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        for listener in (self.tcp, self.udp):
            listener.setblocking(False)
        self._before = self._state()

    def changes(self) -> Iterator[str]:
        """Return the things that were reached despite the containment, or left behind."""
        for listener, receive in ((self.tcp, self.tcp.accept), (self.udp, lambda: self.udp.recv(9))):
            try:
                yield f"{listener.type.name} received {receive()!r}"
            except BlockingIOError:
                continue
        yield from (f"signal {number}" for number in self.signals)
        after = self._state()
        yield from (f"{name} was {was}, is {after[name]}" for name, was in self._before.items() if after[name] != was)

    def close(self) -> None:
        """Stop listening."""
        self.tcp.close()
        self.udp.close()
        for name, value in self._given.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}
        tempfile.tempdir = None
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def _state(self) -> dict[str, Any]:
        state = self.canary.stat()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return {
            "the canary": (self.canary.read_text(), stat.filemode(state.st_mode), state.st_uid, state.st_mtime_ns),
            "its directory": sorted(path.name for path in self.directory.iterdir()),
            "temporary files": sorted(path.name for path in self.temporary.iterdir()),
            "children": sorted(children),
        }
