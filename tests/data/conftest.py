"""A real tokenizer on disk, and functions that open a source as a dataset or a loader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mrl.config.data import DataConfig, SourceConfig
from mrl.config.schema import BatchConfig, RolloutConfig
from mrl.events import EventLog

if (
    TYPE_CHECKING
):  # these load torch, so only the tests import them: a process that only distributes tests does not wait
    from mrl.data.chat import ChatTokenizer
    from mrl.data.prompt_loader import PromptLoader
    from mrl.data.rlhf_dataset import RLHFDataset
    from mrl.protocol import DataProto


def good_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a row in the usual schema, with some columns changed."""
    return {
        "prompt": [{"role": "user", "content": f"What is {number}?"}],
        "data_source": "numbers",
        "ability": "counting",
        "reward_model": {"ground_truth": str(number)},
        "extra_info": {"index": number},
    } | changes


def jsonl(*rows: object) -> bytes:
    """Write rows as JSON Lines; bytes are written unchanged."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def batch_of(dataset: RLHFDataset, rows: Iterable[int]) -> DataProto:
    """Return the prompts of these rows, numbered over all sources, as a batch. A row without a prompt is an error."""
    from mrl.data.rlhf_dataset import SkippedRow, to_batch

    draws = dataset.draws(0, len(dataset))
    results = dataset.read([draws[row] for row in rows])
    for result in results:
        if isinstance(result, SkippedRow):
            raise result.error or ValueError(f"a prompt of {result.num_tokens} tokens is dropped")
    return to_batch([result for result in results if not isinstance(result, SkippedRow)])


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mrl.demo.model import save_toy_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    save_toy_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> ChatTokenizer:
    from mrl.data.chat import load_tokenizer

    return load_tokenizer(str(tokenizer_directory))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that messages contain short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def events(here: Path) -> Iterator[EventLog]:
    log = EventLog(here / "events.jsonl")
    yield log
    log.close()


OpenDataset = Callable[..., "RLHFDataset"]
OpenLoader = Callable[..., "PromptLoader"]


@pytest.fixture
def dataset_of(tokenizer: ChatTokenizer) -> OpenDataset:
    """Function that opens `DataConfig` fields as a dataset. A train source may be just the text of its dataset."""
    from mrl.data.rlhf_dataset import open_dataset

    def make(max_prompt_tokens: int = 64, **fields: Any) -> RLHFDataset:
        data = data_config(**fields)
        rollout = RolloutConfig(max_prompt_tokens=max_prompt_tokens, max_response_tokens=8)
        return open_dataset(data.train, data, rollout, tokenizer)

    return make


@pytest.fixture
def loader_of(dataset_of: OpenDataset, events: EventLog) -> OpenLoader:
    """The same with a loader over the dataset."""
    from mrl.data.prompt_loader import PromptLoader

    def make(prompts_per_step: int = 1, **fields: Any) -> PromptLoader:
        batch = BatchConfig(
            prompts_per_step=prompts_per_step, samples_per_prompt=1, samples_per_update=prompts_per_step
        )
        dataset = dataset_of(**fields)
        fields.pop("max_prompt_tokens", None)
        return PromptLoader(dataset, data_config(**fields), batch, events)

    return make


def data_config(train: Any, **fields: Any) -> DataConfig:
    sources = train if isinstance(train, dict) else {"train": train}
    made = {name: SourceConfig(dataset=given) if isinstance(given, str) else given for name, given in sources.items()}
    return DataConfig(train=made, **fields)
