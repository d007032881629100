"""The process of one rank: `python -m mrl.rehearse.child ROLE RANK CONFIG [KEY=VALUE ...]`.

It prints its report as one line of JSON. An error of the rehearsed code is a line as well, with the place that raised
it.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

from mrl.engine.cpu_shim import import_megatron


def main(arguments: Sequence[str]) -> None:
    role, rank, model, path, *overrides = arguments
    warnings.simplefilter("ignore")  # the parent's output is the rehearsal's
    import_megatron()
    from mrl.rehearse.rank import rehearse_rank
    from mrl.rehearse.subject import rehearsal_subject

    subject = rehearsal_subject(path, overrides, model or None)
    print(json.dumps(asdict(rehearse_rank(subject, role, int(rank)))))


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with the innermost line of mrl, Megatron or the user."""
    frames = [frame for frame in traceback.extract_tb(trace) if "site-packages/torch/" not in frame.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    print(json.dumps({"error": f"{kind.__name__}: {error}", "place": place, "code": frames[-1].line if frames else ""}))


if __name__ == "__main__":
    sys.excepthook = _report
    main(sys.argv[1:])
