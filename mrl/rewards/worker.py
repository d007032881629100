"""One worker: a process that scores one sample after another, and may be killed at any time.

The supervisor forks it, so it starts at once, and it limits the damage of a reward function: memory and files are
limited, the environment contains no secrets, the run's files are reachable only by name, and its remaining processes
are ended. This contains accidents. It is not a sandbox: malicious code needs one around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mrl.children import adopt_orphans, die_with
from mrl.config.reward import BUILT_IN, RewardConfig, RewardFunctionConfig
from mrl.errors import MrlError, NameUnknown, SetupError
from mrl.registry import load_attribute
from mrl.rewards.messages import MAX_REPLY_BYTES, MAX_SAMPLE_BYTES, FrameReader, control, frame, to_json
from mrl.rewards.outcome import BadResult, Failure, FailureKind, Score, answer_of, failure_reply, numbers_of, sum_of
from mrl.rewards.sample import Sample, is_group
from mrl.rewards.side_by_side import Running, SideBySide, clean_up

_MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class RewardFunction:
    label: str
    config: RewardFunctionConfig
    function: Callable[..., Any]

    async def scores(self, samples: list[Sample], *, in_loop: bool) -> list[Score]:
        """Return the share of each sample's score: of the group, or of the single sample."""
        result = self.function(samples if self.config.group else samples[0], **self.config.options)
        if inspect.iscoroutine(result):
            result = await result if in_loop else asyncio.run(result)
        results = result if self.config.group else [result]
        if not isinstance(results, list | tuple) or len(results) != len(samples):
            size = f" of length {len(results)}" if isinstance(results, list | tuple) else ""
            what = f"the result is of type {type(results).__name__}{size}, not a list of {len(samples)} results"
            raise BadResult(what)
        return [self._share(item) for item in results]

    def _share(self, result: Any) -> Score:
        numbers = numbers_of(result)
        parts = {self.label if name == "score" else f"{self.label}/{name}": numbers[name] for name in numbers}
        return Score(self.config.weight * numbers["score"], parts, 0.0, answer_of(result))


def load_reward_function(label: str, config: RewardFunctionConfig) -> RewardFunction:
    """Load a function and check its options."""
    try:
        function = load_attribute(BUILT_IN.get(config.name, config.name))
    except ModuleNotFoundError as error:
        if config.name not in BUILT_IN:
            raise
        raise SetupError(f"{error.name} is required but not installed", fix='pip install "mrl[math]"') from error
    if not callable(function):
        raise NameUnknown(f'"{config.name}" is a {type(function).__name__}, not a function')
    try:
        inspect.signature(function).bind(None, **config.options)
    except TypeError as error:
        takes = f"{getattr(function, '__name__', 'score')}{inspect.signature(function)}"
        raise NameUnknown(f"{error}; the function is {takes}", fix=f"see reward.functions.{label}.options") from error
    return RewardFunction(label, config, function)


def run_worker(config: RewardConfig, channel: socket.socket, supervisor: int, running: Running) -> NoReturn:
    """Score the samples of the channel until it closes. Never return to the supervisor's code."""
    status = 1
    try:
        loaded: list[RewardFunction | str] = []
        try:
            contain_process(channel, config.memory_bytes, supervisor)
            loaded += [_load(label, function) for label, function in config.functions.items()]
        except OSError as error:
            loaded.append(f"a reward worker cannot set its limits: {error}")
        functions = [item for item in loaded if isinstance(item, RewardFunction)]
        if problems := [item for item in loaded if isinstance(item, str)]:
            channel.sendall(control(problems=problems))
        elif config.concurrency == 1:
            channel.sendall(control(ready=True))
            _serve(channel, functions, config)
            status = 0
        else:
            SideBySide(channel, config, running, partial(score_job, functions, config.memory_bytes)).serve()
            status = 0
    finally:
        os._exit(status)


def contain_process(channel: socket.socket, memory_bytes: int, supervisor: int) -> None:
    """Close everything inherited from the supervisor except the channel, and set the limits."""
    die_with(supervisor)
    os.setsid()
    adopt_orphans()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != channel.fileno():
            with contextlib.suppress(OSError):  # the descriptor that listed them is already closed
                os.close(int(name))
    # Processes forked by a reward function must not use the channel.
    os.register_at_fork(after_in_child=channel.close)
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, kill workers before the run
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (lower, lower))


def _load(label: str, config: RewardFunctionConfig) -> RewardFunction | str:
    """Return the function after calling `warm_up()` of its module, so that late imports are not charged to a sample."""
    try:
        function = load_reward_function(label, config)
        warm_up = getattr(sys.modules[BUILT_IN.get(config.name, config.name).partition(":")[0]], "warm_up", None)
        if warm_up is not None:
            warm_up()
        return function
    except BaseException as error:  # importing a user's module may raise anything, including SystemExit
        return f"reward.functions.{label}: {config.name} cannot be loaded: {describe(error)}"


def _serve(channel: socket.socket, functions: list[RewardFunction], config: RewardConfig) -> None:
    """Answer each frame, and announce that the next may be sent."""
    reader, scored, home, own = FrameReader(MAX_SAMPLE_BYTES), 0, os.getcwd(), os.getpid()
    while data := channel.recv(1 << 20):
        for ticket, body in reader.feed(data):
            reply = score_sample(functions, body, config.memory_bytes)
            if os.getpid() != own:
                return  # a fork inside the reward function that returned from it
            clean_up(home)
            scored += 1
            stays = scored < config.samples_per_worker and reply.get("failure") != "memory"
            channel.sendall(frame(ticket, to_json(reply)) + (control(ready=True) if stays else b""))
            if not stays:
                return


def score_sample(functions: list[RewardFunction], body: bytes, memory_bytes: int) -> dict[str, Any]:
    """Return the result of `score_job` for a sample that is alone in this process. A coroutine gets its own event
    loop."""
    try:
        score_job(functions, memory_bytes, 0, body, in_loop=False).send(None)
    except StopIteration as done:
        reply: dict[str, Any] = done.value
        return reply
    raise AssertionError("score_job never waits outside of a loop")


async def score_job(
    functions: list[RewardFunction], memory_bytes: int, ticket: int, body: bytes, *, in_loop: bool = True
) -> dict[str, Any]:
    """Return the scores of a sample, or of each sample in a group, or the failure, ready to be sent."""
    begin, label = time.monotonic(), ""
    kind: FailureKind
    try:
        samples = Sample.all_from_json(body)
        shares: list[list[Score]] = [[] for _ in samples]
        for function in functions:
            if function.config.group != is_group(body) or not function.config.scores(samples[0].data_source):
                continue
            label = function.label
            # Each function gets its own copies, so it cannot affect the next one.
            results = await function.scores(Sample.all_from_json(body), in_loop=in_loop)
            for sample_shares, share in zip(shares, results, strict=True):
                sample_shares.append(share)
        scores = []
        for sample_shares in shares:
            score = sum_of(sample_shares)
            if isinstance(score, Failure):
                raise BadResult(score.detail)
            entry = {"value": score.value, "parts": score.parts, "answer": score.answer}
            scores.append({name: value for name, value in entry.items() if value is not None})
        reply = {"scores": scores, "seconds": time.monotonic() - begin}
        if (size := len(to_json(reply))) > MAX_REPLY_BYTES:
            num_parts = sum(len(share.parts) for sample_shares in shares for share in sample_shares)
            raise BadResult(f"the {num_parts} parts of all functions take {size} bytes; at most {MAX_REPLY_BYTES}")
        return reply
    except BadResult as error:
        kind, detail = "bad_result", str(error)
    except MemoryError:
        kind, detail = "memory", f"more than {memory_bytes / (1 << 20):g} MiB"
    except BaseException as error:  # any exception, including SystemExit, is a failure of this sample
        kind, detail = "raised", describe(error)
    return failure_reply(kind, f"{label}: {detail}", time.monotonic() - begin)


def describe(error: BaseException) -> str:
    """Return an exception as text, with the line that raised it. This also works if its own text cannot be created."""
    if isinstance(error, MrlError):
        return str(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    places = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{text} ({places[-1].filename}:{places[-1].lineno}, {places[-1].name})" if places else text
