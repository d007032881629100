"""Paths that are not regular files: every reader reports them at once, without waiting."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.data import SourceConfig
from mrl.config.resolved.load import load_config
from mrl.config.rules.model_shape import read_model_shape
from mrl.data.chat import ChatTokenizer, load_tokenizer
from mrl.data.rlhf_dataset import Prompt, SkippedRow
from mrl.data.row_files import ParquetFile, read_newest_samples
from mrl.data.sources import open_source
from mrl.errors import BadRow, DataError, MrlError, Problem
from mrl.events import read_events
from mrl.launch.slurm import load_slurm_site
from mrl.models.hf_config import HfConfig
from mrl.models.hf_reader import HfReader
from mrl.observe.metrics import read_metrics
from mrl.rewards.functions import services
from tests.data.conftest import OpenDataset, data_config, good_row, jsonl

LIMIT_S = 30  # an endless wait reaches any limit; a busy machine takes seconds for megabytes


@pytest.fixture
def within_limit(tokenizer: ChatTokenizer) -> Iterator[None]:
    """Interrupt readers that wait or read forever. Libraries are loaded before."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise TimeoutError("it waits without an end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # relative to the current directory, because a socket's path must be short


def make_circle(path: Path) -> None:
    one, other = path.with_name("one"), path.with_name("other")
    one.symlink_to(other)
    other.symlink_to(one)
    path.symlink_to(one)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    # kind: how it is made, and its message
    "FIFO": (lambda path: os.mkfifo(path), "is a FIFO, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "socket": (make_socket, "is a socket, not a file"),
    "directory": (lambda path: path.mkdir(), "is a directory"),
    "circle": (make_circle, "Too many levels of symbolic links"),
}


def show(path: Path) -> object:
    return load_config(str(path), [])


def extends(path: Path) -> object:
    Path("run.yaml").write_text(f"extends: {path.name}\n")
    return load_config("run.yaml", [])


def in_model(name: str, read: Callable[[], object]) -> Callable[[Path], object]:
    """Replace one file of a model by something else, and read the model."""

    def put(path: Path) -> object:
        Path("model", name).unlink(missing_ok=True)
        path.rename(Path("model", name))
        return read()

    return put


def shape() -> object:
    model_shape = read_model_shape("model.path", "model")
    assert isinstance(model_shape, Problem)
    raise MrlError(model_shape.what)


def weights() -> object:
    return HfReader("model").check  # made before anything is read


READERS: dict[str, Callable[[Path], object]] = {
    "configuration": show,
    "extends": extends,
    "cluster file": lambda path: load_slurm_site(str(path)),
    "jsonl": lambda path: open_source(SourceConfig(dataset=str(path.rename("rows.jsonl")))),
    "parquet": lambda path: open_source(SourceConfig(dataset=str(path.rename("rows.parquet")))),
    "shape": in_model("config.json", shape),
    "generation_config.json": in_model("generation_config.json", lambda: load_tokenizer("model")),
    "config.json": in_model("config.json", lambda: HfConfig.read("model")),
    "tokenizer.json": in_model("tokenizer.json", lambda: load_tokenizer("model")),
    "tokenizer_config.json": in_model("tokenizer_config.json", lambda: load_tokenizer("model")),
    "special_tokens_map.json": in_model("special_tokens_map.json", lambda: load_tokenizer("model")),
    "chat template": in_model("chat_template.jinja", lambda: load_tokenizer("model")),
    "weights": in_model("model.safetensors", weights),
    "index": in_model("model.safetensors.index.json", weights),
    "template file": lambda path: load_tokenizer("model", data_config("rows.jsonl", template_file=str(path))),
    "judge's template": lambda path: services._template(str(path)),
    "metrics": lambda path: read_metrics(path),
    "events": lambda path: list(read_events(path)),
    "samples": lambda path: read_newest_samples(path.rename("step-000001.parquet").parent, 1),
}


EACH_ONCE = [*(("FIFO", reader) for reader in READERS), *((kind, "jsonl") for kind in KINDS), ("circle", "weights")]


@pytest.mark.usefixtures("within_limit")
@pytest.mark.parametrize(("kind", "reader"), dict.fromkeys(EACH_ONCE))
def test_what_is_no_file_is_named_at_once(kind: str, reader: str, here: Path, tokenizer_directory: Path) -> None:
    shutil.copytree(tokenizer_directory, "model")
    make, what = KINDS[kind]
    make(here / "thing")
    with pytest.raises(MrlError) as caught:
        READERS[reader](here / "thing")
    says = (what, "is a directory", "does not exist", "no such", "should name a checkpoint", "has no chat template")
    assert any(each in str(caught.value) for each in says), caught.value


PACKED = {"gunzip": gzip.compress, "unxz": lzma.compress, "bunzip2": bz2.compress}


@pytest.mark.parametrize(("program", "name"), zip(PACKED, ["rows.jsonl", "rows.parquet", "rows.jsonl"], strict=True))
def test_a_compressed_file_says_how_it_is_unpacked(program: str, name: str, here: Path) -> None:
    Path(name).write_bytes(PACKED[program](jsonl(good_row())))
    with pytest.raises(DataError) as caught:
        open_source(SourceConfig(dataset=name))
    assert str(caught.value) == f"{name}: the file is compressed\n  fix: {program} it, and keep its name"


def write_groups(path: Path, num_rows: int = 3000) -> None:
    """Write rows of numbers that compress badly, in groups."""
    rows = [good_row(number, extra_info={"noise": os.urandom(200).hex()}) for number in range(num_rows)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)


def test_a_parquet_file_that_is_cut_while_it_is_read(here: Path) -> None:
    write_groups(Path("rows.parquet"))
    code = (
        "import os\n"
        "from mrl.config.data import SourceConfig\n"
        "from mrl.data.sources import open_source\n"
        "from mrl.errors import DataError\n"
        "rows = open_source(SourceConfig(dataset='rows.parquet'))\n"
        "rows.row(0)\n"
        "os.truncate('rows.parquet', os.path.getsize('rows.parquet') // 3)\n"
        "try:\n"
        "    rows.row(2999)\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    # A signal would end the process.
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("rows.parquet: rows 2500 to 2999 cannot be read: ")


def test_a_jsonl_file_that_is_cut_while_it_is_read(here: Path) -> None:
    Path("rows.jsonl").write_bytes(jsonl(*map(good_row, range(9))))
    rows = open_source(SourceConfig(dataset="rows.jsonl"))
    os.truncate("rows.jsonl", 300)
    with pytest.raises(DataError, match=r"rows\.jsonl: the file became shorter while it was read") as caught:
        rows.row(8)
    assert not isinstance(caught.value, BadRow), "no row of it is bad, and none may be skipped"


@pytest.mark.usefixtures("within_limit")
def test_a_prompt_of_megabytes_is_refused_and_counted(here: Path, dataset_of: OpenDataset) -> None:
    text = "1 + 1 = " * 1_250_000
    parts = [{"role": "user", "content": text[begin : begin + 1_000_000]} for begin in range(0, len(text), 1_000_000)]
    rows = good_row(prompt=text), good_row(prompt=parts), good_row(prompt=text[: 1 << 19]), good_row()
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    dataset = dataset_of(train="rows.jsonl", overlong="drop")
    one, many, long, good = dataset.read(dataset.draws(0, 4))
    assert isinstance(one, SkippedRow)
    assert "characters; at most 1048576" in str(one.error)
    assert isinstance(many, SkippedRow)
    assert "characters in total; at most 1048576" in str(many.error)
    assert isinstance(long, SkippedRow)
    assert long.error is None
    assert long.num_tokens > 10_000
    assert isinstance(good, Prompt)


def test_a_row_group_that_holds_fewer_rows_than_the_footer_says(here: Path) -> None:
    write_groups(Path("rows.parquet"), 10)
    rows = ParquetFile(Path("rows.parquet"), ["prompt"])
    rows._starts = [0, 12]  # in a damaged footer, which Arrow does not check
    with pytest.raises(DataError, match=r"rows\.parquet: rows 0 to 11 cannot be read: 10 rows found, not 12"):
        rows.row(11)


def test_the_name_of_a_column_that_is_no_text(here: Path) -> None:
    write_groups(Path("rows.parquet"), 10)
    Path("rows.parquet").write_bytes(Path("rows.parquet").read_bytes().replace(b"ability", b"abil\x95ty"))
    with pytest.raises(DataError, match=r"rows\.parquet: "):
        open_source(SourceConfig(dataset="rows.parquet")).row(0)
