"""Effects of windows in some layers only, on an engine's cache and on attention."""

from __future__ import annotations

from mrl.models.spec import ModelSpec


def window_elements(spec: ModelSpec, tp: int, stage: range | None = None) -> int:
    """Return the elements that an engine's rank caches per sample in layers with a window, if others have none.

    They do not grow with the sample. `ModelSpec.cached_elements` counts the other layers. `stage` gives the layers of a
    pipeline stage, otherwise all count.
    """
    if not spec.layers_without_window or spec.sliding_window is None:
        return 0
    layers = range(spec.num_layers) if stage is None else stage
    num_layers = len({*layers} - spec.layers_without_window)
    return 2 * num_layers * max(1, spec.num_kv_heads // tp) * spec.head_dim * spec.sliding_window


def mean_visible(spec: ModelSpec, context: float) -> float:
    """Return how many tokens a token attends to that has `context` before it, on average over all layers."""
    if spec.sliding_window is None:
        return context
    share = len(spec.layers_without_window) / spec.num_layers
    return share * context + (1 - share) * min(context, spec.sliding_window)
