"""How good the policy is on prompts that it is not trained on: mean@k, pass@k and maj@k per source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from mrl.config.schema import Config
from mrl.data.prompt_loader import SkipLog, one_pass
from mrl.data.rlhf_dataset import RLHFDataset
from mrl.trainer.generation import Generator

Answers = list[tuple[str, float]]
"""Text and score of the samples of one prompt."""


class Validator:
    """Goes through the validation prompts."""

    def __init__(self, config: Config, dataset: RLHFDataset, generator: Generator, skips: SkipLog) -> None:
        self._config = config
        self._dataset = dataset
        self._generator = generator
        self._skips = skips

    def run(self) -> dict[str, float]:
        """Measure every source, and of all together. The sampling is the same at each validation."""
        answers: dict[str, dict[str, Answers]] = defaultdict(lambda: defaultdict(list))
        num_samples = self._config.validation.samples_per_prompt
        for prompts in one_pass(self._dataset, self._config.batch.prompts_per_step * 4, self._skips):
            scored = self._generator.run(prompts.repeat(num_samples), self._generator.validation, step=0)
            batch = scored.batch
            scores = np.asarray(batch["scores"])
            for row, score in enumerate(scores.tolist()):
                of_prompt = answers[batch["data_source"][row]][batch["uid"][row]]
                of_prompt.append((batch["response_text"][row], score))
        metrics: dict[str, float] = {}
        together: dict[str, Answers] = {}
        for source, by_prompt in answers.items():
            metrics |= validation_metrics(f"val/{source}", by_prompt, num_samples, self._config.validation.solved_at)
            together |= {f"{source} {uid}": found for uid, found in by_prompt.items()}
        return metrics | validation_metrics("val", together, num_samples, self._config.validation.solved_at)


def validation_metrics(prefix: str, by_prompt: Mapping[str, Answers], k: int, solved_at: float) -> dict[str, float]:
    """Return mean@k (mean score), pass@k (any sample right) and maj@k (commonest answer right, the first of equals)."""
    scores = [[score for _, score in answers] for answers in by_prompt.values()]
    found = {
        f"{prefix}/prompts": float(len(scores)),
        f"{prefix}/score/mean@{k}": float(np.mean([np.mean(of_prompt) for of_prompt in scores])),
        f"{prefix}/solved/mean@{k}": float(np.mean([np.mean(np.array(each) >= solved_at) for each in scores])),
    }
    if k > 1:
        majorities = [_majority(answers) for answers in by_prompt.values()]
        found[f"{prefix}/solved/pass@{k}"] = float(np.mean([max(of_prompt) >= solved_at for of_prompt in scores]))
        found[f"{prefix}/solved/maj@{k}"] = float(np.mean(np.array(majorities) >= solved_at))
    return found


def _majority(answers: Sequence[tuple[str, float]]) -> float:
    commonest, _ = Counter(text for text, _ in answers).most_common(1)[0]
    return next(score for text, score in answers if text == commonest)
