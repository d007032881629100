"""An engine that writes what a script says, under the real loop, real environment processes and a real template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mrl.agents.client import EnvironmentClient, environment_pool
from mrl.agents.conversation import Ids
from mrl.agents.formats import load_format
from mrl.agents.loop import Dialog, Dialogs, Opening
from mrl.agents.observation import Speaker, TurnTemplate
from mrl.config.agent import ENVIRONMENTS, AgentConfig, EnvironmentConfig
from mrl.data.chat import ChatTokenizer
from mrl.events import Event
from mrl.rollout.requests import Generated, GenerationRequest
from tests.agents.tool_templates import tokenizer_with_tools

Script = Callable[[str], str]
"""The model's continuation of a context, including its end token."""


def call(key: str) -> str:
    """Return the text of a call in Qwen's format."""
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'key': key}})}\n</tool_call><|im_end|>"


class Stage:
    """The conversations of one rollout."""

    def __init__(self, directory: Path, script: Script, world: str = "Facts", **settings: Any) -> None:
        options, max_prompt_tokens = settings.pop("options", {}), settings.pop("max_prompt_tokens", 400)
        turns = {
            name: settings.pop(name)
            for name in ("max_turns", "max_observation_tokens", "max_turn_tokens", "weight", "tools")
            if name in settings
        }
        name = world if world in ENVIRONMENTS else f"tests.agents.worlds:{world}"
        environment = EnvironmentConfig(name=name, options=options, **turns)
        self.config = AgentConfig(environments={"world": environment}, **{"num_workers": 2} | settings)
        self.tokenizer: ChatTokenizer = tokenizer_with_tools("qwen2.5", directory / "tokenizer")
        self.script = script
        self.events: list[Event] = []
        self.stack = ExitStack()
        self.form = form = load_format("hermes")
        template = TurnTemplate(self.tokenizer, {})
        limit = environment.max_observation_tokens or 400
        speaker = Speaker(self.tokenizer, form, template, max_tokens=limit, max_prompt_tokens=max_prompt_tokens)
        self.prompts = template
        self.pool = environment_pool(self.config)
        environments: EnvironmentClient[Dialog] = EnvironmentClient(self.pool, self.events.append)
        self.dialogs = Dialogs(self.config, environments, {"world": speaker}, self.tokenizer.decode, self.events.append)
        self.stack.callback(environments.close)
        self.contexts: list[str] = []
        self.spoken: list[tuple[Ids, Ids]] = []
        """Token ids read before each turn, and token ids written in it."""
        self.seeds: list[int] = []
        self.limits: list[int] = []
        self.requests: list[GenerationRequest] = []

    def ids(self, text: str) -> Ids:
        return np.array(self.tokenizer([text], add_special_tokens=False)["input_ids"][0], np.int32)

    def opening(self, row: int, truth: str = "", max_tokens: int = 400, **extra_info: Any) -> Opening:
        messages = [{"role": "user", "content": f"What is {row}?"}]
        text = self.prompts.render(messages, calls_for_answer=True)
        return Opening(
            row=row,
            key=str(row),
            uid=f"p{row}",
            sample=0,
            data_source="facts",
            prompt_ids=self.ids(text),
            seed=row,
            max_tokens=max_tokens,
            messages=messages,
            ground_truth=truth,
            extra_info=extra_info,
        )

    def run(self, *openings: Opening) -> list[Dialog]:
        """Return the dialogs in the order in which they end."""
        self.dialogs.begin(openings)
        ended = []
        for generated in self._generate():
            self.dialogs.written(generated)
            ended += self.dialogs.ended()
        return ended + self.dialogs.ended()

    def _generate(self) -> Iterator[Generated]:
        while True:
            if not (requests := self.dialogs.take()):
                arriving = self.dialogs.arriving()
                if arriving is None:
                    return
                arriving.result(60)
            for request in requests:
                yield self._written(request)

    def _written(self, request: GenerationRequest) -> Generated:
        context = self.tokenizer.decode(request.prompt_ids.tolist())
        self.contexts.append(context)
        self.requests.append(request)
        ids = self.ids(self.script(context))
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        self.spoken.append((request.prompt_ids, ids))
        self.seeds.append(request.seed)
        self.limits.append(request.max_tokens)
        return Generated(request.key, ids, np.full(len(ids), -0.5, np.float32), finish, 1, replica=0)  # type: ignore[arg-type]
