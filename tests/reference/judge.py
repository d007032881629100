"""Check from a recording that a run followed its configuration.

The rules come from the documentation (docs/concepts.md, docs/architecture.md), without code of mrl: order of prompts,
seeds of samples, their texts and scores, and the validation metrics of the samples.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.reference.compare import row_of
from tests.reference.rewards import score_of
from tests.reference.step import Reference

Call = Mapping[str, Any]
_MASK = (1 << 64) - 1


class Judge:
    """Checks runs on `toy:addition` whose only reward function is `tests.reference.rewards:likes_ones`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config["model"]["path"])
        generation = Path(config["model"]["path"], "generation_config.json")
        other_end = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        self.ends = sorted({self.tokenizer.eos_token_id, *([] if other_end is None else [other_end])})
        self.train, self.validation = (_problems(config["data"][part]) for part in ("train", "validation"))

    def judge(self, recorded: Mapping[str, Any]) -> None:
        """Check each sample of each step and validation. Raise an AssertionError for a deviation."""
        order, remax = self._order(), self.config["algorithm"]["advantage"] == "remax"
        for step in recorded["steps"]:
            kinds = [call["kind"] for call in step["calls"]]
            num_rounds = kinds.count("training")
            assert kinds == ["training", "greedy"][: 1 + remax] * num_rounds, f"kinds of generation: {kinds}"
            for call in step["calls"]:
                if call["kind"] == "training":
                    uids = [next(order) for _ in range(self.config["batch"]["prompts_per_step"])]
                num_samples = self.config["batch"]["samples_per_prompt"] if call["kind"] == "training" else 1
                self.judge_call(call, self.train, uids, num_samples, step["step"])
        for validation in recorded["validations"]:
            self.judge_validation(validation)
        self.judge_history(recorded)

    def judge_call(self, call: Call, problems: Mapping[int, Any], uids: list[str], num_samples: int, step: int) -> None:
        """Check the requests and the returned rows."""
        requests = call["requests"]
        assert [request["uid"] for request in requests] == [uid for uid in uids for _ in range(num_samples)], (
            "the prompts differ"
        )
        assert call["sampling"] == self._sampling(call["kind"]), f"{call['kind']} samples at {call['sampling']}"
        number: Counter[str] = Counter()
        for request in requests:
            identity = json.dumps(
                [self.config["training"]["seed"], step, request["uid"], number[request["uid"]]]
            ).encode()
            number[request["uid"]] += 1
            seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
            assert request["seed"] == seed, f"sample {number[request['uid']]} of {request['uid']} has another seed"
            assert request["prompt"] == self._prompt(problems, request["uid"])[1], (
                f"the token ids differ for {request['uid']}"
            )
            assert request["max_tokens"] == self.config["rollout"]["max_response_tokens"]
        assert len({request["seed"] for request in requests}) == len(requests), "two samples have the same seed"
        of_key = {int(request["key"]): request for request in requests}
        ids = [row["row_id"] for row in call["rows"]]
        assert ids == [key for key in of_key if key in set(ids)], "rows are not in the order of the requests"
        for row in call["rows"]:
            assert row["prompts"] == of_key[row["row_id"]]["prompt"], f"row {row['row_id']} answers another prompt"
            assert row["uid"] == of_key[row["row_id"]]["uid"]
            self.judge_row(row, self._prompt(problems, row["uid"]))

    def judge_row(self, row: Mapping[str, Any], prompt: tuple[str, list[int], str]) -> None:
        """Check the text and the score of a row."""
        response = row["responses"]
        ends = response[-1] in self.ends
        text = self.tokenizer.decode(response[:-1] if ends else response)
        name = f"row {row['row_id']} ({row['uid']})"
        assert row["response_text"] == text, (
            f"{name} has text {row['response_text']!r}, but its tokens decode to {text!r}"
        )
        assert (row["prompt_text"], row["ground_truth"]) == (prompt[0], prompt[2]), f"{name} is another row of the data"
        assert row["truncated"] == [not ends], f"{name}: truncated is {row['truncated']}"
        assert ends or len(response) == self.config["rollout"]["max_response_tokens"], (
            f"{name} is shorter than the limit and has no end token"
        )
        score = score_of(text, prompt[2])
        assert row["scores"] == [pytest.approx(score, abs=1e-12)], f"{name} has {row['scores']}, expected {score}"
        assert len(row["rollout_log_probs"]) == len(response)

    def judge_validation(self, validation: Mapping[str, Any]) -> None:
        """Check that each validation prompt occurs once, and the metrics of its samples."""
        uids = [f"sums/0/{row}" for row in range(len(self.validation))]
        settings, seen = self.config["validation"], []
        for call in validation["calls"]:
            assert call["kind"] == "validation"
            of_call = list(dict.fromkeys(request["uid"] for request in call["requests"]))
            seen += of_call
            self.judge_call(call, self.validation, of_call, settings["samples_per_prompt"], step=0)
        assert seen == uids, "the validation prompts differ"
        rows = [row for call in validation["calls"] for row in call["rows"]]
        expected = validation_figures(rows, settings["samples_per_prompt"], settings["solved_at"])
        figures = dict(validation["figures"])
        teacher_kl, *_ = (figures.pop(f"val/teacher_kl{end}", None) for end in ("", "/low", "/high"))
        untaught = figures.pop("val/untaught_share", None)
        by_model = {name for name in figures if re.search(r"/model/mean@\d+$|/solved/best@\d+$", name)}
        assert bool(by_model) == (self.config["reward_model"] is not None)
        by_rule = {name: value for name, value in figures.items() if name.removesuffix("/low") not in by_model}
        by_rule = {name: value for name, value in by_rule.items() if name.removesuffix("/high") not in by_model}
        assert by_rule == pytest.approx(expected, abs=1e-7)
        taught = self.config["algorithm"]["distillation"]
        assert (teacher_kl is None) == (taught is None or "{success}" in (taught["context"] or ""))
        if teacher_kl is not None and validation["after"] == 0:  # the policy changes after step 0
            reference = Reference(dict(self.config))
            samples = [row_of(row) for row in rows]
            if reference.reads_text:
                assert untaught == pytest.approx(reference.teach_texts(samples)["teacher/untaught_share"])
                samples = [row for row in samples if row.success is not None]
            of_teacher = [row.columns.get("teacher_log_probs", None) for row in samples]
            whole = [
                reference.log_probs(reference.actor, row)[0] - (reference.taught_log_probs(row) if of is None else of)
                for row, of in zip(samples, of_teacher, strict=True)
            ]
            assert teacher_kl == pytest.approx(float(torch.cat(whole).mean()), abs=1e-5)

    def judge_history(self, recorded: Mapping[str, Any]) -> None:
        """Check when validation ran, which steps have its metrics, and which step is the best."""
        settings, steps = self.config["validation"], self.config["training"]["steps"]
        every = settings["every"]
        due = [step for step in range(1, steps + 1) if every and (step % every == 0 or step == steps)]
        first = [0] if every and settings["first"] else []
        assert [validation["after"] for validation in recorded["validations"]] == first + due, (
            "validation ran after other steps"
        )
        by_step = {validation["after"]: validation["figures"] for validation in recorded["validations"]}
        for line in recorded["metrics"]:
            figures = {name: value for name, value in line.items() if name.startswith("val/")}
            assert figures == by_step.get(line["step"], {}), (
                f"step {line['step']} has the metrics of another validation"
            )
        assert [line["step"] for line in recorded["metrics"]] == [*first, *range(1, steps + 1)]
        name = f"val/score/mean@{settings['samples_per_prompt']}"
        saved = recorded.get("saved", [])
        best, scores = None, {}
        for validation in recorded["validations"]:
            if (step := validation["after"]) in saved:
                rows = [row for call in validation["calls"] for row in call["rows"]]
                values = values_by_prompt(rows, settings["samples_per_prompt"], settings["solved_at"])[name]
                scores[step] = list(values.values())
                if best is None or _is_beyond_noise(np.array(scores[step]) - np.array(scores[best])):
                    best = step
        expected = None if best is None else f"step-{best:06d}"
        assert recorded["best"] == expected, f"best is {recorded['best']}; scores: {scores}"

    def _sampling(self, kind: str) -> dict[str, Any]:
        rollout, validation = self.config["rollout"], self.config["validation"]
        stop = self.ends
        return {
            "training": {name: rollout[name] for name in ("temperature", "top_p", "top_k")} | {"stop": stop},
            "greedy": {"temperature": 1.0, "top_p": 1.0, "top_k": 1, "stop": stop},
            "validation": {name: validation[name] for name in ("temperature", "top_p", "top_k")} | {"stop": stop},
        }[kind]

    def _prompt(self, problems: Mapping[int, Any], uid: str) -> tuple[str, list[int], str]:
        """Return text, token ids and right answer of the row with this uid."""
        first, second = problems[int(uid.rsplit("/", 1)[1])]
        text = f"<|user|>{first}+{second}=<|end|><|assistant|>"
        return text, self.tokenizer(text, add_special_tokens=False)["input_ids"], str(first + second)

    def _order(self) -> Iterator[str]:
        """Yield the uids of the prompts in the order of their use."""
        epoch, size, seed = 0, len(self.train), self.config["data"]["seed"]
        while True:
            keys = {row: _split_mix(f"{seed}/sums/{epoch}", row) for row in range(size)}
            rows = sorted(keys, key=keys.__getitem__) if self.config["data"]["shuffle"] else range(size)
            yield from (f"sums/{epoch}/{row}" for row in rows)
            epoch += 1


def validation_figures(rows: Sequence[Mapping[str, Any]], k: int, solved_at: float) -> dict[str, float]:
    """Return the figures of `values_by_prompt`, their intervals, and the number of prompts."""
    metrics: dict[str, float] = {}
    for name, by_prompt in values_by_prompt(rows, k, solved_at).items():
        values = np.array(list(by_prompt.values()))
        metrics[name], metrics[f"{name.split('/s')[0]}/prompts"] = float(values.mean()), len(values)
        if len(values) > 1:
            metrics[f"{name}/low"], metrics[f"{name}/high"] = _interval(values)
    return metrics


def _student(freedom: int) -> float:
    """Return the quantile of Student's distribution at 97.5 %, by summing its density."""
    x = np.linspace(0, 60, 3_000_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi * freedom)
    sums = np.cumsum((density[1:] + density[:-1]) / 2) * (x[1] - x[0]) * scale
    return float(np.interp(0.475, sums, x[1:]))


def _interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return Student's interval of scores, or Wilson's of shares.

    Wilson's are the bounds p for which (mean - p)^2 = t^2 p (1 - p) / n, with n answers that explain the variance.
    """
    mean, variance, n = values.mean(), values.var(ddof=1), len(values)
    if values.min() < 0 or values.max() > 1:
        half = _student(len(values) - 1) * math.sqrt(variance / n)
        return mean - half, mean + half
    if variance > 1e-12:
        n = mean * (1 - mean) / (variance / n)
    t2 = _student(len(values) - 1) ** 2
    low, high = sorted(np.roots([1 + t2 / n, -2 * mean - t2 / n, mean**2]).real)
    return float(low), float(high)


def _is_beyond_noise(differences: np.ndarray[Any, Any]) -> bool:
    num = len(differences)
    half = _student(num - 1) * differences.std(ddof=1) / math.sqrt(num)
    return bool(differences.mean() > half and np.count_nonzero(differences) >= 6)


def values_by_prompt(rows: Sequence[Mapping[str, Any]], k: int, solved_at: float) -> dict[str, dict[str, float]]:
    """Return mean@k and, with several samples, pass@k and maj@k of each prompt, for each source and in total."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    sources = {f"val/{row['data_source']}" for row in rows} | {"val"}
    for prefix in sources:
        of_prompt: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for row in rows:
            if prefix in ("val", f"val/{row['data_source']}"):
                of_prompt[row["uid"]].append((row["response_text"], row["scores"][0]))
        for uid, answers in of_prompt.items():
            solved = [score >= solved_at for _, score in answers]
            found[f"{prefix}/score/mean@{k}"][uid] = sum(score for _, score in answers) / len(answers)
            found[f"{prefix}/solved/mean@{k}"][uid] = sum(solved) / len(solved)
            if k == 1:
                continue
            found[f"{prefix}/solved/pass@{k}"][uid] = any(solved)
            count = Counter(text for text, _ in answers if text)  # the text is the answer; an empty text is no answer
            winner = max(
                count, default="", key=lambda text: (count[text], -[answer for answer, _ in answers].index(text))
            )
            is_right = bool(winner) and dict(reversed(answers))[winner] >= solved_at
            found[f"{prefix}/solved/maj@{k}"][uid] = is_right
    return found


def _problems(sources: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Return the two numbers of each row. A problem's hash decides whether it belongs to validation."""
    (source,) = sources.values()
    options = source["options"]
    count, is_validation = options["largest"] - 9, options["part"] == "validation"
    of_part = [
        problem
        for problem in range(count * count)
        if (hashlib.blake2b(f"addition {problem}".encode()).digest()[0] % 10 == 0) is is_validation
    ]
    return {row: (10 + problem // count, 10 + problem % count) for row, problem in enumerate(of_part)}


def _split_mix(key: str, row: int) -> int:
    """Return SplitMix64 of the row, seeded by the key's hash."""
    state = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    z = ((row + 1) * 0x9E3779B97F4A7C15 + state) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
