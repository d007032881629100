"""Every key of a configuration: its type, its default, what it may be and what it means.

The dataclasses below are schema, defaults and documentation at once: the docstring under a field is what
`mrl show --schema` prints. A field without a default must be given; nothing else fills it in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class AtLeast:
    """A number that must not be smaller than `minimum`."""

    minimum: int

    def __str__(self) -> str:
        return f"at least {self.minimum}"

    def allows(self, value: Any) -> bool:
        """Whether `value` is in the range."""
        return bool(value >= self.minimum)


@dataclass(frozen=True)
class MoreThan:
    """A number that must be greater than `bound`."""

    bound: int

    def __str__(self) -> str:
        return f"more than {self.bound}"

    def allows(self, value: Any) -> bool:
        """Whether `value` is in the range."""
        return bool(value > self.bound)


@dataclass(frozen=True)
class Matching:
    """Text of one form; `description` says which in words."""

    pattern: str
    description: str

    def __str__(self) -> str:
        return self.description

    def allows(self, value: Any) -> bool:
        """Whether `value` has the form."""
        return re.fullmatch(self.pattern, value) is not None


Count = Annotated[int, AtLeast(1)]
Seconds = Annotated[float, MoreThan(0)]
Text = Annotated[str, Matching(r"(?=.*\S)[^\x00-\x1f\x7f]+", "one line of text")]
PlainName = Annotated[
    str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name of letters, digits, dots, dashes and underscores")
]


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
    call_s: Seconds = 1800.0
    """For the answer to one call of a worker."""
    heartbeat_s: Seconds = 5.0
    """Between two looks at the processes of a long call."""
    release_s: Seconds = 2.0
    """For the other ranks to finish by themselves after one has failed."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which role runs on which devices. Roles that share a pool take turns on its devices."""

    pools: dict[PlainName, Count]
    """Name of each pool -> its number of devices."""
    roles: dict[str, Text]
    """Role -> its pool. Rollout and the reference model live with the actor."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: Text
    """A directory in Hugging Face format, or the name of a model on the hub (`organisation/name`)."""


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """How the policy is kept near the reference model."""

    where: Literal["none", "reward", "loss", "both"] = "none"
    """Where the divergence is charged. Anything but `none` keeps a reference model beside the actor."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is learnt from the samples."""

    advantage: Text
    """Advantage estimator: a known name such as `gae` or `grpo`, or your own as `package.module:attribute`."""
    kl: KlConfig = field(default_factory=KlConfig)


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
    cp: Count = 1
    """Context parallel size: over how many devices a sequence is split."""
    ep: Count = 1
    """Expert parallel size."""
    etp: Count = 1
    """Tensor parallel size inside each expert."""
    sequence_parallel: bool = False
    """Split the activations between the tensor parallel regions too; needs tp > 1."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """A model that Megatron trains."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_tokens_per_device: Count
    """Tokens of one micro-batch on one device: the one memory knob, micro-batches follow from it."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's TransformerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Passed on to Megatron's OptimizerConfig."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How samples are generated: vLLM engines on the actor's devices."""

    tp: Count = 1
    """Tensor parallel size of one engine; the actor's pool holds as many engines as fit."""
    max_prompt_tokens: Count
    """Longest prompt."""
    max_response_tokens: Count
    """Longest response."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed on to vLLM's engine arguments."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration."""

    run: RunConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    placement: PlacementConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    batch: BatchConfig
    actor: TrainedModelConfig
    """The policy."""
    critic: TrainedModelConfig | None = None
    """The value model; null where the advantage needs none."""
    rollout: RolloutConfig

    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        """The roles that Megatron trains, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})
