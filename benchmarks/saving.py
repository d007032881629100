"""Time that training waits for a checkpoint: saved in the background, compared with saved before training continues.

    python benchmarks/saving.py [--repeats N] [--json FILE]

`mrl train` runs the demo's model and one of 30 million parameters in float32, with and without
`training.background_save`, in turns; every step saves. `save_s` is the phase `save`, without the last one of a run,
which always waits. `step_s` is a whole step with its save, which includes the slowdown of the next step by writing. At
the end, all checkpoints of a run must exist and be intact.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.killed_runs import MAIN, ROOT
from mrl.events import PhaseEnd, Saved, read_events
from mrl.observe.metrics import read_metrics

STEPS, LIMIT_S = 8, 400.0
CONFIG = """\
run: {{name: saving, dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 8, samples_per_prompt: 4, samples_per_update: 32}}
actor: {{dtype: float32, max_tokens_per_device: 512, optimizer: {{lr: 1e-5}}}}
rollout: {{engine: transformers, replicas: 1, max_prompt_tokens: 16, max_response_tokens: 16}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{right: {{name: digits}}}}, num_workers: 1}}
training: {{steps: {steps}, save_every: 1, keep: {steps}}}
"""


def make_large(directory: Path) -> Path:
    """Create a model of 30 million parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from mrl.demo.model import save_toy_tokenizer

    config = Qwen3Config(
        vocab_size=save_toy_tokenizer(directory), hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=64,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def run(config: Path, name: str, background: bool) -> tuple[list[float], list[float], list[Saved]]:
    """Return the seconds of saves and of steps, without the first and the last, and the saved checkpoints."""
    overrides = [f"run.name={name}", f"training.background_save={str(background).lower()}"]
    command = [sys.executable, "-c", MAIN, "train", str(config), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    directory = config.parent / name
    events = [record.event for record in read_events(directory / "events.jsonl")]
    saves = [event.seconds for event in events if isinstance(event, PhaseEnd) and event.phase == "save"]
    steps = [line["timing_s/step"] for line in read_metrics(directory / "metrics.jsonl")]
    whole = [step + save for step, save in zip(steps, saves, strict=True)]
    return saves[1:-1], whole[1:-1], [event for event in events if isinstance(event, Saved)]


def main() -> int:
    """Run both models in both ways, in turns."""
    options = parser("Time that training waits for a checkpoint.")
    arguments = options.parse_args()
    from mrl.demo.model import make_model

    bench = Benchmark("saving")
    for model_name in ("demo", "30 million"):
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            model = make_model(directory / "model", seed=1) if model_name == "demo" else make_large(directory / "model")
            config = directory / "run.yaml"
            config.write_text(CONFIG.format(directory=directory, model=model, steps=STEPS))
            saves: dict[bool, list[float]] = {True: [], False: []}
            steps: dict[bool, list[float]] = {True: [], False: []}
            saved: list[Saved] = []
            for number in range(2 * arguments.repeats):
                background = number % 2 == 0
                results = run(config, f"run-{number}", background)
                saves[background] += results[0]
                steps[background] += results[1]
                saved += results[2]
            for background, name in ((False, "waited for"), (True, "while training goes on")):
                bench.row(
                    model=model_name,
                    save=name,
                    save_s=statistics.median(saves[background]),
                    longest_save_s=max(saves[background]),
                    step_s=statistics.median(steps[background]),
                    megabytes=saved[-1].bytes / 1e6,
                )
            bench.goal(
                f"checkpoints that are not there, {model_name}", 2 * arguments.repeats * STEPS - len(saved), at_most=0
            )
            share = statistics.median(saves[True]) / statistics.median(saves[False])
            if model_name != "demo":
                bench.goal("seconds that training waits, over those of a save that is waited for", share, at_most=0.5)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
