"""Training on recorded samples: no engine, no reward and no prompt is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mrl.config.resolved.load import in_directories
from mrl.config.schema import Config
from mrl.data.chat import load_tokenizer
from mrl.errors import SetupError
from mrl.events import EventLog
from mrl.observe.metrics import StepTimer
from mrl.protocol.step_record import StepRecord, recorded_steps
from mrl.trainer.components import (
    Components,
    check_model,
    kl_controller,
    model_probe,
    model_setup,
    started_groups,
    with_models,
)
from mrl.trainer.device_turns import DeviceTurns
from mrl.trainer.engine_probe import Answers
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.nodes import placed_run
from mrl.trainer.sample_stream import SampleStream, from_stored_form
from mrl.trainer.teachers import teachers_of


class NoEngines:
    """Stands for the engines of a run that generates nothing."""

    version = 1
    unaligned: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.fleet = SimpleNamespace(full_tensor_reason="", generating_s=0.0)

    def weights_changed(self) -> None:
        self.version += 1

    def metrics(self) -> dict[str, float]:
        return {}


class NoProbe:
    def compare_step(
        self, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]]
    ) -> dict[str, float]:
        """Judge nothing: the run that generated the samples has compared its engines."""
        return {}


class KeptState:
    """State of a part that does not run, kept for the next checkpoint."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


class RecordedSamples(SampleStream):
    """Samples of the steps of another run."""

    def __init__(self, directory: Path, engines: NoEngines, clock: StepTimer) -> None:
        self._directory, self._engines, self._clock = directory, engines, clock

    def next(self, step: int) -> tuple[ScoredBatch, Answers]:
        """Return the recorded samples of a step, and set the version of the weights that the engines had."""
        with self._clock("rollout"):
            record = StepRecord.read(self._directory, step)
            self._engines.version = record.facts["weights_version"]
            return ScoredBatch(from_stored_form(record.samples), dict(record.facts["sampled"])), {}

    def go_on(self, step: int, drawn: Mapping[int, ScoredBatch]) -> None:
        """Nothing was drawn ahead."""

    def drawn_ahead(self) -> dict[int, ScoredBatch]:
        return {}


def check_recorded(directory: Path, first: int, last: int) -> None:
    """Raise an error unless all of these steps are recorded."""
    known = recorded_steps(directory)
    if missing := [step for step in range(first, last + 1) if step not in known]:
        listed = ", ".join(map(str, known)) or "none"
        problem = f"step {missing[0]} was not recorded; recorded steps: {listed}"
        fix = f"train it with training.record.every=1, or set training.steps={missing[0] - 1}"
        raise SetupError(problem, where=str(directory), fix=fix)


def without_engines(config: Config) -> Config:
    """Return a configuration with the trained roles, the reference and the teachers, and only their pools."""
    kept = config.model_roles().keys() - config.scoring_models().keys()
    roles = {role: pool for role, pool in config.placement.roles.items() if role in kept}
    pools = {name: size for name, size in config.placement.pools.items() if name in roles.values()}
    placement = replace(config.placement, roles=roles, pools=pools)
    return replace(config, placement=placement, reward_model=None, reward_models={}, judge=None)


@contextmanager
def build_without_engines(config: Config, directory: Path, events: EventLog, clock: StepTimer) -> Iterator[Components]:
    """Start the models of a run whose samples are recorded."""
    config = in_directories(without_engines(config))
    assert config.training.samples_from is not None, "the samples are recorded"
    tokenizer = load_tokenizer(config.model.path, config.data)
    for name in config.model_roles():
        check_model(model_setup(name, config))
    with ExitStack() as stack:
        with clock("start"):
            probe = stack.enter_context(model_probe(config, list(config.model_roles()), tokenizer, events))
            context = stack.enter_context(placed_run(config, directory, events))
            groups = stack.enter_context(started_groups(config, context, list(config.model_roles())))
            turns = DeviceTurns(config)
            roles = with_models(config, groups, events, probe, turns)
        engines = NoEngines()
        yield Components(
            actor=roles["actor"],
            critic=roles.get("critic"),
            model_scores=cast(Any, KeptState()),
            hybrid=cast(Any, engines),
            engine_probe=cast(Any, NoProbe()),
            prompts=cast(Any, KeptState()),
            stream=RecordedSamples(Path(config.training.samples_from), engines, clock),
            validator=cast(Any, None),
            kl=kl_controller(config),
            turns=turns,
            traced=context.traced,
            reference=roles.get("reference"),
            teachers=teachers_of(config, roles, tokenizer),
        )
