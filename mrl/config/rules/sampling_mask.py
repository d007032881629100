"""Rules for `algorithm.keep_sampling_mask`: bounded masks, and what has no masks or needs whole distributions."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.algorithm import LARGEST_MASK, NORM_ADVANTAGES, REFERENCE_ADVANTAGES
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.errors import Problem

_OFF = "algorithm.keep_sampling_mask=false"


def check_sampling_mask(config: Config) -> Iterator[Problem]:
    algorithm, rollout = config.algorithm, config.rollout
    if not algorithm.keep_sampling_mask:
        return
    if not 1 < rollout.top_k <= LARGEST_MASK:
        what = f"{rollout.top_k}: a sampling mask has 2 to {LARGEST_MASK} tokens, and a few more if tokens tie"
        yield problem("rollout.top_k", what, f"rollout.top_k={LARGEST_MASK if rollout.top_k else 64}, or {_OFF}")
    if rollout.engine not in ("vllm", "transformers"):
        what = f"only vllm and transformers return sampling masks, not {rollout.engine}"
        yield problem("rollout.engine", what, f"rollout.engine=vllm, or {_OFF}")
    if rollout.dp > 1:
        what = f"{rollout.dp}: masks of engines with data-parallel ranks have not been compared"
        yield problem("rollout.dp", what, f"rollout.dp=1, or {_OFF}")
    if config.agent.environments:
        what = "observations have no sampling masks"
        yield problem("agent.environments", what, _OFF)
    if algorithm.distillation is not None:
        what = "a teacher is compared with the policy over the whole vocabulary, not over a sampling mask"
        yield problem("algorithm.distillation", what, f"algorithm.distillation=null, or {_OFF}")
    if algorithm.advantage in (*REFERENCE_ADVANTAGES, *NORM_ADVANTAGES):
        what = f"{algorithm.advantage} needs the policy's whole distributions, not those over a sampling mask"
        yield problem("algorithm.advantage", what, f"algorithm.advantage=grpo, or {_OFF}")
