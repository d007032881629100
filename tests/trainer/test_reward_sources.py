"""The data sources of the rows against the functions that score them, before a run begins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.data import ColumnsConfig, DataConfig, SourceConfig
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.config.schema import Config
from mrl.errors import RewardError
from mrl.trainer import checks
from mrl.trainer.checks import check_reward_sources
from tests.trainer.fakes import SCORER, make_config


class Made:
    """Rows made by code; only the last one has another source."""

    num_read = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, str]:
        Made.num_read += 1
        return {"data_source": "last" if index == self._size - 1 else "gsm8k"}


def rows(path: Path, *names: str | None) -> SourceConfig:
    """A file of rows of these data sources; None is a row that has none."""
    table = [{"prompt": "?", **({} if name is None else {"data_source": name})} for name in names]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return SourceConfig(dataset=str(path))


def config_of(directory: Path, *patterns: list[str] | None, **sources: SourceConfig) -> Config:
    functions = {f"f{n}": RewardFunctionConfig(name="gsm8k", sources=given) for n, given in enumerate(patterns)}
    config = make_config(directory, reward=RewardConfig(functions=functions))
    return dataclasses.replace(config, data=DataConfig(train=sources))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_source_in_one_row_that_nothing_scores_is_an_error(tmp_path: Path, kind: str) -> None:
    file = rows(tmp_path / f"rows.{kind}", *["gsm8k"] * 5000, "math/algebra", "code", *["gsm8k"] * 5000)
    with pytest.raises(RewardError) as caught:
        list(check_reward_sources(config_of(tmp_path, ["gsm8k"], ["math/*"], mixed=file)))
    assert str(caught.value) == (
        'data.train.mixed: no function with a weight scores the data source "code" (f0 scores gsm8k; f1 scores math/*)'
        "\n  fix: add it to reward.functions.NAME.sources, or use a function without sources"
    )
    assert not list(check_reward_sources(config_of(tmp_path, ["gsm8k"], ["math/*", "code"], mixed=file)))


def test_a_pattern_without_a_source_is_warned_of(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", "gsm8k", None, "math/algebra")
    named = SourceConfig(dataset=str(tmp_path / "none.jsonl"), columns=ColumnsConfig(data_source=None))
    config = config_of(tmp_path, None, ["gsm8k", "mth/*"], ["aime"], mixed=file, aime=named)
    assert list(check_reward_sources(config)) == [
        'reward.functions.f1.sources: "mth/*" matches no data source; the data sources are: aime, gsm8k, math/algebra'
    ]


def test_no_row_is_read_where_no_function_names_its_sources(tmp_path: Path) -> None:
    config = config_of(tmp_path, None, [], mixed=SourceConfig(dataset=str(tmp_path / "absent.jsonl")))
    assert list(check_reward_sources(config)) == []


def test_a_reward_model_scores_the_rest_of_training_but_not_of_validation(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", "gsm8k", "code")
    config = dataclasses.replace(config_of(tmp_path, ["gsm8k"], mixed=file), reward_model=SCORER)
    assert list(check_reward_sources(config)) == []
    held = dataclasses.replace(config, data=dataclasses.replace(config.data, validation={"held": file}))
    with pytest.raises(RewardError, match=r'data\.validation\.held: .* the data source "code"'):
        list(check_reward_sources(held))


def test_of_many_rows_that_code_makes_some_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MAX_MADE_ROWS", 10)
    made = SourceConfig(dataset="tests.trainer.test_reward_sources:Made", options={"size": 1000})
    config = config_of(tmp_path, ["gsm8k"], made=made)
    Made.num_read = 0
    assert list(check_reward_sources(config)) == []
    assert Made.num_read == 10
    held = dataclasses.replace(config, data=dataclasses.replace(config.data, validation={"held": made}))
    with pytest.raises(RewardError, match='the data source "last"'):
        list(check_reward_sources(held))
