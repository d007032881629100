"""From prompts to scored responses: generation in the engines, and rewards while others still generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer
from mrl.data.end_tokens import end_tokens
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Outcome, Score, reward_metrics
from mrl.rewards.sample import Sample
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed


@dataclass(frozen=True)
class ScoredBatch:
    """Responses with their scores; samples without a score are gone from the batch and stand in the metrics."""

    batch: DataProto
    metrics: dict[str, float]


class Generator:
    """Generates and scores."""

    def __init__(
        self,
        config: Config,
        hybrid: HybridEngine,
        rewards: RewardManager | None,
        tokenizer: ChatTokenizer,
        progress: Callable[[int, int], None],
    ) -> None:
        self._config = config
        self._hybrid = hybrid
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._progress = progress
        rollout, validation = config.rollout, config.validation
        self._end_tokens = {
            token for tokens in end_tokens(tokenizer, config.model.path, rollout).values() for token in tokens
        }
        ends = tuple(sorted(self._end_tokens)), tuple(rollout.stop)
        self.training = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, *ends)
        self.greedy = Sampling(1.0, 1.0, 1, *ends)
        self.validation = Sampling(validation.temperature, validation.top_p, validation.top_k, *ends)
        if validation.greedy:
            self.validation = self.greedy

    def run(self, batch: DataProto, sampling: Sampling, step: int) -> ScoredBatch:
        """One response to each row's prompt, with its score. Rows of one uid are its samples, in their order."""
        requests = self._requests(batch, step)
        row_of = {request.key: row for row, request in enumerate(requests)}
        responses: dict[int, Generated] = {}
        samples: dict[int, Sample] = {}
        tickets: dict[int, int] = {}
        sizes = Counter(batch["uid"])
        for response in self._hybrid.generate(requests, sampling):
            row = row_of[response.key]
            responses[row], samples[row] = response, self._sample(batch, row, response)
            if self._rewards is not None:
                tickets[row] = self._rewards.submit(samples[row], sizes[samples[row].uid])
            self._progress(len(responses), len(requests))
        rows = range(len(requests))
        outcomes: list[Outcome] = [Score(0.0, {}, 0.0)] * len(rows)  # where only a reward model scores, later
        if self._rewards is not None:
            scored = self._rewards.drain()
            outcomes = [scored[tickets[row]] for row in rows]
        columns = self._columns(batch, [responses[row] for row in rows], [samples[row] for row in rows], outcomes)
        kept = [row for row in rows if isinstance(outcomes[row], Score)]
        metrics = reward_metrics([samples[row] for row in rows], outcomes) if self._rewards is not None else {}
        return ScoredBatch(batch.union(columns).take(kept), metrics)

    def _requests(self, batch: DataProto, step: int) -> list[GenerationRequest]:
        uids = batch["uid"]
        seen: dict[str, int] = {}
        requests = []
        rows = np.split(batch.values("prompts").numpy(), np.cumsum(batch.lengths("prompts"))[:-1])
        for row, (ids, uid) in enumerate(zip(rows, uids, strict=True)):
            number = seen[uid] = seen.get(uid, -1) + 1
            seed = request_seed(self._config.training.seed, step, uid, number)
            limit = self._config.rollout.max_response_tokens
            requests.append(GenerationRequest(f"{batch.row_ids[row]}", uid, ids, seed, limit))
        return requests

    def _sample(self, batch: DataProto, row: int, generated: Generated) -> Sample:
        has_end = generated.finish == "stop" and int(generated.token_ids[-1]) in self._end_tokens
        ids = generated.token_ids[:-1] if has_end else generated.token_ids  # a text that ends it stays
        return Sample(
            prompt=batch["prompt_text"][row],
            response=self._tokenizer.decode(ids.tolist()),
            num_response_tokens=len(generated.token_ids),
            ground_truth=batch["ground_truth"][row],
            data_source=batch["data_source"][row],
            extra_info=batch["extra_info"][row],
            uid=batch["uid"][row],
            row_id=int(batch.row_ids[row]),
        )

    def _columns(
        self,
        batch: DataProto,
        responses: Sequence[Generated],
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome],
    ) -> DataProto:
        scores = [outcome.value if isinstance(outcome, Score) else float("nan") for outcome in outcomes]
        return DataProto.from_dict(
            tensors={
                "responses": from_rows([torch.tensor(response.token_ids) for response in responses]),
                "rollout_log_probs": from_rows([torch.tensor(response.log_probs) for response in responses]),
                "truncated": torch.tensor([response.finish == "length" for response in responses]),
                "scores": torch.tensor(scores, dtype=torch.float64),
            },
            non_tensors={
                "response_text": [sample.response for sample in samples],
                "answer": [outcome.answer if isinstance(outcome, Score) else None for outcome in outcomes],
            },
            row_ids=batch.row_ids,
        )
