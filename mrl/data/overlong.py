"""Prompts longer than the rollout allows: an error, dropped, or cut."""

from __future__ import annotations

from typing import Literal

from mrl.errors import DataError

Overlong = Literal["error", "drop", "left", "right", "middle"]


def shorten(ids: list[int], limit: int, overlong: Overlong, where: str) -> list[int] | None:
    """At most `limit` token ids; None where the prompt is to be dropped."""
    if len(ids) <= limit:
        return ids
    match overlong:
        case "error":
            fix = "data.overlong=drop, or a cut (left, right, middle), or a larger rollout.max_prompt_tokens"
            raise DataError(f"the prompt has {len(ids)} tokens; at most {limit}", where=where, fix=fix)
        case "drop":
            return None
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            head = limit // 2
            return ids[:head] + ids[len(ids) - (limit - head) :]
