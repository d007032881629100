"""What a reward function is given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.messages import MAX_SAMPLE_BYTES, to_json


def is_group(body: bytes) -> bool:
    """Return whether these are the samples of a group, be it a single one, and not a sample by itself."""
    return body.startswith(b"[")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the response that the model gave, and what the data set says about the right one."""

    prompt: str
    response: str
    num_response_tokens: int
    """Length of the response as the model wrote it; its text may have fewer or more tokens."""
    ground_truth: Any
    """As the data set has it: text, a number, a list, a dictionary, or None."""
    data_source: str
    extra_info: dict[str, Any]
    uid: str
    """Of the prompt: the samples of a group share it."""
    row_id: int
    turns: list[str] = field(default_factory=list)
    """In a conversation with an environment: what the model wrote and what it was answered, by turns, as it read it;
    `response` has what it wrote alone. Empty where there is no environment."""

    def to_json(self) -> bytes:
        """Return the sample as it travels to a worker; what is not plain data is an error that names it."""
        try:
            body = to_json(dataclasses.asdict(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(
                f"the sample is not plain data: {error}",
                where=self.name,
                fix="ground_truth and extra_info hold text, finite numbers, lists and dictionaries only",
            ) from error
        if len(body) > MAX_SAMPLE_BYTES:
            raise RewardError(f"the sample has {len(body)} bytes; at most {MAX_SAMPLE_BYTES}", where=self.name)
        return body

    @staticmethod
    def group_to_json(bodies: Sequence[bytes], name: str) -> bytes:
        """Return what `to_json` made of the samples of a group as it travels to a worker."""
        group = b"[" + b",".join(bodies) + b"]"
        if len(group) > MAX_SAMPLE_BYTES:
            raise RewardError(f"the samples have {len(group)} bytes together; at most {MAX_SAMPLE_BYTES}", where=name)
        return group

    @classmethod
    def all_from_json(cls, body: bytes) -> list[Sample]:
        """Return the one sample of `to_json`, or those of `group_to_json`."""
        return [cls(**sample) for sample in (json.loads(body) if is_group(body) else [json.loads(body)])]

    @property
    def truth_text(self) -> str:
        """The ground truth of a function that knows one right answer only."""
        if isinstance(self.ground_truth, list | dict):
            what = f"the ground truth is one text or number for this function, not {self.ground_truth!r:.100}"
            raise RewardError(what, where=self.name, fix="exact_match, f1 and search_r1 take several answers")
        return str(self.ground_truth)

    @property
    def accepted_answers(self) -> list[str]:
        """The ground truth as a list of texts; Search-R1's data has it as `{"target": [...]}`."""
        truth = self.ground_truth
        if isinstance(truth, dict) and truth.keys() == {"target"}:
            truth = truth["target"]
        accepted = truth if isinstance(truth, list) else [truth]
        if not accepted or any(not isinstance(answer, str | int | float) for answer in accepted):
            what = f"the ground truth {truth!r:.200} is neither a text nor a list of texts"
            raise RewardError(what, where=self.name)
        return [str(answer) for answer in accepted]

    @property
    def name(self) -> str:
        return f"row {self.row_id} (uid {self.uid}, source {self.data_source})"
