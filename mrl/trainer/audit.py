"""Identities that hold in every right run, checked while it runs: each that breaks stops the run and is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.config.schema import Config
from mrl.controller.transport import fetch
from mrl.data.chat import ChatTokenizer
from mrl.errors import AuditFailed
from mrl.events import EnginesCompared, EventLog
from mrl.observe.metrics import as_written, read_metrics
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged, from_rows
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rounding import round_up
from mrl.trainer.role_client import ActorClient

SAME_POLICY = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far mean log-prob differences of one policy may be from 0: packing and kernels differ between passes."""


def check_invariants(
    config: Config, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]], num_tokens: int
) -> None:
    tolerance = SAME_POLICY[config.actor.dtype]
    if updates:
        # The first update meets the policy that made the old log-probs.
        _check(step, "the loss reports ppo_kl, the mean log-ratio", "ppo_kl" in updates[0], ", ".join(updates[0]))
        moved = abs(updates[0]["ppo_kl"])
        _check(step, "the ratio is 1 in the first update", moved <= tolerance, f"mean log-ratio {moved:.3g}")
        clipped = updates[0].get("pg_clipfrac", 0.0)
        _check(step, "nothing is clipped in the first update", clipped <= tolerance, f"{100 * clipped:.3g} % clipped")
        seen, wanted = round(sum(update["tokens"] for update in updates)), num_tokens * config.batch.epochs_per_step
        _check(step, "every response token is learned from once", seen == wanted, f"{seen} of {wanted}")
        # An estimate at sampled tokens may be below 0; only a divergence has a mass.
        apart = min((update["distill_loss"] for update in updates if "teacher_mass" in update), default=0.0)
        _check(step, "no divergence from the teacher is below 0", apart >= -tolerance, f"it is {apart:.3g}")
    is_other = config.reference is not None and config.reference.path is not None
    if step == 1 and "reward/kl" in metrics and not is_other:
        kl = abs(metrics["reward/kl"])
        _check(step, "the KL to the reference is 0 before training", kl <= tolerance, f"it is {kl:.3g}")
    _check_engines(config, step, metrics)


def _check_engines(config: Config, step: int, metrics: Mapping[str, float]) -> None:
    difference = metrics.get("mismatch/log_prob_abs_diff_mean", metrics.get("actor/rollout_diff"))
    if not config.sync.probe_every or difference is None or config.rollout.top_p < 1 or config.rollout.top_k:
        return
    if metrics.get("async/staleness/max", 0.0) > 0:
        return  # the policy has moved since: engines are compared by `EngineProbe`, at the weights that they hold
    what = f"the mean difference of log-probs is {difference:.3g}; sync.probe_tolerance={config.sync.probe_tolerance:g}"
    _check(step, "the engines sample from the trainer's weights", difference <= config.sync.probe_tolerance, what)


def _check(step: int, identity: str, holds: bool, found: str) -> None:
    if not holds:
        raise AuditFailed(
            f"step {step}: it does not hold that {identity}: {found}",
            fix="this is a defect of mrl or of its settings, not of the model: results would not mean what they say",
        )


NOBODY = -(1 << 31)
"""The age of a token that no weights drew."""


def with_staleness(batch: DataProto, version: int) -> DataProto:
    """Return the rows with the age of each token's weights, where it is known what drew them."""
    if "versions" not in batch.columns():
        return batch
    drawn = batch.values("versions")
    ages = torch.where(drawn < 0, NOBODY, version - drawn)
    return batch.with_column("staleness", Jagged(ages, batch.lengths("responses")))


def staleness_metrics(batch: DataProto, ahead: int) -> dict[str, float]:
    """Return figures of the ages; one that is beyond what may be ahead stops the run."""
    if "staleness" not in batch.columns():
        return {}
    ages = batch.values("staleness").numpy()
    of_rows = np.split(ages, np.cumsum(batch.lengths("responses"))[:-1])
    written = ages[ages != NOBODY]
    if written.min() < 0 or written.max() > ahead:
        what = f"tokens are {written.min()} to {written.max()} updates old, and asynchrony.ahead is {ahead}"
        raise AuditFailed(what, fix="this is a defect of mrl: the samples are not those that they are taken for")
    return {
        "async/staleness/mean": float(written.mean()),
        "async/staleness/max": float(written.max()),
        "async/versions_per_sample": float(np.mean([len(np.unique(row[row != NOBODY])) for row in of_rows])),
    } | {f"async/staleness/share_{age}": float((written == age).mean()) for age in range(ahead + 1)}


_OF_THE_CLOCK = ("timing_s/", "perf/", "sync/seconds", "reward/seconds", "agent/environment_s")


def without_clock(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that do not depend on how fast a machine is."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_CLOCK)}


class ReplayedRun:
    """What a run wrote into `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines = {line["step"]: without_clock(line) for line in read_metrics(directory / "metrics.jsonl")}
        self.num_steps = max(self._lines, default=0)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop where these figures are not those of the run, to the last bit; steps that it has not done are new."""
        if (expected := self._lines.get(step)) is None:
            return
        found = without_clock(as_written(step, metrics))
        names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if names:
            first = names[0]
            raise AuditFailed(
                f"step {step} of the replay is another than the run's: {len(names)} of {len(expected)} figures differ, "
                f"the first {first}: {found.get(first)} instead of {expected.get(first)}",
                where=str(self.directory),
                fix="the model, the data, the configuration and the machine that the run had; GPUs do not promise it",
            )


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
        (prompt,) = tokenizer([TEXT], add_special_tokens=False)["input_ids"]
        ids = np.asarray(prompt[: config.rollout.max_prompt_tokens], dtype=np.int32)
        limit = min(MAX_RESPONSE_TOKENS, config.rollout.max_response_tokens)
        self._request = GenerationRequest("probe", "probe", ids, SEED, limit)
        # Neither cut nor stopped: the whole distribution is compared, and always as many tokens.
        self._sampling = Sampling(config.rollout.temperature)

    def is_due(self, step: int) -> bool:
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
        return {
            engine: float(np.abs(row - answer.log_probs).mean())
            for (engine, answer), row in zip(answers.items(), by_row[: len(answers)], strict=True)
        }
