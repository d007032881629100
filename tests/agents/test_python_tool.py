"""Programs of a model: their output, their exit, and the resources that they cannot reach."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from mrl.agents.built_in_tools import python
from mrl.agents.tools import Tool


def run(code: str, **options: Any) -> str:
    return asyncio.run(python(code, **options))


def test_a_program_is_answered_by_what_it_prints() -> None:
    assert run("import sys\nprint(6 * 7, flush=True)\nprint('ö', file=sys.stderr)") == "42\nö"
    assert run("x = 1") == "(it has printed nothing)"


def test_an_error_is_the_programs_own_and_names_nothing_of_this_machine() -> None:
    with pytest.raises(ValueError, match="exit status 1") as caught:
        run("print('so far')\n\ndef half(x):\n    return x / 0\n\nhalf(1)")
    message = str(caught.value)
    assert message.startswith("exit status 1\nso far\nTraceback")
    assert "line 4, in half\n    return x / 0" in message
    assert message.endswith("ZeroDivisionError: division by zero")
    assert "contained.py" not in message


def test_what_is_no_program_is_told_where() -> None:
    with pytest.raises(ValueError, match="this is no Python program") as caught:
        run("print(1)\nif x\n")
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: pass", "it took more time than 0.5 s"),
        ("print('a' * 2_000)", "it took more output than 1000 bytes"),
        ("print(len(bytearray(1 << 30)))", "MemoryError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import os\nos.fork()", "PermissionError"),
        ("print(open('/etc/passwd').read())", "PermissionError"),
        ("import sys\nsys.exit(3)", "exit status 3"),
    ],
)
def test_what_a_program_may_not_is_told_the_model(code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(code, limit_s=0.5, output_bytes=1000, memory_bytes=256 << 20)


def test_programs_run_beside_what_waits() -> None:
    async def both() -> float:
        program = asyncio.ensure_future(python("import time\ntime.sleep(1)"))
        began = time.monotonic()
        await asyncio.sleep(0.05)
        took = time.monotonic() - began
        await program
        return took

    assert asyncio.run(both()) < 0.6


def test_the_model_is_shown_the_program_alone() -> None:
    assert [*Tool(python).schema["function"]["parameters"]["properties"]] == ["code"]
