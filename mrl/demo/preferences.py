"""The demo's preferences: pairs of answers of a policy, and the reward model that learns from them.

A judge who knows the sums compares two answers to one problem, one of which is right. These preferences are the only
source of right and wrong: the policy is trained only with the reward model.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.config.resolved.load import load_config, load_config_of
from mrl.data.row_files import read_newest_samples
from mrl.data.toy import addition
from mrl.errors import DataError, SetupError
from mrl.events import EventLog
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics
from mrl.trainer.evaluation import evaluate
from mrl.trainer.run import open_run
from mrl.trainer.sft import train_sft

CONFIGS = Path(__file__).parent
LARGEST = 49
"""Same as in base.yaml."""
_SAMPLES = "sampled"


def policy_pairs(samples: str, part: str, errors: float = 0.0, problems: int | None = None) -> Sequence[dict[str, Any]]:
    """Return, for each problem, its right answer paired with each wrong sampled answer, the preferred one as `chosen`.

    A share `errors` of the pairs is exchanged; at 0.5 the preferences carry no information. The judge sees answers to
    `problems` problems, or to all of a part.
    """
    rows = addition(part, LARGEST)
    questions = {rows[at]["extra_info"]["index"]: rows[at]["prompt"] for at in range(len(rows))}
    right: dict[int, str] = {}
    wrong: dict[int, list[str]] = {number: [] for number in questions}
    for row in read_newest_samples(Path(samples), sys.maxsize, "validation"):
        number, answer = int(row["uid"].rpartition("/")[2]), row["response"]
        if row["score"] == 1.0:
            right[number] = answer
        elif answer.strip() and answer not in wrong.get(number, [answer]):
            wrong[number].append(answer)
    pairs = []
    for number in sorted(right.keys() & questions)[:problems]:
        for answer in wrong[number]:
            is_error = random.Random(f"judge {number} {answer}").random() < errors
            chosen, rejected = (answer, right[number]) if is_error else (right[number], answer)
            pairs.append({"prompt": questions[number], "data_source": "sums", "chosen": chosen, "rejected": rejected})
    if not pairs:
        raise DataError("no problem has both a right and a wrong answer", where=samples)
    return pairs


def sample_policy(values: Sequence[str], directory: Path) -> Path:
    """Sample answers to all problems, including those of validation. Return their directory."""
    overrides = [
        "run.name=sampled",
        "training.steps=1",
        "actor.schedule.decay=constant",
        "data.validation.sums.options.part=all",
    ]
    overrides += ["validation={samples_per_prompt: 16, best_metric: null}", "reward.functions.answer.name=digits"]
    overrides += ["reward_model=null", "placement.roles.reward_model=null"]
    resolved = load_config(str(CONFIGS / "preferences.yaml"), [*values, *overrides])
    (directory / _SAMPLES / "logs").mkdir(parents=True, mode=0o700)
    events = EventLog(directory / _SAMPLES / "events.jsonl")
    try:
        evaluate(resolved.config, [resolved.config.validation], directory / _SAMPLES, events, lambda text: None)
    finally:
        events.close()
    return directory / _SAMPLES / "samples"


def train_judged(
    samples: Path, values: Sequence[str], console: Console, errors: float = 0.0, problems: int | None = None
) -> tuple[Path, float]:
    """Train a reward model on pairs of these samples. Return it, and its accuracy on problems that are new to it."""
    options = {"samples": str(samples), "errors": errors, "problems": problems}
    overrides = [f"data.train.pairs.options.{name}={json.dumps(value)}" for name, value in options.items()]
    overrides.append(f"data.validation.pairs.options.samples={json.dumps(str(samples))}")

    def on_update(step: int, metrics: dict[str, float]) -> None:
        if step % 100 == 0:
            shown = f"loss {metrics['loss']:.3f}, {metrics['val/accuracy']:.1%} of new pairs right"
            console.print(f"  update {step}: {shown}")

    resolved = load_config_of("rm", str(CONFIGS / "preferences_rm.yaml"), [*values, *overrides])
    with open_run(resolved, console) as run:
        model = train_sft(run, on_update)
    if model is None:
        raise SetupError("the demo was asked to stop while its reward model was trained", fix="run it again")
    return model, read_metrics(run.directory / "metrics.jsonl")[-1]["val/accuracy"]
