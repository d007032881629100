"""Kernel confinement of a process: system calls by a seccomp filter, files by a Landlock ruleset.

Neither needs root or a namespace. Both apply to the process that installs them, and cannot be removed. The filter is an
allow list: system calls that are not listed, including those of later kernels, are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from mrl.errors import SetupError

# Name, and number on x86_64 and aarch64. No sockets, no new processes (only threads), no signals, no privileges, no
# links.
_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 lseek:8:62 close:3:57 close_range:436:436
fstat:5:80 newfstatat:262:79 statx:332:291 stat:4:- lstat:6:- faccessat:269:48 faccessat2:439:439 access:21:-
getdents64:217:61 getcwd:79:17 chdir:80:49 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73
select:23:- pselect6:270:72 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 brk:12:214
futex:202:98 set_robust_list:273:99 rseq:334:293 gettid:186:178 sched_yield:24:124 sched_getaffinity:204:123
exit:60:93 exit_group:231:94 restart_syscall:219:128 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
sigaltstack:131:132 alarm:37:- setitimer:38:103 getitimer:36:102 clock_gettime:228:113 clock_getres:229:114
clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165
getrlimit:97:163 setrlimit:160:164 getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getgroups:115:158 uname:63:160 sysinfo:99:179 getcpu:309:168 getrandom:318:278 umask:95:166
unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 ftruncate:77:46
open:2:- openat:257:56 clone:56:220 ioctl:16:29 fcntl:72:25 prctl:157:167 prlimit64:302:261
"""
_CLONE3 = 435  # the filter cannot see its flags; if it is missing, libraries use clone
# column above, and the architecture's number in the filter
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
_EVERY_BIT = 0xFFFFFFFF
_O_TRUNC = 0o1000
# With early Landlock, a process that may read a file could open it for reading and truncate it.
_OPEN = (3 | _O_TRUNC, (0, 1, 2, 1 | _O_TRUNC, 2 | _O_TRUNC))
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080
# Allowed values of an argument under a mask: number of the argument, mask, values.
_ARGUMENTS = {
    "open": (1, *_OPEN),
    "openat": (2, *_OPEN),
    "clone": (0, _CLONE_THREAD | _CLONE_NEW, (_CLONE_THREAD,)),
    "ioctl": (1, _EVERY_BIT, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # is it a terminal, bytes available, cloexec
    "fcntl": (1, _EVERY_BIT, (0, 1, 2, 3, 4, 1030)),  # copies and flags; F_SETOWN would send signals to other processes
    "prctl": (0, _EVERY_BIT, (15, 16)),  # names of threads
    "prlimit64": (0, _EVERY_BIT, (0,)),  # its own limits, which it can only lower
}
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000

_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
_READ = _READ_FILE | _READ_DIR
_RIGHTS_OF_VERSION = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_RIGHTS = 0xFFFF
_CREATE_RULESET, _ADD_RULE, _PATH_BENEATH = 444, 445, 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def check_confinement() -> None:
    """Raise an error if the kernel cannot contain programs. There is no weaker fallback."""
    missing = []
    if platform.machine() not in _MACHINES:
        missing.append(f"list of system calls for {platform.machine()}, only for {' and '.join(_MACHINES)}")
    # If filters exist, this fails with EFAULT, because the filter has no address.
    _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, None, None)
    if ctypes.get_errno() != errno.EFAULT:
        missing.append("seccomp filter (CONFIG_SECCOMP_FILTER)")
    if _landlock_version() < 1:
        missing.append("Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK, and landlock in the kernel's option `lsm`)")
    if missing:
        what = f"programs of a model cannot be contained on this machine, which has no {', and no '.join(missing)}"
        raise SetupError(what, fix="score them on another machine, with the http reward")


@cache
def seccomp_filter(machine: str = platform.machine()) -> bytes:
    column, architecture = _MACHINES[machine]
    program = [_instruction(_LOAD, 4), _instruction(_EQUAL, architecture, 1), _instruction(_RETURN, _KILL)]
    program.append(_instruction(_LOAD, 0))
    for entry in _ALLOWED.split():
        name, number = entry.split(":")[0], entry.split(":")[column]
        if number != "-":
            actions = list(_condition(*_ARGUMENTS[name])) if name in _ARGUMENTS else [_instruction(_RETURN, _ALLOW)]
            program += [_instruction(_EQUAL, int(number), 0, len(actions)), *actions]
    program += [_instruction(_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, _REFUSE | errno.ENOSYS)]
    return b"".join([*program, _instruction(_RETURN, _REFUSE | errno.EPERM)])


def _condition(argument: int, mask: int, values: Iterable[int]) -> Iterator[bytes]:
    yield _instruction(_LOAD, 16 + 8 * argument)
    yield _instruction(_AND, mask)
    for value in values:
        yield _instruction(_EQUAL, value, 0, 1)
        yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_RETURN, _REFUSE | errno.EPERM)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def landlock_ruleset(readable: Iterable[str], writable: Path) -> int:
    """Return the descriptor of a ruleset that allows reading these files and directories, and creating files in one
    directory."""
    version = _landlock_version()
    rights = _RIGHTS_OF_VERSION.get(version, _ALL_RIGHTS)
    attributes = struct.pack("=QQQ", rights, 3, 3)  # also no ports, and no sockets or signals outside the process
    ruleset = _landlock(_CREATE_RULESET, attributes, 8 if version < 4 else 16 if version < 6 else 24, 0)
    paths = dict.fromkeys(readable, _READ) | {os.devnull: _READ | _WRITE_FILE}
    paths[str(writable)] = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    for path in filter(os.path.exists, paths):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = paths[path] & (rights if os.path.isdir(path) else rights & ~_READ_DIR)
        try:
            _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        finally:
            os.close(beneath)
    return ruleset


def _landlock_version() -> int:
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _landlock(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "cannot create a Landlock ruleset")
    return result
