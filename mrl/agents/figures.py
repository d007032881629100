"""Metrics of the conversations of a rollout, and the limit on failed conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.agents.loop import Dialog
from mrl.config.agent import AgentConfig
from mrl.errors import AgentError
from mrl.rewards.outcome import FAILURE_KINDS

_NUM_EXAMPLES = 3
ENDS = ("done", "turns", "length")


def dialog_metrics(dialogs: Sequence[Dialog]) -> dict[str, float]:
    """Return turns, calls, ends, failures and times of the conversations with environments."""
    with_environment = [dialog for dialog in dialogs if dialog.environment is not None]
    if not with_environment:
        return {}
    seconds = [dialog.environment_s for dialog in with_environment]
    figures: dict[str, Any] = {f"failed/{kind}": _failures(with_environment)[kind] for kind in FAILURE_KINDS}
    figures |= {"retried": sum(dialog.attempts - 1 for dialog in with_environment)}
    figures |= {"environment_s/mean": np.mean(seconds), "environment_s/max": max(seconds)}
    if spoken := [dialog for dialog in with_environment if dialog.failure is None]:
        num, turns = len(spoken), [len(dialog.writers) for dialog in spoken]
        calls = [call for dialog in spoken for turn_calls in dialog.calls for call in turn_calls]
        masks = [segment.mask for dialog in spoken for segment in dialog.segments]
        written, tokens = sum(int(mask.sum()) for mask in masks), sum(map(len, masks))
        figures |= {
            "segments/mean": len(masks) / num,
            "segments/max": max(len(dialog.segments) for dialog in spoken),
            "turns/mean": np.mean(turns),
            "turns/max": max(turns),
            "calls/mean": len(calls) / num,
            "calls/invalid_share": sum(bool(call.problem) for call in calls) / max(len(calls), 1),
            "turn_tokens/mean": written / sum(turns),
            "observed_share": 1 - written / tokens,
            "observations/cut_share": sum(dialog.num_cut_characters > 0 for dialog in spoken) / num,
            "observations/escaped": sum(dialog.num_escaped for dialog in spoken),
        }
        ended = Counter(dialog.ended_conversation.ended for dialog in spoken)
        figures |= {f"ended/{how}": ended[how] / num for how in ENDS}
    return {f"agent/{name}": float(value) for name, value in figures.items()}


def check_failed_share(config: AgentConfig, dialogs: Sequence[Dialog]) -> None:
    """Stop the run if the environments of too many conversations, or of all, have failed."""
    failed = [(dialog, dialog.failure) for dialog in dialogs if dialog.failure is not None]
    if not failed or len(failed) <= min(config.max_failed_share * len(dialogs), len(dialogs) - 1):
        return
    counted = ", ".join(f"{num} {kind}" for kind, num in sorted(_failures(dialogs).items()))
    examples = [
        f"  {dialog.opening.name}: {failure.kind}: {failure.detail}, {failure.attempts} attempts"
        for dialog, failure in failed[:_NUM_EXAMPLES]
    ]
    share = f"the environments of {len(failed)} of {len(dialogs)} conversations have failed ({counted})"
    allowed = f"at most {100 * config.max_failed_share:g} % may fail, and at least one must succeed"
    raise AgentError(
        "\n".join([f"{share}; {allowed}", *examples]),
        where="agent",
        fix="correct the environment, or raise agent.max_failed_share",
    )


def _failures(dialogs: Sequence[Dialog]) -> Counter[str]:
    return Counter(dialog.failure.kind for dialog in dialogs if dialog.failure is not None)
