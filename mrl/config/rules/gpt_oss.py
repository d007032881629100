"""Rules for gpt-oss: what Megatron, vLLM or mrl cannot do with sinks, and with biases of experts."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.lora import ATTENTION_TARGETS, MLP_TARGETS
from mrl.config.rules.problems import problem
from mrl.config.schema import MegatronModelConfig, TrainedModelConfig
from mrl.errors import Problem

FAMILY = "gpt_oss"


def check_gpt_oss(role: str, model: MegatronModelConfig, kv_heads: int | None) -> Iterator[Problem]:
    """Check the layout of a role, and the targets of its adapters."""
    key = f"{role}.parallel"
    if model.parallel.etp > 1:
        what = f"{model.parallel.etp}, but Megatron does not split experts with biases, which gpt-oss has"
        yield problem(f"{key}.etp", what, f"{key}.etp=1; ep spreads whole experts over ranks")
    yield from check_key_heads(f"{key}.tp", model.parallel.tp, kv_heads)
    lora = model.lora if isinstance(model, TrainedModelConfig) else None
    if lora is not None and (experts := [name for name in lora.targets if name in MLP_TARGETS]):
        what = f"{', '.join(experts)}, but gpt-oss has no such modules: its files stack the experts of a layer"
        yield problem(f"{role}.lora.targets", what, f"{role}.lora.targets=[{', '.join(ATTENTION_TARGETS)}]")


def check_key_heads(key: str, tp: int, kv_heads: int | None) -> Iterator[Problem]:
    if kv_heads is not None and tp > kv_heads and tp % kv_heads == 0:
        what = f"{tp}, but gpt-oss has {kv_heads} key-value heads, and vLLM does not copy them to more ranks"
        yield problem(key, what, f"{key}={kv_heads}")
