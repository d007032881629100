"""Workers whose Megatron is another model than the files say, as a defect of mrl would make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

from mrl.controller import Dispatch, register
from mrl.models.families import read_spec
from mrl.models.spec import ModelSpec
from mrl.workers.critic import CriticWorker
from mrl.workers.messages import ModelFacts
from mrl.workers.supervised import SftWorker


def _wrong_norm(path: str) -> ModelSpec:
    return replace(read_spec(path), norm_eps=0.01)


def _with_wrong_norm(init_model: Callable[[], ModelFacts]) -> ModelFacts:
    with mock.patch("mrl.workers.strategies.read_spec", _wrong_norm):
        return init_model()


class WrongNorm(SftWorker):
    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> ModelFacts:
        return _with_wrong_norm(super().init_model)


class WrongNormCritic(CriticWorker):
    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> ModelFacts:
        return _with_wrong_norm(super().init_model)
