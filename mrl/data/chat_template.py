"""Chat templates, rendered in a process with limits: one that loops for ever is a message, not a hang."""

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
    """A template that cannot be rendered, with its reason; `is_broken` where that is so whatever it is given."""

    def __init__(self, what: str, *, is_broken: bool = False) -> None:
        super().__init__(what)
        self.is_broken = is_broken


class ChatTemplate:
    """One template with the variables that are always the same, and the process that renders it."""

    def __init__(self, template: str, variables: str) -> None:
        given = {"template": template, "variables": json.loads(variables)}
        self._limit_s = template_process.COMPUTES_S
        self._first = json.dumps(given | {"computes_s": self._limit_s}) + "\n"
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, calls_for_answer: bool) -> str:
        """Return the text of a conversation, or raise `TemplateFailure`."""
        given = {"messages": messages, "add_generation_prompt": calls_for_answer}
        with self._lock:
            answer = self._ask(json.dumps(given))
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
                found: dict[str, Any] = json.loads(answer)
                return found
        except BrokenPipeError:
            pass
        self._process = None
        ended = process.wait()
        if ended == -signal.SIGPROF:
            return {"error": f"it computes for more than {self._limit_s:g} s", "is_broken": True}
        return {"error": f"its process ended with status {ended}", "is_broken": True}

    def _started(self) -> subprocess.Popen[str]:
        """Start the process, which knows nothing of this one's environment and ends with it."""
        process = subprocess.Popen(
            _PYTHON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what is sent to a run's group is for the run to hear, and to save at
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None, "it has a pipe"
        process.stdin.write(self._first)
        return process


@lru_cache(maxsize=8)
def chat_template(template: str, variables: str) -> ChatTemplate:
    """Return the template with these variables, as JSON: whoever renders the same shares its process."""
    return ChatTemplate(template, variables)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # of what it no longer reads
                pipe.close()
