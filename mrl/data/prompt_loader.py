"""One batch of prompts per step, always full: what is skipped on the way is counted, written down and limited."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.schema import BatchConfig, DataConfig
from mrl.data.rlhf_dataset import Prompt, RLHFDataset, SkippedRow, to_batch
from mrl.data.sampler import DifficultySampler, Draw, PromptSampler
from mrl.data.sources import fingerprint
from mrl.errors import BadRow, DataError
from mrl.events import EventLog, SampleSkipped
from mrl.protocol import DataProto
from mrl.registry import load_attribute

MAX_CONSECUTIVE_SKIPS = 10_000
MAX_NAMED = 5
SAMPLERS = {"shares": PromptSampler, "difficulty": DifficultySampler}
_GIVEN = ("seed", "shuffle")


class SkipLog:
    """Rows that gave no prompt: overlong ones are counted, bad ones are allowed up to a limit."""

    def __init__(self, max_bad_rows: int, events: EventLog) -> None:
        self.overlong: Counter[str] = Counter()
        """Source -> how many overlong prompts were drawn."""
        self.bad_rows: dict[str, str] = {}
        """Source and row -> what is wrong with it; a row is listed once however often it is drawn."""
        self._max_bad_rows = max_bad_rows
        self._events = events

    def add(self, unusable: SkippedRow) -> None:
        """Count it. A prompt that must not be too long, or one bad row more than allowed, is an error."""
        draw, error = unusable.draw, unusable.error
        if error is not None and not isinstance(error, BadRow):
            raise error
        if error is None:
            self.overlong[draw.source] += 1
            detail = f"{draw.source} row {draw.row}: {unusable.num_tokens} tokens"
            self._events.write(SampleSkipped(draw.number, "prompt too long", detail))
            return
        self.bad_rows[f"{draw.source}/{draw.row}"] = str(error)
        if len(self.bad_rows) > self._max_bad_rows:
            if self._max_bad_rows == 0:
                raise error
            named = "\n  - ".join(["", *list(self.bad_rows.values())[-MAX_NAMED:]])
            counted = f"{len(self.bad_rows)} bad rows, and data.max_bad_rows is {self._max_bad_rows}"
            fix = "mend the rows, or raise data.max_bad_rows"
            raise DataError(f"{counted}; the last of them:{named}", fix=fix)
        self._events.write(SampleSkipped(draw.number, "bad row", str(error)))

    def state_dict(self) -> dict[str, Any]:
        return {"overlong": dict(self.overlong), "bad_rows": dict(self.bad_rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.overlong = Counter(state["overlong"])
        self.bad_rows = dict(state["bad_rows"])


def _make_sampler(sizes: Mapping[str, int], weights: Mapping[str, float | None], data: DataConfig) -> PromptSampler:
    kind: type[PromptSampler] = SAMPLERS[data.sampler] if data.sampler in SAMPLERS else load_attribute(data.sampler)
    try:
        inspect.signature(kind).bind(sizes, weights, seed=data.seed, shuffle=data.shuffle, **data.sampler_options)
    except TypeError as error:
        named = [name for name, each in inspect.signature(kind).parameters.items() if each.kind is each.KEYWORD_ONLY]
        takes = ", ".join(name for name in named if name not in _GIVEN) or "none"
        raise DataError(f"{data.sampler}: {error}", where="data.sampler_options", fix=f"it takes {takes}") from error
    return kind(sizes, weights, seed=data.seed, shuffle=data.shuffle, **data.sampler_options)


class PromptLoader:
    """Draws prompts without end. A batch may reach from one epoch into the next: no row is left out or repeated."""

    def __init__(self, dataset: RLHFDataset, data: DataConfig, batch: BatchConfig, events: EventLog) -> None:
        num_rows, wanted = len(dataset), batch.prompts_per_step
        if num_rows < wanted:
            raise DataError(
                f"{num_rows} prompts for batch.prompts_per_step={wanted}: a step would hold the same prompt twice",
                fix=f"add prompts, or batch.prompts_per_step={num_rows}",
            )
        weights = {name: source.weight for name, source in data.train.items()}
        self.skips = SkipLog(data.max_bad_rows, events)
        self._dataset, self.num_rows = dataset, num_rows
        self._contents = {name: fingerprint(source) for name, source in data.train.items()}
        self._sampler = _make_sampler(dataset.sizes, weights, data)
        self._prompts_per_step = wanted
        self._num_skipped: Counter[str] = Counter()

    def next_batch(self) -> DataProto:
        prompts: list[Prompt] = []
        while missing := self._prompts_per_step - len(prompts):
            # Exactly as many draws as could be used: nothing is drawn ahead, so the counts are the whole state.
            for found in self._dataset.read([self._sampler.draw() for _ in range(missing)]):
                if isinstance(found, SkippedRow):
                    self.skips.add(found)
                    self._count_consecutive_skips(found.draw)
                else:
                    self._num_skipped[found.draw.source] = 0
                    prompts.append(found)
        return to_batch(prompts)

    def learn(self, solved: Mapping[str, float]) -> None:
        """Tell the sampler the share of samples that were solved, by the uid of their prompt."""
        self._sampler.learn(solved)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands between two batches, as plain JSON."""
        skips = self.skips.state_dict()
        return {"sampler": self._sampler.state_dict(), "skips": skips, "contents": dict(self._contents)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch that would have come next."""
        self._sampler.load_state_dict(state["sampler"])
        then = state.get("contents", self._contents)
        if changed := [name for name, now in self._contents.items() if then.get(name) != now]:
            raise DataError(
                f"the files of {', '.join(changed)} hold other rows than when the run began, by size and samples",
                where="data.train",
                fix="resume with the files that it began with, or start a new run",
            )
        self.skips.load_state_dict(state["skips"])

    def _count_consecutive_skips(self, draw: Draw) -> None:
        """A source of which nothing is ever usable would be drawn from for ever."""
        self._num_skipped[draw.source] += 1
        size = self._dataset.sizes[draw.source]
        # Within twice its rows at least one whole epoch was seen.
        if self._num_skipped[draw.source] >= min(2 * size, MAX_CONSECUTIVE_SKIPS):
            raise DataError(
                f'source "{draw.source}": none of the last {self._num_skipped[draw.source]} rows drawn is usable '
                f"({self.skips.overlong[draw.source]} prompts were too long)",
                fix="raise rollout.max_prompt_tokens, or remove the source",
            )


def one_pass(dataset: RLHFDataset, batch_size: int, skips: SkipLog) -> Iterator[DataProto]:
    """Yield every prompt once and in order, for validation; the last batch may be smaller."""
    usable: list[Prompt] = []
    for begin in range(0, len(dataset), batch_size):
        for found in dataset.read(dataset.draws(begin, begin + batch_size)):
            if isinstance(found, SkippedRow):
                skips.add(found)
            else:
                usable.append(found)
        while len(usable) >= batch_size:
            yield to_batch(usable[:batch_size])
            usable = usable[batch_size:]
    if usable:
        yield to_batch(usable)
