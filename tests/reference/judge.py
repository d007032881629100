"""Whether a recorded run did what its configuration says, judged from the recording alone.

Written from the documented rules (docs/concepts.md, docs/architecture.md) with nothing of mrl: which prompt comes next,
which seed a sample has, what its text is and what that is worth, and what validation makes of its samples.
"""

from __future__ import annotations

import hashlib
import json
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
    """Of runs on `toy:addition`, whose only reward function is `tests.reference.rewards:likes_ones`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config["model"]["path"])
        generation = Path(config["model"]["path"], "generation_config.json")
        also = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        self.ends = sorted({self.tokenizer.eos_token_id, *([] if also is None else [also])})
        self.train, self.validation = (_problems(config["data"][part]) for part in ("train", "validation"))

    def judge(self, recorded: Mapping[str, Any]) -> None:
        """Every sample of every step and validation; an AssertionError says what is wrong."""
        order, remax = self._order(), self.config["algorithm"]["advantage"] == "remax"
        for step in recorded["steps"]:
            kinds = [call["kind"] for call in step["calls"]]
            num_rounds = kinds.count("training")
            assert kinds == ["training", "greedy"][: 1 + remax] * num_rounds, f"generated were {kinds}"
            for call in step["calls"]:
                if call["kind"] == "training":
                    uids = [next(order) for _ in range(self.config["batch"]["prompts_per_step"])]
                num_samples = self.config["batch"]["samples_per_prompt"] if call["kind"] == "training" else 1
                self.judge_call(call, self.train, uids, num_samples, step["step"])
        for validation in recorded["validations"]:
            self.judge_validation(validation)
        self.judge_history(recorded)

    def judge_call(self, call: Call, problems: Mapping[int, Any], uids: list[str], num_samples: int, step: int) -> None:
        """What was asked for and what came back."""
        asked = call["requests"]
        assert [each["uid"] for each in asked] == [uid for uid in uids for _ in range(num_samples)], "other prompts"
        assert call["sampling"] == self._sampling(call["kind"]), f"{call['kind']} samples at {call['sampling']}"
        number: Counter[str] = Counter()
        for each in asked:
            identity = json.dumps([self.config["training"]["seed"], step, each["uid"], number[each["uid"]]]).encode()
            number[each["uid"]] += 1
            seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
            assert each["seed"] == seed, f"sample {number[each['uid']]} of {each['uid']} has another seed"
            assert each["prompt"] == self._prompt(problems, each["uid"])[1], f"other token ids for {each['uid']}"
            assert each["max_tokens"] == self.config["rollout"]["max_response_tokens"]
        assert len({each["seed"] for each in asked}) == len(asked), "two samples have one seed"
        of_key = {int(each["key"]): each for each in asked}
        ids = [row["row_id"] for row in call["rows"]]
        assert ids == [key for key in of_key if key in set(ids)], "rows are not in the order of the requests"
        for row in call["rows"]:
            assert row["prompts"] == of_key[row["row_id"]]["prompt"], f"row {row['row_id']} answers another prompt"
            assert row["uid"] == of_key[row["row_id"]]["uid"]
            self.judge_row(row, self._prompt(problems, row["uid"]))

    def judge_row(self, row: Mapping[str, Any], prompt: tuple[str, list[int], str]) -> None:
        """The text of a row, and its score."""
        response = row["responses"]
        ends = response[-1] in self.ends
        text = self.tokenizer.decode(response[:-1] if ends else response)
        name = f"row {row['row_id']} ({row['uid']})"
        assert row["response_text"] == text, f"{name} reads {row['response_text']!r}, but its tokens say {text!r}"
        assert (row["prompt_text"], row["ground_truth"]) == (prompt[0], prompt[2]), f"{name} is another row of the data"
        assert row["truncated"] == [not ends], f"{name}: truncated is {row['truncated']}"
        assert ends or len(response) == self.config["rollout"]["max_response_tokens"], f"{name} ends without an end"
        score = score_of(text, prompt[2])
        assert row["scores"] == [pytest.approx(score, abs=1e-12)], f"{name} has {row['scores']}, its text earns {score}"
        assert len(row["rollout_log_probs"]) == len(response)

    def judge_validation(self, validation: Mapping[str, Any]) -> None:
        """Every validation prompt once, and the figures that its samples give."""
        uids = [f"sums/0/{row}" for row in range(len(self.validation))]
        settings, seen = self.config["validation"], []
        for call in validation["calls"]:
            assert call["kind"] == "validation"
            of_call = list(dict.fromkeys(each["uid"] for each in call["requests"]))
            seen += of_call
            self.judge_call(call, self.validation, of_call, settings["samples_per_prompt"], step=0)
        assert seen == uids, "other validation prompts"
        rows = [row for call in validation["calls"] for row in call["rows"]]
        expected = validation_figures(rows, settings["samples_per_prompt"], settings["solved_at"])
        figures = dict(validation["figures"])
        apart = figures.pop("val/teacher_kl", None)
        said = {name for name in figures if "/model/mean@" in name or "/solved/best@" in name}
        assert bool(said) == (self.config["reward_model"] is not None)
        by_rule = {name: value for name, value in figures.items() if name not in said}
        assert by_rule == pytest.approx(expected, abs=1e-12)
        assert (apart is None) == (self.config.get("teacher") is None)
        if apart is not None and validation["after"] == 0:  # later the policy is another
            by = Reference(dict(self.config))
            whole = [by.log_probs(by.actor, row)[0] - by.log_probs(by.teacher, row)[0] for row in map(row_of, rows)]
            assert apart == pytest.approx(float(torch.cat(whole).mean()), abs=1e-5)

    def judge_history(self, recorded: Mapping[str, Any]) -> None:
        """When there was a validation, where its figures stand, and which step is called the best."""
        settings, steps = self.config["validation"], self.config["training"]["steps"]
        every = settings["every"]
        due = [step for step in range(1, steps + 1) if every and (step % every == 0 or step == steps)]
        first = [0] if every and settings["first"] else []
        assert [each["after"] for each in recorded["validations"]] == first + due, "validated at other steps"
        by_step = {each["after"]: each["figures"] for each in recorded["validations"]}
        for line in recorded["metrics"]:
            figures = {name: value for name, value in line.items() if name.startswith("val/")}
            assert figures == by_step.get(line["step"], {}), (
                f"step {line['step']} has the figures of another validation"
            )
        assert [line["step"] for line in recorded["metrics"]] == [*first, *range(1, steps + 1)]
        name = f"val/score/mean@{settings['samples_per_prompt']}"
        saved = recorded.get("saved", [])
        scores = {step: by_step[step][name] for step in saved if step in by_step}
        best = max(scores, key=lambda step: (scores[step], -step)) if scores else None
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
        """Text, token ids and right answer of the row that a uid names."""
        first, second = problems[int(uid.rsplit("/", 1)[1])]
        text = f"<|user|>{first}+{second}=<|end|><|assistant|>"
        return text, self.tokenizer(text, add_special_tokens=False)["input_ids"], str(first + second)

    def _order(self) -> Iterator[str]:
        """The uids of the prompts, in the order in which they are drawn."""
        epoch, size, seed = 0, len(self.train), self.config["data"]["seed"]
        while True:
            keys = {row: _split_mix(f"{seed}/sums/{epoch}", row) for row in range(size)}
            rows = sorted(keys, key=keys.__getitem__) if self.config["data"]["shuffle"] else range(size)
            yield from (f"sums/{epoch}/{row}" for row in rows)
            epoch += 1


def validation_figures(rows: Sequence[Mapping[str, Any]], k: int, solved_at: float) -> dict[str, float]:
    """Of each source and of all: mean@k, and with several samples pass@k and maj@k."""
    found: dict[str, float] = {}
    sources = {f"val/{row['data_source']}" for row in rows} | {"val"}
    for prefix in sources:
        of_prompt: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for row in rows:
            if prefix in ("val", f"val/{row['data_source']}"):
                of_prompt[row["uid"]].append((row["response_text"], row["scores"][0]))
        scores = [[score for _, score in answers] for answers in of_prompt.values()]
        found[f"{prefix}/prompts"] = len(scores)
        found[f"{prefix}/score/mean@{k}"] = float(np.mean([sum(each) / len(each) for each in scores]))
        solved = [[score >= solved_at for score in each] for each in scores]
        found[f"{prefix}/solved/mean@{k}"] = float(np.mean([sum(each) / len(each) for each in solved]))
        if k == 1:
            continue
        found[f"{prefix}/solved/pass@{k}"] = float(np.mean([any(each) for each in solved]))
        votes = []
        for answers in of_prompt.values():
            count = Counter(text for text, _ in answers if text)  # the text is the answer, and none is no answer
            winner = max(count, default="", key=lambda text: (count[text], -[each for each, _ in answers].index(text)))
            votes.append(bool(winner) and dict(reversed(answers))[winner] >= solved_at)
        found[f"{prefix}/solved/maj@{k}"] = float(np.mean(votes))
    return found


def _problems(sources: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Row -> the two numbers; a problem belongs to validation where its hash says so."""
    (source,) = sources.values()
    options = source["options"]
    count, wanted = options["largest"] - 9, options["part"] == "validation"
    of_part = [
        problem
        for problem in range(count * count)
        if (hashlib.blake2b(f"addition {problem}".encode()).digest()[0] % 10 == 0) is wanted
    ]
    return {row: (10 + problem // count, 10 + problem % count) for row, problem in enumerate(of_part)}


def _split_mix(key: str, row: int) -> int:
    """SplitMix64 of the row, seeded by the key's hash."""
    state = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    z = ((row + 1) * 0x9E3779B97F4A7C15 + state) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
