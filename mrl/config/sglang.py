"""Settings of SGLang's engines (`rollout.engine: sglang`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mrl.config.bounds import Count, Proportion, Text

ENVIRONMENT = ".venv-sglang"
"""Directory of SGLang's environment, next to the environment of this interpreter."""
INSTALL = "make install-sglang, or name an interpreter that has SGLang in rollout.sglang.python"
PROVEN_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose weights, sent to SGLang, have been compared with transformers."""


@dataclass(frozen=True, kw_only=True)
class SglangConfig:
    """SGLang's engines, which run in an environment without vLLM."""

    python: Text | None = None
    """The interpreter that has SGLang. Null is `.venv-sglang` next to mrl's environment, from `make install-sglang`."""
    mem_fraction_static: Proportion | None = None
    """Share of a GPU's memory for weights and cache. Null leaves it to SGLang."""
    max_total_tokens: Count | None = None
    """Tokens in the cache. Null: on a GPU all that fit into the memory, on a CPU every sample under way at its longest.
    """
    max_running_requests: Count | None = None
    """Samples that an engine processes at a time. Null: its share of a step, at least 128."""

    def interpreter(self) -> Path:
        return Path(self.python or Path(sys.prefix).with_name(ENVIRONMENT) / "bin" / "python")
