"""TRL's GRPOTrainer on the task of `benchmarks/end_to_end.py`. Runs in TRL's own environment.

    python trl_grpo.py TASK.json RESULT.json

Prints nothing that matters; the result has the seconds of every step and, of them, those of generation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each step, from its first call to its optimizer's last."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.tokens: list[int] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self._began)


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    clock = Clock()

    def shortness(completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.tokens.append(sum(map(len, completion_ids)))
        return [1.0 - len(ids) / task["max_response_tokens"] for ids in completion_ids]

    arguments = GRPOConfig(
        output_dir=task["directory"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=task["samples_per_micro_batch"],
        gradient_accumulation_steps=task["samples_per_step"] // task["samples_per_micro_batch"],
        num_generations=task["samples_per_prompt"],
        max_completion_length=task["max_response_tokens"],
        max_steps=task["steps"],
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=shortness,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task["prompts"]]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    generate = trainer._generate

    def timed(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = generate(*given, **options)
        clock.generation.append(time.perf_counter() - began)
        return made

    trainer._generate = timed
    trainer.train()
    result = {"step": clock.steps, "generation": clock.generation, "tokens": clock.tokens}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
