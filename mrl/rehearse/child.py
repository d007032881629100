"""The process of one rank, or of an engine: `python -m mrl.rehearse.child REQUEST`, with the request as JSON.

With the role `rollout`, the process rehearses all ranks of an engine. It prints its report as one line of JSON. An
error of the rehearsed code is a line as well, with the place that raised it.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from mrl.engine.cpu_shim import import_megatron
from mrl.rehearse.engine_weights import ENGINE_ROLE
from mrl.rehearse.subject import Request

_INNER = ("site-packages/torch/", "mrl/rehearse/")
"""Files whose lines are not shown: they only carry out what was called."""


def main(request: Request) -> None:
    warnings.simplefilter("ignore")  # the parent's output is the rehearsal's
    # Import late: an engine does without Megatron, and the ranks of training do without vLLM.
    if request.role == ENGINE_ROLE:
        from mrl.rehearse.vllm_ranks import rehearse_engine

        config = request.subject().config
        _answer(asdict(rehearse_engine(config, request.model or config.model_of("actor")[1])))
        return
    import_megatron()
    from mrl.rehearse.rank import rehearse_rank

    _answer(asdict(rehearse_rank(request)))


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with the innermost line of mrl, Megatron or the user."""
    frames = [frame for frame in traceback.extract_tb(trace) if not any(part in frame.filename for part in _INNER)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    _answer({"error": f"{kind.__name__}: {error}", "place": place, "code": frames[-1].line if frames else ""})


def _answer(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    sys.excepthook = _report
    main(Request(**json.loads(sys.argv[1])))
