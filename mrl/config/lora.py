"""The section `lora` of a trained role: low-rank adapters on a frozen model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.config.bounds import Count, Share, Text

ALL_LINEAR = "all-linear"
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
DELTA_TARGETS = (*(f"in_proj_{name}" for name in ("qkv", "z", "b", "a", "qkvz", "ba")), "out_proj")
TARGETS = (*ATTENTION_TARGETS, *MLP_TARGETS, *LATENT_TARGETS, *DELTA_TARGETS)
_OTHER_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Targets -> their names in Mixtral."""
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM, which pads others with zeros."""
MAX_ENGINE_RANK = ENGINE_RANKS[-1]
ENGINE_TARGETS = {"qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}
ENGINE_TARGETS |= {"fused_qkv_a_proj": 2, "kv_a_proj_with_mqa": 1, "q_proj": 1, "q_b_proj": 1}  # of latents
"""vLLM's modules that may have adapters, and the Hugging Face modules in each."""
_PARTS = "adapters belong to the matrices of each expert: write gate_proj, up_proj, down_proj"
REFUSED_TARGETS = {
    "lm_head": "engines cannot serve an adapter of the output matrix",
    "score": "a score head has one row, which is always trained whole",
    "embed_tokens": "engines cannot serve an adapter of the embeddings",
    "gate": "an adapter of the router would send tokens to other experts in the engine than in training",
    "router": "an adapter of the router would send tokens to other experts in the engine than in training",
    "kv_b_proj": "vLLM decodes with its base weight, so the adapter would act on prompts only",
    **dict.fromkeys(("experts", "w1", "w2", "w3", "gate_up_proj"), _PARTS),
    "qkv_proj": "adapters belong to Hugging Face's modules: write q_proj, k_proj, v_proj",
    "linear_qkv": "adapters belong to Hugging Face's modules: write q_proj, k_proj, v_proj",
    "linear_proj": "adapters belong to Hugging Face's modules: write o_proj",
    "linear_fc1": "adapters belong to Hugging Face's modules: write gate_proj, up_proj",
    "linear_fc2": "adapters belong to Hugging Face's modules: write down_proj",
}
"""Modules that cannot be targets -> reason."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters, and keep the model frozen. A linear layer `W x` becomes `W x + alpha / rank * B A x`,
    with A of `rank` rows and B of `rank` columns. B starts at zero, so training starts from the model itself. The model
    with its adapters off is the reference."""

    rank: Count
    """Rows of each A, and columns of each B. Each Hugging Face module has its own pair."""
    alpha: Share
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: list[Text] = field(default_factory=lambda: [ALL_LINEAR])
    """Modules with adapters, by Hugging Face's names: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`,
    `down_proj`, with multi-latent attention also `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, with linear attention
    also `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` and `out_proj` (Qwen3-Next: `in_proj_qkvz`,
    `in_proj_ba`); or `all-linear` for all of them. Each expert has its own pair, also in Mixtral, whose files say `w1`,
    `w3` and `w2`; those of gpt-oss have none."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that the scale of the gradients does not depend on the rank."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A, drawn from training.seed and the name of the module: `kaiming` is uniform in +-1 /
    sqrt(inputs), the default of peft; `gaussian` has a standard deviation of 1 / rank."""

    path: Text | None = None
    """Directory of PEFT's files with the first adapters, instead of `init`: as peft's `save_pretrained` or `mrl export`
    writes them. Rank, alpha, rslora, targets and model must be those of the files. The reference is still the model
    without adapters."""
    base: Literal["own", "actor"] = "own"
    """For `critic.lora`. `actor` puts the critic's adapters on the frozen model of the actor, in the actor's processes:
    a device holds the model once. `own` loads a copy."""
    base_quantization: Literal["fp8_per_block"] | None = None
    """Keep the linear layers of the frozen model in FP8, about one byte per weight instead of two. `fp8_per_block` has
    one scale per block of 128 x 128, a power of two, so that bfloat16 holds each weight exactly. Engines get these
    weights, and merged exports add the adapters to them. Gates, norms, embeddings and heads keep their dtype."""
    sync: Literal["adapters", "merged"] = "adapters"
    """How engines get the policy: as `adapters`, which they apply like the trainer; or as `merged` weights, which any
    engine can use, but rounding removes most of a small update (`sync/lost_update`)."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def engine_rank(self) -> int:
        """Return the rank of the adapters that engines apply; 0 if they get plain weights."""
        return self.rank if self.sync == "adapters" else 0

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what saved adapters mean."""
        targets = (*ATTENTION_TARGETS, *MLP_TARGETS) if ALL_LINEAR in self.targets else self.targets
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora, "targets": sorted(targets)}

    @property
    def modules(self) -> frozenset[str]:
        """Return the names of the targets in the files of any family."""
        targets = frozenset(TARGETS if ALL_LINEAR in self.targets else self.targets)
        return targets | {other for name, other in _OTHER_NAMES.items() if name in targets}

    @property
    def has_expert_targets(self) -> bool:
        """Return whether experts get adapters, in a model with experts."""
        return bool(self.modules & {*MLP_TARGETS})


def padded_rank(rank: int) -> int:
    """Return the rank of vLLM's slot for adapters of a rank."""
    return next(allowed for allowed in ENGINE_RANKS if allowed >= rank)
