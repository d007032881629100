"""Fakes for Ray, Megatron and engines. All of them record their calls in one journal, in order.

Rows come back in another order than they went in, samples finish in reverse, and tickets of rewards are unordered: code
that relies on positions instead of names fails.
"""

from __future__ import annotations

import dataclasses
import io
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.data import DataConfig, SourceConfig
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import Resolved
from mrl.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    PlacementConfig,
    RewardModelConfig,
    RolloutConfig,
    RunConfig,
    TrainedModelConfig,
)
from mrl.config.training import TrainingConfig
from mrl.config.values import ConfigLayer, Secrets
from mrl.errors import RolloutError, WorkerRaised
from mrl.observe.console import Console
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.protocol.step_record import RankRecord, TensorPrint
from mrl.rewards.outcome import Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.fleet import FollowUps
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer.collector import Collector
from mrl.trainer.components import Components, kl_controller
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.generation import Generator
from mrl.trainer.model_scores import ModelScores, ScoringModel
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.run import Run
from mrl.trainer.sample_stream import open_stream

END = 2
Journal = list[Any]
CRITIC = TrainedModelConfig(dtype="float32", max_tokens_per_device=64)
SCORER = RewardModelConfig(dtype="float32", max_tokens_per_device=64, path="scorer", weight=2.0)


def make_config(directory: Path, **sections: Any) -> Config:
    """Two prompts of two samples a step, learnt from in one update; a dictionary changes a section, else it is one."""
    config = Config(
        run=RunConfig(name="run", dir=str(directory)),
        cluster=ClusterConfig(devices_per_node=4, device="cpu"),
        placement=PlacementConfig(pools={"all": 4}, roles={"actor": "all", "critic": "all", "reward_model": "all"}),
        model=ModelConfig(path="policy"),
        algorithm=AlgorithmConfig(advantage="grpo"),
        data=DataConfig(train={"sums": SourceConfig(dataset="toy:addition")}),
        batch=BatchConfig(prompts_per_step=2, samples_per_prompt=2, samples_per_update=4),
        actor=TrainedModelConfig(dtype="float32", max_tokens_per_device=64),
        rollout=RolloutConfig(max_prompt_tokens=8, max_response_tokens=4, temperature=0.7),
        training=TrainingConfig(steps=3, seed=5, samples_every=0),
    )
    changes = {
        name: dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return dataclasses.replace(config, **changes)


def resolved(config: Config, *warnings: str) -> Resolved[Config]:
    """The configuration as `load_config` gives it."""
    return Resolved("run.yaml", config, warnings, Secrets(), ConfigLayer())


class Tokenizer:
    """Token 17 reads `17`."""

    def __init__(self, eos_token_id: int | None = END) -> None:
        self.eos_token_id = eos_token_id

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(200)}

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class Prompts:
    """Prompt n has the uid `pn`, the row id n and n % 3 + 1 tokens, which are 10 + n."""

    def __init__(self, num: int = 2) -> None:
        self.num, self.num_drawn = num, 0
        self.solved: list[dict[str, float]] = []

    def learn(self, solved: dict[str, float]) -> None:
        self.solved.append(solved)

    def next_batch(self) -> DataProto:
        numbers = list(range(self.num_drawn, self.num_drawn + self.num))
        self.num_drawn += self.num
        return prompts_of(numbers)

    def state_dict(self) -> dict[str, Any]:
        solved = {"solved": list(self.solved)} if any(self.solved) else {}
        return {"drawn": self.num_drawn, **solved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drawn, self.solved = state["drawn"], list(state.get("solved", ()))


def prompts_of(numbers: Sequence[int]) -> DataProto:
    """These prompts, as a loader gives them."""
    return DataProto.from_dict(
        {"prompts": from_rows([torch.tensor([10 + number] * (number % 3 + 1)) for number in numbers])},
        {
            "uid": [f"p{number}" for number in numbers],
            "prompt_text": [f"prompt {number}" for number in numbers],
            "data_source": [f"source {number % 2}" for number in numbers],
            "ability": [None for _ in numbers],
            "ground_truth": [f"truth {number}" for number in numbers],
            "extra_info": [{"number": number} for number in numbers],
        },
        row_ids=numbers,
    )


Answer = Callable[[GenerationRequest, Sampling], Sequence[int]]


def default_answer(request: GenerationRequest, sampling: Sampling) -> Sequence[int]:
    """One to three tokens and the end, of which the first is 100 and the row id."""
    row_id = int(request.key)
    return [100 + row_id, *[50] * (row_id % 3), END][:4]


class Hybrid:
    """Engines that answer in reverse; a response without the end token was cut off."""

    full_tensor_reason = ""
    unaligned: frozenset[str] = frozenset()

    def __init__(self, journal: Journal, answer: Answer = default_answer) -> None:
        self.journal, self.answer = journal, answer
        self.requests: list[list[GenerationRequest]] = []
        self.samplings: list[Sampling] = []
        self.finish: Callable[[Any], Any] = lambda ids: "stop" if ids[-1] == END else "length"
        self.version, self.held = 1, 0
        self.actor_lock = threading.Lock()
        self.fleet = SimpleNamespace(full_tensor_reason=self.full_tensor_reason, generating_s=0.125, is_closing=False)

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        assert self.actor_lock.acquire(blocking=False), "the trainer has the actor"
        self.actor_lock.release()
        self.journal.append("awake")
        self.held = self.version
        yield
        self.journal.append("asleep")

    def pause(self) -> None:
        self.journal.append("paused")

    def weights_changed(self) -> None:
        self.journal.append("weights changed")
        self.version += 1

    def metrics(self) -> dict[str, float]:
        return {"sync/seconds": 0.25}

    def has_newest(self) -> bool:
        self.held = self.version
        return True

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        follow_ups: FollowUps | None = None,
        *,
        in_flight: bool = False,
    ) -> Iterator[Generated]:
        """All at once; with `follow_ups` what these ask for too, until there is nothing and nothing can come."""
        asked = list(requests)
        while True:
            asked += follow_ups.take() if follow_ups else ()
            if asked or not in_flight:
                self.requests.append(asked)
                self.samplings.append(sampling)
                self.journal.append(("generate", len(asked)))
            for request in reversed(asked):
                ids = np.asarray(self.answer(request, sampling), dtype=np.int32)
                log_probs = np.asarray([-(int(request.key) + place / 8) for place in range(len(ids))], dtype=np.float32)
                yield Generated(request.key, ids, log_probs, self.finish(ids), self.held)
            if follow_ups is None or not (asked or follow_ups.arriving()):
                return
            if self.fleet.is_closing:
                raise RolloutError("the run ends while samples are generated")
            asked = []


class Probe:
    """An engine that answers at every third step, but not before training."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def is_due(self, step: int) -> bool:
        return bool(step) and step % 3 == 0

    def ask(self, step: int) -> dict[int, int]:
        self.journal.append(("ask", step))
        return {7: step} if self.is_due(step) else {}

    def compare(self, step: int, answers: dict[int, int]) -> None:
        assert answers == {7: step}
        self.journal.append(("compare", step))

    def compare_step(self, step: int, metrics: dict[str, float], updates: list[dict[str, float]]) -> dict[str, float]:
        assert metrics
        return {"sync/engine_warnings": 0.0}


class Rewards:
    """Outcomes as a function of the sample. Tickets are unordered, and are drained in yet another order."""

    def __init__(self, outcome: Callable[[Sample], Outcome]) -> None:
        self.outcome = outcome
        self.samples: list[Sample] = []
        self._outcomes: dict[int, Outcome] = {}
        self._num_submitted = 0

    def submit(self, sample: Sample, group_size: int = 1) -> int:
        self.samples.append(sample)
        self._num_submitted += 1
        ticket = self._num_submitted * 600 % 1009
        self._outcomes[ticket] = self.outcome(sample)
        return ticket

    def collect(self) -> dict[int, Outcome]:
        return self.drain()

    def check_share(self, failed: Sequence[Any], total: int) -> None:
        assert not failed, "none is made to"

    def drain(self) -> dict[int, Outcome]:
        drained = sorted(self._outcomes.items(), key=lambda item: item[0] % 5)
        self._outcomes = {}
        return dict(drained)


def score_of_row(sample: Sample) -> Outcome:
    """A quarter of the row id."""
    return Score(sample.row_id / 4, {"rule": sample.row_id / 4}, 0.125)


WRITTEN = {
    "compute_log_prob": ("old_log_probs", 0.125),
    "compute_ref_log_prob": ("ref_log_probs", 0.25),
    "compute_values": ("values", 0.5),
}


class Role:
    """A model: what it writes of a row is its row id and a fraction; an update reports how many there were before."""

    def __init__(self, name: str, journal: Journal) -> None:
        self.name, self.journal = name, journal
        self.batches: dict[str, list[DataProto]] = {}
        self.whole: list[Any] = []
        self.kl = 0.0
        self.num_updates = 0
        self.flops_per_token, self.device = 5e9, "cpu"
        self.loaded: list[str] = []
        self.recorded: list[Any] = []
        self.micro_batches: list[Any] = []
        self.group = SimpleNamespace(
            mesh=SimpleNamespace(world_size=4),
            begin_checkpoint=self._begin_checkpoint,
            checkpoint_is_written=lambda: self.is_written,
            finish_checkpoint=self._finish_checkpoint,
            load_checkpoint=self.loaded.append,
        )
        self.is_written = [True] * 4
        self.full_disk = False

    def _took(self, method: str, batch: DataProto) -> None:
        self.journal.append((self.name, method, len(batch)))
        self.batches.setdefault(method, []).append(batch)

    def _written(self, method: str, batch: DataProto) -> DataProto:
        self._took(method, batch)
        name, extra = WRITTEN[method]
        return DataProto.from_dict({name: self._tokens(batch, extra)}, row_ids=batch.row_ids[::-1].copy())

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        self._took("compute_rm_score", batch)
        return batch.with_column("rm_scores", torch.tensor(batch.row_ids * 0.5))

    def compute_log_prob(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        return self._written("compute_log_prob", batch), {"mismatch/log_prob_abs_diff_mean": 0.001}

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._written("compute_ref_log_prob", batch)

    def compute_values(self, batch: DataProto) -> DataProto:
        return self._written("compute_values", batch)

    def compute_advantages(self, batch: DataProto, whole: Any) -> tuple[DataProto, dict[str, float]]:
        self._took("compute_advantages", batch)
        self.whole.append(whole)
        columns = {"advantages": 0.75} | ({"returns": 0.875} if self.name == "critic" else {})
        tensors = {name: self._tokens(batch, extra) for name, extra in columns.items()}
        return DataProto.from_dict(tensors, row_ids=batch.row_ids[::-1].copy()), {"reward/kl": self.kl}

    def update_actor(self, batch: DataProto) -> dict[str, float]:
        return self._update("update_actor", batch)

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        return self._update("update_critic", batch)

    def record(self, method: str, *arguments: Any) -> list[RankRecord]:
        """One rank, whose only weight is the number of updates."""
        self.recorded.append((method, *arguments))
        number = float(self.num_updates)
        weight = TensorPrint("main_weight", "w", 1, self.num_updates, number**2, (number,) * 16, True)
        return [RankRecord(asdict(Mesh(1).coordinates(0)), "host", [weight], [])]

    def _update(self, method: str, batch: DataProto) -> dict[str, float]:
        self._took(method, batch)
        self.micro_batches = [[batch.row_ids.tolist()]]
        self.num_updates += 1
        masked = "response_mask" in batch.columns()
        tokens = batch.values("response_mask").sum() if masked else batch.lengths("responses").sum()
        shared = {"loss": float(self.num_updates), "grad_norm": 1.0, "lr": 0.5, "skipped": 0.0}
        return shared | {"ppo_kl": 0.0, "pg_clipfrac": 0.0, "tokens": float(tokens)}

    @staticmethod
    def _tokens(batch: DataProto, extra: float) -> Any:
        lengths = batch.lengths("responses").tolist()
        rows = [torch.full((length,), row + extra) for row, length in zip(batch.row_ids, lengths, strict=True)]
        return from_rows(rows[::-1])

    def _begin_checkpoint(self, directory: str) -> None:
        self._saving = Path(directory), self.num_updates

    def _finish_checkpoint(self) -> None:
        if self.full_disk:
            raise WorkerRaised("rank 1 raised in finish_checkpoint: no space left on device", role=self.name, ranks=[1])
        path, num_updates = self._saving
        path.mkdir()
        (path / "manifest.json").write_text(json.dumps({"updates": num_updates}))


class Screen(Console):
    """Keeps what it is to show, and journals the phases."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(3, io.StringIO())
        self.journal = journal
        self.said: list[str] = []
        self.steps: list[tuple[Any, ...]] = []
        self.done: list[tuple[int, int]] = []

    def print(self, text: str) -> None:
        self.said.append(text)

    def phase(self, name: str) -> None:
        self.journal.append(("phase", name))

    def progress(self, done: int, total: int) -> None:
        self.done.append((done, total))

    def step(self, step: int, metrics: Any, sample: Any = None) -> None:
        self.steps.append((step, dict(metrics), sample))
        self.journal.append(("shown", step))


class Validations:
    """Scores given beforehand, in turn."""

    def __init__(self, journal: Journal, scores: Iterable[float]) -> None:
        self.journal, self.scores = journal, iter(scores)
        self.warnings: list[str] = []
        self.by_prompt: dict[str, dict[str, float]] = defaultdict(dict)

    def run(self, step: int, models: ModelScores) -> dict[str, float]:
        self.journal.append("validation")
        return {"val/score/mean@1": next(self.scores)}


@dataclasses.dataclass
class Scene:
    """A trainer with fakes around it."""

    trainer: RayPPOTrainer
    components: Any
    run: Run
    screen: Screen
    hybrid: Hybrid
    journal: Journal
    roles: dict[str, Role]
    stored: list[DataProto]
    """Everything that was put into the object store."""


@contextmanager
def scene(
    config: Config,
    directory: Path,
    outcome: Callable[[Sample], Outcome] = score_of_row,
    answer: Answer = default_answer,
    validations: Iterable[float] = (),
) -> Iterator[Scene]:
    """A trainer whose workers have been started, on a run of that directory."""
    journal: Journal = []
    screen, hybrid = Screen(journal), Hybrid(journal, answer)
    stored: list[DataProto] = []
    run = Run(resolved(config), directory, screen)
    roles = {name: Role(name, journal) for name in config.model_roles()}
    models = [
        ScoringModel(role, settings, roles[role], None)  # type: ignore[arg-type]
        for role, settings in config.scoring_models().items()
    ]
    generator = Generator(config, hybrid, Rewards(outcome), Tokenizer(), run.clock.progress)  # type: ignore[arg-type]
    prompts, probe = Prompts(config.batch.prompts_per_step), Probe(journal)
    scores = ModelScores(models, run.clock, hybrid.pause)
    collector = Collector(config, prompts, generator, scores)  # type: ignore[arg-type]
    components: Any = Components(
        roles["actor"],  # type: ignore[arg-type]
        roles.get("critic"),  # type: ignore[arg-type]
        scores,
        hybrid,  # type: ignore[arg-type]
        probe,  # type: ignore[arg-type]
        prompts,  # type: ignore[arg-type]
        open_stream(config, collector, hybrid, probe, run.clock),  # type: ignore[arg-type]
        Validations(journal, validations),  # type: ignore[arg-type]
        kl_controller(config),
        DeviceTurns(config),
    )

    @contextmanager
    def build_components(*arguments: Any) -> Iterator[Any]:
        assert arguments == (config, directory, run.events, run.clock)
        try:
            yield components
        finally:
            components.stream.close()

    def store(batch: DataProto) -> DataProto:
        stored.append(batch)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mrl.trainer.ppo.build_components", build_components)
        patch.setattr("mrl.trainer.ppo.store", store)
        trainer = RayPPOTrainer(run)
        with trainer.init_workers() as started:
            assert started is components
            yield Scene(trainer, components, run, screen, hybrid, journal, roles, stored)
    run.events.close()
