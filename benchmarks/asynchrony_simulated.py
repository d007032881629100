"""The simulator of `mrl plan` against whole asynchronous runs: three mixes of generating and training, on two cores.

    python benchmarks/asynchrony_simulated.py [--steps N] [--epochs N N N] [--repeats N] [--json FILE]

The runs are those of `benchmarks/asynchrony.py`, with an engine and a trainer on a core each. More epochs make training
longer, so that generating takes about twice, once and half as long. Each mix runs in turns synchronously, a batch ahead
between batches, and two ahead in flight. All have the correction, so that the same passes are counted in each.

`fitted` is the synchronous run of each mix, from which the simulator is told: the seconds of training, of weights, and
from the last token to a whole batch; seconds of an engine's step over rows, tokens of context and of prompts, by least
squares; and the lengths of the very samples, which every mode has alike. How much longer an engine and its trainer take
when both cores are busy, no synchronous run can say: both numbers are read off one asynchronous run, that between
batches of the middle mix, which is called fitted too. `predicted` are the five others, of which nothing is told.

Seconds are means over the same steps of each run, behind those in which engines get ahead and before the last ones, in
which they have no more to do; of a step, the median over the repeats.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asynchrony import APART, CONFIG, CORRECTION, MAX_TOKENS, cut, run
from benchmarks.harness import Benchmark, parser
from mrl.config.training import AsynchronyConfig
from mrl.demo.model import make_model
from mrl.plan.asynchrony import Simulated, Workload, simulate
from mrl.rollout.engine import EngineSettings
from mrl.rollout.requests import Generated, GenerationRequest, Sampling

TOLERANCE = 0.1
SAMPLES, ROWS = 64, 256
SYNCHRONOUS, BETWEEN = "synchronous", "ahead 1, between"
MODES = {
    SYNCHRONOUS: AsynchronyConfig(),
    BETWEEN: AsynchronyConfig(ahead=1),
    "ahead 2, in flight": AsynchronyConfig(ahead=2, weights="in_flight", cache="recompute"),
}
MOST_AHEAD = max(mode.ahead for mode in MODES.values())
FIRST = 2 + MOST_AHEAD
"""The step from which on engines are as far ahead as they get."""
FEWEST_STEPS = FIRST + MOST_AHEAD + 2
LOG = "engine-steps.jsonl"


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine."""

    began: float
    seconds: float
    rows: int
    context: int
    """Tokens of all rows before it."""
    prompts: int
    """Tokens of the prompts that begin with it."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    lines: Sequence[Mapping[str, float]]
    """The figures of its steps."""
    engine_steps: Sequence[EngineStep]
    batches: Sequence[Sequence[float]]
    """The lengths of what began together: batches, where the run is synchronous."""

    @property
    def compared(self) -> list[Mapping[str, float]]:
        """Without the steps in which engines get ahead, and those in which they have no more to do."""
        return [line for line in self.lines if FIRST <= line["step"] <= self.lines[-1]["step"] - MOST_AHEAD]

    @property
    def train_s(self) -> float:
        """All of a step but its rollout, mean over the steps that are compared."""
        return statistics.fmean(line["timing_s/step"] - line["timing_s/rollout"] for line in self.compared)


def __getattr__(name: str) -> object:
    """Make the engine where one is asked for: this process needs no vLLM."""
    if name != "steps_written":
        raise AttributeError(name)
    from mrl.rollout.vllm_engine import VllmEngine

    class StepsWritten(VllmEngine):
        """Has the lengths of `asynchrony.py`, and writes down each of its steps in the directory of the model."""

        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(settings)
            self._log = (settings.model / LOG).open("w", buffering=1)
            self._contexts: dict[str, int] = {}
            self._prompts = 0

        def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
            requests, sampling = cut(requests, sampling)
            super()._start(requests, sampling)
            contexts = {each.key: len(each.prompt_ids) for each in requests}
            self._contexts |= contexts
            self._prompts += sum(contexts.values())
            self._log.write(json.dumps([each.max_tokens for each in requests]) + "\n")

        def _step(self) -> list[Generated]:
            told = {"rows": len(self._contexts), "context": sum(self._contexts.values()), "prompts": self._prompts}
            self._prompts, began = 0, time.perf_counter()
            finished = super()._step()
            self._log.write(json.dumps({"began": began, "seconds": time.perf_counter() - began, **told}) + "\n")
            self._contexts = {key: length + 1 for key, length in self._contexts.items()}
            for each in finished:
                del self._contexts[each.key]
            return finished

    return StepsWritten


def measure(directory: Path, name: str, epochs: int, steps: int, mode: AsynchronyConfig) -> Measured:
    """Run once, with a model of its own."""
    pools, roles = APART
    told = {"directory": directory / name, "epochs": epochs, "steps": steps, "longest": MAX_TOKENS}
    model = make_model(directory / name / "model", seed=1, max_length=MAX_TOKENS + 16)
    config = directory / name / "run.yaml"
    config.write_text(CONFIG.format(**told, pools=pools, roles=roles))
    overrides = (
        CORRECTION,
        f"asynchrony={{ahead: {mode.ahead}, weights: {mode.weights}, cache: {mode.cache or 'null'}}}",
        "rollout.engine=benchmarks.asynchrony_simulated:steps_written",
        f"rollout.vllm.max_num_seqs={ROWS}",
        "rollout.vllm.async_scheduling=false",  # as on every CPU
    )
    lines = run(config, "run", overrides)
    written = [json.loads(line) for line in (model / LOG).read_text().splitlines()]
    begun = [each for each in written if isinstance(each, list) and len(each) >= SAMPLES]  # and no probe of an engine
    return Measured(lines, [EngineStep(**each) for each in written if isinstance(each, dict)], begun)


@dataclass(frozen=True)
class Law:
    """Seconds of an engine's step."""

    base_s: float
    row_s: float
    context_s: float
    """Of each token of all rows."""
    prompt_s: float
    """Of each token of prompts."""

    def decode_s(self, rows: float, context: float) -> float:
        """Return those of a token for so many rows with so much context each."""
        return self.base_s + self.row_s * rows + self.context_s * rows * context

    def seconds(self, terms: Sequence[Sequence[float]]) -> float:
        """Return those of steps."""
        return float((np.array(terms) @ [self.base_s, self.row_s, self.context_s, self.prompt_s]).sum())


def engine_work(measured: Measured) -> tuple[list[list[float]], list[float]]:
    """Return what each step of a synchronous run's engine had to do, and how long it took up to the next."""
    begins = [place for place, step in enumerate(measured.engine_steps) if step.prompts]
    terms, seconds = [], []
    for begin, end in pairwise(begins[FIRST - 1 : len(measured.batches) - MOST_AHEAD + 1]):
        of_batch = measured.engine_steps[begin:end]
        terms += [[1.0, step.rows, step.context, step.prompts] for step in of_batch]
        seconds += [after.began - step.began for step, after in pairwise(of_batch)] + [of_batch[-1].seconds]
    return terms, seconds


def fitted_law(runs: Sequence[Measured]) -> Law:
    """Return the law whose seconds of whole synchronous runs are the measured ones."""
    terms, seconds = zip(*map(engine_work, runs), strict=True)
    found, *_ = np.linalg.lstsq(np.concatenate(terms), np.concatenate(seconds), rcond=None)
    return Law(*map(float, found))


@dataclass(frozen=True)
class Beside:
    """How many times as long as alone it takes while the other core is busy."""

    decode: float = 1.0
    train: float = 1.0


def beside_in(between: Measured, alone: Measured) -> Beside:
    """Return what a run between batches says: each batch begins to be generated as the one before begins training."""
    terms, seconds = engine_work(between)
    batches = sum(each[3] > 0 for each in terms)
    generating_s, generating_alone_s = sum(seconds) / batches, fitted_law([alone]).seconds(terms) / batches
    both_s = min(generating_s, between.train_s)

    def factor(longer_s: float) -> float:
        return both_s / (both_s - max(0.0, longer_s))

    return Beside(factor(generating_s - generating_alone_s), factor(between.train_s - alone.train_s))


def workload(alone: Sequence[Measured], beside: Beside) -> Workload:
    """Return what the simulator is told, all of it from synchronous runs."""
    law, push_s, prompt = fitted_law(alone), mean(alone, "sync/seconds"), mean(alone, "prompt_length/mean")
    return Workload(
        samples=SAMPLES,
        lengths=(),  # those of all batches are known
        prompt_tokens=prompt,
        num_engines=1,
        rows=ROWS,
        decode_s=law.decode_s,
        prompt_s=law.prompt_s * prompt,
        token_s=law.prompt_s,
        train_s=mean(alone, "timing_s/step") - mean(alone, "timing_s/rollout"),
        push_s=push_s,
        finish_s=mean(alone, "timing_s/rollout") - mean(alone, "perf/generating_s") - push_s,
        decode_beside=beside.decode,
        train_beside=beside.train,
        batches=alone[0].batches,
    )


def predict(load: Workload, mode: AsynchronyConfig) -> Simulated:
    """Simulate the steps that are compared."""
    last, first = len(load.batches) - MOST_AHEAD, 2 + mode.ahead
    found = simulate(load, mode, num_steps=last - first + 1)
    return Simulated(found.step_s[FIRST - first :], found.trainer_idle, found.engines_idle, found.ages)


def mean(runs: Sequence[Measured], name: str) -> float:
    """Return the mean over the steps that are compared of the median over the runs."""
    steps = zip(*(run.compared for run in runs), strict=True)
    return statistics.fmean(statistics.median(line[name] for line in lines) for lines in steps)


def compare(
    bench: Benchmark, epochs: int, runs: Mapping[str, Sequence[Measured]], beside: Beside, *, is_middle: bool
) -> None:
    """Add the rows and goals of a mix."""
    alone = runs[SYNCHRONOUS]
    load = workload(alone, beside)
    for name, mode in MODES.items():
        found, measured_s = predict(load, mode), mean(runs[name], "timing_s/step")
        is_fitted = name == SYNCHRONOUS or (is_middle and name == BETWEEN)
        error = found.seconds / measured_s - 1
        inputs = {"training_s": load.train_s, "generating_s": mean(alone, "perf/generating_s")}
        inputs |= {"weights_s": load.push_s, "finish_s": load.finish_s, **vars(fitted_law(alone))}
        bench.row(
            epochs=epochs,
            mode=name,
            simulated="fitted" if is_fitted else "predicted",
            measured_s=measured_s,
            simulated_s=found.seconds,
            error=error,
            trainer_idle=mean(runs[name], "timing_s/rollout") / measured_s,
            simulated_trainer_idle=found.trainer_idle,
            engines_idle=max(0.0, 1 - mean(runs[name], "perf/generating_s") / measured_s),
            simulated_engines_idle=found.engines_idle,
            **(inputs if name == SYNCHRONOUS else {}),
        )
        if not is_fitted:
            bench.goal(f"{name}, {epochs} epochs: error of the predicted step", abs(error), at_most=TOLERANCE)


def main() -> int:
    """All mixes and modes in turns."""
    options = parser("What the simulator predicts of asynchronous runs.", repeats=1)
    options.add_argument("--steps", type=int, default=18, help="of a run (default 18)")
    options.add_argument("--epochs", type=int, nargs=3, default=(1, 3, 6))
    arguments = options.parse_args()
    if arguments.steps < FEWEST_STEPS:
        options.error(f"of {arguments.steps} steps too few are left to compare: at least {FEWEST_STEPS}")
    bench = Benchmark("asynchrony_simulated")
    found: dict[int, dict[str, list[Measured]]] = {each: {mode: [] for mode in MODES} for each in arguments.epochs}
    besides: list[Beside] = []
    with tempfile.TemporaryDirectory() as made:
        for repeat in range(arguments.repeats):
            directory = Path(made, str(repeat))
            for epochs, runs in found.items():
                for number, (name, mode) in enumerate(MODES.items()):
                    measured = measure(directory, f"{epochs}-{number}", epochs, arguments.steps, mode)
                    runs[name].append(measured)
                    print(epochs, "epochs,", name, f"{mean(runs[name], 'timing_s/step'):.2f} s a step", flush=True)
            middle = found[arguments.epochs[1]]
            besides.append(beside_in(middle[BETWEEN][-1], middle[SYNCHRONOUS][-1]))
            print("beside each other:", besides[-1], flush=True)
    beside = Beside(*(statistics.median(getattr(each, name) for each in besides) for name in ("decode", "train")))
    for epochs, runs in found.items():
        compare(bench, epochs, runs, beside, is_middle=epochs == arguments.epochs[1])
    bench.row(mode="beside each other", simulated="fitted", decode_beside=beside.decode, train_beside=beside.train)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
