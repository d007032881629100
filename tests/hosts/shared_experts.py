"""`mrl` with vLLM's engine for ranks that share experts on a CPU: `python -m tests.hosts.shared_experts COMMAND`.

mrl refuses such engines on CPUs, where vLLM's kernel crashes. This program checks a configuration as if its engine were
vLLM, and leaves that one rule out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from mrl.cli.main import main
from mrl.config.rules import check
from mrl.config.schema import Config
from mrl.errors import Problem

ENGINE = "tests.rollout.expert_parallel_engine:ExpertParallelEngine"
_check_rules = check.check_rules


def _check(config: Config) -> Iterator[Problem]:
    for problem in _check_rules(replace(config, rollout=replace(config.rollout, engine="vllm"))):
        if "vLLM's kernels for experts on a CPU" not in str(problem):
            yield problem


if __name__ == "__main__":
    check.check_rules = _check  # type: ignore[assignment]
    sys.exit(main())
