"""Conversions of verl's values. Each returns the text that follows mrl's key in the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mrl.config.algorithm import ADVANTAGES
from mrl.config.training import TRACKERS
from mrl.config.values import UNUSABLE, leaves_of

_FUSED_MODULES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Megatron's names of adapted modules -> Hugging Face's."""
Values = Mapping[str, Any]
Convert = Callable[[Any, Values], str]
"""Takes the value of verl's key and all values of the configuration."""


def find(values: Values, key: str) -> Any:
    """Return the value of the first key whose last parts are `key`, or None without such a key."""
    end = tuple(key.split("."))
    return next(
        (value for path, value in leaves_of(dict(values)) if path[-len(end) :] == end and value is not UNUSABLE), None
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "null" if value is None else str(value)


def same(value: Any, values: Values) -> str:
    return "" if value is None or isinstance(value, dict) else f"={_text(value)}"


def name_alone(value: Any, values: Values) -> str:
    return ""


def zero_if_negative(value: Any, values: Values) -> str:
    return "=0" if _number(value) < 0 else same(value, values)


def default(instead: Any) -> Convert:
    """Replace verl's null with a value."""
    return lambda value, values: f"={_text(instead if value is None else value)}"


def among(known: Collection[str], **renamed: str) -> Convert:
    """Keep a word, or replace it with mrl's word for the same thing. Say so if mrl does not support it."""

    def convert(value: Any, values: Values) -> str:
        word = renamed.get(str(value), str(value))
        return f"={word}" if word in known else f", which does not support {value} (known: {', '.join(known)})"

    return convert


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _counts(values: Values, *keys: str) -> list[int] | None:
    counts = [find(values, key) for key in keys]
    return counts if all(type(count) is int and count > 0 for count in counts) else None


def kl_where(value: Any, values: Values) -> str:
    in_reward, in_loss = find(values, "use_kl_in_reward"), find(values, "use_kl_loss")
    where = {(True, True): "both", (True, False): "reward", (False, True): "loss"}
    text = f"={where.get((in_reward is True, in_loss is True), 'none')}"
    is_old = in_reward is None and in_loss is False
    return f"{text}, or reward if this verl has no use_kl_in_reward" if is_old else text


def kl_coef(switch: str, other: str) -> Convert:
    """Convert the coefficient of the KL term that `switch` turns on. `other` is verl's other coefficient."""

    def convert(value: Any, values: Values) -> str:
        if find(values, switch) is False:
            return f", but {switch} is false: this value has no effect"
        both = find(values, "use_kl_in_reward") is True and find(values, "use_kl_loss") is True
        other_value = find(values, other)
        if both and other_value not in (None, value):
            return f", which applies to both reward and loss: {other} is {_text(other_value)}, this one {_text(value)}"
        return same(value, values)

    return convert


def if_adaptive(value: Any, values: Values) -> str:
    return (
        same(value, values)
        if find(values, "algorithm.kl_ctrl.type") == "adaptive"
        else ", but kl_ctrl.type is fixed: this value has no effect"
    )


def kl_target(value: Any, values: Values) -> str:
    is_adaptive = find(values, "algorithm.kl_ctrl.type") == "adaptive"
    return (
        same(find(values, "algorithm.kl_ctrl.target_kl"), values)
        if is_adaptive
        else "=null, because kl_ctrl.type is fixed"
    )


def samples_per_update(value: Any, values: Values) -> str:
    n = _counts(values, "rollout.n") or _counts(values, "batch.samples_per_prompt")
    if n is None or not _number(value):
        return " = ppo_mini_batch_size x rollout.n"
    return f"={value * n[0]}, which is ppo_mini_batch_size {value} x rollout.n {n[0]}"


def advantage(value: Any, values: Values) -> str:
    without_std = find(values, "norm_adv_by_std_in_grpo") is False
    grpo = "dr_grpo" if without_std else "grpo"
    same_form = {"rloo_vectorized": "rloo", "tir_optimal_token_baseline": "optimal_token_baseline"}
    return among(ADVANTAGES, grpo=grpo, grpo_vectorized=grpo, **same_form)(value, values)


def of_loss(policy: str) -> Convert:
    """Keep a number that only this policy loss reads. Say so if the file names another one."""

    def convert(value: Any, values: Values) -> str:
        mode = find(values, "loss_mode") or "vanilla"
        return same(value, values) if mode == policy else f", but loss_mode is {mode}: this value has no effect"

    return convert


def grpo_by_std(value: Any, values: Values) -> str:
    estimator = find(values, "adv_estimator")
    if estimator in ("grpo_passk", "gdpo"):
        divides = f", but mrl's {estimator} always divides by the standard deviation"
        return divides if value is False else f"={estimator}"
    if estimator not in (None, "grpo", "grpo_vectorized"):
        return f", but adv_estimator is {estimator}: this value has no effect"
    return "=dr_grpo" if value is False else "=grpo"


def warmup_updates(value: Any, values: Values) -> str:
    """Convert warm-up steps of verl to updates. A negative number selects verl's ratio."""
    if _number(value) < 0:
        value = find(values, "lr_warmup_steps_ratio")
        return warmup_share(value, values)
    return _updates(value, values)


def warmup_share(value: Any, values: Values) -> str:
    return " = lr_warmup_steps_ratio x all updates" if _number(value) > 0 else "=0"


def decay_updates(value: Any, values: Values) -> str:
    return _updates(value, values) if _number(value) > 0 else ", in updates"


def _updates(steps: Any, values: Values) -> str:
    counts = _counts(values, "train_batch_size", "ppo_mini_batch_size")
    if not isinstance(steps, int) or counts is None:
        return ", in updates (verl: in steps)"
    epochs = _counts(values, "ppo_epochs") or [1]
    updates = -(-counts[0] // counts[1]) * epochs[0]
    return f"={steps * updates}, with {updates} updates per step"


def bypass(value: Any, values: Values) -> str:
    return f"={'engine' if value is True else 'trainer'}"


def recompute(value: Any, values: Values) -> str:
    return "=full, with recompute_method=uniform and recompute_num_layers=1" if value else ", which is not needed"


def overlong(value: Any, values: Values) -> str:
    drops = find(values, "filter_overlong_prompts") is True
    return f"={'drop' if drops else _text(find(values, 'truncation') or 'error')}"


def lora_rank(value: Any, values: Values) -> str:
    return same(value, values) if _number(value) > 0 else ", but 0 trains all weights: leave the section lora out"


def lora_targets(value: Any, values: Values) -> str:
    names = value if isinstance(value, list) else [value]
    fused = {name: modules for name, modules in _FUSED_MODULES.items() if name in names}
    return f"={_text([module for name in names for module in fused.get(name, [name])])}"


def sequence_parallel(value: Any, values: Values) -> str:
    return "=true if tp is above 1" if value else "=false"


def trackers(value: Any, values: Values) -> str:
    names = value if isinstance(value, list) else [value]
    return f"={_text([name for name in names if name in TRACKERS])}, in addition to the terminal and metrics.jsonl"


def one_switch(value: Any, values: Values) -> str:
    return ", one switch for weights, gradients, optimizer and cache; false only if all fit on the devices at once"


def is_set(value: Any, values: Values) -> str:
    return f"={_text(value is not None)}"


def greedy(value: Any, values: Values) -> str:
    return f"={_text(not value)}"


def sampled_at(value: Any, values: Values) -> str:
    """Validation of verl at temperature 0 is greedy decoding."""
    is_greedy = value == 0 or find(values, "val_kwargs.do_sample") is False
    return ", which is not needed: validation.greedy=true" if is_greedy else same(value, values)


def samples_every(value: Any, values: Values) -> str:
    return "=0" if value is None else ""


def optional_section(value: Any, values: Values) -> str:
    return ", a section to add" if value else ", a section to leave out"


def search_turns(value: Any, values: Values) -> str:
    return f"={value + 1}, the turn of the answer included" if isinstance(value, int) else ""
