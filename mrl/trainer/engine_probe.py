"""Comparison of engines with the trainer: a probe of each engine, and the mean over each step's samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
"""Largest expected mean differences: in float32, in 16 bits, and with experts, whose routing flips at ties."""
STOPS_AT = 10
"""Factor on the expected difference at which a run stops. On GPUs, one model is measured: 0.008 at 0.5B."""
ROUNDED_LOGITS = {0.0: 0.0, 0.1: 0.0041, 0.3: 0.0059, 0.5: 0.0096, 1.0: 0.0154, 2.0: 0.0224}
"""Entropy in nats -> mean log-prob difference caused by rounding logits to bfloat16 alone.

Measured with normal logits of 32,000 tokens scaled to that entropy, the largest at 25 to 28; 20 tokens drawn from each
of 400 rows.
"""
_FLOAT32_ROUNDS = 1e-5
"""Measured on CPUs: packing and kernels differ."""


@dataclass(frozen=True)
class EngineDifference:
    """Mean difference of log-probs between engines and trainer, at the same weights."""

    about: str
    claim: str
    """Statement that is false if the difference is too large."""
    over: str
    """Tokens that were compared."""
    mean: float
    entropy: float
    """Entropy of the policy at these tokens, in nats; NaN if unknown."""
    others: str = ""


@dataclass(frozen=True)
class DifferenceLimits:
    """Mean differences above which the run warns, and above which it stops."""

    warns: float
    stops: float
    reason: str

    @classmethod
    def of(cls, config: Config) -> DifferenceLimits:
        """Return the user's limit, which stops the run, or the limits that number formats and experts explain."""
        if (tolerance := config.sync.probe_tolerance) is not None:
            return cls(tolerance, tolerance, f"sync.probe_tolerance={tolerance:g}")
        dtypes = number_formats(config)
        has_experts = dtypes != ["float32"] and read_spec(config.model.path).moe is not None
        kind = "float32" if dtypes == ["float32"] else "rounded experts" if has_experts else "rounded"
        expected, formats = EXPECTED[kind], " and ".join(dtypes) + " with experts" * has_experts
        stops = STOPS_AT * expected
        return cls(expected, stops, f"at most {expected:g} is expected in {formats}, more than {stops:g} stops the run")


def number_formats(config: Config) -> list[str]:
    """Return the number format of the trainer, and that of the engines if it differs."""
    return [*dict.fromkeys((config.actor.dtype, config.rollout.vllm.get("dtype", config.actor.dtype)))]


class DifferenceAudit:
    """Judges differences. Differences that rounding can explain are counted as warnings; larger ones stop the run."""

    def __init__(self, config: Config, events: EventLog) -> None:
        self.limits = DifferenceLimits.of(config)
        self._config, self._events, self.num_warned, self._num_told = config, events, 0, 0

    def judge(self, step: int, difference: EngineDifference) -> None:
        if difference.mean <= self.limits.warns:
            return
        measured = (
            f"over {difference.over} the mean difference of log-probs is {difference.mean:.3g}; {self.limits.reason}"
        )
        measured += f"{difference.others}. {self.explanation(difference.entropy)}"
        if not difference.mean <= self.limits.stops:  # also for NaN
            raise AuditFailed(
                f"step {step}: {difference.claim}: {measured}",
                fix="use other kernels, or another rollout.vllm.dtype or quantization for the engines; raise "
                "sync.probe_tolerance only if these are known to cause such a difference",
            )
        self.num_warned += 1
        self._events.write(Warned(difference.about, f"step {step}: {measured} Warning {self.num_warned} of this kind."))

    def explanation(self, entropy: float) -> str:
        """Explain how much of a difference rounding causes at this entropy."""
        if number_formats(self._config) == ["float32"]:
            return f"Rounding to float32 explains about {_FLOAT32_ROUNDS:g}."
        if not math.isfinite(entropy):
            return "Without the policy's entropy, the part that rounding explains is unknown."
        rounding = float(np.interp(max(entropy, 0.0), [*ROUNDED_LOGITS], [*ROUNDED_LOGITS.values()]))
        rounding /= self._config.rollout.temperature
        start = f"At an entropy of {entropy:.2g} nats, rounding logits to bfloat16 causes about {rounding:.2g}"
        overrides = self._config.rollout.vllm.get("hf_overrides") or {}
        heads = overrides.get("head_dtype", "float32")
        if self._config.rollout.engine in ("vllm", "sglang") and heads == "float32":
            return f"{start}; the engines' float32 heads avoid it, but the rounding in layers remains."
        return f"{start} of it; the rounding in layers adds to this."

    def pop_warnings(self) -> int:
        """Return the number of warnings since the last call."""
        num_new, self._num_told = self.num_warned - self._num_told, self.num_warned
        return num_new


TEXT = "A ferry crosses the bay in 40 minutes and waits 15 on each side. When is it back where it began? Step by step,"
MAX_RESPONSE_TOKENS = 64
SEED = 0

Answers = Mapping[int, Generated]
"""Answers by engine number."""


class EngineProbe:
    """Compares every engine with the actor: each engine answers one prompt, and the actor scores the answers.

    Digests prove that an engine received the right bytes. They cannot detect kernels that read the bytes in another
    order, or experts that were not updated. The step's own samples would show one such engine only in the mean over all
    engines. Engines answer while they are awake, and are compared when the actor has its devices again.
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
        # No top-p, top-k or stop: compare the whole distribution, on a fixed number of tokens.
        self._sampling = Sampling(config.rollout.temperature)

    def is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def ask(self, step: int) -> Answers:
        """Return the answers of engines that have not answered since their start, and regularly of all engines."""
        if not self._every:
            return {}
        return self._hybrid.probe(self._request, self._sampling, everyone=self.is_due(step))

    def compare(self, step: int, answers: Answers) -> None:
        """Compare the log-probs of each engine with the actor's, and judge the worst engine."""
        means, entropy = self._mean_differences(answers)
        self._events.write(EnginesCompared(step, {str(engine): mean for engine, mean in means.items()}))
        worst = max(means, key=lambda engine: (not np.isfinite(means[engine]), means[engine]))
        others = ", ".join(f"engine {engine} {mean:.3g}" for engine, mean in means.items() if engine != worst)
        difference = EngineDifference(
            about=f"engine {worst}",
            claim=f"engine {worst} and the trainer disagree on log-probs",
            over=f"{len(answers[worst].token_ids)} tokens of a fixed prompt",
            mean=means[worst],
            entropy=entropy,
            others=f" ({others})" if others else "",
        )
        self.audit.judge(step, difference)

    def compare_step(
        self, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]] = ()
    ) -> dict[str, float]:
        """Judge the mean over a step's samples, or over those of its first update, before the policy moves. Return the
        number of warnings since the last step."""
        difference = metrics.get("mismatch/log_prob_abs_diff_mean")
        if difference is None and updates:
            difference = updates[0].get("rollout_diff")
        if difference is not None and self._are_comparable(metrics):
            perplexity = metrics.get("mismatch/training_ppl", math.nan)
            entropy = metrics.get("actor/entropy_mean", math.log(perplexity) if perplexity > 0 else math.nan)
            claim = "the engines and the trainer disagree on the log-probs of the samples"
            self.audit.judge(step, EngineDifference("engines", claim, "the step's samples", difference, entropy))
        return {"sync/engine_warnings": float(self.audit.pop_warnings())}

    def _are_comparable(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a step's samples come from the scored distribution of the weights that scored them."""
        rollout = self._config.rollout
        # If the policy has changed since then, only the probe compares the engines.
        has_moved = metrics.get("async/staleness/max", 0.0) > 0
        is_whole = (rollout.top_p == 1 and not rollout.top_k) or self._config.algorithm.keep_sampling_mask
        return bool(self._every) and is_whole and not has_moved

    def _mean_differences(self, answers: Answers) -> tuple[dict[int, float], float]:
        """Return the mean difference of each engine, and the entropy estimated by the actor's log-probs."""
        generated = list(answers.values())
        # One row per engine; then repeat them from the first on until every rank has its micro-batches.
        rows = [generated[row % len(generated)] for row in range(round_up(len(generated), self._actor.row_multiple))]
        columns = {
            "prompts": from_rows([torch.tensor(self._request.prompt_ids) for _ in rows]),
            "responses": from_rows([torch.tensor(row.token_ids) for row in rows]),
        }
        batch = DataProto.from_dict(columns)
        written, _ = self._actor.compute_log_prob(batch)
        log_probs = (
            batch.union(fetch(written, self._config.deadlines.call_s)).values("old_log_probs").float().cpu().numpy()
        )
        by_row = np.split(log_probs, np.cumsum(batch.lengths("responses"))[:-1])
        differences = {
            engine: float(np.abs(row - answer.log_probs).mean())
            for (engine, answer), row in zip(answers.items(), by_row[: len(answers)], strict=True)
        }
        return differences, -float(np.mean(log_probs))
