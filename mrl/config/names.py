"""Names in a configuration: datasets and components, built in by a word, the user's own as `package.module:attribute`.

Nothing is imported to check them, so a login node without torch also rejects a wrong name. The components are
registered in `algos`, `data` and `rollout`; tests keep both lists equal.
"""

from __future__ import annotations

from mrl.config.schema import SourceConfig

ADVANTAGES = (
    *("gae", "grpo", "dr_grpo", "rloo", "opo", "gpg", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
)
POLICY_LOSSES = ("ppo", "vanilla", "gspo", "cispo", "gmpo", "geo_mean", "gpg")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "kl", "mse", "low_var_kl")
RATIO_LEVELS = ("token", "sequence", "geometric")
ENGINES = {
    "vllm": "mrl.rollout.vllm_engine:VllmEngine",
    "transformers": "mrl.rollout.transformers_engine:TransformersEngine",
}
ENVIRONMENTS = {
    "tools": "mrl.agents.tools:ToolEnvironment",
    "search_r1": "mrl.agents.search:SearchR1",
    "program": "mrl.agents.program:Program",
}
TEXT_FORMATS = ("search_r1",)
"""Formats that write text without chat roles."""
FORMATS = ("hermes", "llama3_json", *TEXT_FORMATS)
TOOLS = {
    "calculator": "mrl.agents.built_in_tools:calculator",
    "python": "mrl.agents.built_in_tools:python",
    "search": "mrl.agents.search:search",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
SAMPLERS = ("shares", "difficulty")
DATASETS = ("toy", "reasoning_gym")
TOY_TASKS = ("addition", "reversing", "sorting")
FILE_KINDS = (".jsonl", ".parquet")
PREFERENCE_LOSSES = ("sigmoid", "conservative", "robust", "hinge", "ipo_sum", "ipo_mean", "simpo", "orpo")
OF_A_BATCH = {
    "kto": "its baseline is a mean over the batch",
    "aot": "it sorts the batch",
    "aot_unpaired": "it sorts the batch",
}
"""Preference losses that are refused, with the reason."""


def is_file(source: SourceConfig) -> bool:
    """Return whether a source is read from files. Any other source is a dataset with a name."""
    return source.dataset.endswith(FILE_KINDS)


def is_path(name: str) -> bool:
    """Return whether a name has the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
