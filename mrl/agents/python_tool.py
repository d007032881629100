"""The tool `python`: a program of the model in the contained process that the reward of code has too."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from mrl.rewards.contained import NO_PROGRAM
from mrl.rewards.sandbox import ContainedProgram, Limits, ProgramEnded

_PROGRAMS = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "programs")
"""More at once would only make each of them late."""


async def python(
    code: str, *, limit_s: float = 5.0, memory_bytes: int = 512 << 20, output_bytes: int = 64 << 10
) -> str:
    """Run a Python program, and return what it prints. It has no network, and nothing is kept for the next one.

    Args:
        code: The program; only what it prints is seen.
    """
    limits = Limits(program_s=limit_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    return await asyncio.get_running_loop().run_in_executor(_PROGRAMS, _run, code, limits)


def _run(code: str, limits: Limits) -> str:
    try:
        with ContainedProgram({"program.py": code}, "", range(0), limits, keeps_errors=True) as process:
            status, output = process.rest(limits.program_s)
    except ProgramEnded as ended:
        most = {"time": f"{limits.program_s:g} s", "output": f"{limits.output_bytes} bytes"}.get(ended.reason, "it may")
        raise ValueError(f"the program was ended: it took more {ended.reason} than {most}") from None
    said = output.decode(errors="replace").rstrip("\n")
    if status == 0:
        return said or "(it has printed nothing)"
    how = f"a signal ended it ({-status})" if status < 0 else f"exit status {status}"
    raise ValueError(f"{'this is no Python program' if status == NO_PROGRAM else how}\n{said}".strip())
