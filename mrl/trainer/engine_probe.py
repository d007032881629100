"""Do engines compute what the trainer computes? A probe of each engine, and the mean over each step's samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mrl.config.schema import Config
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer
from mrl.errors import AuditFailed
from mrl.events import EnginesCompared, EventLog, Warned
from mrl.models.families import read_spec
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rounding import round_up
from mrl.trainer.role_client import ActorClient

EXPECTED = {"float32": 0.001, "rounded": 0.05, "rounded experts": 0.1}
"""Mean differences that are expected at most: in float32, in 16 bits, and with experts, whose routes turn at ties."""
STOPS_AT = 10
"""Times the expected difference, at which a run stops. No GPU has calibrated the expected ones."""
ROUNDED_LOGITS = {0.0: 0.0, 0.1: 0.0041, 0.3: 0.0059, 0.5: 0.0096, 1.0: 0.0154, 2.0: 0.0224}
"""Entropy in nats -> mean difference of log-probs made by rounding logits to bfloat16, and by nothing else: normal
logits of 32,000 tokens scaled to that entropy, the largest at 25 to 28; 20 tokens drawn from each of 400 rows."""
_FLOAT32_ROUNDS = 1e-5
"""As measured on CPUs: packing and kernels differ."""


@dataclass(frozen=True)
class EngineDifference:
    """A mean difference of log-probs between engines and trainer, at the same weights."""

    about: str
    claim: str
    """What does not hold where the difference is too large."""
    over: str
    """The tokens that were compared."""
    mean: float
    entropy: float
    """Of the policy at these tokens, in nats; NaN where it is not known."""
    others: str = ""


@dataclass(frozen=True)
class DifferenceLimits:
    """Mean differences beyond which the run is warned, and beyond which it stops."""

    warns: float
    stops: float
    reason: str

    @classmethod
    def of(cls, config: Config) -> DifferenceLimits:
        """Return the user's number, which stops the run, or what the number formats and experts explain."""
        if (tolerance := config.sync.probe_tolerance) is not None:
            return cls(tolerance, tolerance, f"sync.probe_tolerance={tolerance:g}")
        dtypes = number_formats(config)
        has_experts = dtypes != ["float32"] and read_spec(config.model.path).moe is not None
        kind = "float32" if dtypes == ["float32"] else "rounded experts" if has_experts else "rounded"
        expected, what = EXPECTED[kind], " and ".join(dtypes) + " with experts" * has_experts
        stops = STOPS_AT * expected
        return cls(expected, stops, f"at most {expected:g} is expected in {what}, more than {stops:g} stops the run")


def number_formats(config: Config) -> list[str]:
    """Return the number format of the trainer, and that of the engines where it is another."""
    return [*dict.fromkeys((config.actor.dtype, config.rollout.vllm.get("dtype", config.actor.dtype)))]


class DifferenceAudit:
    """Judges differences: what rounding may have made is warned of and counted, what it cannot have made stops."""

    def __init__(self, config: Config, events: EventLog) -> None:
        self.limits = DifferenceLimits.of(config)
        self._config, self._events, self.num_warned, self._num_told = config, events, 0, 0

    def judge(self, step: int, found: EngineDifference) -> None:
        if found.mean <= self.limits.warns:
            return
        measured = f"over {found.over} the mean difference of log-probs is {found.mean:.3g}; {self.limits.reason}"
        measured += f"{found.others}. {self.explanation(found.entropy)}"
        if not found.mean <= self.limits.stops:  # what is no number, too
            raise AuditFailed(
                f"step {step}: {found.claim}: {measured}",
                fix="other kernels, rollout.vllm.dtype or quantization for the engines; a larger sync.probe_tolerance "
                "only where the difference is the one that these are known to make",
            )
        self.num_warned += 1
        self._events.write(Warned(found.about, f"step {step}: {measured} Warning {self.num_warned} of this kind."))

    def explanation(self, entropy: float) -> str:
        """Say how much of a difference rounding explains at this entropy."""
        if number_formats(self._config) == ["float32"]:
            return f"Rounding to float32 explains about {_FLOAT32_ROUNDS:g}."
        if not math.isfinite(entropy):
            return "How much of it rounding explains is unknown without the policy's entropy."
        made = float(np.interp(max(entropy, 0.0), [*ROUNDED_LOGITS], [*ROUNDED_LOGITS.values()]))
        made /= self._config.rollout.temperature
        at = f"At an entropy of {entropy:.2g} nats, rounding logits to bfloat16 makes about {made:.2g}"
        overrides = self._config.rollout.vllm.get("hf_overrides") or {}
        if self._config.rollout.engine == "vllm" and overrides.get("head_dtype", "float32") == "float32":
            return f"{at}, which the engines' float32 heads avoid: the rounding of layers remains."
        return f"{at} of it; the rounding of layers comes on top."

    def pop_warnings(self) -> int:
        """Return how often the run was warned since this was last asked."""
        found, self._num_told = self.num_warned - self._num_told, self.num_warned
        return found


TEXT = "A ferry crosses the bay in 40 minutes and waits 15 on each side. When is it back where it began? Step by step,"
MAX_RESPONSE_TOKENS = 64
SEED = 0

Answers = Mapping[int, Generated]
"""By the number of the engine."""


class EngineProbe:
    """Does every engine compute what the trainer computes? One prompt, answered by each and scored by the actor.

    Digests prove that an engine got the right bytes; they cannot see kernels that read them in another order, or
    experts that stayed behind. The step's own samples would show one such engine only in the mean of all. Engines are
    asked while they are awake, and compared once the actor has its devices again.
    """

    def __init__(
        self, config: Config, hybrid: HybridEngine, actor: ActorClient, tokenizer: ChatTokenizer, events: EventLog
    ) -> None:
        self._config, self._hybrid, self._actor, self._events = config, hybrid, actor, events
        self.audit, self._every = DifferenceAudit(config, events), config.sync.probe_every
        (prompt,) = tokenizer([TEXT], add_special_tokens=False)["input_ids"]
        ids = np.asarray(prompt[: config.rollout.max_prompt_tokens], dtype=np.int32)
        limit = min(MAX_RESPONSE_TOKENS, config.rollout.max_response_tokens)
        self._request = GenerationRequest("probe", "probe", ids, SEED, limit)
        # Neither cut nor stopped: the whole distribution is compared, and always as many tokens.
        self._sampling = Sampling(config.rollout.temperature)

    def is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def ask(self, step: int) -> Answers:
        """What engines answer that have not been asked since they started, and every so many steps what all do."""
        if not self._every:
            return {}
        return self._hybrid.probe(self._request, self._sampling, everyone=self.is_due(step))

    def compare(self, step: int, answers: Answers) -> None:
        """Hold the log-probs of each engine against the actor's; the worst is judged."""
        means, entropy = self._mean_differences(answers)
        self._events.write(EnginesCompared(step, {str(engine): mean for engine, mean in means.items()}))
        worst = max(means, key=lambda engine: (not np.isfinite(means[engine]), means[engine]))
        others = ", ".join(f"engine {engine} {mean:.3g}" for engine, mean in means.items() if engine != worst)
        found = EngineDifference(
            about=f"engine {worst}",
            claim=f"engine {worst} does not compute what the trainer computes",
            over=f"{len(answers[worst].token_ids)} tokens of a fixed prompt",
            mean=means[worst],
            entropy=entropy,
            others=f" ({others})" if others else "",
        )
        self.audit.judge(step, found)

    def compare_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge the mean over a step's samples; return how often the run was warned since the step before."""
        difference = metrics.get("mismatch/log_prob_abs_diff_mean", metrics.get("actor/rollout_diff"))
        if difference is not None and self._are_comparable(metrics):
            perplexity = metrics.get("mismatch/training_ppl", math.nan)
            entropy = metrics.get("actor/entropy_mean", math.log(perplexity) if perplexity > 0 else math.nan)
            claim = "it does not hold that the engines sample from the trainer's weights"
            self.audit.judge(step, EngineDifference("engines", claim, "the step's samples", difference, entropy))
        return {"sync/engine_warnings": float(self.audit.pop_warnings())}

    def _are_comparable(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a step's samples were drawn from the whole distribution of the weights that scored them."""
        rollout = self._config.rollout
        # Where the policy has moved since, engines are compared by their probe alone.
        has_moved = metrics.get("async/staleness/max", 0.0) > 0
        return bool(self._every) and rollout.top_p == 1 and not rollout.top_k and not has_moved

    def _mean_differences(self, answers: Answers) -> tuple[dict[int, float], float]:
        """Return the mean difference of each engine, and the entropy that the actor's log-probs estimate."""
        each = list(answers.values())
        # A row for each engine, and more from the first on until every rank has its micro-batches.
        rows = [each[row % len(each)] for row in range(round_up(len(each), self._actor.row_multiple))]
        columns = {
            "prompts": from_rows([torch.tensor(self._request.prompt_ids) for _ in rows]),
            "responses": from_rows([torch.tensor(row.token_ids) for row in rows]),
        }
        batch = DataProto.from_dict(columns)
        written, _ = self._actor.compute_log_prob(batch)
        found = batch.union(fetch(written, self._config.deadlines.call_s)).values("old_log_probs").float().cpu().numpy()
        by_row = np.split(found, np.cumsum(batch.lengths("responses"))[:-1])
        differences = {
            engine: float(np.abs(row - answer.log_probs).mean())
            for (engine, answer), row in zip(answers.items(), by_row[: len(answers)], strict=True)
        }
        return differences, -float(np.mean(found))
