"""Names and text of figures with confidence intervals. The bounds of `NAME` are `NAME/low` and `NAME/high`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOW, HIGH = "low", "high"


def is_bound(name: str) -> bool:
    """Return whether a metric is the bound of another metric's interval."""
    return name.startswith("val/") and name.endswith((f"/{LOW}", f"/{HIGH}"))


def bounds_of(figures: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Return the interval of a figure, if it is known."""
    low, high = (figures.get(f"{name}/{end}") for end in (LOW, HIGH))
    return None if low is None or high is None else (low, high)


def shown_figure(figures: Mapping[str, Any], name: str) -> str:
    """Return a figure with its interval, or a dash if it is missing."""
    if figures.get(name) is None:
        return "-"
    bounds = bounds_of(figures, name)
    return f"{figures[name]:.4g}" + ("" if bounds is None else f" ({bounds[0]:.3g} to {bounds[1]:.3g})")
