"""What is asked of a rollout engine, and what comes back: token ids in, token ids and log-probs out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mrl.errors import RolloutError

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature whenever it is asked for a lower one."""


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


@dataclass(frozen=True, eq=False)
class Generated:
    """A finished sample."""

    key: str
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    """Of each token, in the distribution that it was really drawn from."""
    finish: Literal["stop", "length"]
    weight_version: int


def request_seed(run_seed: int, step: int, prompt: str, sample: int) -> int:
    """The seed of one sample: the same wherever, whenever and beside whomever it is generated."""
    identity = json.dumps([run_seed, step, prompt, sample]).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
