"""Requests to a rollout engine and their results: token ids in, token ids and log-probs out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mrl.errors import RolloutError

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature that vLLM uses; lower values are silently raised to it."""
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Sampling:
    """Distribution of the tokens, and the tokens and texts that end a response."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Only these tokens stop; the model's files add none. The stop token is part of the response."""
    stop: tuple[str, ...] = ()
    """Texts that also end a response. The tokens that complete one are part of it."""
    alone: bool = False
    """Compute each sample separately, so that its log-probs do not depend on the other samples, bit for bit."""
    keeps_mask: bool = False
    """Return the ids of the tokens that top-k and top-p left for each token."""

    def __post_init__(self) -> None:
        if self.temperature < LOWEST_TEMPERATURE:
            raise RolloutError(
                f"temperature {self.temperature} is below {LOWEST_TEMPERATURE}, which vLLM would silently use instead"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise RolloutError(f"top_p {self.top_p} is not in (0, 1], or top_k {self.top_k} is negative")


Routes = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
"""Chosen experts [tokens, layers with experts, experts per token] of all tokens but the last."""

Mask = npt.NDArray[np.int32]
"""Ids [tokens, width] of the tokens that top-k and top-p left to draw each token from; -1 in unused places."""


@dataclass(frozen=True)
class StoredRoutes:
    """Routes of one sample in the object store: a row of a stored part."""

    part: Any
    row: int
    num_rows: int
    """Rows of the part."""
    length: int
    """Number of tokens with routes."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Request for one sample. Its tokens depend on its own seed, not on other samples."""

    key: str
    """Unique name among all samples under way."""
    prompt: str
    """Name shared by all samples of the same prompt."""
    prompt_ids: npt.NDArray[np.int32]
    seed: int
    max_tokens: int
    home: int | None = None
    """Replica of the previous turn, whose cache holds most of the prompt."""
    stop: tuple[str, ...] = ()
    """Additional texts that end this sample."""
    routes: StoredRoutes | None = None
    """Routes of the previous turn's tokens, which the prompt begins with."""


@dataclass(frozen=True, eq=False)
class Generated:
    key: str
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    """Log-prob of each token in the distribution from which it was drawn."""
    finish: Literal["stop", "length"]
    weight_version: int
    """Version of the weights that drew the first token."""
    replica: int | None = None
    """Number of the replica that generated it; set by the fleet."""
    switches: tuple[tuple[int, int], ...] = ()
    """Changes of weights in flight: the first token drawn by newer weights, and their version."""
    routes: Routes | None = None
    """Routes of prompt and response, if the engine returns them. They never travel to the driver."""
    stored_routes: StoredRoutes | None = None
    """Where the routes are stored; set by the fleet."""
    sampling_mask: Mask | None = None
    """The mask of its tokens, if it was requested."""

    def token_versions(self) -> npt.NDArray[np.int32]:
        versions = np.full(len(self.token_ids), self.weight_version, np.int32)
        for first, version in self.switches:
            versions[first:] = version
        return versions


def wrong_answer(
    samples: Sequence[Generated], requests: Mapping[str, GenerationRequest], versions: Collection[int], vocab: int
) -> str:
    """Return why these cannot be answers to the requests; empty if they can. All are checked together.

    `versions` are the versions of the weights that may have drawn the last token of each sample.
    """
    keys = [sample.key for sample in samples]
    if len(set(keys)) < len(keys) or not set(keys) <= requests.keys():
        return f"it answered {sorted(set(keys) - requests.keys())[:3] or 'one request twice'}, which was not requested"
    lengths = [len(sample.token_ids) for sample in samples]
    for sample, length in zip(samples, lengths, strict=True):
        limit = requests[sample.key].max_tokens
        if not 0 < length <= limit or len(sample.log_probs) != length:
            return (
                f"{length} tokens and {len(sample.log_probs)} log-probs for {sample.key}, expected 1 to {limit} tokens"
            )
        last = sample.switches[-1][1] if sample.switches else sample.weight_version
        if last not in versions or sample.finish not in ("stop", "length"):
            allowed = " or ".join(map(str, sorted(versions)))
            return f"{sample.key} has weights {last}, not {allowed}, or finish reason {sample.finish!r:.40}"
    if not samples:
        return ""
    tokens = np.concatenate([sample.token_ids for sample in samples])
    log_probs = np.concatenate([sample.log_probs for sample in samples])
    is_token, is_log_prob = (tokens >= 0) & (tokens < vocab), (log_probs <= _ROUNDING) & (log_probs > -np.inf)
    if is_token.all() and is_log_prob.all():
        return ""
    at = int(np.argmin(is_token & is_log_prob))
    key = keys[int(np.searchsorted(np.cumsum(lengths), at, side="right"))]
    return f"token {tokens[at]} with log-prob {log_probs[at]} in {key}: tokens are in [0, {vocab}), log-probs up to 0"


def request_seed(run_seed: int, step: int, prompt: str, sample: int) -> int:
    """Return the seed of one sample, which does not depend on where, when and with which others it is generated."""
    identity_json = json.dumps([run_seed, step, prompt, sample]).encode()
    return int.from_bytes(hashlib.blake2b(identity_json, digest_size=8).digest(), "big") >> 1
