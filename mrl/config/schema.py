"""Every key of a configuration: its type, its default, what it may be and what it means.

The dataclasses below are schema, defaults and documentation at once: the docstring under a field is what
`mrl show --schema` prints. A field without a default must be given; nothing else fills it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mrl.config.agent import AgentConfig
from mrl.config.algorithm import AlgorithmConfig
from mrl.config.bounds import Characters, Count, NotNegative, PlainName, Proportion, Seconds, Share, Text
from mrl.config.reward import JudgeConfig, ModelScoreConfig, RewardConfig, RewardFunctionConfig
from mrl.config.training import AsynchronyConfig, SyncConfig, TrainingConfig, ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called and where its files go."""

    name: PlainName
    """Name of the run, and of its directory."""
    dir: Text = "runs"
    """Directory that holds the run directories."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines."""

    nodes: Count = 1
    """Number of machines."""
    devices_per_node: Count
    """Devices of each machine; without GPUs a device is one CPU slot."""
    device: Literal["cpu", "gpu"]
    """What a device is."""
    hardware: Text | None = None
    """Which GPUs they are (`h100-80gb`, `h200-141gb`, ...): plans, checks, launches and runs go by it where
    devices are GPUs. Null judges no start by its memory, and plans for the first of these."""
    overfull: Literal["refuse", "warn"] = "refuse"
    """What becomes of a run that, by its plan, does not fit into the memory of `hardware`."""
    numa_binding: bool = True
    """Whether a GPU's processes run on the CPUs of its own NUMA node."""
    ray_address: Text | None = None
    """Address of a running Ray cluster (`host:port` or `auto`); null starts Ray on this machine."""
    allow_insecure_ray: bool = False
    """Join a Ray cluster without token authentication: whoever reaches its ports can run code on it."""


@dataclass(frozen=True, kw_only=True)
class DeadlinesConfig:
    """How long to wait before something counts as failed; nothing is waited for without end."""

    resources_s: Seconds = 120.0
    """For Ray to hand out the devices of every pool."""
    start_s: Seconds = 300.0
    """For the workers of a role to start."""
    engine_start_s: Seconds | None = None
    """For an engine to start; null gives it `start_s`, and a second more for every half billion parameters."""
    download_s: Seconds = 7200.0
    """For a node of a joined cluster to download the models that it lacks."""
    call_s: Seconds = 1800.0
    """For the answer to one call of a worker."""
    heartbeat_s: Seconds = 5.0
    """Between two looks at the processes of a long call; another node is lost after six of them without an answer."""
    release_s: Seconds = 2.0
    """For the other ranks to finish by themselves after one has failed."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which role runs on which devices. Roles that share a pool take turns on its devices."""

    pools: dict[PlainName, Count]
    """Name of each pool -> its number of devices."""
    roles: dict[str, Text]
    """Role -> its pool. The reference model is the actor's frozen copy unless `reference` has a pool. The engines are
    on the actor's devices unless `rollout` has a pool of its own: then weights go over the network, and the two
    memories need not take turns."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: Text
    """A Hugging Face model directory, or a model on the hub: `organization/name` or `organization/name@revision`."""
    critic: Text | None = None
    """The same for the critic, with a value head (`score.weight`); null starts from `path` with a new head."""
    verify: bool = True
    """Whether models that no engine is compared with (critic, reward models, teacher; what `mrl sft`, `mrl rm` and `mrl
    dpo` train) are compared with transformers on a fixed text when they load. The driver reads their files once more, a
    layer in memory at a time, while workers start; a layer of 70B took 13 s and 7 GB on two busy cores of a CPU."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many prompts and samples go into a step and into an update; all sizes are global."""

    prompts_per_step: Count
    """Prompts drawn for one step."""
    samples_per_prompt: Count
    """Responses generated for each prompt."""
    samples_per_update: Count
    """Samples that one optimizer step learns from."""
    epochs_per_step: Count = 1
    """How often the samples of a step are gone through."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How Megatron spreads a model over the devices of its pool; data parallelism takes what is left."""

    tp: Count = 1
    """Tensor parallel size."""
    pp: Count = 1
    """Pipeline parallel size."""
    vpp: Count = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which has the embedding as well; null gives all stages as many."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which has the head as well; null gives all stages as many."""
    cp: Count = 1
    """Context parallel size: over how many devices a sequence is split."""
    ep: Count = 1
    """Expert parallel size."""
    etp: Count = 1
    """Tensor parallel size inside each expert."""
    sequence_parallel: bool = False
    """Split the activations between the tensor parallel regions too; needs tp > 1."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the updates of a run; its highest value is `optimizer.lr`."""

    warmup_steps: NotNegative = 0
    """Updates over which it rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls after the warm-up."""
    decay_steps: Count | None = None
    """Updates, warm-up included, after which it has fallen to its lowest value; constant needs none."""
    min_lr_ratio: Proportion = 0.0
    """The lowest value, as a share of the highest."""


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    """A model that Megatron runs."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What weights and activations are held in; gradients and optimizer state are float32."""
    max_tokens_per_device: Count
    """Tokens of one micro-batch on one device: the one memory knob, micro-batches follow from it."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's TransformerConfig: recomputation and fused kernels. What the model is, its config.json
    says; all else is refused with its reason."""
    worker: Text | None = None
    """Your own class for the role's workers as `package.module:class`, made like mrl's; null takes mrl's."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(MegatronModelConfig):
    """A model that Megatron trains."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's OptimizerConfig."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ModelScoreConfig, MegatronModelConfig):
    """A frozen model that scores responses: the policy's token ids, or their text where its tokens are others."""

    path: Text
    """A directory or a name on the hub, as in `model.path`, with a head of one output (`score.weight`)."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(MegatronModelConfig):
    """A frozen model that the policy learns from (`algorithm.distillation`). Its tokens must be the policy's."""

    path: Text
    """A directory or a name on the hub, as in `model.path`."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(MegatronModelConfig):
    """The reference model as a role with workers of its own, which `placement.roles.reference` turns on. Its layout,
    dtype, `max_tokens_per_device` and `megatron` are the actor's unless they are set here."""

    path: Text | None = None
    """A directory or a name on the hub, as in `model.path`, with the tokens of the policy; null takes `model.path`."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How samples are generated: vLLM engines on the actor's devices, or on those of the role `rollout`."""

    tp: Count = 1
    """Tensor parallel size of one engine."""
    replicas: Count | None = None
    """Number of engines; null takes as many as fit on their devices."""
    engine: Text = "vllm"
    """`vllm`, or `transformers`, which is slow and simple, for comparison; or your own as `package.module:class`."""
    max_prompt_tokens: Count
    """Longest prompt."""
    max_response_tokens: Count
    """Longest response."""
    temperature: Share = 1.0
    """What logits are divided by before sampling; training uses the same."""
    top_p: Share = 1.0
    """Sample among the likeliest tokens that have this probability together; below 1, the sampled distribution is not
    the trained one, which is warned of."""
    top_k: NotNegative = 0
    """Sample among this many likeliest tokens; 0 means all. The same warning holds."""
    stop_token_ids: list[NotNegative] = field(default_factory=list)
    """Tokens that end a response beside the end tokens of the tokenizer and of generation_config.json; `mrl check`
    says who names which. The token belongs to the response, and is trained."""
    ignore_eos: bool = False
    """Whether only `stop_token_ids`, `stop` and the length end a response."""
    stop: list[Characters] = field(default_factory=list)
    """Texts that end a response, which holds them and is trained on their tokens."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed on to vLLM's engine arguments: memory, batches and kernels. What mrl sets is refused, and so is all that
    nobody has held against the trainer."""


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Which column of a source holds what; a dot goes into a nested column (`reward_model.ground_truth`)."""

    prompt: Text = "prompt"
    """Chat messages (a list of `role` and `content`), or one text, which becomes a user's message."""
    data_source: Text | None = "data_source"
    """Name under which rewards and metrics know the row; null takes the name of the source."""
    ability: Text | None = "ability"
    """What the row exercises, for metrics; null where the source has no such column."""
    ground_truth: Text | None = "reward_model.ground_truth"
    """The right answer: text, a list of accepted texts, or `{"target": ...}` of either; null where none is read."""
    extra_info: Text | None = "extra_info"
    """Anything else that rewards read; null where the source has no such column."""
    id: Text | None = None
    """An id that must not occur twice; null where the source has none."""
    chosen: Text = "chosen"
    """For `mrl rm` and `mrl dpo`, the preferred response: text, or a whole conversation that ends with it."""
    rejected: Text | None = "rejected"
    """The other response in the same form, or a list of others, the better first; null where there is none."""
    label: Text | None = None
    """A number: by how much the preferred response is to win (reward.margin), or what a response is worth
    (`regression`); or a list of them, one for each response."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of prompts."""

    dataset: Text
    """A `.jsonl` or `.parquet` file, or a dataset by name. Several files are a pattern (`data/*.parquet`), a name is
    a known one such as `toy:addition` or `reasoning_gym:leg_counting`, or your own as `package.module:attribute`."""
    weight: Share | None = None
    """Share of the prompts, relative to the other sources; null goes by the number of rows."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    options: dict[str, Any] = field(default_factory=dict)
    """Passed on to a dataset that is not a file."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts."""

    train: dict[PlainName, SourceConfig]
    """Name of each source of training prompts -> where they come from."""
    validation: dict[PlainName, SourceConfig] = field(default_factory=dict)
    """The same for validation, which goes through every source once."""
    shuffle: bool = True
    """Draw the rows of a source in a new order in every epoch."""
    seed: NotNegative = 0
    """Decides the order of the rows."""
    sampler: Text = "shares"
    """Which row comes next: by the `shares` of the sources, or by `difficulty` too, which leaves out prompts that were
    too easy or too hard by what functions and environments score; or your own as `package.module:class`, a
    `PromptSampler`."""
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the sampler (`difficulty`: between, rest)."""
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error"
    """A prompt beyond rollout.max_prompt_tokens stops the run, is dropped and counted, or loses its tokens at the
    left, at the right (with the template's call for an answer) or in the middle."""
    max_bad_rows: NotNegative = 0
    """How many rows that are no prompts may be skipped, each with an event; one more stops the run."""
    template: dict[str, Any] = field(default_factory=dict)
    """Passed on to the tokenizer's chat template (`enable_thinking: false`)."""
    template_file: Text | None = None
    """A Jinja file that is the chat template in place of the tokenizer's own, which a base model has none of."""
    tools: Text | None = None
    """A JSON file with a list of tools, which the chat template is given."""
    raw_text: bool = False
    """Prompts are not chats but text, which is encoded as it stands with what the tokenizer puts before a text."""

    def sources(self) -> Iterator[tuple[str, SourceConfig]]:
        for part, sources in (("train", self.train), ("validation", self.validation)):
            yield from ((f"data.{part}.{name}", source) for name, source in sources.items())


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
    """The value model; null where the advantage needs none."""
    reward_model: RewardModelConfig | None = None
    """A model that scores responses, beside the reward functions or in their place; null where these suffice."""
    reward_models: dict[PlainName, RewardModelConfig] = field(default_factory=dict)
    """More of them: what metrics call each -> the model, whose role in placement.roles is `reward_models.NAME`."""
    reference: ReferenceConfig | None = None
    """The reference model on devices of its own; null keeps it as the actor's frozen copy."""
    teacher: TeacherConfig | None = None
    """A model that the policy learns from, token by token."""
    judge: JudgeConfig | None = None
    """A language model that the reward function `judge` asks where its `service` has no address; null where all have.
    Its pool is its own."""
    rollout: RolloutConfig
    sync: SyncConfig = field(default_factory=SyncConfig)
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    training: TrainingConfig
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def validation_reward(self) -> RewardConfig:
        """Return the section `reward` as it holds for validation."""
        own = self.validation.reward_functions
        return replace(self.reward, functions=own) if own else self.reward

    def reward_functions(self) -> Iterator[tuple[str, RewardFunctionConfig]]:
        """Yield the key of each function, in training and in validation, and the function."""
        yield from ((f"reward.functions.{label}", each) for label, each in self.reward.functions.items())
        own = self.validation.reward_functions.items()
        yield from ((f"validation.reward_functions.{label}", each) for label, each in own)

    def model_roles(self) -> dict[str, MegatronModelConfig]:
        """Return the roles that Megatron runs, trained or frozen, by name."""
        reference = {"reference": self.reference} if self.reference is not None else {}
        teacher = {"teacher": self.teacher} if self.teacher is not None else {}
        return {**self.trained_roles(), **reference, **self.scoring_models(), **teacher}

    def scoring_models(self) -> dict[str, RewardModelConfig]:
        """Return the reward models by their roles."""
        one = {"reward_model": self.reward_model} if self.reward_model is not None else {}
        return one | {f"reward_models.{name}": model for name, model in self.reward_models.items()}

    def model_of(self, role: str) -> tuple[str, str]:
        """Return the key that says which model a role begins with, and what it says."""
        if isinstance(model := self.model_roles().get(role), RewardModelConfig | TeacherConfig):
            return f"{role}.path", model.path
        if role == "reference" and self.reference is not None and self.reference.path is not None:
            return "reference.path", self.reference.path
        if role == "critic" and self.model.critic is not None:
            return "model.critic", self.model.critic
        return "model.path", self.model.path
