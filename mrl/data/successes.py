"""The successful sample that a teacher reads with the question of another sample (SDPO, 2601.20802)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def other_successes(uids: Sequence[str], scores: Sequence[float], least: float) -> list[int | None]:
    """Return for each sample the first other sample of its prompt that scored at least `least`, if there is one."""
    successes: dict[str, list[int]] = defaultdict(list)
    for sample, (uid, score) in enumerate(zip(uids, scores, strict=True)):
        if score >= least:
            successes[uid].append(sample)
    return [next((other for other in successes[uid] if other != sample), None) for sample, uid in enumerate(uids)]
