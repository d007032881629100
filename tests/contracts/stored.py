"""Stored facts of the libraries that CUDA needs, for machines where the package index does not answer.

The copy holds only facts: names, parameters, values, and digests of statements. It holds no library's source.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.contracts.entry import Entry, Fact, read_table

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("stored.json")
ENTRIES = read_table(Path(__file__).with_name("table.yaml"))


def _pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE))


CUDA_PINS = _pins("requirements-cuda.txt")
PINS = _pins("requirements-sglang.txt") | CUDA_PINS
OTHER_NAMES = {"megatron": "megatron-core", "fla": "fla-core"}
PACKAGES = OTHER_NAMES | {name: name for name in ("torch", "transformer_engine", "vllm", "sglang")}
EXTENSION = "transformer_engine_torch"
REFRESH = "run `python -m tests.contracts.refresh` where the package index answers"


def package_of(library: str) -> tuple[str, str]:
    """Return the package of a library in the table, and the version to look up."""
    name, _, version = library.partition("@")
    return PACKAGES[name], version or PINS[PACKAGES[name]]


@dataclass
class Stored:
    """Facts by library and question, for one version of each library."""

    versions: dict[str, str]
    facts: dict[str, dict[str, Fact]]
    fields: dict[str, list[str]]
    """Field names of each class that receives a section of the configuration."""
    extension_words: list[str]
    """Names of environment variables in the source of Transformer Engine's extension."""
    extension_requires: list[str]
    asked: list[str]
    """Requirements given to pip in addition to requirements-cuda.txt."""
    resolved: dict[str, str]
    """Versions that pip would install, by normalized name."""

    @classmethod
    def read(cls) -> Stored:
        return cls(**json.loads(FILE.read_text()))

    def write(self) -> None:
        FILE.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    def complaint(self, entry: Entry) -> str:
        """Return how the stored fact differs from this entry, or why it is missing; empty if it agrees."""
        package, version = package_of(entry.library)
        if (known := self.versions.get(entry.library)) != version:
            return f"the stored copy has {package} {known}, not {version}: {REFRESH}"
        facts = self.facts[entry.library]
        if entry.question not in facts:
            return f"{entry.question} was never looked up: {REFRESH}"
        why = entry.complaint(facts[entry.question])
        return why and f"mrl/{entry.branch}: {why}"
