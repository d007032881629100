"""Chat templates, rendered in a process with limits, so that an endless loop becomes an error instead of a hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mrl.data import template_process

_PYTHON = (sys.executable, "-P", "-B", "-X", "utf8", template_process.__file__)
_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "TZ")


class TemplateFailure(Exception):
    """A template that cannot be rendered, with the reason. `is_broken` means that it fails for any conversation."""

    def __init__(self, what: str, *, is_broken: bool = False) -> None:
        super().__init__(what)
        self.is_broken = is_broken


class ChatTemplate:
    """A template with its constant variables, and the process that renders it."""

    def __init__(self, template: str, variables: str) -> None:
        setup = {"template": template, "variables": json.loads(variables)}
        self._limit_s = template_process.COMPUTES_S
        self._first = json.dumps(setup | {"computes_s": self._limit_s}) + "\n"
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, calls_for_answer: bool) -> str:
        """Return the text of a conversation, or raise `TemplateFailure`."""
        request = {"messages": messages, "add_generation_prompt": calls_for_answer}
        with self._lock:
            answer = self._ask(json.dumps(request))
        if "error" in answer:
            raise TemplateFailure(answer["error"], is_broken=answer.get("is_broken", False))
        text: str = answer["text"]
        return text

    def _ask(self, line: str) -> dict[str, Any]:
        if self._process is None:
            self._process = self._started()
        process = self._process
        assert process.stdin is not None, "it has a pipe"
        assert process.stdout is not None, "it has a pipe"
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                parsed: dict[str, Any] = json.loads(answer)
                return parsed
        except BrokenPipeError:
            pass
        self._process = None
        ended = process.wait()
        if ended == -signal.SIGPROF:
            return {"error": f"rendering took more than {self._limit_s:g} s of CPU time", "is_broken": True}
        return {"error": f"the process that renders it ended with status {ended}", "is_broken": True}

    def _started(self) -> subprocess.Popen[str]:
        """Start the process, which has an empty environment and ends with this process."""
        process = subprocess.Popen(
            _PYTHON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to a run's process group must reach only the run, which then saves
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None, "it has a pipe"
        process.stdin.write(self._first)
        return process


@lru_cache(maxsize=8)
def chat_template(template: str, variables: str) -> ChatTemplate:
    """Return the template with these variables, as JSON. Equal templates share a process."""
    return ChatTemplate(template, variables)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # the process may no longer read its input
                pipe.close()
