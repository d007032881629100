"""Files of published data sets become the files that presets read: checked, counted, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from mrl.config.resolved.load import load_config
from mrl.data.prepare import find_sources, prepare
from mrl.data.published import PUBLISHED, Published
from mrl.data.rows import PromptRow, read_prompt
from mrl.data.sources import open_source
from mrl.errors import DataError
from mrl.files import sha256
from tests.data.conftest import OpenDataset, batch_of
from tests.data.published_files import COUNTDOWN, EMPTY_BOX, GSM8K, MATH, dapo, resized, search_r1, write_file
from tests.hub import hub_service

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OTHER_DATA = {"ppo-llama3.1-70b-8n8g.yaml"}
"""Presets that use files of the user."""


def gsm8k_files(suffix: str = "jsonl") -> tuple[Published, list[Path]]:
    train = write_file(Path("given", f"train.{suffix}"), GSM8K)
    test = write_file(Path("given", f"test-00000.{suffix}"), GSM8K[:1])
    return resized("gsm8k", train=train, test=test), [train, test]


def rows_of(path: Path) -> list[Any]:
    return list(pq.read_table(path).to_pylist())


def prompts_of(preset: str, part: str) -> list[PromptRow]:
    """Return the rows of a preset as a run parses them."""
    data = load_config(str(CONFIGS / preset)).config.data
    prompts = []
    for name, source in (data.train if part == "train" else data.validation).items():
        rows = open_source(source)
        prompts += [read_prompt(source.columns, name, rows.row(index), rows.where(index)) for index in range(len(rows))]
    return prompts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_preset_reads_what_is_made_of_given_files(suffix: str, here: Path) -> None:
    dataset, files = gsm8k_files(suffix)
    made = prepare(dataset, find_sources(dataset, files, {}), Path("data/gsm8k"))
    assert [len(part.exercises) for part in made.values()] == [3, 1]
    train, test = (prompts_of("grpo-qwen2.5-0.5b-1n1g.yaml", part) for part in ("train", "test"))
    assert [row.ground_truth for row in train] == ["7", "1200", "-5"]
    assert [(row.data_source, row.ability, row.extra_info) for row in test] == [
        ("openai/gsm8k", "math", {"split": "test", "index": 0})
    ]
    assert test[0].messages[0]["content"].startswith(GSM8K[0]["question"])


@pytest.mark.parametrize("preset", sorted({path.name for path in CONFIGS.glob("[gp]*g.yaml")} - OTHER_DATA))
def test_every_preset_reads_files_that_the_verb_makes(preset: str) -> None:
    data = load_config(str(CONFIGS / preset)).config.data
    sources = [source.dataset for source in (*data.train.values(), *data.validation.values())]
    made = {f"data/{name}/{part}.parquet" for name, dataset in PUBLISHED.items() for part in dataset.parts}
    assert sources
    assert set(sources) <= made


def test_the_files_of_a_data_set_come_from_the_hub(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("math")
    published = PUBLISHED["math"]
    files = {
        part: write_file(directory / file.path, [*MATH, EMPTY_BOX][: 4 if part == "train" else 2])
        for part, file in published.files.items()
    }
    dataset = resized("math", **files)
    with hub_service({f"{dataset.repository}@{dataset.revision}": directory}) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        sources = find_sources(dataset, [], {})
        with pytest.raises(DataError, match=f"its sha256 is {sha256(files['test'])}, not 0000") as caught:
            find_sources(resized("math", train=4, test=2), [], {})
    assert "damaged or another version" in caught.value.fix
    assert [source.is_published for source in sources] == [True, True]
    made = prepare(dataset, sources, Path("data/math"))
    train = made[Path("data/math/train.parquet")]
    assert (train.num_read, len(train.exercises), list(train.refused)) == (4, 3, ["the solution's box is empty"])
    assert [row.ability for row in prompts_of("grpo-qwen2.5-7b-1n8g.yaml", "train")] == [row["type"] for row in MATH]


def test_dapo_rows_come_once_and_contradictions_not_at_all(here: Path) -> None:
    asked = [dapo("Find $a$.", "1"), dapo("Find $b$.", "2"), dapo("Find $c$.", "3"), dapo("Find $b$.", "-2")]
    odd = dapo("Find $d$.", "4", form="{}")
    file = write_file(Path("dapo-math-17k.parquet"), [*asked, *asked, *asked, odd])
    dataset = resized("dapo17k", train=file)
    (made,) = prepare(dataset, find_sources(dataset, [file], {}), Path("data/dapo17k")).values()
    assert [exercise.answer for exercise in made.exercises] == ["1", "3"]
    assert (made.num_read, made.num_repeated) == (13, 9)
    assert made.refused == {
        "the prompt does not use the published wording": ["dapo-math-17k.parquet: row 12"],
        "another row gives a different answer to the same question": ["dapo-math-17k.parquet: row 1"],
    }
    assert [row["reward_model"]["ground_truth"] for row in rows_of(Path("data/dapo17k/train.parquet"))] == ["1", "3"]


def test_the_last_puzzles_of_countdown_are_its_test(here: Path) -> None:
    file = write_file(Path("puzzles.parquet"), COUNTDOWN)
    dataset = resized("countdown", num_test=1, train=file)
    made = prepare(dataset, find_sources(dataset, [file], {}), Path("out"))
    assert [(path.name, part.num_read, part.num_repeated) for path, part in made.items()] == [
        ("train.parquet", 4, 1),
        ("test.parquet", 0, 0),
    ]
    numbers = {
        part: [row["extra_info"]["numbers"] for row in rows_of(Path(f"out/{part}.parquet"))] for part in dataset.parts
    }
    assert numbers == {"train": [[44, 19, 35], [1, 3, 4, 6]], "test": [[2, 3, 4]]}


def test_questions_of_two_sources_with_equal_indices_stay_apart(here: Path, dataset_of: OpenDataset) -> None:
    rows = [search_r1("who wrote it?", "Ann", "Ann Lee"), search_r1("who sang it?", "Bo", source="hotpotqa")]
    odd = search_r1("why?", "so") | {"prompt": [{"role": "user", "content": "why?"}]}
    files = [write_file(Path("train.parquet"), [*rows, odd]), write_file(Path("test.parquet"), rows[1:])]
    dataset = resized("search-r1", train=files[0], test=files[1])
    made = prepare(dataset, find_sources(dataset, files, {}), Path("data/search-r1"))
    train, test = (made[Path(f"data/search-r1/{part}.parquet")] for part in ("train", "test"))
    assert train.refused == {"the prompt does not use the wording of Search-R1": ["train.parquet: row 2"]}
    assert (len(train.exercises), len(test.exercises)) == (2, 1)
    for preset in sorted(path.name for path in CONFIGS.glob("*search*")):
        prompts = prompts_of(preset, "train")
        assert [row.data_source for row in prompts] == ["nq", "hotpotqa"]
        assert [row.ground_truth for row in prompts] == [["Ann", "Ann Lee"], ["Bo"]]
        assert [row.extra_info["index"] for row in prompts] == [0, 1]
        assert prompts[0].messages[0]["content"].endswith("<answer> Beijing </answer>. Question: who wrote it?\n")
    batch = batch_of(dataset_of(train="data/search-r1/train.parquet", max_prompt_tokens=4096), [0, 1])
    assert len(set(batch["uid"])) == 2


def test_lines_that_are_no_rows_are_counted_by_their_reason(here: Path) -> None:
    dataset, files = gsm8k_files()
    lines = [json.dumps(row).encode() for row in GSM8K]
    files[0].write_bytes(b"\n".join([lines[0], b"{", b"\xff", b"{", b"", b"[1]", lines[1], lines[1]]) + b"\n")
    dataset = resized("gsm8k", train=files[0], test=files[1])
    made = prepare(dataset, find_sources(dataset, files, {}), Path("out"))[Path("out/train.parquet")]
    assert {what: len(rows) for what, rows in made.refused.items()} == {
        "not a JSON object: Expecting property name enclosed in double quotes at column 2": 2,
        "byte 0 of the line (0xff) is not UTF-8": 1,
        "the line is empty": 1,
        "a row must be an object of columns, not a list": 1,
    }
    assert len(made.exercises) == 3, "what GSM8K repeats is kept, so that its numbers are those of others"
    assert made.num_read == len(made.exercises) + sum(map(len, made.refused.values())) == 8


def test_the_same_files_make_the_same_bytes_and_others_are_noticed(here: Path) -> None:
    dataset, files = gsm8k_files()
    out = Path("out")
    made = prepare(dataset, find_sources(dataset, files, {}), out)
    first = [path.read_bytes() for path in made]
    prepare(dataset, find_sources(dataset, files[::-1], {files[0]: sha256(files[0])}), out)
    assert [path.read_bytes() for path in made] == first
    write_file(files[1], GSM8K[1:2])
    with pytest.raises(DataError, match=r"out/train\.parquet: was made from .*, but the new file would be made from "):
        prepare(dataset, find_sources(dataset, files, {}), out)
    assert [path.read_bytes() for path in made] == first
    assert sorted(path.name for path in out.iterdir()) == ["test.parquet", "train.parquet"]


@pytest.mark.parametrize("content", ["parquet", "text"])
def test_a_file_of_somebody_else_stays(content: str, here: Path) -> None:
    dataset, files = gsm8k_files()
    mine = write_file(Path("out/test.parquet"), GSM8K)
    if content == "text":
        mine.write_text("mine")
    before = mine.read_bytes()
    with pytest.raises(DataError, match=r"out/test\.parquet: already exists, and was not made by `mrl data`"):
        prepare(dataset, find_sources(dataset, files, {}), Path("out"))
    assert [path.read_bytes() for path in Path("out").iterdir()] == [before]


def test_nothing_is_written_where_a_part_is_wrong(here: Path) -> None:
    dataset, files = gsm8k_files()
    dataset = resized("gsm8k", train=files[0], test=1_319)
    with pytest.raises(DataError, match="openai/gsm8k, test: 1 rows, not 1319") as caught:
        prepare(dataset, find_sources(dataset, files, {}), Path("out"))
    assert "complete" in caught.value.fix
    assert not Path("out").exists()
    Path("out").touch()
    with pytest.raises(DataError, match="out: cannot be written: File exists"):
        prepare(resized("gsm8k", train=files[0], test=files[1]), find_sources(dataset, files, {}), Path("out"))


def test_a_file_without_a_usable_row(here: Path) -> None:
    file = write_file(Path("train.jsonl"), [EMPTY_BOX] * 2)
    test = write_file(Path("test.jsonl"), MATH)
    dataset = resized("math", train=file, test=test)
    with pytest.raises(DataError, match=r"train: 0 of 2 rows remain \(2: the solution's box is empty\)"):
        prepare(dataset, find_sources(dataset, [file, test], {}), Path("out"))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["given/train.jsonl"], "no file for test is given"),
        (["given/train.jsonl", "given/other.jsonl"], r"given/other\.jsonl: the name does not show the part"),
        (["given/train.json"], r"given/train\.json: not a \.jsonl or \.parquet file"),
        (["given/train.jsonl", "given/test.jsonl"], r"given/test\.jsonl: cannot be opened: No such file or directory"),
    ],
)
def test_files_that_are_named_wrong(given: list[str], what: str, here: Path) -> None:
    dataset, _ = gsm8k_files()
    with pytest.raises(DataError, match=what):
        find_sources(dataset, [Path(name) for name in given], {})


def test_a_hash_given_by_hand_is_held(here: Path) -> None:
    dataset, files = gsm8k_files()
    with pytest.raises(DataError, match=f"its sha256 is {sha256(files[1])}, not {'1' * 64}"):
        find_sources(dataset, files, {files[1]: "1" * 64})
    with pytest.raises(DataError, match="a hash is given for elsewhere, which is not read"):
        find_sources(dataset, files, {Path("elsewhere"): "1" * 64})


def test_a_parquet_file_with_other_columns_or_broken_text_or_a_torn_one(here: Path) -> None:
    dataset, files = gsm8k_files("parquet")
    write_file(files[0], MATH)
    with pytest.raises(DataError, match=r"given/train\.parquet: the column `question` does not exist"):
        prepare(dataset, find_sources(dataset, files, {}), Path("out"))
    torn = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\x03\0\0\0"), pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"question": torn, "answer": ["#### 1"]}), files[0])
    with pytest.raises(DataError, match=r"given/train\.parquet: cannot be read: .*utf-8.*byte 0xff"):
        prepare(dataset, find_sources(dataset, files, {}), Path("out"))
    files[0].write_bytes(files[1].read_bytes()[:-9])
    with pytest.raises(DataError, match="not a readable parquet file"):
        prepare(dataset, find_sources(dataset, files, {}), Path("out"))
