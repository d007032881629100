"""A whole training step in plain torch with transformers' models. mrl's workers, engines and layouts must equal it.

Inputs: configuration, models, sampled rows. Outputs: columns, losses, norms, learning rates, weights and metrics.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.reference import formulas
from tests.reference.formulas import Row

Loss = Callable[[list[Row]], tuple[Tensor, dict[str, float]]]
Round = dict[str, Any]  # `sampled` and, for ReMax, `greedy`: rows with a score; `figures`: metrics of the rewards


class Adam:
    """AdamW with a clipped gradient norm and a schedule. Vectors (norms, biases) have no weight decay."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01, "clip_grad": 1.0}
        self.own, self.schedule = defaults | settings["optimizer"], settings["schedule"]
        self.parameters = list(model.parameters())
        self.moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in self.parameters]
        self.num_updates = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update: linear warmup from 0, then decay to a share of the peak."""
        at, peak, warmup = self.num_updates, self.own["lr"], self.schedule["warmup_steps"]
        lowest, end = peak * self.schedule["min_lr_ratio"], self.schedule["decay_steps"]
        if at < warmup:
            return float(peak * at / warmup)
        if self.schedule["decay"] == "constant":
            return float(peak)
        done = min((at - warmup) / (end - warmup), 1.0)
        left = 1 - done if self.schedule["decay"] == "linear" else (math.cos(math.pi * done) + 1) / 2
        return float(lowest + left * (peak - lowest))

    @torch.no_grad()
    def step(self, loss: Tensor) -> float:
        """Do one update and return the gradient norm before clipping."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        complete = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients, strict=True)]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in complete))
        clip = self.own["clip_grad"]
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        rate, b1, b2 = self.learning_rate, self.own["adam_beta1"], self.own["adam_beta2"]
        self.num_updates += 1
        for parameter, gradient, (first, second) in zip(self.parameters, complete, self.moments, strict=True):
            gradient = gradient * factor
            first.mul_(b1).add_(gradient, alpha=1 - b1)
            second.mul_(b2).add_(gradient.square(), alpha=1 - b2)
            if parameter.ndim > 1:
                parameter.mul_(1 - rate * self.own["weight_decay"])
            denominator = (second / (1 - b2**self.num_updates)).sqrt() + self.own["adam_eps"]
            parameter.sub_(rate * (first / (1 - b1**self.num_updates)) / denominator)
        return norm


def value_model(path: str, new_head: bool = False) -> Any:
    """Load a model with one value per token. A head that is missing in the files starts at 0."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float64)
    if new_head:
        torch.nn.init.zeros_(model.score.weight)
    return model


def token_values(model: Any, row: Row, last: bool = False) -> Tensor:
    """Return the value of the state before each written token or, for a reward model, of the whole sample."""
    values: Tensor = model.score(model.model(torch.tensor([[*row.prompt, *row.response]])).last_hidden_state)[0, :, 0]
    return values[-1] if last else values[len(row.prompt) - 1 : -1][row.written]


@torch.no_grad()
def add_column(rows: list[Row], name: str, of_row: Callable[[Row], Tensor]) -> None:
    """Add a column with one value per written token."""
    for row in rows:
        row.columns[name] = of_row(row)


class Reference:
    """Models, their optimizers and the KL coefficient, kept from step to step."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.algorithm, model = config, config["algorithm"], config["model"]
        self.actor = AutoModelForCausalLM.from_pretrained(model["path"], dtype=torch.float64)
        self.initial, self.actor_adam = copy.deepcopy(self.actor), Adam(self.actor, config["actor"])
        self.critic = self.reward_model = None
        self.tokenizer = AutoTokenizer.from_pretrained(model["path"])
        if config["critic"] is not None:
            self.critic = value_model(model["critic"] or model["path"], new_head=model["critic"] is None)
            self.critic_adam = Adam(self.critic, config["critic"])
        if config["reward_model"] is not None:
            self.reward_model = value_model(config["reward_model"]["path"])
        self.teacher = self.initial
        if config["teacher"] is not None:
            self.teacher = AutoModelForCausalLM.from_pretrained(config["teacher"]["path"], dtype=torch.float64)
            self.teachers_tokenizer = AutoTokenizer.from_pretrained(config["teacher"]["path"])
        self.kl_coef = self.algorithm["kl"]["coef"]

    def step(self, number: int, rounds: Sequence[Round]) -> dict[str, Any]:
        """Do one step on the rows that were sampled for it."""
        rows, figures = self.collect(rounds)
        for row in rows:
            row.columns = {"rollout": row.rollout[row.written]}
        kl, batch = self.algorithm["kl"], self.config["batch"]
        num_samples = batch["prompts_per_step"] * batch["samples_per_prompt"] * batch["epochs_per_step"]
        if self.algorithm["old_log_probs"] == "trainer" and (
            num_samples > batch["samples_per_update"]
            or kl["where"] in ("reward", "both")
            or self.algorithm["correction"] is not None
            or self.algorithm["loss"]["policy"] in ("clip_cov", "kl_cov", "m2po")
            or self.algorithm["advantage"] in ("online_dpo", "optimal_token_baseline")
        ):
            add_column(rows, "old_log_probs", lambda row: self.log_probs(self.actor, row)[0])
            if self.algorithm["advantage"] == "optimal_token_baseline":
                add_column(rows, "score_norms", self.score_norms)
            figures |= formulas.mismatch(rows)
            if self.algorithm["correction"] is not None:
                figures |= formulas.correction_figures(self.algorithm["correction"], rows)
        if kl["where"] != "none" or self.algorithm["advantage"] == "online_dpo":
            add_column(rows, "ref_log_probs", lambda row: self.log_probs(self.initial, row)[0])
        if self.algorithm["distillation"] is not None:
            if self.config["teacher"] is None:
                self.teacher = copy.deepcopy(self.actor)  # the policy from before the updates
            if self.shows_success:
                figures |= self.choose_successes(rows)
            if self.reads_text:
                figures |= self.teach_texts(rows)
            else:
                add_column(rows, "teacher_log_probs", self.taught_log_probs)
        if self.critic is not None:
            add_column(rows, "values", lambda row: token_values(self.critic, row))
        figures["reward/kl"], rewards = formulas.add_advantages(rows, self.algorithm, self.kl_coef)
        figures |= spread_of("critic/rewards", rewards)
        if self.algorithm["advantage"] == "online_dpo":
            figures |= formulas.dpo_figures(rows, [row.score for row in rows], self.algorithm["dpo_beta"])
        for name in ("advantages", "returns", "values")[: 3 if self.critic is not None else 1]:
            figures |= spread_of(f"critic/{name}", torch.cat([row.columns[name] for row in rows]).tolist())
        if self.critic is not None:
            returns, values = (torch.cat([row.columns[name] for row in rows]) for name in ("returns", "values"))
            left, whole = (column.var(correction=0) for column in (returns - values, returns))
            figures["critic/vf_explained_var"] = float(1 - left / (whole + 1e-8))
        updates = {}
        if self.critic is not None:
            updates["critic"] = self.update(rows, number, self.critic_adam, self.critic_loss)
        if number > self.config["training"]["critic_warmup_steps"]:
            updates["actor"] = self.update(rows, number, self.actor_adam, self.actor_loss)
        if self.algorithm["distillation"] is not None and "actor" in updates:
            taught, own = (
                np.mean([update[f"{x}_abs"] for update in updates["actor"]]) for x in ("taught", "advantages")
            )
            if taught:
                figures["actor/taught_share"] = float(taught / (taught + own))
        for role, of_role in updates.items():
            names = [name for name in of_role[0] if name != "row_ids"]
            figures |= {f"{role}/{name}": float(np.mean([update[name] for update in of_role])) for name in names}
            for name in ("actor/teacher_kl", "actor/teacher_mass") if figures.get("actor/taught_tokens") else ():
                if name in figures:
                    figures[name] /= figures["actor/taught_tokens"]
            figures[f"{role}/skipped"] = 0.0
        if kl["where"] in ("reward", "both"):
            figures["reward/kl_coef"] = self.kl_coef
        if kl["target"] is not None:
            error = min(max(figures["reward/kl"] / kl["target"] - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * len(rows) / kl["horizon_samples"]
        return {
            "row_ids": [row.row_id for row in rows],
            "scores": {row.row_id: [row.score] for row in rows},
            "columns": {
                name: {
                    row.row_id: []
                    if name == "teacher_log_probs" and row.success is None and not self.reads_text
                    else row.spread(name)
                    for row in rows
                }
                for name in rows[0].columns
            },
            "updates": updates,
            "kl_coef": self.kl_coef,
            "metrics": figures | self.batch_figures(rows),
        }

    def collect(self, rounds: Sequence[Round]) -> tuple[list[Row], dict[str, float]]:
        """Return the rows to learn from. For DAPO, take prompts whose scores differ until there are enough."""
        rows: list[Row] = []
        per_round, num_uniform = [], 0
        num_prompts = self.config["batch"]["prompts_per_step"]
        for sample_round in rounds:
            sampled, figures = list(sample_round["sampled"]), dict(sample_round["figures"])
            if self.reward_model is not None:
                figures |= self.add_model_scores(sampled)
                self.add_model_scores(sample_round.get("greedy", []))
            if self.algorithm["advantage"] == "remax":
                greedy = {row.uid: row.score for row in sample_round["greedy"]}
                sampled = [row for row in sampled if row.uid in greedy]
                for row in sampled:
                    row.baseline = greedy[row.uid]
                figures["reward/greedy/mean"] = float(np.mean([row.baseline for row in sampled]))
            if self.algorithm["dynamic_sampling"] is not None:
                scores: dict[str, list[float]] = {}
                for row in sampled:
                    scores.setdefault(row.uid, []).append(row.score)
                uneven = [uid for uid, of_uid in scores.items() if len(set(of_uid)) > 1]
                num_uniform += sum(len(of_uid) > 1 and len(set(of_uid)) == 1 for of_uid in scores.values())
                taken = set(uneven[: num_prompts - len({row.uid for row in rows})])
                sampled = [row for row in sampled if row.uid in taken]
            rows += sampled
            per_round.append(figures)
        figures = {name: float(np.mean([metrics.get(name, np.nan) for metrics in per_round])) for name in per_round[-1]}
        if self.algorithm["dynamic_sampling"] is not None:
            figures |= {"sampling/rounds": len(rounds), "sampling/uniform_prompts": num_uniform}
        if overlong := self.algorithm["overlong"]:
            longest, buffer = self.config["rollout"]["max_response_tokens"], overlong["buffer_tokens"]
            into = [min(max(row.num_written - (longest - buffer), 0) / buffer, 1.0) for row in rows]
            penalties = [-overlong["factor"] * share for share in into]  # linear over the last tokens
            for row, penalty in zip(rows, penalties, strict=True):
                row.score += penalty
            figures["reward/overlong_penalty"] = float(np.mean(penalties))
        return rows, figures

    @torch.no_grad()
    def add_model_scores(self, rows: list[Row]) -> dict[str, float]:
        """Add the reward model's weighted score to the score of each sample."""
        scores = [float(token_values(self.reward_model, row, last=True)) for row in rows]
        for row, score in zip(rows, scores, strict=True):
            row.score += self.config["reward_model"]["weight"] * score
        return spread_of("reward/model", scores) if scores else {}

    def log_probs(self, model: Any, row: Row) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy at each written token, at the temperature of the rollout."""
        log_probs = self.distributions(model, row)
        sampled = log_probs.gather(1, torch.tensor(row.response)[row.written][:, None])[:, 0]
        return sampled, -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum(-1)

    def score_norms(self, row: Row) -> Tensor:
        """Return w^2 |d log pi / d logits|^2 of each written token, with logits divided by the temperature and the
        correction w."""
        probs = self.distributions(self.actor, row).exp()
        chosen = torch.nn.functional.one_hot(torch.tensor(row.response)[row.written], probs.shape[-1])
        corrects = self.algorithm["correction"]
        factor: Any = 1.0 if corrects is None else formulas.correction(corrects, row)
        norms: Tensor = (chosen - probs).square().sum(-1) * factor**2
        return norms

    def distributions(self, model: Any, row: Row) -> Tensor:
        """Return the log-probs of the whole vocabulary, or of the tokens it was drawn from, at each written token."""
        logits = model(torch.tensor([[*row.prompt, *row.response]])).logits[0, len(row.prompt) - 1 : -1]
        if self.algorithm["keep_sampling_mask"]:
            is_left = torch.zeros(logits.shape, dtype=torch.bool)
            for place, ids in enumerate(row.drawn_from):
                is_left[place, [token for token in ids if token >= 0]] = True
            logits = logits.masked_fill(~is_left, -math.inf)
        of_places: Tensor = (logits / self.config["rollout"]["temperature"]).log_softmax(-1)[row.written]
        return of_places

    @property
    def shows_success(self) -> bool:
        return "{success}" in (self.algorithm["distillation"]["context"] or "")

    @property
    def reads_text(self) -> bool:
        """Whether the teacher has another tokenizer."""
        return self.config["teacher"] is not None and self.teachers_tokenizer.vocab != self.tokenizer.vocab

    def teach_texts(self, rows: Sequence[Row]) -> dict[str, float]:
        """Add the columns of a teacher that reads texts. Return metrics.

        All texts are ASCII, and each token of the policy is a character. So each of the teacher's tokens is a span.
        """
        lost, sizes = 0, Counter[str]()
        for row in rows:
            (question,) = re.findall(r"\d+\+\d+=", row.text)
            ended = row.response[-1] == self.tokenizer.eos_token_id
            text = bytes(self.tokenizer.decode(row.response[: len(row.response) - ended]), "ascii").decode()
            asked = [{"role": "user", "content": question}]
            prompt = self.teachers_tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            read = self.teachers_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, lengths = read["input_ids"], [end - begin for begin, end in read["offset_mapping"]]
            if ended:
                ids, lengths = [*ids, self.teachers_tokenizer.eos_token_id], [*lengths, 1]
            prompt = self.teachers_tokenizer(prompt, add_special_tokens=False)["input_ids"]
            row.columns["teacher_log_probs"] = torch.zeros(len(row.response), dtype=torch.float64)
            row.columns["teacher_spans"] = torch.zeros(len(row.response), dtype=torch.float64)
            if len(prompt) + len(ids) > self.config["teacher"]["max_tokens_per_device"]:
                row.success, lost = None, lost + 1
                continue
            own = dataclasses.replace(row, prompt=prompt, response=ids, written=torch.ones(len(ids), dtype=torch.bool))
            log_probs = self.log_probs(self.teacher, own)[0].detach()
            shares = [log_prob / num for log_prob, num in zip(log_probs, lengths, strict=True) for _ in range(num)]
            row.columns["teacher_log_probs"] = torch.stack(shares)
            marks = [2 - (place > 0) for num in lengths for place in range(num)]
            row.columns["teacher_spans"] = torch.tensor(marks, dtype=torch.float64)
            sizes.update(policy=len(row.response), teacher=len(ids))
        sums = [formulas.over_spans(row, row.columns["teacher_log_probs"]) for row in rows if row.success is not None]
        for row in rows:
            if row.success is None:
                row.columns["teacher_log_probs"] += torch.cat(sums).mean()
        figures = {f"teacher/untaught/{reason}": 0.0 for reason in ("control_token", "not_text", "other_text")}
        figures |= {"teacher/untaught/too_long": float(lost), "teacher/untaught_share": lost / len(rows)}
        share = sizes["teacher"] / sizes["policy"]
        return figures | {"teacher/tokens_per_token": share, "teacher/spans_per_token": share}

    def choose_successes(self, rows: Sequence[Row]) -> dict[str, float]:
        """Give each row the first other response to its prompt with enough score, or none. Return metrics."""
        taught, lost = self.algorithm["distillation"], Counter[str]()
        for row in rows:
            of_others = [
                other.said
                for other in rows
                if other.uid == row.uid and other.row_id != row.row_id and other.score >= taught["success_at"]
            ]
            if not of_others:
                row.success, reason = None, "no_success"
            else:
                row.success, reason = of_others[0].split(taught["success_after"] or "\0")[-1], ""
                if len(self.as_taught(row).prompt) > taught["context_tokens"]:
                    row.success, reason = None, "too_long"
            lost[reason] += 1
        reasons = ("no_success", "control_token", "too_long")
        figures = {f"teacher/untaught/{reason}": float(lost[reason]) for reason in reasons}
        return figures | {"teacher/untaught_share": 1 - lost[""] / len(rows)}

    def taught_log_probs(self, row: Row) -> Tensor:
        if row.success is None:
            return torch.zeros(row.num_written, dtype=torch.float64)
        return self.log_probs(self.teacher, self.as_taught(row))[0]

    def as_taught(self, row: Row) -> Row:
        """Return the row with the prompt that the teacher reads: the sum inside the context."""
        context = self.algorithm["distillation"]["context"]
        if context is None:
            return row
        (question,) = re.findall(r"\d+\+\d+=", row.text)
        before, after = context.split("{prompt}")
        of_row = {"{ground_truth}": row.truth, "{success}": row.success or ""}
        for name, value in of_row.items():
            before, after = before.replace(name, value), after.replace(name, value)
        prompt = row.text.replace(question, before + question + after)
        assert prompt != row.text, f"no sum in {row.text}"
        return dataclasses.replace(row, prompt=self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def update(self, rows: list[Row], step: int, adam: Adam, loss: Loss) -> list[dict[str, Any]]:
        """Do all updates of one model in this step: in each epoch, shuffle the rows and cut them into equal parts."""
        batch, reports = self.config["batch"], []
        num_parts = max(1, round(len(rows) / batch["samples_per_update"]))
        for epoch in range(batch["epochs_per_step"]):
            order = np.random.default_rng([self.config["training"]["seed"], step - 1, epoch]).permutation(len(rows))
            for part in np.array_split(order if num_parts > 1 else np.arange(len(rows)), num_parts):
                chosen, rate = [rows[at] for at in part], adam.learning_rate
                value, report = loss(chosen)
                report |= {"loss": float(value.detach()), "grad_norm": adam.step(value), "lr": rate}
                reports.append(report | {"row_ids": sorted(row.row_id for row in chosen)})
        return reports

    def actor_loss(self, rows: list[Row]) -> tuple[Tensor, dict[str, float]]:
        """Return the actor's loss and its metrics.

        L = sum_t w_t (c_t (pg_t + kl_coef kl_t + coef d_t) - entropy_coef H_t), with the correction c and the
        divergence d from the teacher.
        """
        loss = self.algorithm["loss"] | {"old_log_probs": self.algorithm["old_log_probs"]}
        kl, taught = self.algorithm["kl"], self.algorithm["distillation"]
        terms: dict[str, Any] = {"pg_loss": 0.0, "kl_loss": 0.0, "entropy": 0.0, "distill_loss": 0.0}
        sums: Counter[str] = Counter()
        formulas.select_tokens(loss, rows)
        for row, weight in zip(rows, formulas.token_weights(self.config, rows), strict=True):
            log_probs, entropy = self.log_probs(self.actor, row)
            of_token, reports = formulas.policy_loss(loss, taught, log_probs, row)
            correction: Any = 1.0
            if self.algorithm["correction"] is not None:
                correction = formulas.correction(self.algorithm["correction"], row)
            of_token = of_token * correction
            terms["pg_loss"] = terms["pg_loss"] + weight * of_token.sum()
            terms["entropy"] = terms["entropy"] + weight * entropy.sum()
            if kl["where"] in ("loss", "both"):
                estimate = formulas.kl_estimate(kl["in_loss"], log_probs, row.columns["ref_log_probs"])
                terms["kl_loss"] = terms["kl_loss"] + weight * (correction * estimate).sum()
            if taught is not None:
                distance, teacher_reports = self.divergence(row, log_probs)
                terms["distill_loss"] = terms["distill_loss"] + weight * (correction * distance).sum()
                reports |= teacher_reports
            reports |= {"entropy_mean": entropy, "rollout_diff": (log_probs - row.columns["rollout"]).abs()}
            sums.update({name: float(value.sum()) for name, value in reports.items()})
        # The loss's KL coefficient is constant; only the reward's is adapted.
        whole = terms["pg_loss"] + kl["coef"] * terms["kl_loss"] - loss["entropy_coef"] * terms["entropy"]
        is_used = {"pg_loss": True, "kl_loss": kl["where"] in ("loss", "both"), "entropy": bool(loss["entropy_coef"])}
        if taught is not None and taught["form"] != "advantage":
            whole, is_used["distill_loss"] = whole + taught["coef"] * terms["distill_loss"], True
        term_metrics = {name: float(terms[name].detach()) for name in terms if is_used.get(name)}
        return whole, means(sums, rows) | term_metrics | {"tokens": float(sum(row.num_written for row in rows))}

    def divergence(self, row: Row, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy's divergence from the teacher at each token, in the form of distillation, and metrics."""
        taught, of_teacher = self.algorithm["distillation"], row.columns["teacher_log_probs"]
        is_taught = torch.full(log_probs.shape, float(row.success is not None), dtype=torch.float64)
        difference = is_taught * (log_probs.detach() - of_teacher)
        signal = formulas.over_spans(row, difference).abs()
        if self.reads_text and row.success is None:
            signal = of_teacher.abs()
        reports = {"teacher_kl": difference, "taught_abs": taught["coef"] * signal}
        reports["advantages_abs"] = taught["reward_coef"] * row.columns["advantages"].abs()
        if self.shows_success or self.reads_text:
            reports["taught_tokens"] = is_taught
        if row.success is None:
            is_divergence = taught["form"] in ("top_k", "full")
            return is_taught, reports | ({"teacher_mass": is_taught} if is_divergence else {})
        if taught["form"] in ("advantage", "sampled"):
            return formulas.kl_estimate(taught["estimator"], log_probs, of_teacher), reports
        with torch.no_grad():
            teacher = self.distributions(self.teacher, self.as_taught(row))
        distance, mass = formulas.divergence(taught, self.distributions(self.actor, row), teacher)
        return distance, reports | {"teacher_mass": mass}

    def critic_loss(self, rows: list[Row]) -> tuple[Tensor, dict[str, float]]:
        """Return L = sum_t w_t value_loss_t and its metrics."""
        whole, sums = torch.zeros((), dtype=torch.float64), Counter[str]()
        for row, weight in zip(rows, formulas.token_weights(self.config, rows), strict=True):
            values = token_values(self.critic, row)
            of_token, reports = formulas.value_loss(self.algorithm["loss"]["value_clip"], values, row)
            whole = whole + weight * of_token.sum()
            sums.update({name: float(value.sum()) for name, value in reports.items()})
        return whole, means(sums, rows) | {"vf_loss": float(whole.detach())}

    def batch_figures(self, rows: list[Row]) -> dict[str, float]:
        """Return metrics of the batch: scores, lengths, and the share of prompts with equal scores."""
        responses, prompts = [len(row.response) for row in rows], [len(row.prompt) for row in rows]
        uniform = uniform_share([(row.uid, row.score) for row in rows])
        figures: dict[str, float] = {
            "response_length/clip_ratio": responses.count(self.config["rollout"]["max_response_tokens"]) / len(rows),
            "groups/uniform_share": uniform,
            "batch/samples": len(rows),
            "perf/total_num_tokens": sum(prompts) + sum(responses),
        }
        figures |= spread_of("critic/score", [row.score for row in rows]) | spread_of(
            "response_length", [row.num_written for row in rows]
        )
        has_vector = self.algorithm["advantage"] == "gdpo"
        for number, name in enumerate(self.config["reward"]["functions"] if has_vector else ()):
            of_prompts = [(row.uid, row.rewards[number][1]) for row in rows]
            figures[f"reward/{name}/uniform_share"] = uniform_share(of_prompts)
        for name, is_solved in (("solved", True), ("unsolved", False)):
            at = self.config["validation"]["solved_at"]
            lengths = [row.num_written for row in rows if (row.score >= at) is is_solved]
            figures |= {f"response_length/{name}/mean": float(np.mean(lengths))} if lengths else {}
        return figures | spread_of("prompt_length", prompts)


def uniform_share(scores: Sequence[tuple[str, float]]) -> float:
    """Return the share of prompts with a single score."""
    num_scores = Counter(uid for uid, _ in set(scores))
    return list(num_scores.values()).count(1) / len(num_scores)


def spread_of(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, maximum and minimum."""
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": max(values), f"{name}/min": min(values)}


def means(sums: Counter[str], rows: list[Row]) -> dict[str, float]:
    """Return the mean of each sum over the tokens of an update."""
    return {name: value / max(sum(row.num_written for row in rows), 1) for name, value in sums.items()}
