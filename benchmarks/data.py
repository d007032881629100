"""What it costs to open a million prompts, and to draw a step of them from anywhere.

A child process opens the file, so that memory is the growth of a fresh process: resident before, and at its highest
while the dataset opens and draws its first prompt's place. Steps of 512 prompts are then drawn in shuffled order.

    python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.data import DataConfig, SourceConfig
from mrl.config.schema import BatchConfig, RolloutConfig
from mrl.data.chat import load_tokenizer
from mrl.data.prompt_loader import PromptLoader
from mrl.data.rlhf_dataset import open_dataset
from mrl.demo.model import save_toy_tokenizer
from mrl.events import EventLog

NUM_ROWS = 1_000_000
WRITTEN_AT_ONCE = 50_000
PROMPTS_PER_STEP = 512
STEPS = 5
MIB = 1 << 20


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Rows in the field's schema, of about 300 bytes."""
    words = [f"word{number}" for number in range(500)]
    chance = random.Random(1)
    for number in range(count):
        text = " ".join(chance.choices(words, k=18))
        yield {
            "prompt": [{"role": "user", "content": f"Question {number}: {text}"}],
            "data_source": "benchmark",
            "ability": "none",
            "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number},
        }


def write_jsonl(path: Path, count: int) -> None:
    """The rows as JSON Lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))


def write_parquet(path: Path, count: int) -> None:
    """The same rows as parquet, in row groups as large as pyarrow's default makes them."""
    made = rows(count)
    tables = []
    for begin in range(0, count, WRITTEN_AT_ONCE):
        chunk = [next(made) for _ in range(min(WRITTEN_AT_ONCE, count - begin))]
        tables.append(pa.Table.from_pylist(chunk))
    table = pa.concat_tables(tables)
    writer = pq.ParquetWriter(path, table.schema)
    writer.write_table(table)
    writer.close()


def memory_mib(key: str) -> float:
    """A line of this process's memory: VmRSS, or VmHWM for the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise LookupError(key)


def measure(path: str, tokenizer: str) -> dict[str, float]:
    """In a fresh process: open, draw the first step, draw more."""
    loaded = load_tokenizer(tokenizer)
    data = DataConfig(train={"million": SourceConfig(dataset=path)})
    rollout = RolloutConfig(max_prompt_tokens=1024, max_response_tokens=1024)
    batch = BatchConfig(prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=1, samples_per_update=PROMPTS_PER_STEP)
    with tempfile.TemporaryDirectory() as folder:
        events = EventLog(Path(folder) / "events.jsonl")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
        before, begin = memory_mib("VmRSS"), time.perf_counter()
        loader = PromptLoader(open_dataset(data.train, data, rollout, loaded), data, batch, events)
        seconds, growth = time.perf_counter() - begin, memory_mib("VmHWM") - before
        marks = [time.perf_counter()]
        for _ in range(1 + STEPS):
            loader.next_batch()
            marks.append(time.perf_counter())
        events.close()
    return {
        "open_s": seconds,
        "open_mib": growth,
        "first_step_s": marks[1] - marks[0],
        "step_s": (marks[-1] - marks[1]) / STEPS,
        "all_mib": memory_mib("VmHWM") - before,
    }


def in_child(path: Path, tokenizer: Path) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(path), "--tokenizer", str(tokenizer)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return measured


def main() -> int:
    """Write the files, measure each, print the table."""
    arguments = parser("Opening a million prompts.")
    arguments.add_argument("--rows", type=int, default=NUM_ROWS)
    arguments.add_argument("--measure", help=argparse.SUPPRESS)
    arguments.add_argument("--tokenizer", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.tokenizer)))
        return 0
    bench = Benchmark("data")
    kinds: dict[str, Callable[[Path, int], None]] = {"jsonl": write_jsonl, "parquet": write_parquet}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        save_toy_tokenizer(tokenizer)
        for kind, write in kinds.items():
            path = Path(folder) / f"prompts.{kind}"
            write(path, given.rows)
            repeated = [in_child(path, tokenizer) for _ in range(given.repeats)]
            worst = {name: max(run[name] for run in repeated) for name in repeated[0]}
            bench.row(kind=kind, rows=given.rows, file_mib=path.stat().st_size / MIB, **worst)
            bench.goal(f"seconds to open {given.rows} rows of {kind}", worst["open_s"], at_most=2)
            bench.goal(f"MiB to open {given.rows} rows of {kind}", worst["open_mib"], at_most=200)
            path.unlink()
    return bench.finish(given)


if __name__ == "__main__":
    sys.exit(main())
