"""Simulation of the time of a step when batches are generated during training: events on a virtual clock.

The gate is the one used in runs; engines and trainer are modeled by times. All rows of an engine advance together, one
token per step, so nothing changes between the ends of two rows, and each such stretch is one event.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean

from mrl.config.arithmetic import cache_in_flight, num_engines, samples_per_step
from mrl.config.schema import Config
from mrl.config.training import AsynchronyConfig
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.engine_memory import engine_memory
from mrl.plan.memory import plan_memory, rollout_pool
from mrl.plan.plan_input import PlanInput
from mrl.plan.search import Changes
from mrl.plan.timing import Lengths, decode_step, engine_link_s, plan_time, rows_by_cache
from mrl.rollout.gate import Gate

_QUANTILES = 500
_MIN_STEPS, _MAX_STEPS, _MAX_ROWS, _MIN_ENGINE_ROWS = 10, 30, 25_000, 16
_ROUNDING = 1e-6
_SPLITS, _SIMULATED_SPLITS = 16, 3


def log_normal(mean: float, longest: float, sigma: float = ASSUMPTIONS.response_sigma) -> tuple[float, ...]:
    """Return equally likely response lengths, cut at `longest`, with the given mean."""
    spread = [NormalDist().inv_cdf((i + 0.5) / _QUANTILES) * sigma for i in range(_QUANTILES)]
    low, high = 0.0, math.log(longest) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        is_low = fmean(min(math.exp(middle + deviation), longest) for deviation in spread) < mean
        low, high = (middle, high) if is_low else (low, middle)
    return tuple(min(math.exp(low + deviation), longest) for deviation in spread)


@dataclass(frozen=True)
class Workload:
    """Work of the steps of a run."""

    samples: int
    """Samples per step."""
    lengths: Sequence[float]
    """Response lengths, all equally likely."""
    prompt_tokens: float
    num_engines: int
    rows: int
    """Rows that an engine processes at a time."""
    decode_s: Callable[[float, float], float]
    """Seconds for one token of each row, given the number of rows and their context."""
    prompt_s: float
    """Seconds of prefill for the prompt of a sample."""
    token_s: float
    """Seconds of prefill for one token when a cache is recomputed."""
    train_s: float
    """Seconds of everything that a step does with samples, including old log-probs."""
    push_s: float
    drain_every: int = 0
    """Steps between probes of engines, which wait until no sample is running; 0 means never."""
    finish_s: float = 0.0
    """Seconds from a batch's last token until it can be trained on, for example for the last rewards. Engines in flight
    continue meanwhile."""
    decode_beside: float = 1.0
    """Slowdown of an engine's steps while the trainer works: on one machine both use its memory."""
    train_beside: float = 1.0
    """Slowdown of training while engines generate."""
    batches: Sequence[Sequence[float]] = ()
    """Lengths of the first batches, if known. Later batches are drawn."""


@dataclass(frozen=True)
class Simulated:
    """Means over the steps of a simulated run."""

    step_s: tuple[float, ...]
    """Seconds of each step."""
    trainer_idle: float
    """Share of time in which the trainer waited for samples or for weights to arrive."""
    engines_idle: float
    """Share of time in which an engine had nothing to generate, as a mean over the engines."""
    ages: dict[int, float]
    """Age of a token -> share of tokens. The age is the number of updates between the weights that drew it and those
    trained from it."""

    @property
    def seconds(self) -> float:
        return fmean(self.step_s)


class _Engine:
    """Rows of one engine, rows that wait for room, and two clocks: seconds and tokens."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        self.at_s = self.busy_s = self._token = self._offset = 0.0
        self._rows: list[tuple[float, float, int]] = []
        """Heap of (end, begin, batch), with end and begin on the token clock."""
        self._waiting: deque[tuple[float, int]] = deque()
        self._left: Counter[int] = Counter()
        self._versions = [(0.0, 0)]
        """Pairs of (token from which the weights apply, version)."""
        self.ages: dict[int, Counter[int]] = {}
        """Batch -> age -> tokens."""
        self._ended: dict[int, float] = {}
        """Batch -> time at which the last finished sample of it ended."""

    @property
    def num_left(self) -> int:
        return len(self._rows) + len(self._waiting)

    def add(self, length: float, batch: int) -> None:
        self._waiting.append((length, batch))
        self._left[batch] += 1

    def take_weights(self, now: float, version: int, *, recomputes: bool) -> None:
        """Pause for a push, and then for the prefill of all running samples."""
        self.at_s = max(self.at_s, now) + self._load.push_s
        self._versions.append((self._token, version))
        if recomputes:
            self._work((len(self._rows) * self._token + self._offset) * self._load.token_s)

    def run(self, until: float, batch: int | None = None, slower: float = 1.0) -> None:
        """Generate up to this time, or only until this batch has ended, `slower` times slower than alone."""
        while self.at_s < until and (batch is None or self._left[batch]):
            self._admit()
            if not self._rows or self.at_s >= until:
                break
            count, gap = len(self._rows), self._rows[0][0] - self._token
            # The context grows within the stretch; its value at the middle is the mean.
            context = self._token + self._offset / count
            step_s = slower * self._load.decode_s(count, context + gap / 2)
            if self.at_s + gap * step_s > until:
                step_s = slower * self._load.decode_s(count, context + (until - self.at_s) / step_s / 2)
                self._token += min(gap, (until - self.at_s) / step_s)
                self._work(until - self.at_s)
                break
            self._work(gap * step_s)
            self._token += gap
            while self._rows and self._rows[0][0] <= self._token + _ROUNDING:
                self._end(*heapq.heappop(self._rows))

    def end_of(self, batch: int | None = None) -> float:
        """Return when this batch, or everything, has ended; minus infinity if nothing of it ran."""
        if self._left[batch] if batch is not None else self.num_left:
            self.run(math.inf, batch)
        return self._ended.get(batch, -math.inf) if batch is not None else max(self._ended.values(), default=-math.inf)

    def _work(self, seconds: float) -> None:
        self.at_s += seconds
        self.busy_s += seconds

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._load.rows:
            length, batch = self._waiting.popleft()
            heapq.heappush(self._rows, (self._token + length, self._token, batch))
            self._offset += self._load.prompt_tokens - self._token
            self._work(self._load.prompt_s)

    def _end(self, end: float, begin: float, batch: int) -> None:
        self._offset -= self._load.prompt_tokens - begin
        self._left[batch] -= 1
        self._ended[batch] = self.at_s
        ages = self.ages.setdefault(batch, Counter())
        for since, version in reversed(self._versions):
            if end > since:
                ages[batch - 1 - version] += round(end - max(since, begin))
                end = since
            if begin >= since:
                break


def simulate(load: Workload, mode: AsynchronyConfig, num_steps: int | None = None, seed: int = 0) -> Simulated:
    """Return the timing of `num_steps` steps. Earlier steps, in which the engines get ahead, do not count."""
    counted = num_steps or max(_MIN_STEPS, min(_MAX_STEPS, _MAX_ROWS // load.samples // _MIN_STEPS * _MIN_STEPS))
    first = 2 + mode.ahead
    # end the run later, so that the engines never run out of work
    gate = Gate(mode.ahead, first + counted + mode.ahead)
    engines = [_Engine(load) for _ in range(load.num_engines)]
    in_flight = mode.weights == "in_flight"

    def whole_s(batch: int | None) -> float:
        return max(engine.end_of(batch) for engine in engines) + load.finish_s

    now, trained_s, marks = 0.0, 0.0, []
    for step in range(1, first + counted):
        if not in_flight:
            now = max(now, whole_s(None))
        for engine in engines:
            engine.take_weights(now, step - 1, recomputes=mode.cache == "recompute")
        now += load.push_s
        if in_flight and load.drain_every and step % load.drain_every == 0:
            now = max(now, whole_s(None))
        gate.trained = step - 1
        for number in gate.open():
            _deal(load, engines, now, number, random.Random(f"{seed} {number}"))
        begin = max(now, whole_s(step))
        now = _train(load, engines, begin)
        trained_s += now - begin
        marks.append((now, sum(engine.busy_s for engine in engines), trained_s))
    marks = marks[first - 2 :]
    total, busy, training = (last - earlier for last, earlier in zip(marks[-1], marks[0], strict=True))
    ages = sum((engine.ages[number] for engine in engines for number in engine.ages if number >= first), Counter[int]())
    return Simulated(
        step_s=tuple(end - begin for (begin, *_), (end, *_) in pairwise(marks)),
        trainer_idle=1 - training / total,
        engines_idle=1 - busy / total / len(engines),
        ages={age: ages[age] / ages.total() for age in sorted(ages)},
    )


def _train(load: Workload, engines: list[_Engine], begin: float) -> float:
    """Return the end of a training phase that begins at `begin`. Engines generate until then."""
    for engine in engines:
        engine.run(begin)
    busy_s, end = sum(engine.busy_s for engine in engines), begin + load.train_s
    while True:
        for engine in engines:
            engine.run(end, slower=load.decode_beside)
        beside_s = (sum(engine.busy_s for engine in engines) - busy_s) / len(engines)
        now, end = end, begin + load.train_s + (1 - 1 / load.train_beside) * beside_s
        if end <= now + _ROUNDING:
            return now


def _deal(load: Workload, engines: list[_Engine], now: float, number: int, chance: random.Random) -> None:
    """Give each sample of a batch to the engine with the fewest samples."""
    for engine in engines:
        engine.at_s = max(engine.at_s, now)
    heap = [(engine.num_left, place) for place, engine in enumerate(engines)]
    heapq.heapify(heap)
    known = load.batches[number - 1] if number <= len(load.batches) else ()
    for length in known or [chance.choice(load.lengths) for _ in range(load.samples)]:
        num_left, place = heap[0]
        engines[place].add(length, number)
        heapq.heapreplace(heap, (num_left + 1, place))


# --- for a configuration ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsynchronyPlan:
    """Gain of a configuration from asynchrony."""

    shared: Simulated | None
    """Synchronous run in which engines and actor take turns on all of their devices. None if this is not a valid
    configuration or does not fit."""
    synchronous: Simulated
    asynchronous: Simulated
    generation_s: float
    """Seconds of a batch if training takes no time."""
    training_s: float
    push_s: float

    @property
    def bound_s(self) -> float:
        """Return the lower bound of a step's time."""
        return max(self.generation_s, self.training_s) + self.push_s


def workload(subject: PlanInput, lengths: Lengths) -> Workload:
    config, spec, device = subject.config, subject.specs["actor"], subject.hardware
    engine, rollout = engine_memory(config, spec, device), config.rollout
    flops_per_s = rollout.tp * rollout.pp * device.flops_per_s * ASSUMPTIONS.prefill_efficiency
    whole, prompt = math.ceil(lengths.whole), math.ceil(lengths.prompt)
    sharing = config.batch.samples_per_prompt if rollout.vllm.get("enable_prefix_caching") is not False else 1
    phases = {phase.name: phase.seconds for phase in plan_time(subject, lengths).phases}
    load = Workload(
        samples=samples_per_step(config.batch),
        lengths=log_normal(lengths.response, rollout.max_response_tokens),
        prompt_tokens=lengths.prompt,
        num_engines=num_engines(config) * rollout.dp,  # ranks have their own samples, as engines do
        rows=max(1, int(min(rows_by_cache(engine, lengths), engine.max_sequences))),
        decode_s=decode_step(subject, engine),
        prompt_s=(spec.sequence_flops(prompt) / flops_per_s + prompt * engine_link_s(subject)) / sharing,
        token_s=spec.sequence_flops(whole) / whole / flops_per_s + engine_link_s(subject),
        train_s=sum(phases.values()) - phases["rollout"] - phases["weights"],
        push_s=phases["weights"],
        drain_every=config.sync.probe_every,
    )
    size = min(load.samples * _MIN_STEPS // _MAX_ROWS, load.samples // load.num_engines // _MIN_ENGINE_ROWS)
    return coarsened(load, max(1, size))


def coarsened(load: Workload, size: int) -> Workload:
    """Return a workload whose rows each represent several rows, which is proportionally faster to simulate."""
    decode_s = load.decode_s
    return replace(
        load,
        samples=load.samples // size,
        rows=max(1, load.rows // size),
        decode_s=lambda rows, context: decode_s(rows * size, context),
        prompt_s=load.prompt_s * size,
        token_s=load.token_s * size,
    )


def plan_asynchrony(subject: PlanInput, lengths: Lengths) -> AsynchronyPlan:
    load, mode = workload(subject, lengths), planned_mode(subject.config)
    alone = simulate(replace(load, train_s=0.0), mode)
    shared = _shared(subject)
    return AsynchronyPlan(
        shared=simulate(workload(shared, lengths), AsynchronyConfig()) if shared else None,
        synchronous=simulate(load, AsynchronyConfig()),
        asynchronous=simulate(load, mode),
        generation_s=alone.seconds - load.push_s,
        training_s=load.train_s,
        push_s=load.push_s,
    )


def planned_mode(config: Config) -> AsynchronyConfig:
    """Return the asynchrony settings, with the cache policy resolved if mrl chooses it."""
    return replace(config.asynchrony, cache=cache_in_flight(config))


def _shared(subject: PlanInput) -> PlanInput | None:
    placement = subject.config.placement
    engines, actor = rollout_pool(subject.config), placement.roles["actor"]
    pools = {pool: size for pool, size in placement.pools.items() if pool != engines}
    pools[actor] += placement.pools[engines]
    changes: Changes = {"placement.pools": pools, "rollout.replicas": None, "asynchrony": AsynchronyConfig()}
    changes["placement.roles"] = {role: pool for role, pool in placement.roles.items() if role != "rollout"}
    varied = subject.with_changes(changes)
    return varied if varied is not None and not plan_memory(varied).shortages else None


def faster_split(subject: PlanInput, lengths: Lengths, than_s: float) -> tuple[float, Changes] | None:
    """Return the fastest other division of the devices between engines and actor, with its seconds. The layouts stay
    the same.

    The divisions with the lowest sums of phases are simulated.
    """
    placement, mode = subject.config.placement, planned_mode(subject.config)
    engines, actor = rollout_pool(subject.config), placement.roles["actor"]
    present, total = placement.pools[engines], placement.pools[engines] + placement.pools[actor]
    by_bound = []
    for part in {total * number // _SPLITS for number in range(1, _SPLITS)} - {present}:
        pools = {**placement.pools, engines: part, actor: total - part}
        changes: Changes = {"placement.pools": pools, "rollout.replicas": None}
        varied = subject.with_changes(changes)
        if varied is not None and not plan_memory(varied).shortages:
            phases = {phase.name: phase.seconds for phase in plan_time(varied, lengths).phases}
            rest = sum(phases.values()) - phases["rollout"] - phases["weights"]
            by_bound.append((max(phases["rollout"], rest) + phases["weights"], part, changes, varied))
    by_bound.sort(key=lambda entry: entry[:2])
    simulated = [
        (simulate(workload(varied, lengths), mode).seconds, part, changes)
        for _, part, changes, varied in by_bound[:_SIMULATED_SPLITS]
    ]
    seconds, _, changes = min(simulated, key=lambda entry: entry[:2], default=(math.inf, 0, {}))
    return (seconds, changes) if seconds < than_s else None
