"""The last validations of two finished runs, paired by prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.cli.arguments import aligned
from mrl.errors import DataError, SetupError

if TYPE_CHECKING:
    from mrl.observe.confidence import PairedDifference

_COLUMNS = ("data_source", "uid", "prompt", "score")
_FIX = "validation.save_samples=true, with the same data.validation in both runs"
Prompt = tuple[str, str]
"""Source and text of a prompt."""


def compare_runs(a: Path, b: Path) -> tuple[list[str], bool]:
    """Return lines with the mean score of each source and of all prompts, and whether all prompts show a difference.

    The verdict is about these two models. Other seeds may train other models: configurations need several pairs.
    """
    from mrl.observe.confidence import PairedDifference

    scores = [_scores(path) for path in (a, b)]
    shared = [prompt for prompt in scores[0] if prompt in scores[1]]
    if len(shared) < max(map(len, scores)):
        counts = " and ".join(str(len(side)) for side in scores)
        problem = f"the runs validated {counts} prompts, of which {len(shared)} are the same"
        raise SetupError(problem, where=f"{a} and {b}", fix=_FIX)
    sources = list(dict.fromkeys(source for source, _ in shared))
    rows = [["source", "prompts", "A", "B", "B - A", "95 % interval", "verdict"]]
    for source in [*sources, None] if len(sources) > 1 else [None]:
        prompts = [prompt for prompt in shared if source in (None, prompt[0])]
        means = [sum(side[prompt] for prompt in prompts) / len(prompts) for side in scores]
        difference = PairedDifference.of([scores[1][prompt] - scores[0][prompt] for prompt in prompts])
        low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
        interval = f"{low:+.3g} to {high:+.3g}" if len(prompts) > 1 else "-"
        figures = [f"{mean:.4g}" for mean in means]
        rows.append(
            [source or "all", str(len(prompts)), *figures, f"{difference.mean:+.3g}", interval, _verdict(difference)]
        )
    return list(aligned(rows)), difference.is_beyond_noise


def _verdict(difference: PairedDifference) -> str:
    if difference.is_beyond_noise:
        return f"B scores {'higher' if difference.mean > 0 else 'lower'}"
    return f"no difference seen{difference.more('prompt')}"


def _scores(run: Path) -> Mapping[Prompt, float]:
    """Return the mean score of each prompt in a run's newest validation."""
    from mrl.data.row_files import read_sample_columns

    newest = max((run / "samples").glob("validation-*.parquet"), default=None)
    if newest is None:
        raise SetupError("the run has no samples of a validation", where=str(run), fix=_FIX)
    columns = read_sample_columns(newest, _COLUMNS, _FIX)
    by_prompt: dict[Prompt, list[float]] = defaultdict(list)
    for source, uid, prompt, score in zip(*columns, strict=True):
        by_prompt[source, f"{uid} {prompt}"].append(score)
    if not by_prompt:
        raise DataError("there are no samples", where=str(newest), fix=_FIX)
    return {prompt: sum(values) / len(values) for prompt, values in by_prompt.items()}
