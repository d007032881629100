"""The process of a program that a model wrote. This separate script drops its privileges, then runs the program.

`mrl.rewards.sandbox` starts it with an empty environment in a private directory, which contains `program.py` and, for
tests written in Python, `tests.py`. It prints "ready" when the confinement is active. From then on its output is not
trusted: the parent process compares the results.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

READY, LOADED, FAILED = "ready", "loaded", "failed"
NO_PROGRAM = 65  # exit status if the program is not Python
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LANDLOCK_RESTRICT_SELF = 446
_CAPABILITIES_VERSION = 0x20080522
_LARGEST_INT = 1 << 63
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def plain(value: Any) -> str:
    """Return a value of plain types as JSON that keeps the types apart. Text is hexadecimal, and sets are sorted."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value) if -_LARGEST_INT < value < _LARGEST_INT else f'{{"int":"{value:x}"}}'
        case float():
            return _NOT_FINITE.get(text := float.__repr__(value), text)
        case str():
            return f'"{value.encode("utf-8", "surrogatepass").hex()}"'
        case bytes():
            return f'{{"bytes":"{value.hex()}"}}'
        case list():
            return f"[{','.join(map(plain, value))}]"
        case tuple():
            return f'{{"tuple":[{",".join(map(plain, value))}]}}'
        case set() | frozenset():
            return f'{{"set":[{",".join(sorted(map(plain, value)))}]}}'
        case dict():
            return f'{{"dict":[{",".join(sorted(f"[{plain(key)},{plain(item)}]" for key, item in value.items()))}]}}'
    return plain(value.item())  # a numpy number; other types have no `item`, or no plain value


def main(arguments: Sequence[str]) -> None:
    """Run `program.py`, as the main program or with its tests."""
    parent, ruleset, instructions, limits, first, count, *packages = arguments
    out, nothing, secret, tests = os.dup(1), os.open(os.devnull, os.O_RDWR), "", None
    if int(count):
        secret, tests = sys.stdin.read(), _code("tests")
        os.unlink("tests.py")
    try:
        _confine(int(parent), int(ruleset), bytes.fromhex(instructions), limits)
    except OSError as error:
        os.write(out, f"{error}\n".encode())
        os._exit(1)
    os.write(out, f"{READY}\n".encode())
    sys.argv, sys.orig_argv = ["program.py"], ["python", "program.py"]
    sys.path += packages
    sys.set_int_max_str_digits(0)
    if tests is None:
        os.closerange(out, nothing + 1)
        sys.excepthook = _print_error
        FunctionType(_code("program"), vars(_module("__main__")))()
        return
    for standard in (0, 1):
        os.dup2(nothing, standard)
    _run_tests(tests, range(int(first), int(count)), out, secret)


def _confine(parent: int, ruleset: int, instructions: bytes, limits: str) -> None:
    """Set the limits, drop all capabilities, and install ruleset and filter. None of this can be undone."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong] * 4

    def call(name: str, *values: Any) -> None:
        if getattr(libc, name)(*values):
            raise OSError(ctypes.get_errno(), f"{name}{values[:2]}: {os.strerror(ctypes.get_errno())}")

    libc.prctl.argtypes = [ctypes.c_int, *words]
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    for limit, most in (map(int, entry.split(":")) for entry in limits.split(",")):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("syscall", _LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    memory = ctypes.create_string_buffer(instructions)
    pointer = ctypes.addressof(memory)
    program = (ctypes.c_ulong * 2)(len(instructions) // 8, pointer)  # a short, and padding before the pointer
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0)


def _run_tests(tests: CodeType, numbers: range, out: int, secret: str) -> None:
    """Answer each test with the secret and the result of its function, or with a failure."""
    write, encode, module = os.write, plain, _module("program")
    FunctionType(_code("program"), vars(module))()
    FunctionType(tests, vars(module))()
    functions = [vars(module)[f"mrl_test_{number}"] for number in numbers]
    write(out, f"{secret} {LOADED}\n".encode())
    for function in functions:
        try:
            reply = encode(function())
        except BaseException:  # any exception, including SystemExit, is a failure of this test
            reply = FAILED
        write(out, f"{secret} {reply}\n".encode())
    os._exit(0)


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as if the program had run directly, without the two frames of this file."""
    sys.stdout.flush()  # its earlier output comes first
    own = trace and trace.tb_next and trace.tb_next.tb_next
    sys.__excepthook__(kind, error.with_traceback(own), own)


def _code(name: str) -> CodeType:
    try:
        code = SourceFileLoader(name, f"{name}.py").get_code(name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        sys.__excepthook__(type(error), error, None)
        os._exit(NO_PROGRAM)
    assert code is not None, "a source loader always returns code"
    return code


def _module(name: str) -> ModuleType:
    sys.modules[name] = ModuleType(name)
    return sys.modules[name]


if __name__ == "__main__":
    main(sys.argv[1:])
