"""One full batch of prompts per step. Skipped rows are counted, recorded and limited."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.data import DataConfig
from mrl.config.schema import BatchConfig
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
    """Rows without a usable prompt: overlong ones are counted, bad ones are allowed up to a limit."""

    def __init__(self, max_bad_rows: int, events: EventLog) -> None:
        self.overlong: Counter[str] = Counter()
        """Source -> number of overlong prompts drawn."""
        self.bad_rows: dict[str, str] = {}
        """Source and row -> its error. A row is listed once, no matter how often it is drawn."""
        self._max_bad_rows = max_bad_rows
        self._events = events

    def add(self, unusable: SkippedRow) -> None:
        """Count a skipped row. Raise an error if overlong prompts are errors, or if there are more bad rows than
        allowed."""
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
            counted = f"{len(self.bad_rows)} bad rows, but data.max_bad_rows is {self._max_bad_rows}"
            fix = "correct the rows, or raise data.max_bad_rows"
            raise DataError(f"{counted}; the last ones:{named}", fix=fix)
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
        named = [name for name, part in inspect.signature(kind).parameters.items() if part.kind is part.KEYWORD_ONLY]
        takes = ", ".join(name for name in named if name not in _GIVEN) or "none"
        raise DataError(f"{data.sampler}: {error}", where="data.sampler_options", fix=f"it takes {takes}") from error
    return kind(sizes, weights, seed=data.seed, shuffle=data.shuffle, **data.sampler_options)


class PromptLoader:
    """Draws prompts without end. A batch may span two epochs, so that no row is left out or repeated."""

    def __init__(self, dataset: RLHFDataset, data: DataConfig, batch: BatchConfig, events: EventLog) -> None:
        num_rows, needed = len(dataset), batch.prompts_per_step
        if num_rows < needed:
            raise DataError(
                f"{num_rows} prompts for batch.prompts_per_step={needed}: a step would hold the same prompt twice",
                fix=f"add prompts, or set batch.prompts_per_step={num_rows}",
            )
        weights = {name: source.weight for name, source in data.train.items()}
        self.skips = SkipLog(data.max_bad_rows, events)
        self._dataset, self.num_rows = dataset, num_rows
        self._contents = {name: fingerprint(source) for name, source in data.train.items()}
        self._sampler = _make_sampler(dataset.sizes, weights, data)
        self._prompts_per_step = needed
        self._num_skipped: Counter[str] = Counter()

    def next_batch(self) -> DataProto:
        prompts: list[Prompt] = []
        while missing := self._prompts_per_step - len(prompts):
            # Draw only as many as are needed. Nothing is drawn ahead, so the counts are the whole state.
            for entry in self._dataset.read([self._sampler.draw() for _ in range(missing)]):
                if isinstance(entry, SkippedRow):
                    self.skips.add(entry)
                    self._count_consecutive_skips(entry.draw)
                else:
                    self._num_skipped[entry.draw.source] = 0
                    prompts.append(entry)
        return to_batch(prompts)

    def learn(self, solved: Mapping[str, float]) -> None:
        """Pass the share of solved samples, by the uid of their prompt, to the sampler."""
        self._sampler.learn(solved)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader between two batches, as plain JSON."""
        skips = self.skips.state_dict()
        return {"sampler": self._sampler.state_dict(), "skips": skips, "contents": dict(self._contents)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, so that the same batch follows as before."""
        self._sampler.load_state_dict(state["sampler"])
        recorded = state.get("contents", self._contents)
        if changed := [name for name, now in self._contents.items() if recorded.get(name) != now]:
            raise DataError(
                f"the files of {', '.join(changed)} have changed since the run began, judged by size and samples",
                where="data.train",
                fix="resume with the original files, or start a new run",
            )
        self.skips.load_state_dict(state["skips"])

    def _count_consecutive_skips(self, draw: Draw) -> None:
        """Raise an error for a source without usable rows, which would be drawn from forever."""
        self._num_skipped[draw.source] += 1
        size = self._dataset.sizes[draw.source]
        # Twice the number of rows includes at least one whole epoch.
        if self._num_skipped[draw.source] >= min(2 * size, MAX_CONSECUTIVE_SKIPS):
            raise DataError(
                f'source "{draw.source}": none of the last {self._num_skipped[draw.source]} drawn rows is usable '
                f"({self.skips.overlong[draw.source]} prompts were too long)",
                fix="raise rollout.max_prompt_tokens, or remove the source",
            )


def one_pass(dataset: RLHFDataset, batch_size: int, skips: SkipLog) -> Iterator[DataProto]:
    """Yield every prompt once, in order, for validation. The last batch may be smaller."""
    usable: list[Prompt] = []
    for begin in range(0, len(dataset), batch_size):
        for entry in dataset.read(dataset.draws(begin, begin + batch_size)):
            if isinstance(entry, SkippedRow):
                skips.add(entry)
            else:
                usable.append(entry)
        while len(usable) >= batch_size:
            yield to_batch(usable[:batch_size])
            usable = usable[batch_size:]
    if usable:
        yield to_batch(usable)
