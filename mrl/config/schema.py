"""Every key of a configuration: type, default, allowed values and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from mrl.config.agent import AgentConfig
from mrl.config.algorithm import AlgorithmConfig
from mrl.config.bounds import (
    Amount,
    Characters,
    Count,
    NotNegative,
    PlainName,
    Proportion,
    Seconds,
    Share,
    Text,
    component,
    own_component,
)
from mrl.config.data import DataConfig
from mrl.config.fsdp import FsdpConfig
from mrl.config.lora import LoraConfig
from mrl.config.reward import JudgeConfig, ModelScoreConfig, RewardConfig, RewardFunctionConfig
from mrl.config.sglang import SglangConfig
from mrl.config.training import AsynchronyConfig, SyncConfig, TrainingConfig, ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name of the run and directory of its files."""

    name: PlainName
    """Name of the run and of its directory."""
    dir: Text = "runs"
    """Directory that holds the run directories."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines."""

    nodes: Count = 1
    """Number of machines."""
    devices_per_node: Count
    """Devices of each machine. Without GPUs, a device is one CPU slot."""
    device: Literal["cpu", "gpu"]
    """Kind of device."""
    hardware: Text | None = None
    """GPU model (`h100-80gb`, `h200-141gb`, ...), used by plans, checks, launches and runs when devices are GPUs. With
    null, no start is judged by its memory, and plans assume the first model in the list."""
    overfull: Literal["refuse", "warn"] = "refuse"
    """Whether to refuse or only warn if the plan says that the run does not fit into the memory of `hardware`."""
    numa_binding: bool = True
    """Run the processes of a GPU on the CPUs of its NUMA node."""
    ray_address: Text | None = None
    """Address of a running Ray cluster (`host:port` or `auto`). Null starts Ray on this machine."""
    allow_insecure_ray: bool = False
    """Join a Ray cluster without token authentication. Anyone who reaches its ports can run code on it."""


@dataclass(frozen=True, kw_only=True)
class DeadlinesConfig:
    """Time limits. mrl never waits without a limit."""

    resources_s: Seconds = 120.0
    """Time for Ray to hand out the devices of all pools."""
    start_s: Seconds = 300.0
    """Time for the workers of a role to start."""
    engine_start_s: Seconds | None = None
    """Time for an engine to start. Null allows `start_s` plus one second for every half billion parameters."""
    download_s: Seconds = 7200.0
    """Time for a node of a joined cluster to download missing models."""
    call_s: Seconds = 1800.0
    """Time for a worker to answer one call."""
    heartbeat_s: Seconds = 5.0
    """Seconds between checks of the processes during a long call. Another node counts as lost after six checks without
    an answer."""
    release_s: Seconds = 2.0
    """Time for the other ranks to finish by themselves after one has failed."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which role runs on which devices. Roles that share a pool take turns on its devices."""

    pools: dict[PlainName, Count]
    """Name of each pool -> its number of devices."""
    roles: dict[str, Text]
    """Role -> its pool. The reference model is a frozen copy of the actor unless `reference` has a pool. The engines
    use the actor's devices unless `rollout` has its own pool: then weights go over the network, and trainer and engines
    need not take turns with the memory."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: Text
    """A Hugging Face model directory, or a model on the hub: `organization/name` or `organization/name@revision`."""
    critic: Text | None = None
    """Model of the critic, in the same form, with a value head (`score.weight`). Null starts from `path` with a new
    head."""
    verify: bool = True
    """Compare models with transformers on a fixed text when they load. This applies to models that no engine is
    compared with: critic, reward models, teacher, and the models of `mrl sft`, `mrl rm` and `mrl dpo`. The driver reads
    their files once more while workers start, one layer in memory at a time. A layer of 70B took 13 s and 7 GB on two
    busy CPU cores."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Prompts and samples per step and per update. All sizes are global."""

    prompts_per_step: Count
    """Prompts drawn for each step."""
    samples_per_prompt: Count
    """Responses generated for each prompt."""
    samples_per_update: Count
    """Samples in one optimizer step."""
    epochs_per_step: Count = 1
    """Passes over the samples of each step."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How Megatron splits a model over the devices of its pool. Data parallelism uses the remaining factor."""

    tp: Count = 1
    """Tensor parallel size."""
    pp: Count = 1
    """Pipeline parallel size."""
    vpp: Count = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which also holds the embedding. Null gives every stage the same number."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which also holds the head. Null gives every stage the same number."""
    cp: Count = 1
    """Context parallel size: the number of devices that share a sequence."""
    ep: Count = 1
    """Expert parallel size."""
    etp: Count = 1
    """Tensor parallel size inside each expert."""
    sequence_parallel: bool = False
    """Also split the activations between the tensor parallel regions. Needs tp > 1."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the updates of a run. The peak is `optimizer.lr`."""

    warmup_steps: NotNegative = 0
    """Updates over which the rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    decay_steps: Count | None = None
    """Updates, including the warm-up, until the rate reaches its lowest value. `constant` needs none."""
    min_lr_ratio: Proportion = 0.0
    """Lowest rate, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    """A model that Megatron or torch runs."""

    strategy: Literal["megatron", "fsdp"] = "megatron"
    """`megatron`: Megatron runs the model, for families with a table. `fsdp`: torch's `fully_shard` runs the model of
    transformers, with data and context parallelism."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations. Gradients and optimizer state are always float32."""
    max_tokens_per_device: Count
    """Tokens of one micro-batch on one device. This is the one memory setting: it determines the micro-batches."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's TransformerConfig: recomputation and fused kernels. Keys that describe the model come
    from its config.json. All other keys are refused with a reason."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    worker: Annotated[str, own_component()] | None = None
    """Your own class for the workers of the role as `package.module:class`, with the same constructor as mrl's. Null
    uses mrl's class."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(MegatronModelConfig):
    """A model that Megatron trains."""

    lora: LoraConfig | None = None
    """Null trains all weights."""
    router_bias_update_rate: Amount = 0.0
    """How far the bias of an expert moves after each update, up if it had fewer tokens than the mean, else down. For
    models whose routers have such a bias (GLM-4.5, DeepSeek-V3 and its kind); 0 keeps the bias of the files, as is
    usual in RL."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's OptimizerConfig."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ModelScoreConfig, MegatronModelConfig):
    """A frozen model that scores responses. It reads the policy's token ids, or the text if its tokenizer differs."""

    path: Text
    """A directory or a name on the hub, as in `model.path`. The model needs a head with one output (`score.weight`)."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(MegatronModelConfig):
    """A frozen model that the policy learns from (`algorithm.distillation`). With another tokenizer than the policy's,
    it reads texts."""

    path: Text
    """A directory or a name on the hub, as in `model.path`."""
    sources: list[Text] = field(default_factory=list)
    """Patterns (`gsm8k`, `math/*`; a star matches any text) of the data sources whose samples it reads. An empty list
    means all that no other teacher names."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(MegatronModelConfig):
    """The reference model as a role with its own workers. Set `placement.roles.reference` to use it. Layout, dtype,
    `max_tokens_per_device` and `megatron` default to the actor's."""

    path: Text | None = None
    """A directory or a name on the hub, as in `model.path`. The model must use the policy's tokens. Null uses
    `model.path`."""


ENGINES = {
    "vllm": "mrl.rollout.vllm_engine:VllmEngine",
    "sglang": "mrl.rollout.sglang_engine:SglangEngine",
    "transformers": "mrl.rollout.transformers_engine:TransformersEngine",
}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How samples are generated: by vLLM engines on the actor's devices, or on those of the role `rollout`."""

    tp: Count = 1
    """Tensor parallel size of one engine: devices of one node, or all devices of several nodes."""
    pp: Count = 1
    """Pipeline stages of one engine, each of `tp` devices with a share of the layers. Stages may be on several
    nodes."""
    dp: Count = 1
    """Devices of one engine of a mixture that generate different samples and share the experts: devices of one node,
    or all devices of several nodes. Needs `vllm.enable_expert_parallel`."""
    replicas: Count | None = None
    """Number of engines. Null starts as many as fit on their devices."""
    engine: Annotated[str, component("rollout engine", ENGINES)] = "vllm"
    """`vllm`; `sglang`; `transformers`, which is slow and simple, for comparison; or your own as
    `package.module:class`."""
    max_prompt_tokens: Count
    """Longest prompt."""
    max_response_tokens: Count
    """Longest response."""
    temperature: Share = 1.0
    """Divisor of the logits before sampling. Training uses the same value."""
    top_p: Share = 1.0
    """Sample only from the likeliest tokens with this total probability. Below 1, the sampled distribution differs from
    the trained one, unless `algorithm.keep_sampling_mask` is true."""
    top_k: NotNegative = 0
    """Sample only from this many likeliest tokens, before `top_p` applies; 0 means all. With any other value, the same
    is true as with `top_p`."""
    stop_token_ids: list[NotNegative] = field(default_factory=list)
    """Tokens that end a response, in addition to the end tokens of the tokenizer and of generation_config.json. `mrl
    check` lists all of them and their origin. The token is part of the response and is trained."""
    ignore_eos: bool = False
    """End a response only at `stop_token_ids`, at `stop` or at its maximum length."""
    stop: list[Characters] = field(default_factory=list)
    """Texts that end a response. They are part of the response, and their tokens are trained."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed on to vLLM's engine arguments: memory, batches and kernels. Keys that mrl sets are refused, as are keys
    that have not been compared with the trainer."""
    sglang: SglangConfig = field(default_factory=SglangConfig)

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration."""

    run: RunConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    placement: PlacementConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    data: DataConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    batch: BatchConfig
    actor: TrainedModelConfig
    """The policy."""
    critic: TrainedModelConfig | None = None
    """The value model. Null if the advantage does not need one."""
    reward_model: RewardModelConfig | None = None
    """A model that scores responses, in addition to or instead of the reward functions. Null uses only the
    functions."""
    reward_models: dict[PlainName, RewardModelConfig] = field(default_factory=dict)
    """More reward models: name in metrics -> model. The role in placement.roles is `reward_models.NAME`."""
    reference: ReferenceConfig | None = None
    """The reference model on its own devices. Null keeps it as a frozen copy of the actor."""
    teacher: TeacherConfig | None = None
    """A model that the policy learns from, token by token."""
    teachers: dict[PlainName, TeacherConfig] = field(default_factory=dict)
    """More teachers: name -> model. Each sample has one teacher, by its data source. The role in placement.roles is
    `teachers.NAME`."""
    judge: JudgeConfig | None = None
    """A language model for the reward function `judge`, if its `service` has no address. It needs its own pool. Null if
    every service has an address."""
    rollout: RolloutConfig
    sync: SyncConfig = field(default_factory=SyncConfig)
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    training: TrainingConfig
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def validation_reward(self) -> RewardConfig:
        """Return the section `reward` that applies in validation."""
        own = self.validation.reward_functions
        return replace(self.reward, functions=own) if own else self.reward

    def reward_functions(self) -> Iterator[tuple[str, RewardFunctionConfig]]:
        """Yield each function of training and validation with its key."""
        yield from ((f"reward.functions.{label}", function) for label, function in self.reward.functions.items())
        own = self.validation.reward_functions.items()
        yield from ((f"validation.reward_functions.{label}", each) for label, each in own)

    def model_roles(self) -> dict[str, MegatronModelConfig]:
        """Return the roles that Megatron runs, trained or frozen, by name."""
        reference = {"reference": self.reference} if self.reference is not None else {}
        return {**self.trained_roles(), **reference, **self.scoring_models(), **self.teaching_models()}

    def scoring_models(self) -> dict[str, RewardModelConfig]:
        """Return the reward models by role."""
        one = {"reward_model": self.reward_model} if self.reward_model is not None else {}
        return one | {f"reward_models.{name}": model for name, model in self.reward_models.items()}

    def teaching_models(self) -> dict[str, TeacherConfig]:
        """Return the teachers by role."""
        one = {"teacher": self.teacher} if self.teacher is not None else {}
        return one | {f"teachers.{name}": model for name, model in self.teachers.items()}

    def model_of(self, role: str) -> tuple[str, str]:
        """Return the key that sets the initial model of a role, and its value."""
        if isinstance(model := self.model_roles().get(role), RewardModelConfig | TeacherConfig):
            return f"{role}.path", model.path
        if role == "reference" and self.reference is not None and self.reference.path is not None:
            return "reference.path", self.reference.path
        if role == "critic" and self.model.critic is not None:
            return "model.critic", self.model.critic
        return "model.path", self.model.path
