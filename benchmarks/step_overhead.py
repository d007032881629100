"""Time of a step by phase, compared with the same work done alone.

    python benchmarks/step_overhead.py              # both sizes
    python benchmarks/step_overhead.py --only demo

demo:  the step of `mrl demo`: PPO, an actor of two ranks, a critic, one engine long:  GRPO on the model of 30 million
parameters with long responses, as in end_to_end.py: two ranks and two engines

First the trainer does its steps. Then each phase is repeated alone, for the rows of each of those steps: generation of
the same number of tokens for the same prompts, by vLLM's own engine stepped in one process per replica; scoring and
training by Megatron in one process per rank, on rows of the same lengths in the same micro-batches. This excludes Ray,
the driver, and transfers of columns and weights. `overhead` is the additional time of the step. `flops_s` is the time
of its matrix products at the rate of a product of 1024 x 1024 matrices on each core.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import end_to_end
from benchmarks.harness import Benchmark, Timing, parser
from mrl.config.arithmetic import longest_sample_tokens, needs_old_log_probs, num_engines
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config, TrainedModelConfig
from mrl.models.families import read_spec
from mrl.models.table import Head
from mrl.verify.spawn import run_distributed

SCENES = ("demo", "long")
SETTLING_STEPS = 2
GOAL = 0.10
LIMIT_S = 900.0
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepWork:
    """Work of one step: its rows, and the rows of each optimizer step."""

    prompts: list[Integers]
    responses: Integers
    updates: list[Integers]

    @property
    def lengths(self) -> Integers:
        """Lengths of whole rows."""
        return np.array([len(prompt) for prompt in self.prompts]) + self.responses


def demo_config(directory: Path, steps: int) -> Path:
    """Write the configuration of `mrl demo` for an untrained model; actor and critic train from the first step."""
    from mrl.demo.demo import DemoSettings, demo_yaml
    from mrl.demo.model import make_model

    config = directory / "demo.yaml"
    text = demo_yaml(DemoSettings(directory, steps=steps), make_model(directory / "model", seed=1), config)
    config.write_text(text.replace("training: {", "training: {critic_warmup_steps: 0, "))
    return config


def long_config(directory: Path, steps: int) -> Path:
    """Write the configuration of the larger size of end_to_end.py."""
    (scene,) = (scene for scene in end_to_end.SCENES if scene.name == "long")
    return end_to_end.our_config(scene, end_to_end.make_model(scene, directory), directory, "long", steps)


def train(config: str) -> tuple[list[StepWork], list[dict[str, float]]]:
    """Run the trainer's steps, and return the work and the metrics of each."""
    from mrl.observe.console import Console
    from mrl.trainer.ppo import RayPPOTrainer
    from mrl.trainer.run import open_run

    resolved = load_config(config, ["validation.every=0"])
    work, figures = [], []
    with open_run(resolved, Console(resolved.config.training.steps, quiet=True)) as run:
        trainer = RayPPOTrainer(run)
        with trainer.init_workers():
            trainer.clock.pop_seconds()
            for _ in range(resolved.config.training.steps):
                report = trainer.step()
                trainer.record(report.step, report.batch, report.metrics)
                figures.append(report.metrics)
                batch = report.batch
                row_of = {row_id: row for row, row_id in enumerate(batch.row_ids.tolist())}
                updates = [
                    np.array([row_of[row] for row in part.row_ids.tolist()])
                    for part in trainer.updates(batch, len(batch))
                ]
                ends = np.cumsum(batch.lengths("prompts"))[:-1]
                prompts = np.split(batch.values("prompts").numpy().astype(np.int64), ends)
                work.append(StepWork(prompts, batch.lengths("responses").astype(np.int64), updates))
    return work[SETTLING_STEPS:], figures[SETTLING_STEPS:]


def model_alone(
    path: str, head: Head, settings: TrainedModelConfig, scored: bool, work: Sequence[StepWork]
) -> list[dict[str, float]]:
    """Return the seconds of scoring and of training the rows of each step, on every rank."""
    import torch

    from mrl.data.packing import plan_step
    from mrl.engine.engine import EngineRequest, MegatronEngine
    from mrl.engine.packed_rows import TokenRows
    from mrl.engine.parallel import model_parallel
    from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
    from mrl.models.hf_reader import HfReader

    def loss(batch: LossInput) -> LossOutput:
        scores_T = batch.scores.log_probs_T if head == "lm" else batch.scores.values_T
        assert scores_T is not None, "the last stage scores"
        return LossOutput(1e-3 * scores_T.square().mean(), {})

    def once(action: Callable[[], object]) -> float:
        torch.distributed.barrier()
        began = time.perf_counter()
        action()
        torch.distributed.barrier()
        return time.perf_counter() - began

    request = ScoreRequest(1.0, "value") if head == "lm" else ScoreRequest()
    with model_parallel(settings.parallel, seed=1) as groups:
        spec = read_spec(path)
        engine = MegatronEngine(EngineRequest(spec, head, settings, new_head=head == "score"), groups)
        engine.load(HfReader(path))

        def shard(step: StepWork, rows: Integers) -> tuple[TokenRows, list[Integers]]:
            lengths, responses = step.lengths[rows], step.responses[rows]
            plan = plan_step(lengths, groups.mesh.dp, settings.max_tokens_per_device, engine.packing)
            own_part = plan[groups.at.dp]
            tokens = torch.randint(spec.vocab, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
            ends = np.cumsum([len(batch) for batch in own_part])
            cuts = np.split(np.arange(ends[-1]), ends[:-1])
            return TokenRows(tokens, lengths, responses, {}).take(np.concatenate(own_part)), cuts

        def measure(step: StepWork) -> dict[str, float]:
            all_rows, updates = shard(step, np.arange(len(step.prompts))), [shard(step, rows) for rows in step.updates]
            seconds = {"update": once(lambda: [engine.update(*part, loss, request) for part in updates])}
            return seconds | ({"score": once(lambda: engine.forward(*all_rows, ScoreRequest()))} if scored else {})

        measure(work[0])  # warm-up
        return [measure(step) for step in work]


def engines_alone(config: Config, work: Sequence[StepWork]) -> list[float]:
    """Return the seconds in which vLLM alone generates the same tokens for each step, with all engines in parallel."""
    context, num = multiprocessing.get_context("spawn"), num_engines(config)
    together, ends = context.Barrier(num), []
    processes = []
    for number in range(num):
        own_end, engine_end = context.Pipe()
        share = [(step.prompts[number::num], step.responses[number::num]) for step in work]
        options = dict(config.rollout.vllm) | {"max_model_len": longest_sample_tokens(config.rollout)}
        arguments = (engine_end, together, config.model.path, config.actor.dtype, options, share)
        processes.append(context.Process(target=_engine_alone, args=arguments, daemon=True))
        processes[-1].start()
        engine_end.close()
        ends.append(own_end)
    try:
        results = [end.recv() for end in ends]
    except EOFError:
        raise SystemExit("a vLLM alone ended without an answer") from None
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    return [max(step_seconds) for step_seconds in zip(*results, strict=True)]


def _engine_alone(
    end: Connection, together: Any, path: str, dtype: str, options: dict[str, Any], share: Sequence[tuple[Any, Any]]
) -> None:
    import torch

    torch.set_num_threads(1)  # as Ray sets for an engine with one device
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    options |= {"skip_tokenizer_init": True, "disable_log_stats": True, "logprobs_mode": "processed_logprobs"}
    arguments = EngineArgs(model=path, dtype=dtype, distributed_executor_backend="uni", **options)
    engine = LLMEngine.from_engine_args(arguments)

    def generate(prompts: Sequence[Integers], lengths: Integers) -> float:
        together.wait()
        began = time.perf_counter()
        for number, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
            params = SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt.tolist()}, params)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - began

    generate(share[0][0][:8], np.full(8, 4))  # warm-up
    end.send([generate(*step_share) for step_share in share])


def matrix_rate() -> float:
    """Return the floating-point operations per second of a matrix product, on one core of each rank."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(12):
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / statistics.median(times[2:])


def alone(config: Config, work: Sequence[StepWork]) -> dict[str, list[float]]:
    """Return the seconds of each phase of each step, done alone."""
    seconds_by_phase = {"rollout": engines_alone(config, work)}
    for role, head, scoring in (("actor", "lm", "old_log_prob"), ("critic", "score", "values")):
        settings = config.model_roles().get(role)
        if settings is None:
            continue
        assert isinstance(settings, TrainedModelConfig), "actor and critic are trained"
        scored = role == "critic" or needs_old_log_probs(config)
        devices = config.placement.pools[config.placement.roles[role]]
        path = config.model_of(role)[1]
        ranks = run_distributed(devices, model_alone, path, head, settings, scored, work, timeout_s=LIMIT_S)
        for name, phase in (("score", scoring), ("update", f"update_{role}")):
            if name in ranks[0][0]:
                seconds_by_phase[phase] = [seconds[name] for seconds in ranks[0]]
    return seconds_by_phase


def at_matrix_rate(config: Config, phase: str, step: StepWork, rate: float) -> float:
    """Return the seconds of a phase's matrix products at this rate."""
    spec = read_spec(config.model.path)
    forward = sum(spec.sequence_flops(int(length)) for length in step.lengths)
    passes = 3 * config.batch.epochs_per_step if phase.startswith("update") else 1
    return passes * forward / rate


def compare(bench: Benchmark, scene: str, steps: int, directory: Path) -> None:
    """Compare one size."""
    config_path = {"demo": demo_config, "long": long_config}[scene](directory, SETTLING_STEPS + steps)
    config = load_config(str(config_path), []).config
    work, figures = train(str(config_path))
    pure = alone(config, work)
    cores = sum(config.placement.pools.values())
    rate = sum(run_distributed(cores, matrix_rate, timeout_s=60))
    whole = Timing(tuple(step["timing_s/step"] for step in figures))
    for phase, seconds in pure.items():
        own, bare = Timing(tuple(step[f"timing_s/{phase}"] for step in figures)), Timing(tuple(seconds))
        limit = [at_matrix_rate(config, phase, step, rate) for step in work]
        bench.row(
            scene=scene,
            phase=phase,
            **own.columns("step"),
            **bare.columns("alone"),
            overhead=(own.median_s - bare.median_s) / whole.median_s,
            flops_s=statistics.median(limit),
        )
    sync = Timing(tuple(step["sync/seconds"] for step in figures))
    bench.row(scene=scene, phase="of rollout: weights and proof", **sync.columns("step"))
    rest = Timing(tuple(s["timing_s/step"] - sum(s[f"timing_s/{phase}"] for phase in pure) for s in figures))
    bench.row(scene=scene, phase="all else", **rest.columns("step"), overhead=rest.median_s / whole.median_s)
    shares = [
        1 - sum(pure[phase][number] for phase in pure) / step["timing_s/step"] for number, step in enumerate(figures)
    ]
    overhead = Timing(tuple(shares))
    bench.row(
        scene=scene,
        phase="whole step",
        **whole.columns("step"),
        alone_s=sum(statistics.median(seconds) for seconds in pure.values()),
        overhead=overhead.median_s,
    )
    if scene == "long":
        bench.goal("long: share of a step that is not the work of its phases", overhead.median_s, at_most=GOAL)


def main() -> int:
    """Measure both sizes, and return the exit status."""
    options = parser("Time of a step by phase, compared with the same work done alone.")
    options.add_argument("--only", choices=SCENES, help="one size")
    arguments = options.parse_args()
    bench = Benchmark("step_overhead")
    for scene in SCENES:
        if arguments.only in (None, scene):
            with tempfile.TemporaryDirectory() as directory:
                compare(bench, scene, arguments.repeats, Path(directory))
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
