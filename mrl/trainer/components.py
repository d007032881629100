"""Workers, engines, prompts and rewards of one run, started and stopped together."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.agents.loop import has_stops, open_dialogs
from mrl.algos.kl import KLController
from mrl.algos.role_baselines import RoleBaselines
from mrl.config.arithmetic import keeps_reference, role_mesh, shares_actor
from mrl.config.mesh import Mesh
from mrl.config.resolved.load import in_directories
from mrl.config.reward import JUDGE, KEY_VARIABLE, URLS_VARIABLE, JudgeConfig, RewardConfig
from mrl.config.role_kinds import kind_of, writes_tokens
from mrl.config.schema import Config, TrainedModelConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, RunContext
from mrl.controller.traced import TracedProcesses
from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import open_dataset
from mrl.data.teacher_context import check_context
from mrl.errors import RewardError, WorkerDied
from mrl.events import EventLog, ModelLoaded, Warned
from mrl.models.adapters import check_sharded_targets
from mrl.models.families import FAMILIES, read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.open_model import require_table
from mrl.observe.metrics import StepTimer
from mrl.registry import load_attribute
from mrl.rewards.manager import RewardManager
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.trainer.checks import check_reference, check_reward_models, check_reward_sources, check_teachers
from mrl.trainer.collector import Collector
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.engine_probe import EngineProbe
from mrl.trainer.generation import Generator
from mrl.trainer.model_probe import ModelProbe
from mrl.trainer.model_scores import ModelScores, scoring_models
from mrl.trainer.nodes import placed_run
from mrl.trainer.role_client import (
    ActorClient,
    CriticClient,
    ReferenceClient,
    RewardModelClient,
    RoleClient,
    TeacherClient,
)
from mrl.trainer.sample_stream import SampleStream, open_stream
from mrl.trainer.shared_critic import CriticOfActor
from mrl.trainer.teachers import Teachers, teachers_of
from mrl.trainer.validation import Validator, check_best
from mrl.workers.messages import ModelSetup

_WORKERS = {
    "actor": "mrl.workers.actor:ActorRolloutRefWorker",
    "critic": "mrl.workers.critic:CriticWorker",
    "reference": "mrl.workers.frozen:ReferenceWorker",
    "reward_model": "mrl.workers.frozen:RewardModelWorker",
    "teacher": "mrl.workers.frozen:TeacherWorker",
}
_ACTOR_AND_CRITIC = "mrl.workers.actor_critic:ActorCriticWorker"
_CLIENTS = {
    "actor": ActorClient,
    "critic": CriticClient,
    "reference": ReferenceClient,
    "reward_model": RewardModelClient,
    "teacher": TeacherClient,
}


@dataclass
class Components:
    """The parts that a step uses."""

    actor: ActorClient
    critic: CriticClient | None
    model_scores: ModelScores
    hybrid: HybridEngine
    engine_probe: EngineProbe
    prompts: PromptLoader
    stream: SampleStream
    validator: Validator
    kl: KLController
    turns: DeviceTurns
    role_baselines: RoleBaselines = field(default_factory=RoleBaselines)
    reference: ReferenceClient | None = None
    """None if the actor holds the reference, or if there is no KL penalty."""
    teachers: Teachers | None = None
    traced: TracedProcesses = field(default_factory=TracedProcesses)

    @property
    def roles(self) -> dict[str, RoleClient]:
        roles: dict[str, RoleClient] = {"actor": self.actor}
        return roles if self.critic is None else roles | {"critic": self.critic}

    def state_dict(self) -> dict[str, Any]:
        model_scores = self.model_scores.state_dict()
        state = {"prompts": self.prompts.state_dict(), "kl": self.kl.state_dict(), "model_scores": model_scores}
        return state | {"role_baselines": self.role_baselines.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.kl.load_state_dict(state["kl"])
        # Checkpoints of older versions have no `model_scores` and no `role_baselines`.
        self.model_scores.load_state_dict(state.get("model_scores", {}))
        self.role_baselines.load_state_dict(state.get("role_baselines", {}))


@contextmanager
def build_components(config: Config, directory: Path, events: EventLog, clock: StepTimer) -> Iterator[Components]:
    """Start everything. Prompts and rewards come first: their errors should appear before devices are requested."""
    config = in_directories(config)
    with ExitStack() as stack:
        tokenizer = load_tokenizer(config.model.path, config.data)
        for name in config.model_roles():
            check_model(model_setup(name, config))
        for role, warning in check_reward_models(config, tokenizer):
            events.write(Warned(role, warning))
        for warning in check_reference(config, tokenizer):
            events.write(Warned("reference", warning))
        for role, warning in check_teachers(config, tokenizer):
            events.write(Warned(role, warning))
        for warning in check_reward_sources(config):
            events.write(Warned("reward", warning))
        training = open_dataset(config.data.train, config.data, config.rollout, tokenizer)
        prompts = PromptLoader(training, config.data, config.batch, events)
        validation = open_dataset(config.data.validation, config.data, config.rollout, tokenizer)
        check_best(config, validation)
        check_context(config, tokenizer, [training, validation])
        if config.judge is None:
            rewards, validation_rewards = _managers(config, {}, events, stack)
        dialogs = open_dialogs(config, tokenizer, events.write, stack)
        with clock("start"):
            probe = stack.enter_context(model_probe(config, list(config.model_roles()), tokenizer, events))
            context = stack.enter_context(placed_run(config, directory, events))
            groups = stack.enter_context(started_groups(config, context, list(config.model_roles())))
            hybrid = HybridEngine(config, groups, context, reads_text=has_stops(config.agent))
            stack.callback(hybrid.close)
            turns = DeviceTurns(config)
            roles = with_models(config, groups, events, probe, turns)
            hybrid.connect()
            if config.judge is not None:
                judge_environment = stack.enter_context(judge_served(config.judge, config.cluster.device, context))
                rewards, validation_rewards = _managers(config, judge_environment, events, stack)
        judge = generator = Generator(config, hybrid, rewards, tokenizer, clock.progress, dialogs)
        if config.validation.reward_functions:
            judge = Generator(config, hybrid, validation_rewards, tokenizer, clock.progress, dialogs)
        validator = Validator(config, validation, judge, directory, events)
        engine_probe = EngineProbe(config, hybrid, roles["actor"], tokenizer, events)
        models = ModelScores(scoring_models(config, roles, tokenizer), clock, hybrid.pause)
        if config.asynchrony.ahead and config.asynchrony.weights == "between":  # its thread has no phases
            models = ModelScores(scoring_models(config, roles, tokenizer))
        stream = open_stream(config, Collector(config, prompts, generator, models), hybrid, engine_probe, clock)
        stack.callback(stream.close)
        yield Components(
            actor=roles["actor"],
            critic=roles.get("critic"),
            model_scores=models,
            hybrid=hybrid,
            engine_probe=engine_probe,
            prompts=prompts,
            stream=stream,
            validator=validator,
            kl=kl_controller(config),
            turns=turns,
            traced=context.traced,
            reference=roles.get("reference"),
            teachers=teachers_of(config, roles, tokenizer),
        )


def _managers(
    config: Config, environment: Mapping[str, str], events: EventLog, stack: ExitStack
) -> tuple[RewardManager | None, RewardManager | None]:
    """Start the reward managers of training, and of validation if it has its own functions."""
    make, rewards, validation_rewards = manager_class(config.reward), None, None
    in_environments = bool(config.agent.environments)
    if config.reward.functions:
        reward, is_model = config.reward.told(environment), bool(config.scoring_models())
        rewards = stack.enter_context(make(reward, events, others_score=is_model or in_environments))
    if config.validation.reward_functions:
        validation_reward = config.validation_reward().told(environment)
        validation_rewards = stack.enter_context(make(validation_reward, events, others_score=in_environments))
    return rewards, validation_rewards


def manager_class(config: RewardConfig) -> type[RewardManager]:
    """Return the reward manager's class: mrl's or the user's."""
    manager: type[RewardManager] = load_attribute(config.manager) if config.manager else RewardManager
    return manager


def check_model(setup: ModelSetup) -> None:
    """Raise an error if the headers of the model's files contradict its config.json."""
    spec = read_spec(setup.path)
    if setup.settings.strategy == "megatron":
        require_table(spec, "the role", FAMILIES)
    elif isinstance(setup.settings, TrainedModelConfig) and setup.settings.lora is not None:
        check_sharded_targets(spec, setup.settings.lora)
    HfReader(setup.path).check(spec, setup.head, setup.new_head)


def model_setup(role: str, config: Config) -> ModelSetup:
    distillation = config.algorithm.distillation
    is_taught = role == "actor" and distillation is not None and distillation.form == "full"
    return ModelSetup(
        path=config.model_of(role)[1],
        head="lm" if writes_tokens(role) else "score",
        settings=config.model_roles()[role],
        seed=config.training.seed,
        timeout_s=config.deadlines.call_s,
        new_head=role == "critic" and config.model.critic is None,
        keeps_reference=role == "actor" and keeps_reference(config),
        replays_routes=role == "actor" and config.algorithm.router_replay != "none",
        teacher=config.model_of("teacher")[1] if is_taught else None,
        critic=model_setup("critic", config) if role == "actor" and shares_actor(config, "critic") else None,
        vocab=read_spec(config.model.path).vocab if writes_tokens(role) and role != "actor" else None,
    )


@contextmanager
def started_groups(
    config: Config, context: RunContext, roles: Sequence[str]
) -> Iterator[dict[str, Future[RayWorkerGroup]]]:
    """Start the processes of these roles at the same time; stop them after the block."""
    started = [name for name in roles if not shares_actor(config, name)]
    with ThreadPoolExecutor(len(roles) or 1, "start") as threads:
        groups: dict[str, Future[Any]] = {name: threads.submit(_start, name, config, context) for name in started}
        for name in roles:
            if name not in started:
                groups[name] = threads.submit(lambda: CriticOfActor(groups["actor"].result()))
        try:
            yield groups
        finally:
            wait(groups.values())
            for group in groups.values():
                if group.exception() is None:
                    group.result().shutdown()


def _start(role: str, config: Config, context: RunContext) -> RayWorkerGroup:
    """Start the processes of a role. Models are loaded later, for all roles at the same time."""
    return RayWorkerGroup(role, role_worker(role, config), role_mesh(config, role), context)


def role_worker(role: str, config: Config) -> RayClassWithInitArgs:
    """Return the worker of a role with its arguments: mrl's or the user's."""
    horizon, distillation = config.rollout.max_response_tokens, config.algorithm.distillation
    arguments: dict[str, list[Any]] = {
        "actor": [config.algorithm, config.rollout.temperature, horizon],
        "critic": [config.algorithm, horizon],
        "reference": [config.rollout.temperature],
        "reward_model": [],
        "teacher": [distillation.top_k if distillation is not None else 0, config.rollout.temperature],
    }
    kind = kind_of(role)
    own = _ACTOR_AND_CRITIC if role == "actor" and shares_actor(config, "critic") else _WORKERS[kind]
    worker_class = config.model_roles()[role].worker or own
    return RayClassWithInitArgs(worker_class, model_setup(role, config), *arguments[kind])


@contextmanager
def model_probe(
    config: Config, roles: Sequence[str], tokenizer: ChatTokenizer, events: EventLog
) -> Iterator[ModelProbe]:
    """Compute a text with transformers for these roles, except the actor, which is compared with the engines."""
    setups = {role: model_setup(role, config) for role in roles if role != "actor" and config.model.verify}
    with ModelProbe(setups, tokenizer, events, config.deadlines.call_s).asked() as probe:
        yield probe


def with_models(
    config: Config,
    groups: Mapping[str, Future[RayWorkerGroup]],
    events: EventLog,
    probe: ModelProbe,
    turns: DeviceTurns,
) -> dict[str, Any]:
    """Load the models in parallel, but one after another on the same GPU, because loading takes extra memory."""

    def load(names: Sequence[str]) -> dict[str, RoleClient]:
        loaded: dict[str, RoleClient] = {}
        for name in names:
            group, began = groups[name].result(), time.monotonic()
            loaded[name] = _CLIENTS[kind_of(name)](group, config.model_roles()[name], turns)
            events.write(ModelLoaded(name, loaded[name].num_parameters, time.monotonic() - began))
            probe.compare(name, loaded[name])
        return loaded

    queues: dict[str, list[str]] = defaultdict(list)
    for name in groups:
        place = "actor" if shares_actor(config, name) else name
        queues[place if config.cluster.device == "cpu" else config.placement.roles[name]].append(name)
    with ThreadPoolExecutor(len(queues) or 1, "load") as threads:
        loaded = dict(item for roles in threads.map(load, queues.values()) for item in roles.items())
    return {name: loaded[name] for name in groups}


def kl_controller(config: Config) -> KLController:
    kl = config.algorithm.kl
    return KLController(kl.coef, kl.target, kl.horizon_samples)


@contextmanager
def judge_served(judge: JudgeConfig, device: str, context: RunContext) -> Iterator[dict[str, str]]:
    """Start a server for each engine. Yield the environment variables that reward workers need to reach the servers.

    If too few samples get a reward and a server has died, raise `WorkerDied` with both reasons: the run can restart.
    """
    deadlines, slots = context.deadlines, context.resources.device_slots(JUDGE)
    addresses = [context.resources.node(device.node_id).network.address for device in slots.devices]
    worker = RayClassWithInitArgs(
        "mrl.rollout.judge_server:JudgeServer", judge, deadlines.engine_start_s or deadlines.call_s
    )
    group = RayWorkerGroup(JUDGE, worker, Mesh(len(addresses)), context)
    try:
        gpus = group.visible_gpus() if device == "gpu" else []
        key = secrets.token_urlsafe(32)
        urls = [url for url in group.serve(addresses, gpus, key) if url]
        yield {URLS_VARIABLE: " ".join(urls), KEY_VARIABLE: key}
    except RewardError as error:
        ended = {rank: state for rank, state in enumerate(group.ends()) if state}
        if not ended:
            raise
        message = "\n".join(f"the judge server of rank {rank} ended: {state}" for rank, state in ended.items())
        fix = "fix the cause; with training.max_restarts the run restarts by itself"
        raise WorkerDied(f"{message}\n{error.what}", fix=fix, role=JUDGE, ranks=list(ended)) from error
    finally:
        group.shutdown()
