"""`RewardManager` turns each sample into one outcome, even if a reward function fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.config.reward import RewardConfig
from mrl.errors import RewardError
from mrl.events import EventLog, Retried, SampleSkipped
from mrl.redaction import redact_text
from mrl.rewards.messages import config_to_json
from mrl.rewards.outcome import FAILURE_KINDS, Failure, Outcome, read_again, read_reply, sum_of
from mrl.rewards.pool import WorkerPool
from mrl.rewards.sample import Sample
from mrl.spans import SPANS

_NUM_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200


@dataclass
class _Job:
    """Work for one worker: one sample for functions that score it alone, or a group for functions with `group`."""

    tickets: list[int]
    name: str
    body: bytes
    attempts: int = 1


@dataclass
class _Awaited:
    """A sample that waits for the outcomes of its jobs."""

    sample: Sample
    num_jobs: int
    outcomes: list[Outcome] = field(default_factory=list)


class RewardManager:
    """Scores samples in worker processes.

    Either all at once with `score`, or one by one while a rollout is still running: `submit` queues a sample and
    returns its ticket, `drain` waits for all submitted samples, and `collect` does not wait. Only one thread at a time
    may use a manager.
    """

    def __init__(self, config: RewardConfig, events: EventLog, *, others_score: bool = False) -> None:
        """Start the workers. With `others_score`, a sample may have a data source that no function scores."""
        self._config = config
        self._others_score = others_score
        self._events = events
        self._awaited: dict[int, _Awaited] = {}
        # incomplete groups: row ids, tickets and samples of a uid
        self._groups: dict[str, list[tuple[int, int, bytes]]] = {}
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = self._num_submitted = 0  # totals
        self._batch_begin = 0  # number submitted when the last batch was drained
        self._failed: list[tuple[Sample, Failure]] = []  # in this batch
        self._pool = WorkerPool("reward", "mrl.rewards.supervisor", config_to_json(config), config.environment)

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcomes of the samples, in their order."""
        if self._awaited:
            raise RewardError(
                f"{len(self._awaited)} submitted samples are not finished", fix="call drain() before score()"
            )
        sizes = Counter(sample.uid for sample in samples)
        tickets = [self.submit(sample, sizes[sample.uid]) for sample in samples]
        outcomes = self.drain()
        return [outcomes[ticket] for ticket in tickets]

    def submit(self, sample: Sample, group_size: int = 1) -> int:
        """Queue a sample. Return the ticket that identifies it in `drain`.

        `group_size` samples with its uid are submitted in total. Functions with `group` start when the last of them
        arrives.
        """
        if not self._others_score and not self._config.scores(sample.data_source):
            raise nothing_scores(self._config, sample.data_source, sample.name)
        body = sample.to_json()
        self._num_submitted += 1
        ticket, functions = self._num_submitted, self._config.functions.values()
        group_flags = {function.group for function in functions if function.scores(sample.data_source)}
        self._awaited[ticket] = _Awaited(sample, max(1, len(group_flags)))
        if group_flags != {True}:
            self._begin(_Job([ticket], sample.name, body))
        if True in group_flags:
            group = self._groups.setdefault(sample.uid, [])
            group.append((sample.row_id, ticket, body))
            if len(group) == group_size:
                _, tickets, bodies = zip(*sorted(self._groups.pop(sample.uid)), strict=True)
                name = f"the {group_size} samples of uid {sample.uid}, source {sample.data_source}"
                self._begin(_Job(list(tickets), name, Sample.group_to_json(bodies, name)))
        return ticket

    def _begin(self, job: _Job) -> None:
        self._num_jobs += 1
        self._jobs[self._num_jobs] = job
        self._pool.submit(self._num_jobs, job.body)

    def drain(self) -> dict[int, Outcome]:
        """Wait for all submitted samples. Stop the run if too many of them have failed."""
        assert not self._groups, f"incomplete groups: {list(self._groups)[:3]}"
        done: dict[int, Outcome] = {}
        with SPANS("wait for rewards"):
            while self._awaited:
                done |= self._take()
                self.check_share(self._failed, self._num_submitted - self._batch_begin)
        self._begin_batch()
        return done

    def _begin_batch(self) -> None:
        self._batch_begin, self._failed = self._num_submitted, []

    def collect(self) -> dict[int, Outcome]:
        """Return the outcomes that are available now, each once. `check_share` limits how many may fail."""
        done = self._take(waits=False)
        self._begin_batch()
        return done

    def close(self) -> None:
        """End all workers and all processes that they started."""
        self._pool.close()

    def _take(self, *, waits: bool = True) -> dict[int, Outcome]:
        done: dict[int, Outcome] = {}
        for number, body in self._pool.receive(waits=waits):
            job = self._jobs[number]
            if reason := read_again(body):  # another sample of its worker failed
                self._try_again(number, f"next to another sample: {reason}")
                continue
            outcomes = read_reply(body, job.attempts, len(job.tickets))
            if isinstance(failure := outcomes[0], Failure) and job.attempts <= self._config.retries:
                job.attempts += 1
                self._try_again(number, f"{failure.kind}: {failure.detail}")
                continue
            del self._jobs[number]
            for ticket, outcome in zip(job.tickets, outcomes, strict=True):
                awaited = self._awaited[ticket]
                awaited.outcomes.append(outcome)
                if len(awaited.outcomes) == awaited.num_jobs:
                    del self._awaited[ticket]
                    done[ticket] = sum_of(awaited.outcomes, self._config.max_abs_score)
                    if isinstance(failed := done[ticket], Failure):
                        self._fail(awaited.sample, failed)
        return done

    def _try_again(self, number: int, reason: str) -> None:
        job = self._jobs[number]
        self._events.write(Retried(f"reward of {job.name}", job.attempts, reason))
        self._pool.submit(number, job.body)

    def _fail(self, sample: Sample, failure: Failure) -> None:
        self._failed.append((sample, failure))
        self._events.write(SampleSkipped(sample.row_id, f"reward {failure.kind}", failure.detail))
        if self._config.on_failure == "stop":
            raise RewardError(
                f"no reward for {_example(sample, failure)}",
                where="reward",
                fix="correct the reward function, or set reward.on_failure=drop to continue without such samples",
            )

    def check_share(self, failed: Sequence[tuple[Sample, Failure]], total: int) -> None:
        """Stop the run if too large a share of the samples has failed."""
        most = self._config.max_failed_share
        if len(failed) <= most * total:
            return
        kinds = Counter(failure.kind for _, failure in failed)
        counted = ", ".join(f"{kinds[kind]} {kind}" for kind in FAILURE_KINDS if kinds[kind])
        examples = [f"  {_example(sample, failure)}" for sample, failure in failed[:_NUM_EXAMPLES]]
        share = f"{len(failed)} of {total} samples have no reward ({counted}); at most {100 * most:g} % may fail"
        raise RewardError(
            "\n".join([share, *examples]),
            where="reward",
            fix="correct the reward function, or raise reward.max_failed_share",
        )


def nothing_scores(config: RewardConfig, data_source: str, where: str) -> RewardError:
    """Return the error for a data source without a reward function of nonzero weight."""
    scored = {label: ", ".join(function.sources or ["everything"]) for label, function in config.functions.items()}
    listed = "; ".join(f"{label} scores {sources}" for label, sources in scored.items())
    what = f'no function with a weight scores the data source "{data_source}" ({listed})'
    return RewardError(
        what, where=where, fix="add it to reward.functions.NAME.sources, or use a function without sources"
    )


def _example(sample: Sample, failure: Failure) -> str:
    response = sample.response[:_EXAMPLE_CHARACTERS] + ("..." if len(sample.response) > _EXAMPLE_CHARACTERS else "")
    tries = f", {failure.attempts} attempts" if failure.attempts > 1 else ""
    return redact_text(f"{sample.name}: {failure.kind}: {failure.detail}{tries}; response {response!r}")
