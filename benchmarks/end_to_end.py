"""Whole GRPO steps compared with TRL's GRPOTrainer: same model, prompts, sampling and update, on the same cores.

    python benchmarks/end_to_end.py            # both sizes
    python benchmarks/end_to_end.py --only tiny

tiny:  a model of 0.6 million parameters, 128 samples of at most 64 tokens
long:  a model of 30 million parameters, whose random weights end a response at each token with the same small
       probability, so that lengths have a long tail, up to 512; mrl's engine compiles its kernels before the first
       step, which does not count

Both train in float32 with Adam, eight samples per prompt, one update per step. The two trainers alternate several
times; the result is the median step after the first two. `overhead` is the part of mrl's step without generation,
scoring and training; `sync` is the transfer of the weights with its verification.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, parser, speedup
from benchmarks.peer_environments import TRL
from mrl.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SETTLING_STEPS = 2
LIMIT_S = 1200
COMPUTE = ("rollout", "update_actor")
"""Phases that generate or train. The rest of a step is overhead."""

CONFIG = """\
run: {{name: {name}, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: {prompts}, samples_per_prompt: 8, samples_per_update: {samples}}}
actor:
  dtype: float32
  max_tokens_per_device: {tokens}
  optimizer: {{lr: 1e-5, weight_decay: 0.0, clip_grad: 1.0}}
rollout:
  max_prompt_tokens: 32
  max_response_tokens: {longest}
  vllm: {{enforce_eager: {eager}, kv_cache_memory_bytes: {cache}}}
sync: {{offload: false}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{length: {{name: "benchmarks.end_to_end:shortness"}}}}, num_workers: 1}}
training: {{steps: {steps}}}
"""


@dataclass(frozen=True)
class Scene:
    """One size of the comparison."""

    name: str
    model: dict[str, int]
    prompts: int
    longest: int
    steps: int
    samples_per_micro_batch: int
    """TRL's micro-batch size, in samples; mrl's micro-batches are cut by tokens."""
    eager: bool
    """Whether nothing is compiled, which suits the shortest runs."""
    goal: float
    """Smallest accepted ratio of samples per second, mrl's over TRL's."""


SCENES = (
    Scene("tiny", {"hidden": 128, "layers": 3, "ffn": 384, "heads": 4}, 16, 64, 8, 128, True, 1.0),
    Scene("long", {"hidden": 512, "layers": 8, "ffn": 1536, "heads": 8}, 4, 512, 4, 8, False, 3.0),
)


def shortness(sample: Any) -> float:
    """Return the reward that both trainers use."""
    return 1.0 - float(sample.num_response_tokens) / 512


def make_model(scene: Scene, directory: Path) -> Path:
    """Create a random model that ends a response at each token with a probability of about 1 in 260."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from mrl.demo.model import save_toy_tokenizer

    path = directory / f"model-{scene.name}"
    sizes = scene.model
    config = Qwen3Config(
        vocab_size=save_toy_tokenizer(path),
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"] // 2,
        head_dim=sizes["hidden"] // sizes["heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.02,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def our_config(scene: Scene, model: Path, directory: Path, name: str, steps: int) -> Path:
    """Write the configuration of mrl's run to a file."""
    config = directory / f"{name}.yaml"
    config.write_text(
        CONFIG.format(
            name=name,
            directory=directory,
            model=model,
            prompts=scene.prompts,
            samples=scene.prompts * 8,
            tokens=max(4096, scene.longest + 32),
            longest=scene.longest,
            eager=str(scene.eager).lower(),
            cache=256 << 20,
            steps=steps,
        )
    )
    return config


def ours(scene: Scene, model: Path, directory: Path, name: str) -> list[dict[str, Any]]:
    """Run mrl and return the metrics of its steps."""
    config = our_config(scene, model, directory, name, scene.steps)
    code = "import sys; from mrl.cli.main import main; sys.exit(main())"
    _run([sys.executable, "-c", code, "train", str(config)], directory / f"{name}.log")
    return list(read_metrics(directory / name / "metrics.jsonl"))


def theirs(scene: Scene, model: Path, directory: Path, name: str) -> dict[str, list[float]]:
    """Run TRL and return its seconds."""
    from mrl.data.toy import TOY_TASKS

    rows = TOY_TASKS["addition"]()
    task = {
        "model": str(model),
        "directory": str(directory / name),
        "prompts": [rows[number * 37 % len(rows)]["prompt"] for number in range(scene.prompts * scene.steps)],
        "samples_per_prompt": 8,
        "samples_per_step": scene.prompts * 8,
        "samples_per_micro_batch": scene.samples_per_micro_batch,
        "max_response_tokens": scene.longest,
        "steps": scene.steps,
        "lr": 1e-5,
    }
    task_file, result = directory / f"{name}.json", directory / f"{name}-result.json"
    task_file.write_text(json.dumps(task))
    script = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
    _run([str(TRL.python), str(script), str(task_file), str(result)], directory / f"{name}.log")
    seconds: dict[str, list[float]] = json.loads(result.read_text())
    return seconds


def _run(command: list[str], log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=environment, cwd=log.parent, timeout=LIMIT_S)
    if code.returncode:
        raise SystemExit(f"{' '.join(command[:3])} exited with {code.returncode}:\n{log.read_text()[-3000:]}")


def compare(bench: Benchmark, scene: Scene, repeats: int, directory: Path) -> None:
    """Compare one size, in turns."""
    model = make_model(scene, directory)
    our_steps: list[dict[str, Any]] = []
    their_steps: list[float] = []
    their_generation: list[float] = []
    their_tokens: list[float] = []
    for number in range(repeats):
        our_steps += ours(scene, model, directory, f"ours-{scene.name}-{number}")[SETTLING_STEPS:]
        their_result = theirs(scene, model, directory, f"trl-{scene.name}-{number}")
        their_steps += their_result["step"][SETTLING_STEPS:]
        their_generation += their_result["generation"][SETTLING_STEPS:]
        their_tokens += their_result["tokens"][SETTLING_STEPS:]
    samples = scene.prompts * 8
    mine, peer = Timing(tuple(step["timing_s/step"] for step in our_steps)), Timing(tuple(their_steps))
    phases = {phase: Timing(tuple(step[f"timing_s/{phase}"] for step in our_steps)).median_s for phase in COMPUTE}
    overhead = Timing(
        tuple(1 - sum(step[f"timing_s/{phase}"] for phase in COMPUTE) / step["timing_s/step"] for step in our_steps)
    )
    # Includes the digests of everything sent and received, and their comparison.
    sync = Timing(tuple(step["sync/seconds"] / step["timing_s/step"] for step in our_steps))
    bench.row(
        scene=scene.name,
        samples=samples,
        response_tokens=Timing(tuple(step["response_length/mean"] for step in our_steps)).median_s,
        trl_response_tokens=Timing(tuple(their_tokens)).median_s / samples,
        mrl_step_s=mine.median_s,
        mrl_spread_s=mine.spread_s,
        mrl_rollout_s=phases["rollout"],
        mrl_update_s=phases["update_actor"],
        overhead=overhead.median_s,
        sync=sync.median_s,
        trl_step_s=peer.median_s,
        trl_spread_s=peer.spread_s,
        trl_generation_s=Timing(tuple(their_generation)).median_s,
        mrl_samples_per_s=samples / mine.median_s,
        trl_samples_per_s=samples / peer.median_s,
    )
    bench.goal(f"{scene.name}: samples per second, over TRL's", speedup(mine, peer), at_least=scene.goal)
    if scene.name == "long":
        bench.goal("long: overhead, as a share of the step", overhead.median_s, at_most=0.15)
        bench.goal("long: weights and the proof of their arrival, as a share of the step", sync.median_s, at_most=0.03)


def main() -> int:
    """Run both trainers on each size, and return the exit status."""
    options = parser("Whole GRPO steps compared with TRL's GRPOTrainer.")
    options.add_argument("--only", choices=[scene.name for scene in SCENES], help="one size")
    options.set_defaults(repeats=2)
    arguments = options.parse_args()
    if failed := TRL.install():
        raise SystemExit(failed)
    bench = Benchmark("end_to_end")
    with tempfile.TemporaryDirectory() as directory:
        for scene in SCENES:
            if arguments.only in (None, scene.name):
                compare(bench, scene, arguments.repeats, Path(directory))
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
