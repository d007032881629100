"""A run in one process per data-parallel rank: mrl's trainer, workers and Megatron, a scripted engine, and no Ray.

Each rank does the driver's work on the same numbers. A group gives each rank's worker its shard and gathers the results
of all ranks. The whole loop takes one or two seconds, and its recording is compared with the reference.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mrl.agents.conversation import Finish
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import Resolved, load_config
from mrl.config.schema import Config, ParallelConfig
from mrl.controller import RankInfo, RayWorkerGroup, Rendezvous, Worker
from mrl.controller.worker import Dispatch, MethodSpec, registered_methods
from mrl.controller.worker_group import _join_shards
from mrl.data.chat import load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import open_dataset
from mrl.engine.parallel import ParallelGroups, model_parallel
from mrl.events import EventLog
from mrl.observe.console import Console
from mrl.observe.metrics import StepTimer
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer import components as team_module
from mrl.trainer.collector import Collector
from mrl.trainer.components import Components
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.engine_probe import EngineProbe
from mrl.trainer.generation import Generator, ScoredBatch
from mrl.trainer.model_scores import ModelScores, scoring_models
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.role_client import RoleClient
from mrl.trainer.run import open_run
from mrl.trainer.sample_stream import open_stream
from mrl.trainer.teachers import teachers_of
from mrl.trainer.validation import Validator
from mrl.workers.actor import ActorRolloutRefWorker
from mrl.workers.critic import CriticWorker
from mrl.workers.frozen import RewardModelWorker, TeacherWorker
from tests.reference.history import history
from tests.reference.matrix import LocalCase
from tests.reference.recording import Recorder
from tests.reference.rewards import FUNCTION, score_of

PARTS = ("parameters", "gradients", "optimizer")
ALPHABET = b"0123456789+= ab"
SEED_OF_MODELS = 5


@dataclass
class _Answered:
    answer: Any
    span: Any = None

    def get(self) -> Any:
        return self.answer


class LocalGroup(RayWorkerGroup):
    """A worker on each rank of this world instead of Ray's processes. Columns are checked like in Ray's group."""

    def __init__(self, role: str, worker: Worker, mesh: Mesh) -> None:
        self.role, self.mesh, self._worker = role, mesh, worker
        self._methods = registered_methods(type(worker))

    def submit(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call this rank's worker and gather the results of all ranks."""
        if spec.dispatch is Dispatch.DATA_PARALLEL:
            shards = self._shards(spec, args)
            shard = shards[self._worker.rank]
            answers = self._gathered(getattr(self._worker, spec.name)(shard, *args[1:], **kwargs))
            if spec.writes:
                written = [sorted(answer.columns()) for answer in answers]
                assert written == [sorted(spec.writes)] * len(shards), f"{spec.name} wrote {written}"
            return _Answered(_join_shards(answers) if spec.writes else answers)
        arguments: list[Any] = [args, kwargs]
        dist.broadcast_object_list(arguments)  # all ranks use the paths of rank 0
        return _Answered(self._gathered(getattr(self._worker, spec.name)(*arguments[0], **arguments[1])))

    def shutdown(self) -> None:
        """Do nothing: no process was started."""

    def _gathered(self, answer: Any) -> list[Any]:
        answers: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(answers, answer)
        return answers


class ScriptedEngine:
    """Replaces the hybrid engine. A sample's text follows from its seed, or from its prompt if greedy."""

    def __init__(self, config: Config, stop_token: Any, groups: Mapping[str, RayWorkerGroup]) -> None:
        self._groups = list(groups.values())
        self._scoring = [group for role, group in groups.items() if role in config.scoring_models()]
        self._stop_token, self._vocab_log = stop_token, float(np.log(200))
        self._symbols = np.frombuffer(ALPHABET, dtype=np.uint8)
        self._encode = load_tokenizer(config.model.path)
        self.version, self.unaligned = 1, frozenset[str]()
        self.fleet = SimpleNamespace(full_tensor_reason="")
        self.is_awake = False

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        self.is_awake = True
        for group in self._groups:
            group.offload(*PARTS)
        yield
        for group in self._groups:
            group.onload(*PARTS)
        self.is_awake = False

    def pause(self) -> None:
        """Load the reward models, which score while no other model is on the device."""
        assert self.is_awake, "scores outside of rollout_mode"
        for group in self._scoring:
            group.onload(*PARTS)

    def weights_changed(self) -> None:
        self.version += 1

    def metrics(self) -> dict[str, float]:
        return {"sync/version": self.version}

    def probe(self, request: GenerationRequest, sampling: Sampling, *, everyone: bool) -> dict[int, Generated]:
        raise AssertionError("sync.probe_every is 0: the engine has no weights to compare")

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, follow_ups: None = None
    ) -> Iterator[Generated]:
        """Yield the samples, the last request first."""
        assert self.is_awake, "generation outside of rollout_mode"
        for group in self._scoring:
            group.offload(*PARTS)
        for request in reversed(requests):
            of_prompt = hashlib.blake2b(request.prompt.encode(), digest_size=4).digest()
            seed = int.from_bytes(of_prompt, "big") if sampling.top_k == 1 else request.seed
            rng = np.random.default_rng(seed)
            length = int(rng.integers(1, request.max_tokens + 2))
            stops = length <= request.max_tokens
            text = bytes(rng.choice(self._symbols, min(length, request.max_tokens))).decode()
            ids = np.array(self._encode([text], add_special_tokens=False)["input_ids"][0], dtype=np.int32)
            if stops:
                ids[-1] = self._stop_token
            mask = _mask(ids, sampling.top_k, rng) if sampling.keeps_mask else None
            likely = -self._vocab_log if mask is None else -np.log((mask >= 0).sum(1))
            log_probs = (likely + rng.normal(0, 0.3, len(ids))).astype(np.float32)
            finish: Finish = "stop" if stops else "length"
            yield Generated(request.key, ids, log_probs, finish, self.version, sampling_mask=mask)


def _mask(ids: npt.NDArray[np.int32], top_k: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return 1 to `top_k` tokens for each token, which is one of them, in any order, with unused places at the end."""
    mask = np.full((len(ids), top_k + 2), -1, np.int32)
    for place, token in enumerate(ids.tolist()):
        others = rng.choice(
            [other for other in range(20) if other != token], int(rng.integers(0, top_k)), replace=False
        )
        mask[place, : len(others) + 1] = rng.permutation([token, *others])
    return mask


@dataclass
class InstantRewards:
    """Replaces the reward manager. Each outcome is ready immediately."""

    failures: bool
    waiting: dict[int, Outcome] = field(default_factory=dict)
    num_submitted: int = 0

    def submit(self, sample: Sample, group_size: int = 1) -> int:
        self.num_submitted += 1
        score = score_of(sample.response, sample.ground_truth)
        fails = self.failures and (sample.row_id * 7 + len(sample.response)) % 11 == 0
        scored = Score(score, {FUNCTION: score}, 0.0, sample.response)
        self.waiting[self.num_submitted] = Failure("raised", "", 0.0) if fails else scored
        return self.num_submitted

    def drain(self) -> dict[int, Outcome]:
        done, self.waiting = dict(reversed(self.waiting.items())), {}
        return done


@contextmanager
def local_team(
    case: LocalCase, groups: ParallelGroups, config: Config, events: EventLog, clock: StepTimer
) -> Iterator[Components]:
    """Build the components of `build_components` without Ray."""
    mesh, rank = groups.mesh, groups.at.rank

    turns = DeviceTurns(config)

    def start(role: str) -> RoleClient:
        place = RankInfo(role, rank, rank, mesh, Rendezvous("", 0, mesh.world_size, None))
        setup, horizon = team_module.model_setup(role, config), config.rollout.max_response_tokens
        worker: Worker
        if role == "actor":
            worker = _Actor(place, setup, config.algorithm, config.rollout.temperature, horizon)
        elif role == "teacher":
            assert config.algorithm.distillation is not None, "a teacher needs algorithm.distillation"
            worker = _Teacher(place, setup, config.algorithm.distillation.top_k, config.rollout.temperature)
        elif role == "critic":
            worker = _Critic(place, setup, config.algorithm, horizon)
        else:
            worker = _RewardModel(place, setup)
        return team_module._CLIENTS[role](LocalGroup(role, worker, mesh), config.model_roles()[role], turns)

    tokenizer = load_tokenizer(config.model.path)
    dataset = open_dataset(config.data.train, config.data, config.rollout, tokenizer)
    validation = open_dataset(config.data.validation, config.data, config.rollout, tokenizer)
    rewards: Any = InstantRewards(case.failures)
    roles: Any = {role: start(role) for role in config.model_roles()}
    groups_of = {name: role.group for name, role in roles.items()}
    hybrid: Any = ScriptedEngine(config, tokenizer.eos_token_id, groups_of)
    generator = Generator(config, hybrid, rewards, tokenizer, clock.progress)
    if case.mask:
        whole = generator.run
        generator.run = lambda *args, **kwargs: _with_holes(whole(*args, **kwargs))  # type: ignore[method-assign]
    prompts = PromptLoader(dataset, config.data, config.batch, events)
    probe = EngineProbe(config, hybrid, roles["actor"], tokenizer, events)
    models = ModelScores(scoring_models(config, roles, tokenizer), clock, hybrid.pause)
    yield Components(
        actor=roles["actor"],
        critic=roles.get("critic"),
        model_scores=models,
        teachers=teachers_of(config, roles, tokenizer),
        hybrid=hybrid,
        engine_probe=probe,
        prompts=prompts,
        stream=open_stream(config, Collector(config, prompts, generator, models), hybrid, probe, clock),
        validator=Validator(config, validation, generator, Path(config.run.dir, config.run.name), events),
        kl=team_module.kl_controller(config),
        turns=turns,
    )


def _with_holes(scored: ScoredBatch) -> ScoredBatch:
    """Mark some tokens as an environment's: in the middle, at the end, and all tokens of every seventh row."""
    lengths = scored.batch.lengths("responses")
    masks = []
    for row_id, length in zip(scored.batch.row_ids.tolist(), lengths.tolist(), strict=True):
        masks += [row_id % 7 != 3 and (row_id + 2 * token) % 5 != 1 for token in range(length)]
    column = jagged(torch.tensor(masks), lengths)
    return ScoredBatch(
        scored.batch.union(DataProto.from_dict({"response_mask": column}, row_ids=scored.batch.row_ids)), scored.metrics
    )


class _InThisWorld:
    def init_process_group(self, backend: str, timeout_s: float) -> None:
        """Do nothing: the process group exists."""


class _Actor(_InThisWorld, ActorRolloutRefWorker):
    pass


class _Critic(_InThisWorld, CriticWorker):
    pass


class _Teacher(_InThisWorld, TeacherWorker):
    pass


class _RewardModel(_InThisWorld, RewardModelWorker):
    pass


def record(cases: Sequence[LocalCase], directory: str) -> list[str]:
    """Return the recordings of these cases as JSON. Called on each rank."""
    torch.set_num_threads(1)
    with model_parallel(ParallelConfig(), SEED_OF_MODELS) as groups:
        return [json.dumps(_record(case, Path(directory), groups)) for case in cases]


def _record(case: LocalCase, directory: Path, groups: ParallelGroups) -> dict[str, Any]:
    place = directory / f"rank-{groups.at.rank}"
    place.mkdir(exist_ok=True)
    file = place / f"{case.name}.yaml"
    file.write_text(json.dumps(case.values | {"run": {"name": case.name, "dir": str(place)}}))
    resolved = load_config(str(file))
    with (
        patch("mrl.workers.model_worker.open_groups", lambda settings, seed: nullcontext(groups)),
        patch(
            "mrl.trainer.ppo.build_components",
            lambda config, path, events, clock: local_team(case, groups, config, events, clock),
        ),
        patch("mrl.trainer.ppo.store", lambda batch: batch),  # without Ray there is no object store
    ):
        recorded = _part(case, resolved, directory, groups, case.stop_after)
        if case.stop_after is not None:
            rest = _part(case, resolved, directory, groups, None)
            recorded["steps"] += rest["steps"]
            recorded["validations"] += rest["validations"]
    return recorded | history(place / case.name)


def _part(
    case: LocalCase, resolved: Resolved[Config], directory: Path, groups: ParallelGroups, stop_after: int | None
) -> dict[str, Any]:
    with open_run(resolved, Console(1, stream=io.StringIO(), quiet=True)) as run:
        trainer = RayPPOTrainer(run)
        if case.stop_after is None:
            run.save = lambda *_, **__: None  # type: ignore[method-assign]
        with trainer.init_workers():
            run.should_stop = lambda: trainer.num_steps_done == stop_after  # type: ignore[method-assign]
            recorder = Recorder(trainer, directory / "weights" / case.name)
            trainer.fit()
            return recorder.recorded()
