"""What was last looked up in the libraries that CUDA needs: for where the package index does not answer.

The copy holds facts alone: names, parameters, values, and digests of statements; no source of any library.
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
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements-cuda.txt").read_text(), re.MULTILINE))
PACKAGES = {"megatron": "megatron-core"} | {name: name for name in ("torch", "transformer_engine", "vllm")}
EXTENSION = "transformer_engine_torch"
REFRESH = "run `python -m tests.contracts.refresh` where the package index answers"


def package_of(library: str) -> tuple[str, str]:
    """Return the package of a library of the table, and the version that is looked up."""
    name, _, version = library.partition("@")
    return PACKAGES[name], version or PINS[PACKAGES[name]]


@dataclass
class Stored:
    """Facts by library and question, of one version each."""

    versions: dict[str, str]
    facts: dict[str, dict[str, Fact]]
    fields: dict[str, list[str]]
    """Names of the fields of each class that a section of the configuration is handed to."""
    extension_words: list[str]
    """Names of environment variables in the source of Transformer Engine's extension."""
    extension_requires: list[str]
    asked: list[str]
    """What pip was asked to install beside the requirements."""
    resolved: dict[str, str]
    """What it would have installed, by plain name."""

    @classmethod
    def read(cls) -> Stored:
        return cls(**json.loads(FILE.read_text()))

    def write(self) -> None:
        FILE.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    def complaint(self, entry: Entry) -> str:
        """Return why the stored facts are not as mrl relies on, or do not answer; empty where they are."""
        package, version = package_of(entry.library)
        if (known := self.versions.get(entry.library)) != version:
            return f"the stored copy is of {package} {known}, not {version}: {REFRESH}"
        facts = self.facts[entry.library]
        if entry.question not in facts:
            return f"{entry.question} was never looked up: {REFRESH}"
        why = entry.complaint(facts[entry.question])
        return why and f"mrl/{entry.branch}: {why}"
