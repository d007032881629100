"""A preset's whole run on a laptop: its file by name, its model by hub name, its data by path.

Only sizes and the keys of `NOT_ON_A_CPU` are overridden.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.config.schema import Config
from mrl.demo.model import save_toy_tokenizer
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.verify.layout import make_random
from tests.presets.twins import MAX_SIZE, cut

NOT_ON_A_CPU = {
    "rollout.vllm.dtype": "bfloat16 for linear attention, which vLLM has in no other dtype on a CPU",
    "enable_prefix_caching": "off for linear attention and R3: on a CPU, vLLM caches no states and no routes",
    "gpu_memory_utilization": "unchanged, but on a CPU the size of the engine's cache is set in bytes",
    "enable_expert_parallel": "off: vLLM's kernels for experts on a CPU ignore which experts a rank has",
    "quantization": "none, because on a CPU vLLM keeps no experts in FP8",
    "cluster.device": "a device is a CPU slot",
    "dtype": "float32, so that all differences are rounding",
    "agent.environments": "the search index is not part of a preset, and twelve tokens are too few for a conversation",
    "reward.functions": "an untrained model is never right, so it would learn nothing",
}
"""Keys of a preset that its run on a CPU overrides, with the reason."""
_SIZES = {
    "batch": "{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 8}",  # two updates in a step
    "training.steps": "3",
    "training.save_every": "3",
    "validation.every": "3",
    "reward.num_workers": "1",
    "rollout.replicas": "1",
    "rollout.max_prompt_tokens": "40",
    "rollout.max_response_tokens": "12",
}
_REWARDS = "def score(sample, tag=None):\n    return sum(map(ord, sample.response)) % 7 / 7\n"


def num_devices(config: Config) -> int:
    """Return the devices for one copy of each model, or two copies if a copy takes one device."""
    sizes = [cut(role.parallel) for role in config.model_roles().values()]
    least = 2 if config.placement.pools[config.placement.roles["actor"]] > 1 else 1
    return max(least, *(max(size.tp * size.cp, size.etp * size.ep) * size.pp for size in sizes))


def overrides(config: Config) -> Iterator[str]:
    """Yield the overrides for `mrl train` that make a preset small."""
    devices = num_devices(config)
    known, actor = model_values(config.model_of("actor")[1]), cut(config.actor.parallel)
    heads = small_config(known, actor).get("linear_num_key_heads", MAX_SIZE)
    tp, engines = min(config.rollout.tp, devices, heads), config.placement.roles.get("rollout")
    pools = {pool: tp if pool == engines else devices for pool in config.placement.pools}
    yield f"cluster={{nodes: 1, devices_per_node: {sum(pools.values())}, device: cpu, ray_address: null}}"
    yield from (f"placement.pools.{pool}={size}" for pool, size in pools.items())
    for role, settings in config.model_roles().items():
        small = cut(settings.parallel)
        yield from (f"{role}.parallel.{name}={getattr(small, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp"))
        yield from (f"{role}.parallel.{end}_stage_layers=null" for end in ("first", "last"))  # of a deep model
        yield f"{role}.dtype=float32"
        yield f"{role}.max_tokens_per_device=128"
    yield from (f"{role}.optimizer.lr=1e-3" for role in config.trained_roles())
    scores = "reward.functions" if config.reward.functions else "validation.reward_functions"
    yield f"{scores}.answer.name=my_rewards:score"
    yield from (f"agent.environments.{name}=null" for name in config.agent.environments)
    yield f"rollout.tp={tp}"
    if config.rollout.engine == "vllm":
        yield "rollout.vllm.kv_cache_memory_bytes=67108864"
        yield "rollout.vllm.enforce_eager=true"
    if "quantization" in config.rollout.vllm:
        yield "rollout.vllm.quantization=null"
    if "enable_expert_parallel" in config.rollout.vllm:
        yield "rollout.vllm.enable_expert_parallel=false"
    if "linear_num_key_heads" in known:
        yield "rollout.vllm.dtype=bfloat16"
    if "linear_num_key_heads" in known or config.algorithm.router_replay == "R3":
        yield "rollout.vllm.enable_prefix_caching=false"
    yield from (f"{key}={value}" for key, value in _SIZES.items())


def write_model(config: Config, directory: Path, role: str = "actor") -> Path:
    """Write a small model of the role's family with a byte tokenizer."""
    values = small_config(model_values(config.model_of(role)[1]), cut(config.model_roles()[role].parallel))
    directory.mkdir(parents=True)
    values["vocab_size"] = save_toy_tokenizer(directory) + 9  # the tokenizers of some families add tokens
    if "head_dim" not in values:  # heads of 32, the smallest size that the engine's attention accepts
        values["hidden_size"] = 32 * values["num_attention_heads"]
    if config.rollout.engine == "sglang":  # on a CPU, SGLang pads other widths
        values["intermediate_size"] = 128
    if "linear_num_key_heads" in values:  # the only size that vLLM's kernels for CPUs take
        values |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return make_random(values, "lm", directory)


def write_data(config: Config, directory: Path) -> None:
    """Write prompts to the preset's paths, and a file with a reward function."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+{number + 7}="}],
            "data_source": "sums",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number + 7)},
            "extra_info": {"index": number},
        }
        for number in range(12)
    ]
    for source in (*config.data.train.values(), *config.data.validation.values()):
        path = directory / source.dataset.replace("*", "0")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "my_rewards.py").write_text(_REWARDS)
