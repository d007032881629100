"""Does every engine compute what the trainer computes? One prompt, answered by each of them and scored by the actor.

Digests prove that an engine got the right bytes; they cannot see kernels that read them in another order, or experts
that stayed behind. The step's own samples would show one such engine only in the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mrl.config.schema import Config
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer
from mrl.errors import AuditFailed
from mrl.events import EnginesCompared, EventLog
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rounding import round_up
from mrl.trainer.role_client import ActorClient

TEXT = "A ferry crosses the bay in 40 minutes and waits 15 on each side. When is it back where it began? Step by step,"
MAX_RESPONSE_TOKENS = 64
SEED = 0

Answers = Mapping[int, Generated]
"""By the number of the engine."""


class EngineProbe:
    """Asks engines while they are awake, and compares once the actor has its devices again."""

    def __init__(
        self, config: Config, hybrid: HybridEngine, actor: ActorClient, tokenizer: ChatTokenizer, events: EventLog
    ) -> None:
        self._config, self._hybrid, self._actor, self._events = config, hybrid, actor, events
        (prompt,) = tokenizer([TEXT], add_special_tokens=False)["input_ids"]
        ids = np.asarray(prompt[: config.rollout.max_prompt_tokens], dtype=np.int32)
        limit = min(MAX_RESPONSE_TOKENS, config.rollout.max_response_tokens)
        self._request = GenerationRequest("probe", "probe", ids, SEED, limit)
        # Neither cut nor stopped: the whole distribution is compared, and always as many tokens.
        self._sampling = Sampling(config.rollout.temperature)

    def is_due(self, step: int) -> bool:
        """Return whether all engines are asked at this step."""
        every = self._config.sync.probe_every
        return bool(every) and step % every == 0

    def ask(self, step: int) -> Answers:
        """What engines answer that have not been asked since they started, and every so many steps what all do."""
        if not self._config.sync.probe_every:
            return {}
        return self._hybrid.probe(self._request, self._sampling, everyone=self.is_due(step))

    def compare(self, step: int, answers: Answers) -> None:
        """Hold the log-probs of each engine against the actor's; beyond the tolerance the run stops."""
        means = self._mean_differences(answers)
        self._events.write(EnginesCompared(step, {str(engine): mean for engine, mean in means.items()}))
        worst = max(means, key=lambda engine: (not np.isfinite(means[engine]), means[engine]))
        tolerance = self._config.sync.probe_tolerance
        if not means[worst] <= tolerance:
            others = ", ".join(f"engine {engine} {mean:.3g}" for engine, mean in means.items() if engine != worst)
            raise AuditFailed(
                f"step {step}: engine {worst} does not compute what the trainer computes: over "
                f"{len(answers[worst].token_ids)} tokens of a fixed prompt the mean difference of log-probs is "
                f"{means[worst]:.3g}; sync.probe_tolerance={tolerance:g}" + (f" ({others})" if others else ""),
                fix="other kernels, rollout.vllm.dtype or quantization for the engines; a larger tolerance only where "
                "the difference is the one that these are known to make",
            )

    def _mean_differences(self, answers: Answers) -> dict[int, float]:
        batch = self._batch(list(answers.values()))
        written, _ = self._actor.compute_log_prob(batch)
        found = batch.union(fetch(written, self._config.deadlines.call_s)).values("old_log_probs").float().cpu().numpy()
        rows = np.split(found, np.cumsum(batch.lengths("responses"))[:-1])
        return {
            engine: float(np.abs(row - answer.log_probs).mean())
            for (engine, answer), row in zip(answers.items(), rows[: len(answers)], strict=True)
        }

    def _batch(self, answers: list[Generated]) -> DataProto:
        """Return a row for each engine, and more from the first on until every rank has its micro-batches."""
        rows = [answers[row % len(answers)] for row in range(round_up(len(answers), self._actor.row_multiple))]
        prompt = torch.tensor(self._request.prompt_ids)
        return DataProto.from_dict(
            {
                "prompts": from_rows([prompt for _ in rows]),
                "responses": from_rows([torch.tensor(row.token_ids) for row in rows]),
            }
        )
