"""Parts of a run's components: their order of creation, saved state, and each role's arguments."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from mrl.algos.kl import KLController
from mrl.config.algorithm import DistillationConfig, KlConfig
from mrl.config.data import SourceConfig
from mrl.config.mesh import Mesh
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import Config, ParallelConfig, PlacementConfig, TeacherConfig
from mrl.controller.traced import TracedProcesses
from mrl.errors import MrlError
from mrl.events import EventLog, ModelLoaded, Warned, read_events
from mrl.observe.metrics import StepTimer
from mrl.trainer import components as made
from mrl.trainer import nodes
from mrl.trainer.components import Components, build_components, kl_controller, model_setup, with_models
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.model_scores import ModelScores
from mrl.workers.messages import ModelSetup
from tests.trainer.fakes import CRITIC, SCORER, Prompts, Tokenizer, make_config

KL = KlConfig(where="reward", coef=0.2, target=0.5, horizon_samples=10)


def team_of(kl: Any, critic: Any = None, drawn: int = 0, models: Any = ()) -> Any:
    nothing: Any = None
    prompts: Any = Prompts()
    prompts.num_drawn = drawn
    actor: Any = "the actor"
    return Components(actor, critic, ModelScores(models), nothing, nothing, prompts, nothing, nothing, kl, nothing)


def test_the_roles_of_a_team_are_those_that_learn() -> None:
    assert team_of(KLController(0.1)).roles == {"actor": "the actor"}
    both = team_of(KLController(0.1), critic="the critic", models=["frozen"])
    assert list(both.roles.items()) == [("actor", "the actor"), ("critic", "the critic")]


def test_a_team_remembers_its_prompts_its_kl_coefficient_and_its_baselines(tmp_path: Path) -> None:
    config = make_config(tmp_path, algorithm={"kl": KL})
    team = team_of(kl_controller(config), drawn=12)
    team.kl.update(1.5, 5)
    team.role_baselines.update("games", "first", 1.0, 0.75)
    assert team.kl.coef == pytest.approx(0.2 * (1 + 0.2 * 5 / 10))
    state = json.loads(json.dumps(team.state_dict()))
    resumed = team_of(kl_controller(config))
    resumed.load_state_dict(state)
    assert resumed.prompts.num_drawn == 12
    assert resumed.role_baselines.state_dict() == {"games": {"first": 0.25}}
    assert resumed.kl == KLController(team.kl.coef, 0.5, 10)
    with pytest.raises(MrlError, match="the checkpoint's KL controller is 'adaptive'"):
        team_of(KLController(0.2)).load_state_dict(state)


def test_the_kl_coefficient_is_steered_where_there_is_a_target(tmp_path: Path) -> None:
    assert kl_controller(make_config(tmp_path, algorithm={"kl": KL})) == KLController(0.2, 0.5, 10)
    fixed = make_config(tmp_path, algorithm={"kl": replace(KL, target=None)})
    assert kl_controller(fixed) == KLController(0.2, None, 10)


def whole_config(directory: Path, **sections: Any) -> Config:
    """Three roles; data and rewards of both kinds."""
    settings: dict[str, Any] = {
        "critic": CRITIC,
        "reward_model": SCORER,
        "actor": {"parallel": ParallelConfig(tp=2), "max_tokens_per_device": 99},
        "data": {"validation": {"held": SourceConfig(dataset="toy:addition")}, "max_bad_rows": 3},
        "reward": RewardConfig(functions={"answer": RewardFunctionConfig(name="digits")}),
        "deadlines": {"call_s": 77.0},
        "rollout": {"max_response_tokens": 6},
    }
    return make_config(directory, **settings | sections)


def test_each_role_is_told_its_model_and_its_part(tmp_path: Path) -> None:
    config = whole_config(tmp_path, algorithm={"kl": KL})
    assert model_setup("actor", config) == ModelSetup("policy", "lm", config.actor, 5, 77.0, False, True)
    assert model_setup("critic", config) == ModelSetup("policy", "score", CRITIC, 5, 77.0, True, False)
    assert model_setup("reward_model", config) == ModelSetup("scorer", "score", SCORER, 5, 77.0, False, False)
    own = whole_config(tmp_path, model={"critic": "values"})
    assert model_setup("critic", own) == ModelSetup("values", "score", CRITIC, 5, 77.0, False, False), "it has a head"
    assert model_setup("actor", own).path == "policy"


@pytest.mark.parametrize(("where", "keeps"), [("none", False), ("reward", True), ("loss", True), ("both", True)])
def test_the_actor_keeps_its_reference_wherever_it_is_read(where: Any, keeps: bool, tmp_path: Path) -> None:
    config = whole_config(tmp_path, algorithm={"kl": KlConfig(where=where)})
    assert model_setup("actor", config).keeps_reference is keeps
    assert not model_setup("critic", config).keeps_reference


class _Context(str):
    """A run's context by its name."""

    traced = TracedProcesses()


class Stage:
    """Everything heavy of `build_components`, replaced; the journal has what began and ended."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.journal: list[Any] = []
        self.workers: dict[str, tuple[Any, Mesh, Any]] = {}
        self.given: dict[str, tuple[Any, ...]] = {}
        self.tokenizer = Tokenizer()
        self.dataset_of: dict[str, Any] = {}
        self.compared: list[str] = []
        stands_in = {
            "in_directories": lambda config: config,
            "load_tokenizer": self._load_tokenizer,
            "check_model": lambda setup: self.journal.append(("check", setup.path, setup.head)),
            "check_reward_models": lambda config, tokenizer: iter([("reward_model", "it reads other templates")]),
            "scoring_models": lambda config, roles, tokenizer: [roles.get("reward_model")],
            "check_reward_sources": self._check_sources,
            "open_dataset": self._open_dataset,
            "PromptLoader": self._recorder("prompts"),
            "RewardManager": self._manager,
            "RayWorkerGroup": self._group,
            "HybridEngine": self._hybrid,
            "_CLIENTS": dict.fromkeys(("actor", "critic", "reward_model"), self._role),
            "EngineProbe": self._recorder("probe"),
            "ModelProbe": self._model_probe,
            "Generator": self._recorder("generator"),
            "Validator": self._recorder("validator"),
        }
        for name, stand_in in stands_in.items():
            patch.setattr(made, name, stand_in)
        of_nodes = {
            "ray_cluster": self._block("ray"),
            "ResourcePoolManager": self._resources,
            "check_libraries": lambda config, resources: self.journal.append("libraries"),
            "RunContext": lambda *arguments: _Context(self._recorder("context")(*arguments)),
        }
        for name, stand_in in of_nodes.items():
            patch.setattr(nodes, name, stand_in)

    def _load_tokenizer(self, path: str, data: Any) -> Tokenizer:
        self.journal.append(("tokenizer", path))
        return self.tokenizer

    def _open_dataset(self, sources: Any, *arguments: Any) -> str:
        name = ", ".join(sources)
        self.dataset_of[name] = arguments
        return name

    def _recorder(self, name: str) -> Any:
        def make(*arguments: Any) -> str:
            self.given[name] = arguments
            return f"the {name}"

        return make

    def _block(self, name: str, value: Any = None) -> Any:
        @contextmanager
        def block(*arguments: Any) -> Iterator[Any]:
            self.given[name] = arguments
            self.journal.append(f"{name} begins")
            yield value
            self.journal.append(f"{name} ends")

        return block

    def _model_probe(self, setups: Any, *arguments: Any) -> Any:
        self.given["setups of the model probe"] = setups
        probe = SimpleNamespace(compare=lambda role, client: self.compared.append(role))
        return SimpleNamespace(asked=lambda: nullcontext(probe))

    def _check_sources(self, config: Config) -> Iterator[str]:
        self.journal.append("sources")
        yield "a pattern matches nothing"

    def _manager(self, *arguments: Any, others_score: bool = False) -> Any:
        return self._block("rewards", "the rewards")(*arguments, others_score)

    def _resources(self, *arguments: Any) -> Any:
        self.given["resources"] = arguments
        create = lambda *where: self.journal.append(("resources", *where))  # noqa: E731
        return SimpleNamespace(create=create, release=lambda: self.journal.append("release"))

    def _group(self, role: str, worker: Any, mesh: Mesh, context: Any) -> Any:
        self.workers[role] = (worker, mesh, context)
        return SimpleNamespace(role=role, shutdown=lambda: self.journal.append("shutdown"))

    def _hybrid(self, config: Any, groups: Any, context: Any, *, reads_text: bool) -> Any:
        assert not reads_text, "no environment's format has texts that end a turn"
        self.given["hybrid"] = (config, sorted(groups), context)
        self.journal.append("hybrid")
        return SimpleNamespace(
            connect=lambda: self.journal.append("connect"), close=lambda: self.journal.append("close"), pause=None
        )

    def _role(self, group: Any, settings: Any, turns: Any) -> Any:
        self.journal.append(("model", group.role))
        return SimpleNamespace(name=group.role, settings=settings, num_parameters=7)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@contextmanager
def team_in(directory: Path, config: Config) -> Iterator[tuple[Components, EventLog, StepTimer]]:
    events = EventLog(directory / "events.jsonl")
    clock = StepTimer(events)
    with build_components(config, directory, events, clock) as team:
        yield team, events, clock
    events.close()


def test_a_team_is_put_together(tmp_path: Path, stage: Stage) -> None:
    config = whole_config(tmp_path, algorithm={"kl": KL})
    with team_in(tmp_path, config) as (team, events, clock):
        roles: Any = [team.actor, team.critic, *team.model_scores._models]
        assert [role.name for role in roles] == ["actor", "critic", "reward_model"]
        assert [role.settings for role in roles] == [config.actor, CRITIC, SCORER]
        generator = team.stream.collector.generator
        assert (team.prompts, generator, team.validator) == ("the prompts", "the generator", "the validator")
        assert team.kl == KLController(0.2, 0.5, 10)
        assert stage.given["prompts"] == ("sums", config.data, config.batch, events)
        assert stage.given["rewards"] == (config.reward, events, True)
        assert stage.given["ray"] == (config.cluster,)
        assert stage.given["generator"] == (config, team.hybrid, "the rewards", stage.tokenizer, clock.progress, None)
        assert team.engine_probe == "the probe"
        without_engines = {role: model_setup(role, config) for role in ("critic", "reward_model")}
        assert stage.given["setups of the model probe"] == without_engines
        assert sorted(stage.compared) == ["actor", "critic", "reward_model"], "the probe knows which"
        assert stage.given["probe"] == (config, team.hybrid, team.actor, stage.tokenizer, events)
        assert stage.given["validator"] == (config, "held", "the generator", tmp_path, events)
        assert clock.pop_seconds().keys() == {"start", "step"}
    assert stage.dataset_of == dict.fromkeys(["sums", "held"], (config.data, config.rollout, stage.tokenizer))
    warned = [record.event for record in read_events(tmp_path / "events.jsonl")]
    assert Warned("reward_model", "it reads other templates") in warned
    assert Warned("reward", "a pattern matches nothing") in warned
    assert stage.given["hybrid"] == (config, ["actor", "critic", "reward_model"], "the context")


def test_validation_has_the_reward_functions_that_are_given_for_it(tmp_path: Path, stage: Stage) -> None:
    own = {"strict": RewardFunctionConfig(name="exact_match")}
    config = whole_config(tmp_path, validation={"reward_functions": own})
    with team_in(tmp_path, config) as _:
        given, _, others_score = stage.given["rewards"]
        assert not others_score, "a reward model does not validate"
        assert given == replace(config.reward, functions=own), "the manager that was made last"
        assert stage.journal.count("rewards begins") == 2, "and training has its own"


def test_what_is_cheap_comes_first_and_what_began_last_ends_first(tmp_path: Path, stage: Stage) -> None:
    with team_in(tmp_path, whole_config(tmp_path)) as (_, events, _):
        assert sorted(stage.journal[-4:-1]) == [("model", role) for role in ("actor", "critic", "reward_model")]
        assert [*stage.journal[:-4], stage.journal[-1]] == [
            ("tokenizer", "policy"),
            *[("check", "policy", "lm"), ("check", "policy", "score"), ("check", "scorer", "score")],
            "sources",
            "rewards begins",
            "ray begins",
            ("resources", tmp_path, events),
            "libraries",
            "hybrid",
            "connect",
        ]
        stage.journal.clear()
    assert stage.journal == ["close", *["shutdown"] * 3, "release", "ray ends", "rewards ends"]


@pytest.mark.parametrize(("device", "pools", "together"), [("cpu", "aa", 2), ("gpu", "ab", 2), ("gpu", "aa", 1)])
def test_models_load_side_by_side_but_for_those_of_one_gpu(
    device: Literal["cpu", "gpu"], pools: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = whole_config(tmp_path, reward_model=None)
    roles = dict(zip(("actor", "critic"), pools, strict=True))
    cluster = replace(config.cluster, device=device)
    config = replace(config, cluster=cluster, placement=PlacementConfig(pools={"a": 1, "b": 1}, roles=roles))
    present: list[str] = []
    most: list[int] = []

    def load(group: str, settings: Any, turns: Any) -> Any:
        present.append(group)
        time.sleep(0.2)
        most.append(len(present))
        present.remove(group)
        return SimpleNamespace(num_parameters=7, settings=settings)

    monkeypatch.setattr(made, "_CLIENTS", dict.fromkeys(("actor", "critic", "reward_model"), load))
    groups: dict[str, Future[Any]] = {role: Future() for role in roles}
    for role, group in groups.items():
        group.set_result(role)
    events = EventLog(tmp_path / "events.jsonl")
    probe: Any = SimpleNamespace(compare=lambda role, client: None)
    loaded = with_models(config, groups, events, probe, DeviceTurns(config))
    assert {name: role.settings for name, role in loaded.items()} == config.model_roles()  # type: ignore[attr-defined]
    assert max(most) == together
    seen = [record.event for record in read_events(tmp_path / "events.jsonl")]
    assert sorted(event.role for event in seen if isinstance(event, ModelLoaded)) == ["actor", "critic"]


def test_workers_are_started_with_what_they_need(tmp_path: Path, stage: Stage) -> None:
    config = whole_config(tmp_path)
    with team_in(tmp_path, config):
        pass
    assert stage.given["resources"] == (config.placement, config.cluster, config.deadlines)
    workers = {role: (worker.worker_class, worker.args) for role, (worker, _, _) in stage.workers.items()}
    setups = {role: model_setup(role, config) for role in ("actor", "critic", "reward_model")}
    assert workers == {
        "actor": ("mrl.workers.actor:ActorRolloutRefWorker", (setups["actor"], config.algorithm, 0.7, 6)),
        "critic": ("mrl.workers.critic:CriticWorker", (setups["critic"], config.algorithm, 6)),
        "reward_model": ("mrl.workers.frozen:RewardModelWorker", (setups["reward_model"],)),
    }
    meshes = {role: mesh for role, (_, mesh, _) in stage.workers.items()}
    assert meshes == {"actor": Mesh(4, tp=2), "critic": Mesh(4), "reward_model": Mesh(4)}


def test_a_teacher_is_told_the_policys_vocabulary_and_temperature(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both define the meaning of its log-probs relative to the policy's; the actor has the same temperature."""
    specs = {"policy": SimpleNamespace(vocab=90), "teacher": SimpleNamespace(vocab=99)}
    monkeypatch.setattr(made, "read_spec", specs.__getitem__)
    settings = TeacherConfig(path="teacher", max_tokens_per_device=64)
    distillation = DistillationConfig(form="top_k", top_k=5)
    roles = {"actor": "all", "teacher": "all"}
    config = make_config(tmp_path, teacher=settings, algorithm={"distillation": distillation})
    config = replace(config, placement=PlacementConfig(pools={"all": 4}, roles=roles))
    for role in roles:
        made._start(role, config, SimpleNamespace())  # type: ignore[arg-type]
    (of_actor, _, _), (of_teacher, _, _) = (stage.workers[role] for role in roles)
    setup, top_k, temperature = of_teacher.args
    assert of_teacher.worker_class == "mrl.workers.frozen:TeacherWorker"
    assert (setup.path, setup.head, setup.vocab, top_k) == ("teacher", "lm", 90, 5)
    assert (temperature, of_actor.args[2]) == (0.7, 0.7)


def test_a_team_may_do_without_critic_scorer_and_functions(tmp_path: Path, stage: Stage) -> None:
    config = whole_config(tmp_path, critic=None, reward_model=None, reward=RewardConfig())
    with team_in(tmp_path, config) as (team, _, _):
        assert (team.critic, team.model_scores._models, list(stage.workers)) == (None, [None], ["actor"])
        assert stage.given["generator"][2] is None
        assert "rewards" not in stage.given


def test_a_role_that_does_not_start_takes_the_others_with_it(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(role: str, *arguments: Any) -> Any:
        if role == "critic":
            raise MrlError("no place for it")
        return stage._group(role, *arguments)

    monkeypatch.setattr(made, "RayWorkerGroup", group)
    with pytest.raises(MrlError, match="no place for it"), team_in(tmp_path, whole_config(tmp_path)):
        pass
    assert stage.journal.count("shutdown") == 2
    assert "release" in stage.journal


class OwnManager:
    """A user's, which is made as mrl's."""

    def __init__(self, config: Any, events: EventLog, others_score: bool = False) -> None:
        self.config = config

    def __enter__(self) -> OwnManager:
        return self

    def __exit__(self, *error: object) -> None:
        OWN.append(self.config)


OWN: list[Any] = []


def test_own_classes_take_the_place_of_mrls(tmp_path: Path, stage: Stage) -> None:
    config = whole_config(tmp_path)
    config = replace(
        config,
        reward=replace(config.reward, manager=f"{__name__}:OwnManager"),
        actor=replace(config.actor, worker="mine.workers:Actor"),
    )
    with team_in(tmp_path, config):
        classes = {role: worker.worker_class for role, (worker, _, _) in stage.workers.items()}
    assert classes["actor"] == "mine.workers:Actor"
    assert classes["critic"] == "mrl.workers.critic:CriticWorker"
    assert [config.reward] == OWN, "it was made, and ended with the block"
    assert "rewards begins" not in stage.journal
