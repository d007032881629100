"""The runs to compare with the reference. Each pair of options occurs together in one run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reference.rewards import FUNCTION

Options = Mapping[str, Any]


@dataclass(frozen=True)
class LocalCase:
    """A configuration and further properties of its run."""

    name: str
    options: dict[str, Any]
    """Level of each factor below."""
    values: dict[str, Any]
    mask: bool = False
    """Whether some response tokens are marked as not written by the model."""
    failures: bool = False
    """Whether some samples get no score."""
    stop_after: int | None = None
    """Step after which the run saves, ends, and continues in a new trainer."""


COMMON: dict[str, tuple[Any, ...]] = {
    "kl": ("none", "reward", "loss", "both", "reward adaptive", "both adaptive"),
    "in_reward": ("k1", "k2", "k3", "abs"),
    # Not abs: if the policy equals its reference, as in each first update, its gradient is a rounding error's sign.
    "in_loss": ("k3", "k1", "k2", "k1+", "k3+", "abs+"),
    "aggregation": ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    # Not kl_cov, for the same reason: its penalty is abs.
    "policy": ("ppo", "gspo", "cispo", "gmpo", "gpg", "sapo", "dppo_tv", "dppo_kl", "topr", "clip_cov", "dro", "vespo"),
    "opsm": (None, 1e-4),
    "temperature": (0.7, 1.0),
    "updates": ("2 updates", "1 update", "3 updates", "2 updates 2 epochs"),
    "schedule": ("warmup linear", "constant", "cosine"),
    "clip": ((0.1, 0.3, None), (0.2, 0.2, 3.0), (0.05, 0.05, 1.01)),
    "entropy": (0.02, 0.0),
    "correction": (None, ("token", "truncate"), ("token", "mask"), ("sequence", "truncate"), ("geometric", "mask")),
    "sampling": ("plain", "overlong", "dynamic", "failures"),
    "mask": (False, True),
    "reward_model": (None, 0.5),
    # For an estimate, the estimator; for a divergence, its beta.
    "distillation": (None, ("advantage", 0), ("top_k", 0.0), ("full", 0.3), ("sampled", "k3"), ("full", 1.0)),
    "resume": (False, True),
    "old_log_probs": ("trainer", "engine"),
}
GROUPS = {
    "advantage": (
        # Not maxrl, which excludes other levels: those with negative scores.
        *("grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
    ),
    "gamma": ((1.0, 1.0), (0.9, 0.8)),
} | COMMON
VALUES = {
    "advantage": ("gae",),
    "gamma": ((0.95, 0.9), (1.0, 1.0)),
    "whiten": (True, False),
    "value_clip": (0.05, None, 0.5),
    "warmup": (1, 0, 2),
    "head": ("made", "new"),
} | COMMON
PAIRS: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()} | {
    "advantage": "online_dpo",
    "aggregation": "token-sum",
    "policy": "gpg",
    "updates": "1 update",
}
"""An estimator that most levels of the other factors contradict."""
OF_PAIRS: tuple[dict[str, Any], ...] = (
    {},
    {"kl": "loss", "mask": True, "entropy": 0.0},
    {"resume": True},
    {"kl": "loss", "reward_model": 0.5},
)
BASELINES: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()} | {
    "advantage": "optimal_token_baseline"
}
OF_BASELINES: tuple[dict[str, Any], ...] = (
    {"kl": "reward", "mask": True, "correction": ("token", "truncate")},
    {"updates": "1 update", "resume": True},
    {"policy": "gspo", "correction": ("sequence", "truncate"), "temperature": 1.0},
    {"sampling": "overlong", "mask": True},
)
TAUGHT: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()} | {"context": "{prompt} {ground_truth}"}
OF_TAUGHT: tuple[dict[str, Any], ...] = (
    {"distillation": ("top_k", 0.3), "kl": "loss", "resume": True},
    {"distillation": ("advantage", 0), "mask": True, "reward_coef": 0.4},
    {"distillation": ("sampled", "k3"), "updates": "1 update", "temperature": 1.0},
    {"distillation": ("full", 1.0), "has_teacher": True},
)
"""A teacher, here the policy itself, that reads the answer."""
SHOWN: dict[str, Any] = TAUGHT | {"context": "{prompt} {success}", "success_at": 0.5, "advantage": "dr_grpo"}
OF_SHOWN: tuple[dict[str, Any], ...] = (
    {"distillation": ("top_k", 0.3), "resume": True, "success_after": "b"},
    {"distillation": ("advantage", 0), "mask": True, "reward_coef": 0.4, "success_at": 0.75},
    {"distillation": ("sampled", "k3"), "updates": "1 update", "reward_coef": 0.0, "sampling": "overlong"},
    {"distillation": ("full", 1.0), "has_teacher": True, "sampling": "failures", "kl": "loss"},
)
"""A teacher that reads another sample, if it is a success and short enough."""
MASKED: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()}
OF_MASKED: tuple[dict[str, Any], ...] = (
    {"drawn_from": (5, 0.8), "kl": "loss", "correction": ("token", "truncate"), "mask": True},
    {"drawn_from": (5, 0.8), "kl": "reward", "policy": "gspo", "updates": "2 updates 2 epochs"},
    {"drawn_from": (12, 1.0), "advantage": "remax", "updates": "1 update", "temperature": 1.0},
    {"drawn_from": (12, 1.0), "old_log_probs": "engine", "resume": True},
)
"""top_k and top_p of engines that return the tokens from which each token was drawn."""
FOREIGN: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()} | {
    "distillation": ("advantage", 0),
    "teacher": ("foreign", 28),
}
OF_FOREIGN: tuple[dict[str, Any], ...] = (
    {"kl": "loss", "resume": True},
    {"updates": "3 updates", "reward_coef": 0.4, "advantage": "rloo"},
)
"""A teacher with another tokenizer, and its `max_tokens_per_device`, into which some samples do not fit."""
LATER: dict[str, Any] = {name: levels[0] for name, levels in GROUPS.items()}
OF_LATER: tuple[dict[str, Any], ...] = (
    {"advantage": "maxrl", "kl": "loss", "resume": True},
    {"advantage": "maxrl", "sampling": "dynamic", "updates": "1 update"},
    {"advantage": "gdpo", "mask": True, "temperature": 1.0},
    {"advantage": "gdpo", "kl": "loss", "policy": "sapo"},
    {"policy": "m2po", "kl": "reward", "resume": True},
    {"policy": "m2po", "advantage": "rloo", "updates": "2 updates 2 epochs", "mask": True},
)
"""Methods that some levels of the other factors contradict."""
SCHEDULES = {
    "constant": {},
    "warmup linear": {"warmup_steps": 2, "decay": "linear", "decay_steps": 5, "min_lr_ratio": 0.1},
    "cosine": {"decay": "cosine", "decay_steps": 4},
}
PROMPTS, SAMPLES, MAX_LENGTH = 4, 3, 8
SHOWN_TOKENS = 17  # some successes are longer


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few combinations that together contain each pair of levels of any two factors; deterministic.

    Each combination starts with a missing pair and takes, for each other factor, the level that adds most pairs.
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    combinations: list[dict[str, Any]] = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [(names.index(name), level) for name, level in pair]))
        for name in names:
            if name not in chosen:
                new = [_num_new(missing, names, chosen, name, level) for level in range(len(factors[name]))]
                # Ties: take another level in each combination, so that uncounted properties vary too.
                best = [level for level, count in enumerate(new) if count == max(new)]
                chosen[name] = best[len(combinations) % len(best)]
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        combinations.append({name: factors[name][chosen[name]] for name in names})
    return combinations


def _num_new(missing: set[Any], names: list[str], chosen: dict[str, int], name: str, level: int) -> int:
    pairs = (
        sorted([(other, at), (name, level)], key=lambda factor: names.index(factor[0])) for other, at in chosen.items()
    )
    return sum(tuple(pair) in missing for pair in pairs)


def make_case(name: str, options: Options, models: Path, num_ranks: int) -> LocalCase:
    """Return the configuration of a combination. Leave out an option if the option that it needs is missing."""
    is_gae, resume = options["advantage"] == "gae", options["resume"] and num_ranks == 1
    number, num_updates = int(name.split("-")[1]), int(options["updates"][0])
    where, *adaptive = options["kl"].split()
    kl = {"where": where, "coef": 0.1, "in_reward": options["in_reward"], "in_loss": options["in_loss"]}
    low, high, dual = options["clip"]
    trained = {
        "dtype": "float32",
        "max_tokens_per_device": 64,
        "schedule": SCHEDULES[options["schedule"]],
        "optimizer": {"lr": 1.5e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-4},
    }
    roles = ["actor", *(["critic"] if is_gae else []), *(["reward_model"] if options["reward_model"] else [])]
    dynamic = options["sampling"] == "dynamic"
    values: dict[str, Any] = {
        "cluster": {"devices_per_node": num_ranks, "device": "cpu"},
        "placement": {"pools": {"all": num_ranks}, "roles": dict.fromkeys(roles, "all")},
        "model": {"path": str(models / "policy")},
        "algorithm": {
            "advantage": options["advantage"],
            "gamma": options["gamma"][0],
            "lam": options["gamma"][1],
            "whiten": options.get("whiten", True),
            "dpo_beta": 0.5,
            **({} if options.get("whiten", True) else {"lam_critic": 1.0, "lam_length": 0.3}),
            "kl": kl | ({"target": 0.002, "horizon_samples": 50} if adaptive else {}),
            "loss": {
                "policy": options["policy"],
                "aggregation": options["aggregation"],
                "clip_low": low,
                "clip_high": high,
                "dual_clip": dual,
                "cov_share": 0.2,
                "cov_low": 0.01,
                "m2_threshold": 0.06,
                "opsm_delta": options.get("opsm"),
                "entropy_coef": options["entropy"],
                "value_clip": options.get("value_clip", 0.5),
            },
            "dynamic_sampling": {"most_rounds": 20} if dynamic else None,
            "overlong": {"buffer_tokens": 4, "factor": 0.7} if options["sampling"] == "overlong" else None,
            "correction": _correction(options["correction"]),
            "old_log_probs": _old_log_probs(options),
            "keep_sampling_mask": "drawn_from" in options,
        },
        "batch": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "samples_per_update": PROMPTS * SAMPLES // num_updates,
            "epochs_per_step": 2 if "epochs" in options["updates"] else 1,
        },
        "actor": trained,
        "rollout": {
            "max_prompt_tokens": 16,
            "max_response_tokens": MAX_LENGTH,
            "temperature": options["temperature"],
            **dict(zip(("top_k", "top_p"), options.get("drawn_from", (0, 1.0)), strict=True)),
            "replicas": 1,
        },
        "sync": {"probe_every": 0},  # the scripted engine has no weights
        "data": {"train": _source("train"), "validation": _source("validation"), "seed": number % 5},
        "reward": {"functions": {FUNCTION: {"name": f"tests.reference.rewards:{FUNCTION}"}}},
        "training": {
            "steps": 3,
            "seed": number,
            "critic_warmup_steps": options.get("warmup", 0) if is_gae else 0,
        },
        "validation": {"every": 2, "samples_per_prompt": 2, "temperature": 0.5, "top_p": 0.9, "solved_at": 0.5},
    }
    if is_gae:
        values["critic"] = trained | {"optimizer": trained["optimizer"] | {"lr": 2e-3}}  # type: ignore[operator]
        values["model"]["critic"] = str(models / "critic") if options["head"] == "made" else None
    if options["reward_model"]:
        path, weight = str(models / "scorer"), options["reward_model"]
        values["reward_model"] = {"path": path, "weight": weight, "dtype": "float32", "max_tokens_per_device": 64}
    if options["distillation"]:
        form, of_form = options["distillation"]
        form = "advantage" if form == "sampled" and options["updates"] != "1 update" else form
        if form == "advantage" and options["policy"] == "clip_cov":  # refused together
            form, of_form = "top_k", 0.0
        by = {"sampled": {"estimator": of_form}, "advantage": {}}.get(form, {"beta": of_form})
        values["algorithm"]["distillation"] = {"form": form, "coef": 0.3, "top_k": 6, **by}
        values["algorithm"]["distillation"] |= {"context": options.get("context"), "context_tokens": 40}
        values["algorithm"]["distillation"] |= {
            name: options[name] for name in ("success_at", "success_after", "reward_coef") if name in options
        }
        if "success_at" in options:
            values["algorithm"]["distillation"]["context_tokens"] = SHOWN_TOKENS
        if not options.get("context"):
            del values["algorithm"]["distillation"]["context_tokens"]
    if options["distillation"] and (options.get("has_teacher") or not options.get("context")):
        model, room = options.get("teacher", ("teacher", 64))
        values["teacher"] = {"path": str(models / model), "dtype": "float32", "max_tokens_per_device": room}
        values["placement"]["roles"]["teacher"] = "all"
    failures = options["sampling"] == "failures"
    return LocalCase(name, dict(options), values, options["mask"], failures, 2 if resume else None)


def _source(part: str) -> dict[str, Any]:
    return {"sums": {"dataset": "toy:addition", "options": {"part": part, "largest": 14 if part == "train" else 20}}}


def _old_log_probs(options: Options) -> str:
    """Return the level unless other levels exclude it."""
    is_excluded = where_of_kl(options) in ("reward", "both") or options["correction"] or options["policy"] == "clip_cov"
    return "trainer" if is_excluded else str(options["old_log_probs"])


def where_of_kl(options: Options) -> str:
    return str(options["kl"].split()[0])


def _correction(options: tuple[str, str] | None) -> dict[str, Any] | None:
    if options is None:
        return None
    rules = [{"statistic": "token_k1", "upper": 1.3}, {"statistic": "seq_max_k3", "upper": 0.02}]
    reject = {"reject": rules} if options[0] == "sequence" else {}
    return {"level": options[0], "beyond": options[1], "upper": 1.2, "lower": 0.6} | reject


def all_cases(models: Path) -> dict[str, tuple[int, list[LocalCase]]]:
    """Return ranks and cases of each part by name. Quick parts are few cases with each level of each factor."""
    combinations = [("values", options) for options in pairwise(VALUES)]
    combinations += [("groups", options) for options in pairwise(GROUPS)]
    combinations += [("pairs", PAIRS | changes) for changes in OF_PAIRS]
    combinations += [("taught", TAUGHT | changes) for changes in OF_TAUGHT]
    combinations += [("shown", SHOWN | changes) for changes in OF_SHOWN]
    combinations += [("baselines", BASELINES | changes) for changes in OF_BASELINES]
    combinations += [("masked", MASKED | changes) for changes in OF_MASKED]
    combinations += [("foreign", FOREIGN | changes) for changes in OF_FOREIGN]
    combinations += [("later", LATER | changes) for changes in OF_LATER]
    parts: dict[str, tuple[int, list[LocalCase]]] = {}
    for ranks in (1, 2):
        cases = [
            make_case(f"{kind}-{number}", options, models, ranks)
            for number, (kind, options) in enumerate(combinations)
            if number % 2 + 1 == ranks
        ]
        quick = every_level(cases)
        parts[f"{ranks}-quick"] = ranks, quick
        rest = [case for case in cases if case not in quick]
        parts |= {f"{ranks}-{number}": (ranks, rest[number::2]) for number in range(2)}
    return parts


def every_level(cases: Sequence[LocalCase]) -> list[LocalCase]:
    """Return few of these cases that together have all levels, chosen greedily by the number of new levels."""
    chosen: list[LocalCase] = []
    missing = set().union(*(_levels(case) for case in cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(_levels(case) & missing)))
        missing -= _levels(chosen[-1])
    return chosen


def _levels(case: LocalCase) -> set[tuple[str, str]]:
    """Return the levels of a case, and the combinations that only have an effect together."""
    options = case.options
    levels = {(name, str(level)) for name, level in options.items()}
    if (
        options["sampling"] == "dynamic" and not options["reward_model"]
    ):  # with a reward model no two samples have the same score
        levels.add(("together", "prompts are dropped"))
    if options.get("value_clip") == 0.05 and options["updates"] != "1 update":
        levels.add(("together", "values are clipped"))
    if options["policy"] == "ppo" and options["clip"][2] == 1.01 and options["updates"] != "1 update":
        levels.add(("together", "negative advantages are clipped"))
    return levels


def record(cases: Sequence[LocalCase], directory: str) -> list[str]:
    """Return the recordings of these cases as JSON. Called on each rank of a separate world."""
    from tests.reference import local_run  # imports Megatron, which only the ranks need

    return local_run.record(cases, directory)
