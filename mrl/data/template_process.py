"""The process that renders a chat template: a program that came with a model, and may loop, recurse and allocate.

This script loads only Jinja. The template sees the same variables as in transformers, in the same sandbox. A sandbox
does not limit time and memory, but this process does. It reads requests line by line from its standard input, and
writes one answer per line; the first line contains template and variables.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

COMPUTES_S, MEMORY_BYTES, TEXT_CHARACTERS = 5.0, 1 << 30, 4 << 20
"""Limits of one prompt: seconds of CPU time, bytes of memory, and characters of text."""
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text; here the mark is ignored."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


def main() -> None:
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (most, most))
    for answer in _answers():
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answers() -> Iterator[dict[str, Any]]:
    setup = json.loads(sys.stdin.readline())
    limit_s: float = setup["computes_s"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    template: Any = None
    failure: dict[str, Any] = {}
    try:
        template = _limited(limit_s, lambda: environment.from_string(setup["template"]))
    except jinja2.TemplateSyntaxError as error:
        failure = {"error": f"line {error.lineno}: {error.message}", "is_broken": True}
    except (*_FAILURES, MemoryError, SyntaxError) as error:
        failure = {"error": str(error)}
    for line in sys.stdin:
        yield failure or _rendered(template, setup["variables"] | json.loads(line), limit_s)


def _rendered(template: Any, variables: dict[str, Any], limit_s: float) -> dict[str, Any]:
    try:
        text = _limited(limit_s, lambda: template.render(variables))
    except _FAILURES as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    if len(text) > TEXT_CHARACTERS:
        return {"error": f"it writes {len(text)} characters; at most {TEXT_CHARACTERS}"}
    return {"text": text}


def _limited(limit_s: float, action: Callable[[], Any]) -> Any:
    """Run an action. After `limit_s` seconds of CPU time, the kernel ends this process."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return action()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
