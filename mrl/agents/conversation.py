"""One conversation as token ids: the model's turns and the observations, kept apart.

A conversation's ids are stored only here. They are only appended, in turns: the model writes, then an observation
follows. Written tokens are never encoded from text again, so the trainer sees each token after exactly the tokens that
preceded it when it was drawn.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mrl.errors import AgentError
from mrl.rollout.requests import GenerationRequest, Mask, StoredRoutes

Ids = npt.NDArray[np.int32]
Finish = Literal["stop", "length"]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class WrittenTurn:
    """Position of a turn's tokens in the response, and why the turn ended."""

    start: int
    length: int
    finish: Finish


class Conversation:
    """Prompt and response of one row. The response contains the model's turns and the observations."""

    def __init__(self, key: str, uid: str, prompt_ids: Ids, *, max_tokens: int, seed: int) -> None:
        self.key, self.uid = key, uid
        self._max_tokens, self._seed = max_tokens, seed
        self._num_prompt = len(prompt_ids)
        self.context_ids = _joined(np.empty(0, np.int32), prompt_ids)
        """Tokens that the model reads next: the prompt and everything after it."""
        self.mask: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        """Whether the model wrote each token of the response."""
        self.log_probs: npt.NDArray[np.float32] = np.empty(0, np.float32)
        """Log-prob of each token of the response from the engine that drew it; NaN, never 0, for observations."""
        self.versions: Ids = np.empty(0, np.int32)
        """Weight version that drew each token of the response; -1 for observations."""
        self.routes: StoredRoutes | None = None
        """Routes of all tokens but the last, if the engines return them."""
        self.sampling_mask: Mask | None = None
        """Mask of the tokens of the response, if it was requested: then the response is one turn."""
        self.role = ""
        """Name of the player or agent who writes it; empty without roles."""
        self.turns: list[WrittenTurn] = []
        self.ended = ""
        """How the conversation ended. Empty while it continues."""
        if not self._num_prompt or max_tokens < 1:
            raise self._error(f"a prompt of {self._num_prompt} tokens and room for {max_tokens}; at least 1 of each")

    @property
    def prompt_ids(self) -> Ids:
        return self.context_ids[: self._num_prompt]

    @property
    def response_ids(self) -> Ids:
        return self.context_ids[self._num_prompt :]

    @property
    def room(self) -> int:
        """Number of tokens that may follow."""
        return self._max_tokens - len(self.mask)

    def request(self, max_turn_tokens: int) -> GenerationRequest:
        """Return the next request for an engine, within the remaining room."""
        self._expect(models_turn=True, what="a turn is asked for")
        turn = len(self.turns)
        return GenerationRequest(
            key=f"{self.key}/{turn}" if turn else self.key,
            prompt=self.uid,
            prompt_ids=self.context_ids,
            seed=derived_seed(self._seed, "turn", turn),
            max_tokens=min(max_turn_tokens, self.room),
            routes=self.routes,
        )

    def write(self, ids: Ids, log_probs: npt.NDArray[np.float32], finish: Finish, versions: Ids | int = 0) -> None:
        """Append the model's turn, including the token that ended it, and the version of the weights that drew it."""
        self._expect(models_turn=True, what="a turn is written")
        if not 0 < len(ids) <= self.room or len(log_probs) != len(ids):
            what = f"{len(ids)} tokens and {len(log_probs)} log-probs, where 1 to {self.room} tokens fit"
            raise self._error(what)
        if not np.isfinite(log_probs).all():
            at = int(np.argmin(np.isfinite(log_probs)))
            raise self._error(f"token {at} of what the model wrote has log-prob {log_probs[at]}")
        self.turns.append(WrittenTurn(len(self.mask), len(ids), finish))
        self._append(ids, log_probs, versions, is_written=True)

    def observe(self, ids: Ids) -> None:
        """Append an observation. If no token could follow it, end the conversation by length."""
        self._expect(models_turn=False, what="an observation comes")
        if not len(ids):
            raise self._error("an observation without tokens", fix="end the conversation instead")
        if len(ids) < self.room:
            self._append(ids, np.full(len(ids), np.nan, np.float32), -1, is_written=False)
        else:
            self.ended = "length"

    def end(self, how: str) -> None:
        """End the conversation after at least one turn. Its last token is the model's."""
        self._expect(models_turn=False, what=f"it ends by {how}")
        self.ended = how

    def _append(self, ids: Ids, log_probs: npt.NDArray[np.float32], versions: Ids | int, *, is_written: bool) -> None:
        self.context_ids = _joined(self.context_ids, ids)
        self.versions = _joined(self.versions, np.broadcast_to(np.asarray(versions, np.int32), len(ids)))
        self.mask = _joined(self.mask, np.full(len(ids), is_written))
        self.log_probs = _joined(self.log_probs, log_probs)

    def _expect(self, *, models_turn: bool, what: str) -> None:
        if self.ended:
            raise self._error(f"{what}, but it has ended by {self.ended}")
        is_models_turn = not len(self.mask) or not self.mask[-1]
        if is_models_turn != models_turn:
            raise self._error(f"{what}, but {'the model writes' if is_models_turn else 'an observation follows'} next")

    def _error(self, what: str, fix: str = "") -> AgentError:
        return AgentError(what, where=f"conversation {self.key}, turn {len(self.turns)}", fix=fix)


def derived_seed(seed: int, use: Literal["turn", "segment", "environment"], number: int = 0) -> int:
    """Return the seed of a turn or a segment by its number, or of the environment's random numbers, all different.

    The first turn and segment use the conversation's own seed, so that a single turn keeps its seed.
    """
    if not number and use != "environment":
        return seed
    identity = json.dumps([seed, use, number]).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1


def _joined(first: npt.NDArray[Number], more: npt.NDArray[Any]) -> npt.NDArray[Number]:
    """Return both in a read-only array, so that appended values stay unchanged."""
    joined: npt.NDArray[Number] = np.concatenate([first, more], dtype=first.dtype)
    joined.setflags(write=False)
    return joined
