"""What the model of `mrl sft` answers to a few validation prompts, by the forward pass that measures its loss.

Answers are guessed whole, at first as the data has them. A pass says which token is the likeliest at every place behind
the guessed ones, and that is the next guess (Jacobi decoding). A token is greedy when all before it are, so each pass
settles one more at least, and a guess that comes back as it was is what the model writes token by token.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress, takewhile
from typing import Any

import numpy as np

from mrl.config.sft import SftConfig
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer, model_end_tokens
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.role_client import SupervisedClient

Ids = list[int]


class AnswerSampler:
    def __init__(self, config: SftConfig, tokenizer: ChatTokenizer, rows: DataProto) -> None:
        self._rows, self._tokenizer = first_by_source(rows, config.validation.samples), tokenizer
        self._ends = {end for ends in model_end_tokens(tokenizer, config.model.path).values() for end in ends}
        self._timeout_s = config.deadlines.call_s
        self._max_tokens = min(config.validation.max_response_tokens, config.batch.max_response_tokens)
        pairs = zip(_lists(self._rows, "responses"), _lists(self._rows, "response_mask"), strict=True)
        # A conversation goes on with what others say: the answer is what is learned before.
        self._truths = [list(compress(ids, takewhile(bool, mask))) for ids, mask in pairs]

    def columns(self, client: SupervisedClient) -> dict[str, list[Any]]:
        answers = self._answers(client)
        return {
            "uid": list(self._rows["uid"]),
            "data_source": list(self._rows["data_source"]),
            "prompt": list(self._rows["prompt_text"]),
            "response": [self._text(answer) for answer in answers],
            "ground_truth": [self._text(truth) for truth in self._truths],
            "num_tokens": [len(answer) for answer in answers],
            "truncated": [answer[-1] not in self._ends for answer in answers],
        }

    def _answers(self, client: SupervisedClient) -> list[Ids]:
        num = self._max_tokens
        rooms = (client.capacity - self._rows.lengths("prompts")).tolist()  # a micro-batch's, behind each prompt
        pairs = zip(self._truths, rooms, strict=True)
        guesses = [(truth + [0] * num)[: min(num, room)] for truth, room in pairs]
        for _ in range(num):
            found = client.score(
                "predict_sft", self._rows.select("prompts").with_column("responses", from_rows(guesses))
            )
            found = fetch(found.select("greedy_tokens"), self._timeout_s)
            before, guesses = guesses, _lists(found, "greedy_tokens")
            answers = [self._until_end(guess) for guess in guesses]
            if all(answer == guess[: len(answer)] for answer, guess in zip(answers, before, strict=True)):
                break
        return answers

    def _until_end(self, ids: Ids) -> Ids:
        return ids[: next((at for at, token in enumerate(ids, start=1) if token in self._ends), len(ids))]

    def _text(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids[:-1] if ids[-1] in self._ends else ids)


def first_by_source(rows: DataProto, num: int) -> DataProto:
    """Return the first rows, one of each data source in turn."""
    seen: Counter[str] = Counter()
    turns = []
    for source in rows["data_source"]:
        turns.append(seen[source])
        seen[source] += 1
    return rows.take(np.argsort(turns, kind="stable")[:num])


def _lists(rows: DataProto, name: str) -> list[list[int]]:
    return [row.tolist() for row in rows[name].rows()]
