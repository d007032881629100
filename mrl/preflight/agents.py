"""Checks of the environments: the chat template between turns, and a conversation with a fixed answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from mrl.agents.formats import load_format
from mrl.agents.loop import Dialog, Dialogs, Opening, open_dialogs
from mrl.agents.observation import CONVERSATIONS, TurnTemplate, differences
from mrl.config.agent import EnvironmentConfig
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, template_options
from mrl.data.rlhf_dataset import Prompt
from mrl.errors import AgentError
from mrl.preflight.findings import CheckResult, fail, ok, warn
from mrl.rollout.requests import Generated

_REPLY = "I know."
"""Text that replaces the model's turn: it calls no tool."""


def check_agents(
    config: Config, prompts: Mapping[str, list[Prompt]], tokenizer: ChatTokenizer
) -> Iterator[CheckResult]:
    """Check the chat template, the room for turns, and the environments, without generating."""
    formats = {environment.format for environment in config.agent.environments.values()}
    if not config.data.raw_text and not all(load_format(name).answers_in_text for name in formats):
        yield from _check_template(config, tokenizer)
    for name, environment in config.agent.environments.items():
        yield from _check_room(name, environment, config.rollout.max_response_tokens)
    first: dict[str, Prompt] = {}
    for prompt in (prompt for rows in prompts.values() for prompt in rows):
        first.setdefault(config.agent.name_for(prompt.row.data_source) or "", prompt)
    for name in config.agent.environments:
        if name not in first:
            what = "none of the checked rows has a data source that it handles"
            yield warn(f"environment {name}", what, f"change agent.environments.{name}.sources, or use `--all-rows`")
    first.pop("", None)
    with ExitStack() as stack:
        dialogs = open_dialogs(config, tokenizer, lambda event: None, stack)
        if dialogs is not None and first:
            yield from _check_environments(config, dialogs, list(first.values()), tokenizer)


def _check_room(name: str, environment: EnvironmentConfig, room: int) -> Iterator[CheckResult]:
    full, wanted = environment.full_turns(room), environment.whole_response_tokens()
    if full is not None and wanted is not None and full < environment.max_turns:
        what = f"{full} of {environment.max_turns} turns of full length fit into a response of {room} tokens"
        yield warn(
            f"environment {name}",
            what,
            f"set rollout.max_response_tokens={wanted}; otherwise long conversations are cut",
        )


def _check_template(config: Config, tokenizer: ChatTokenizer) -> Iterator[CheckResult]:
    """Check whether the template would show the model something other than it has written and read."""
    template = TurnTemplate(tokenizer, template_options(config.data))
    same = []
    for label, messages in CONVERSATIONS.items():
        try:
            problems = list(differences(template, tokenizer, messages))
        except AgentError as error:
            problems = [error.what]
        if problems:
            yield warn(f"turns: {label}", problems[0], "the model sees its earlier turns as one text instead")
        else:
            same.append(label)
    if same:
        yield ok("turns", f"the chat template gives the same text turn by turn: {', '.join(same)}")


def _check_environments(
    config: Config, dialogs: Dialogs, prompts: Sequence[Prompt], tokenizer: ChatTokenizer
) -> Iterator[CheckResult]:
    began, limit = time.monotonic(), config.rollout.max_response_tokens
    ended = _spoken(dialogs, [_opening(row, prompt, limit) for row, prompt in enumerate(prompts)], tokenizer)
    seconds = time.monotonic() - began
    for dialog in sorted(ended, key=lambda dialog: dialog.opening.row):
        about = f"environment {dialog.environment}"
        if dialog.failure is not None:
            what = f"{dialog.failure.kind}: {dialog.failure.detail}"
            yield fail(about, what, "correct the environment, or the service that it uses")
            continue
        score = "no score" if dialog.score is None else f"the score {dialog.score:g}"
        added = f", {len(dialog.prompt_ids)} prompt tokens with its tools" if dialog.prompt_text else ""
        what = f"after {_REPLY!r} it ends with `{dialog.ended_conversation.ended}` and {score}{added}"
        yield ok(about, f"{what}; {seconds:.1f} s including its start")


def _opening(row: int, prompt: Prompt, max_tokens: int) -> Opening:
    return Opening(
        row=row,
        key=str(row),
        uid=prompt.draw.uid,
        sample=0,
        data_source=prompt.row.data_source,
        prompt_ids=np.asarray(prompt.ids, np.int32),
        seed=row,
        max_tokens=max_tokens,
        messages=prompt.row.messages,
        ground_truth=prompt.row.ground_truth,
        extra_info=prompt.row.extra_info,
    )


def _spoken(dialogs: Dialogs, openings: Sequence[Opening], tokenizer: ChatTokenizer) -> list[Dialog]:
    """Return the conversations with the same reply in each turn."""
    reply = np.asarray(tokenizer([_REPLY], add_special_tokens=False)["input_ids"][0], np.int32)
    dialogs.begin(openings)
    while True:
        for request in dialogs.take():
            ids = reply[: request.max_tokens]
            dialogs.written(Generated(request.key, ids, np.zeros(len(ids), np.float32), "stop", 1))
        arriving = dialogs.arriving()
        if arriving is None:
            return dialogs.ended()
        arriving.result()
