"""Comparison of the simulator of `mrl plan` with whole asynchronous runs: three ratios of generation to training, on
two cores.

    python benchmarks/asynchrony_simulated.py [--steps N] [--epochs N N N] [--repeats N] [--json FILE]

The runs are those of `benchmarks/asynchrony.py`, with one engine and one trainer on one core each. More epochs make
training longer, so that generation takes about twice, once and half as long. Each ratio runs in turns synchronously,
one batch ahead between batches, and two ahead in flight. All have the correction, so that each counts the same passes.

`fitted` is the synchronous run of each ratio, from which the simulator gets: the seconds of training, of weights, and
from the last token to a complete batch; the seconds of an engine's step by rows, context tokens and prompt tokens, by
least squares; and the lengths of the samples, which are equal in all modes. The slowdown of an engine and its trainer
when both cores are busy cannot be seen in synchronous runs: both numbers come from one asynchronous run, the one
between batches with the middle ratio, which therefore is `fitted`, too. `predicted` are the other five, without any
input from them.

Seconds are means over the same steps of each run, after the steps in which engines get ahead and before the last ones,
in which they have no more work; for a step, the median over the repeats.
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
"""First step at which engines are as far ahead as possible."""
FEWEST_STEPS = FIRST + MOST_AHEAD + 2
LOG = "engine-steps.jsonl"


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine."""

    began: float
    seconds: float
    rows: int
    context: int
    """Number of tokens in all rows before the step."""
    prompts: int
    """Number of prompt tokens that the step begins with."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    lines: Sequence[Mapping[str, float]]
    """Metrics of its steps."""
    engine_steps: Sequence[EngineStep]
    batches: Sequence[Sequence[float]]
    """Lengths of samples that began together: batches, if the run is synchronous."""

    @property
    def compared(self) -> list[Mapping[str, float]]:
        """Steps without those in which engines get ahead, and those in which they have no more work."""
        return [line for line in self.lines if FIRST <= line["step"] <= self.lines[-1]["step"] - MOST_AHEAD]

    @property
    def train_s(self) -> float:
        """Mean seconds of a step without its rollout, over the compared steps."""
        return statistics.fmean(line["timing_s/step"] - line["timing_s/rollout"] for line in self.compared)


def __getattr__(name: str) -> object:
    """Create the engine class on demand: this process needs no vLLM."""
    if name != "steps_written":
        raise AttributeError(name)
    from mrl.rollout.vllm_engine import VllmEngine

    class StepsWritten(VllmEngine):
        """Uses the lengths of `asynchrony.py`, and writes each of its steps to the model's directory."""

        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(settings)
            self._log = (settings.model / LOG).open("w", buffering=1)
            self._contexts: dict[str, int] = {}
            self._prompts = 0

        def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
            requests, sampling = cut(requests, sampling)
            super()._start(requests, sampling)
            contexts = {request.key: len(request.prompt_ids) for request in requests}
            self._contexts |= contexts
            self._prompts += sum(contexts.values())
            self._log.write(json.dumps([request.max_tokens for request in requests]) + "\n")

        def _step(self) -> list[Generated]:
            step_facts = {
                "rows": len(self._contexts),
                "context": sum(self._contexts.values()),
                "prompts": self._prompts,
            }
            self._prompts, began = 0, time.perf_counter()
            finished = super()._step()
            self._log.write(json.dumps({"began": began, "seconds": time.perf_counter() - began, **step_facts}) + "\n")
            self._contexts = {key: length + 1 for key, length in self._contexts.items()}
            for sample in finished:
                del self._contexts[sample.key]
            return finished

    return StepsWritten


def measure(directory: Path, name: str, epochs: int, steps: int, mode: AsynchronyConfig) -> Measured:
    """Run once, with a separate model."""
    pools, roles = APART
    settings = {"directory": directory / name, "epochs": epochs, "steps": steps, "longest": MAX_TOKENS}
    model = make_model(directory / name / "model", seed=1, max_length=MAX_TOKENS + 16)
    config = directory / name / "run.yaml"
    config.write_text(CONFIG.format(**settings, pools=pools, roles=roles))
    overrides = (
        CORRECTION,
        f"asynchrony={{ahead: {mode.ahead}, weights: {mode.weights}, cache: {mode.cache or 'null'}}}",
        "rollout.engine=benchmarks.asynchrony_simulated:steps_written",
        f"rollout.vllm.max_num_seqs={ROWS}",
        "rollout.vllm.async_scheduling=false",  # as on every CPU
    )
    lines = run(config, "run", overrides)
    entries = [json.loads(line) for line in (model / LOG).read_text().splitlines()]
    batches = [
        entry for entry in entries if isinstance(entry, list) and len(entry) >= SAMPLES
    ]  # excludes engine probes
    return Measured(lines, [EngineStep(**entry) for entry in entries if isinstance(entry, dict)], batches)


@dataclass(frozen=True)
class Law:
    """Seconds of an engine's step."""

    base_s: float
    row_s: float
    context_s: float
    """Seconds per token of all rows."""
    prompt_s: float
    """Seconds per prompt token."""

    def decode_s(self, rows: float, context: float) -> float:
        """Return the seconds of one decoding step for this many rows with this much context each."""
        return self.base_s + self.row_s * rows + self.context_s * rows * context

    def seconds(self, terms: Sequence[Sequence[float]]) -> float:
        """Return the total seconds of these steps."""
        return float((np.array(terms) @ [self.base_s, self.row_s, self.context_s, self.prompt_s]).sum())


def engine_work(measured: Measured) -> tuple[list[list[float]], list[float]]:
    """Return the work of each step of a synchronous run's engine, and its time until the next step."""
    begins = [place for place, step in enumerate(measured.engine_steps) if step.prompts]
    terms, seconds = [], []
    for begin, end in pairwise(begins[FIRST - 1 : len(measured.batches) - MOST_AHEAD + 1]):
        batch_steps = measured.engine_steps[begin:end]
        terms += [[1.0, step.rows, step.context, step.prompts] for step in batch_steps]
        seconds += [after.began - step.began for step, after in pairwise(batch_steps)] + [batch_steps[-1].seconds]
    return terms, seconds


def fitted_law(runs: Sequence[Measured]) -> Law:
    """Return the law that reproduces the seconds of whole synchronous runs."""
    terms, seconds = zip(*map(engine_work, runs), strict=True)
    coefficients, *_ = np.linalg.lstsq(np.concatenate(terms), np.concatenate(seconds), rcond=None)
    return Law(*map(float, coefficients))


@dataclass(frozen=True)
class Beside:
    """Slowdown factors while the other core is busy."""

    decode: float = 1.0
    train: float = 1.0


def beside_in(between: Measured, alone: Measured) -> Beside:
    """Return the slowdowns in a run between batches, where a batch is generated while the previous one is trained."""
    terms, seconds = engine_work(between)
    batches = sum(step_terms[3] > 0 for step_terms in terms)
    generating_s, generating_alone_s = sum(seconds) / batches, fitted_law([alone]).seconds(terms) / batches
    both_s = min(generating_s, between.train_s)

    def factor(longer_s: float) -> float:
        return both_s / (both_s - max(0.0, longer_s))

    return Beside(factor(generating_s - generating_alone_s), factor(between.train_s - alone.train_s))


def workload(alone: Sequence[Measured], beside: Beside) -> Workload:
    """Return the simulator's input, all from synchronous runs."""
    law, push_s, prompt = fitted_law(alone), mean(alone, "sync/seconds"), mean(alone, "prompt_length/mean")
    return Workload(
        samples=SAMPLES,
        lengths=(),  # the lengths of all batches are known
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
    """Simulate the compared steps."""
    last, first = len(load.batches) - MOST_AHEAD, 2 + mode.ahead
    simulated = simulate(load, mode, num_steps=last - first + 1)
    return Simulated(simulated.step_s[FIRST - first :], simulated.trainer_idle, simulated.engines_idle, simulated.ages)


def mean(runs: Sequence[Measured], name: str) -> float:
    """Return the mean over the compared steps of the median over the runs."""
    steps = zip(*(run.compared for run in runs), strict=True)
    return statistics.fmean(statistics.median(line[name] for line in lines) for lines in steps)


def compare(
    bench: Benchmark, epochs: int, runs: Mapping[str, Sequence[Measured]], beside: Beside, *, is_middle: bool
) -> None:
    """Add the rows and goals of one ratio."""
    alone = runs[SYNCHRONOUS]
    load = workload(alone, beside)
    for name, mode in MODES.items():
        simulated, measured_s = predict(load, mode), mean(runs[name], "timing_s/step")
        is_fitted = name == SYNCHRONOUS or (is_middle and name == BETWEEN)
        error = simulated.seconds / measured_s - 1
        inputs = {"training_s": load.train_s, "generating_s": mean(alone, "perf/generating_s")}
        inputs |= {"weights_s": load.push_s, "finish_s": load.finish_s, **vars(fitted_law(alone))}
        bench.row(
            epochs=epochs,
            mode=name,
            simulated="fitted" if is_fitted else "predicted",
            measured_s=measured_s,
            simulated_s=simulated.seconds,
            error=error,
            trainer_idle=mean(runs[name], "timing_s/rollout") / measured_s,
            simulated_trainer_idle=simulated.trainer_idle,
            engines_idle=max(0.0, 1 - mean(runs[name], "perf/generating_s") / measured_s),
            simulated_engines_idle=simulated.engines_idle,
            **(inputs if name == SYNCHRONOUS else {}),
        )
        if not is_fitted:
            bench.goal(f"{name}, {epochs} epochs: error of the predicted step", abs(error), at_most=TOLERANCE)


def main() -> int:
    """Run all ratios and modes in turns."""
    options = parser("Comparison of the simulator with asynchronous runs.", repeats=1)
    options.add_argument("--steps", type=int, default=18, help="steps of a run (default 18)")
    options.add_argument("--epochs", type=int, nargs=3, default=(1, 3, 6))
    arguments = options.parse_args()
    if arguments.steps < FEWEST_STEPS:
        options.error(f"{arguments.steps} steps leave too few to compare: use at least {FEWEST_STEPS}")
    bench = Benchmark("asynchrony_simulated")
    runs_by_epochs: dict[int, dict[str, list[Measured]]] = {
        pair: {mode: [] for mode in MODES} for pair in arguments.epochs
    }
    besides: list[Beside] = []
    with tempfile.TemporaryDirectory() as made:
        for repeat in range(arguments.repeats):
            directory = Path(made, str(repeat))
            for epochs, runs in runs_by_epochs.items():
                for number, (name, mode) in enumerate(MODES.items()):
                    measured = measure(directory, f"{epochs}-{number}", epochs, arguments.steps, mode)
                    runs[name].append(measured)
                    print(epochs, "epochs,", name, f"{mean(runs[name], 'timing_s/step'):.2f} s a step", flush=True)
            middle = runs_by_epochs[arguments.epochs[1]]
            besides.append(beside_in(middle[BETWEEN][-1], middle[SYNCHRONOUS][-1]))
            print("side by side:", besides[-1], flush=True)
    beside = Beside(*(statistics.median(getattr(pair, name) for pair in besides) for name in ("decode", "train")))
    for epochs, runs in runs_by_epochs.items():
        compare(bench, epochs, runs, beside, is_middle=epochs == arguments.epochs[1])
    bench.row(mode="beside each other", simulated="fitted", decode_beside=beside.decode, train_beside=beside.train)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
