"""`RewardManager`: samples in, an outcome for each of them out, whatever the reward functions do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from mrl.config.reward import RewardConfig
from mrl.errors import RewardError
from mrl.events import EventLog, Retried, SampleSkipped
from mrl.redaction import redact_text
from mrl.rewards.outcome import FAILURE_KINDS, Failure, Outcome, read_reply
from mrl.rewards.pool import RewardPool
from mrl.rewards.sample import Sample

_NUM_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200


@dataclass
class _Pending:
    """A sample that waits for its outcome."""

    sample: Sample
    body: bytes
    attempts: int = 1


class RewardManager:
    """Score samples in worker processes.

    All at once with `score`, or one by one while a rollout still runs: `submit` queues a sample and returns its
    ticket, `drain` waits for all that were submitted. One thread at a time may use a manager.
    """

    def __init__(self, config: RewardConfig, events: EventLog, *, others_score: bool = False) -> None:
        """Make workers. With `others_score` a sample may be of a data source that no function scores."""
        self._config = config
        self._others_score = others_score
        self._events = events
        self._pending: dict[int, _Pending] = {}
        self._num_submitted = 0  # in all
        self._batch_begin = 0  # what had been submitted when the last batch was drained
        self._failed: list[tuple[Sample, Failure]] = []  # of this batch
        self._pool = RewardPool(config)

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in their order."""
        if self._pending:
            raise RewardError(f"{len(self._pending)} submitted samples are not done", fix="drain() before score()")
        tickets = [self.submit(sample) for sample in samples]
        outcomes = self.drain()
        return [outcomes[ticket] for ticket in tickets]

    def submit(self, sample: Sample) -> int:
        """Queue a sample; the ticket that is returned names it in `drain`."""
        if not self._others_score and not self._config.scores(sample.data_source):
            raise nothing_scores(self._config, sample.data_source, sample.name)
        body = sample.to_json()
        self._num_submitted += 1
        self._pending[self._num_submitted] = _Pending(sample, body)
        self._pool.submit(self._num_submitted, body)
        return self._num_submitted

    def drain(self) -> dict[int, Outcome]:
        """Wait for all that were submitted; the run stops where too many of them have failed."""
        done: dict[int, Outcome] = {}
        self._check_share()
        while self._pending:
            done |= self._take()
            self._check_share()
        self._batch_begin, self._failed = self._num_submitted, []
        return done

    def close(self) -> None:
        """End all workers and whatever they have started; nothing is left behind."""
        self._pool.close()

    def _take(self) -> dict[int, Outcome]:
        done: dict[int, Outcome] = {}
        for ticket, body in self._pool.receive():
            pending = self._pending[ticket]
            outcome = read_reply(body, pending.attempts)
            if isinstance(outcome, Failure) and pending.attempts <= self._config.retries:
                self._retry(ticket, outcome)
                continue
            del self._pending[ticket]
            done[ticket] = outcome
            if isinstance(outcome, Failure):
                self._fail(pending.sample, outcome)
        return done

    def _retry(self, ticket: int, failure: Failure) -> None:
        pending = self._pending[ticket]
        pending.attempts += 1
        reason = f"{failure.kind}: {failure.detail}"
        self._events.write(Retried(f"reward of {pending.sample.name}", pending.attempts, reason))
        self._pool.submit(ticket, pending.body)

    def _fail(self, sample: Sample, failure: Failure) -> None:
        self._failed.append((sample, failure))
        self._events.write(SampleSkipped(sample.row_id, f"reward {failure.kind}", failure.detail))
        if self._config.on_failure == "stop":
            raise RewardError(
                f"no reward for {_example(sample, failure)}",
                where="reward",
                fix="mend the reward function, or reward.on_failure=drop to go on without such samples",
            )

    def _check_share(self) -> None:
        """Stop as soon as it is certain that too many fail."""
        total, most = self._num_submitted - self._batch_begin, self._config.max_failed_share
        if len(self._failed) <= most * total:
            return
        kinds = Counter(failure.kind for _, failure in self._failed)
        counted = ", ".join(f"{kinds[kind]} {kind}" for kind in FAILURE_KINDS if kinds[kind])
        examples = [f"  {_example(sample, failure)}" for sample, failure in self._failed[:_NUM_EXAMPLES]]
        share = f"{len(self._failed)} of {total} samples have no reward ({counted}); at most {100 * most:g} % may fail"
        raise RewardError(
            "\n".join([share, *examples]),
            where="reward",
            fix="mend the reward function, or raise reward.max_failed_share",
        )


def nothing_scores(config: RewardConfig, data_source: str, where: str) -> RewardError:
    """Return the error of a data source that no function with a weight scores."""
    scored = {label: ", ".join(function.sources or ["everything"]) for label, function in config.functions.items()}
    listed = "; ".join(f"{label} scores {sources}" for label, sources in scored.items())
    what = f'no function with a weight scores the data source "{data_source}" ({listed})'
    return RewardError(what, where=where, fix="add it to reward.functions.NAME.sources, or a function without sources")


def _example(sample: Sample, failure: Failure) -> str:
    response = sample.response[:_EXAMPLE_CHARACTERS] + ("..." if len(sample.response) > _EXAMPLE_CHARACTERS else "")
    tries = f", {failure.attempts} attempts" if failure.attempts > 1 else ""
    return redact_text(f"{sample.name}: {failure.kind}: {failure.detail}{tries}; response {response!r}")
