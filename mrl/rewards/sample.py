"""The input of a reward function."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.messages import MAX_SAMPLE_BYTES, to_json


def is_group(body: bytes) -> bool:
    """Return whether `body` contains the samples of a group, even a single one, instead of a sample by itself."""
    return body.startswith(b"[")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the model's response, and the ground truth of the data set."""

    prompt: str
    response: str
    num_response_tokens: int
    """Length of the response as the model wrote it. Encoding its text may give fewer or more tokens."""
    ground_truth: Any
    """Ground truth in the data set: text, a number, a list, a dictionary, or None."""
    data_source: str
    extra_info: dict[str, Any]
    uid: str
    """Id of the prompt, shared by the samples of a group."""
    row_id: int
    turns: list[str] = field(default_factory=list)
    """Turns of a conversation with an environment, as the model read it: what it wrote, then the observation,
    alternating. `response` contains only what it wrote. Empty without an environment."""

    def to_json(self) -> bytes:
        """Return the sample in the form sent to a worker. Raise an error that names the sample if it is not plain
        data."""
        try:
            body = to_json(dataclasses.asdict(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(
                f"the sample is not plain data: {error}",
                where=self.name,
                fix="use only text, finite numbers, lists and dictionaries in ground_truth and extra_info",
            ) from error
        if len(body) > MAX_SAMPLE_BYTES:
            raise RewardError(f"the sample has {len(body)} bytes; at most {MAX_SAMPLE_BYTES}", where=self.name)
        return body

    @staticmethod
    def group_to_json(bodies: Sequence[bytes], name: str) -> bytes:
        """Return the samples of a group, from `to_json`, in the form sent to a worker."""
        group = b"[" + b",".join(bodies) + b"]"
        if len(group) > MAX_SAMPLE_BYTES:
            raise RewardError(f"the samples have {len(group)} bytes in total; at most {MAX_SAMPLE_BYTES}", where=name)
        return group

    @classmethod
    def all_from_json(cls, body: bytes) -> list[Sample]:
        """Return the sample from `to_json`, or the samples from `group_to_json`."""
        return [cls(**sample) for sample in (json.loads(body) if is_group(body) else [json.loads(body)])]

    @property
    def truth_text(self) -> str:
        """Ground truth for a function that accepts only one answer."""
        if isinstance(self.ground_truth, list | dict):
            what = f"this function needs one text or number as the ground truth, not {self.ground_truth!r:.100}"
            raise RewardError(what, where=self.name, fix="use exact_match, f1 or search_r1 for several answers")
        return str(self.ground_truth)

    @property
    def accepted_answers(self) -> list[str]:
        """The ground truth as a list of texts. Search-R1's data stores it as `{"target": [...]}`."""
        truth = self.ground_truth
        if isinstance(truth, dict) and truth.keys() == {"target"}:
            truth = truth["target"]
        accepted = truth if isinstance(truth, list) else [truth]
        if not accepted or any(not isinstance(answer, str | int | float) for answer in accepted):
            what = f"the ground truth {truth!r:.200} is not a text or a list of texts"
            raise RewardError(what, where=self.name)
        return [str(answer) for answer in accepted]

    @property
    def name(self) -> str:
        return f"row {self.row_id} (uid {self.uid}, source {self.data_source})"
