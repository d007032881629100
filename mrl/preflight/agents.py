"""The environments as a run will meet them: the chat template between turns, and a conversation without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from mrl.agents.loop import Dialog, Dialogs, Opening, open_dialogs
from mrl.agents.observation import CONVERSATIONS, TurnTemplate, differences
from mrl.config.agent import EnvironmentConfig
from mrl.config.names import TEXT_FORMATS
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, template_options
from mrl.data.rlhf_dataset import Prompt
from mrl.errors import AgentError
from mrl.preflight.findings import CheckResult, fail, ok, warn
from mrl.rollout.requests import Generated

_SAID = "I know."
"""What is said in the place of a model: a turn that calls nothing."""


def check_agents(
    config: Config, prompts: Mapping[str, list[Prompt]], tokenizer: ChatTokenizer
) -> Iterator[CheckResult]:
    """Check what conversations go by; nothing is generated."""
    formats = {each.format for each in config.agent.environments.values()}
    if formats - {*TEXT_FORMATS} and not config.data.raw_text:
        yield from _check_template(config, tokenizer)
    for name, environment in config.agent.environments.items():
        yield from _check_room(name, environment, config.rollout.max_response_tokens)
    first: dict[str, Prompt] = {}
    for prompt in (each for of_source in prompts.values() for each in of_source):
        first.setdefault(config.agent.name_for(prompt.row.data_source) or "", prompt)
    for name in config.agent.environments:
        if name not in first:
            what = "none of the rows that were looked at is of a data source that it takes"
            yield warn(f"environment {name}", what, f"agent.environments.{name}.sources; or `--all-rows`")
    first.pop("", None)
    with ExitStack() as stack:
        dialogs = open_dialogs(config, tokenizer, lambda event: None, stack)
        if dialogs is not None and first:
            yield from _check_environments(config, dialogs, list(first.values()), tokenizer)


def _check_room(name: str, environment: EnvironmentConfig, room: int) -> Iterator[CheckResult]:
    full, wanted = environment.full_turns(room), environment.whole_response_tokens()
    if full is not None and wanted is not None and full < environment.max_turns:
        what = f"{full} of {environment.max_turns} turns fit into the {room} tokens of a response where all are full"
        yield warn(f"environment {name}", what, f"rollout.max_response_tokens={wanted}, or the rest ends by length")


def _check_template(config: Config, tokenizer: ChatTokenizer) -> Iterator[CheckResult]:
    """Say in which conversations the template would show a model something else than what it has written and read."""
    template = TurnTemplate(tokenizer, template_options(config.data))
    same = []
    for label, messages in CONVERSATIONS.items():
        try:
            found = list(differences(template, tokenizer, messages))
        except AgentError as error:
            found = [error.what]
        if found:
            yield warn(f"turns: {label}", found[0], "the model is shown what it has written and read, in one piece")
        else:
            same.append(label)
    if same:
        yield ok("turns", f"turn by turn is what the chat template makes of the whole: {', '.join(same)}")


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
            yield fail(about, what, "mend the environment, or what it asks")
            continue
        score = "no score of its own" if dialog.score is None else f"the score {dialog.score:g}"
        added = f", {len(dialog.prompt_ids)} tokens of prompt with its tools" if dialog.prompt_text else ""
        what = f"to {_SAID!r} it ends by {dialog.ended_conversation.ended} with {score}{added}"
        yield ok(about, f"{what}; {seconds:.1f} s with its start")


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
    """Return the conversations in which the same is said in each turn."""
    said = np.asarray(tokenizer([_SAID], add_special_tokens=False)["input_ids"][0], np.int32)
    dialogs.begin(openings)
    while True:
        for request in dialogs.take():
            ids = said[: request.max_tokens]
            dialogs.written(Generated(request.key, ids, np.zeros(len(ids), np.float32), "stop", 1))
        arriving = dialogs.arriving()
        if arriving is None:
            return dialogs.ended()
        arriving.result()
