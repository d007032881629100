"""What is asked of a rollout engine, and what comes back: token ids in, token ids and log-probs out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mrl.errors import RolloutError

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature whenever it is asked for a lower one."""
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from, and which tokens end a response."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Exactly these; an engine adds none from the model's files. The token that stops belongs to the response."""
    stop: tuple[str, ...] = ()
    """Texts that end a response as well; the tokens that complete one belong to it."""
    alone: bool = False
    """Compute each sample by itself and whole, so that its log-probs do not depend to the bit on its company."""

    def __post_init__(self) -> None:
        if self.temperature < LOWEST_TEMPERATURE:
            raise RolloutError(
                f"temperature {self.temperature} is below {LOWEST_TEMPERATURE}, where vLLM would silently take that"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise RolloutError(f"top_p {self.top_p} is not in (0, 1], or top_k {self.top_k} is negative")


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One sample that is wanted: what it draws follows from its own seed alone, not from its neighbours."""

    key: str
    """Names it among all that are under way."""
    prompt: str
    """What it shares with the other samples of the same prompt."""
    prompt_ids: npt.NDArray[np.int32]
    seed: int
    max_tokens: int
    home: int | None = None
    """The replica that had the turn before, whose cache holds most of the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end this sample beside those of `Sampling`."""


@dataclass(frozen=True, eq=False)
class Generated:
    key: str
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    """Of each token, in the distribution that it was really drawn from."""
    finish: Literal["stop", "length"]
    weight_version: int
    """Of the weights that drew its first token."""
    replica: int | None = None
    """Which one generated it, as the fleet knows."""
    switches: tuple[tuple[int, int], ...] = ()
    """Where newer weights came in flight: the first token that each drew, and their version."""

    def token_versions(self) -> npt.NDArray[np.int32]:
        versions = np.full(len(self.token_ids), self.weight_version, np.int32)
        for first, version in self.switches:
            versions[first:] = version
        return versions


def wrong_answer(
    samples: Sequence[Generated], asked: Mapping[str, GenerationRequest], versions: Collection[int], vocab: int
) -> str:
    """Return why these cannot be answers to what was asked; nothing where they may be. All are looked at at once.

    The versions are those of the weights that may have drawn their last tokens.
    """
    keys = [sample.key for sample in samples]
    if len(set(keys)) < len(keys) or not set(keys) <= asked.keys():
        return f"it answered {sorted(set(keys) - asked.keys())[:3] or 'one request twice'}, which it was not asked"
    lengths = [len(sample.token_ids) for sample in samples]
    for sample, length in zip(samples, lengths, strict=True):
        limit = asked[sample.key].max_tokens
        if not 0 < length <= limit or len(sample.log_probs) != length:
            return f"{length} tokens and {len(sample.log_probs)} log-probs for {sample.key}, of 1 to {limit} tokens"
        last = sample.switches[-1][1] if sample.switches else sample.weight_version
        if last not in versions or sample.finish not in ("stop", "length"):
            held = " or ".join(map(str, sorted(versions)))
            return f"{sample.key} is of weights {last}, not {held}, or ended by {sample.finish!r:.40}"
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
    """The seed of one sample: the same wherever, whenever and beside whomever it is generated."""
    identity = json.dumps([run_seed, step, prompt, sample]).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
