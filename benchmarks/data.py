"""Cost of opening a million prompts, and of drawing a step of them from anywhere.

A child process opens the file, so memory is the growth of a fresh process: from the resident size before to the peak
while the dataset opens and draws its first prompt. Steps of 512 prompts are then drawn in shuffled order.

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
    """Yield rows in the field's schema, of about 300 bytes."""
    words = [f"word{number}" for number in range(500)]
    generator = random.Random(1)
    for number in range(count):
        text = " ".join(generator.choices(words, k=18))
        yield {
            "prompt": [{"role": "user", "content": f"Question {number}: {text}"}],
            "data_source": "benchmark",
            "ability": "none",
            "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number},
        }


def write_jsonl(path: Path, count: int) -> None:
    """Write the rows as JSON Lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))


def write_parquet(path: Path, count: int) -> None:
    """Write the same rows as parquet, with pyarrow's default row groups."""
    row_iterator = rows(count)
    tables = []
    for begin in range(0, count, WRITTEN_AT_ONCE):
        chunk = [next(row_iterator) for _ in range(min(WRITTEN_AT_ONCE, count - begin))]
        tables.append(pa.Table.from_pylist(chunk))
    table = pa.concat_tables(tables)
    writer = pq.ParquetWriter(path, table.schema)
    writer.write_table(table)
    writer.close()


def memory_mib(key: str) -> float:
    """Return a line of this process's memory: VmRSS, or VmHWM for the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise LookupError(key)


def measure(path: str, tokenizer: str) -> dict[str, float]:
    """Open the file and draw steps, in a fresh process."""
    loaded = load_tokenizer(tokenizer)
    data = DataConfig(train={"million": SourceConfig(dataset=path)})
    rollout = RolloutConfig(max_prompt_tokens=1024, max_response_tokens=1024)
    batch = BatchConfig(prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=1, samples_per_update=PROMPTS_PER_STEP)
    with tempfile.TemporaryDirectory() as folder:
        events = EventLog(Path(folder) / "events.jsonl")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the resident size
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
    """Run `measure` in a child process."""
    command = [sys.executable, __file__, "--measure", str(path), "--tokenizer", str(tokenizer)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return measured


def main() -> int:
    """Write the files, measure each, and print the table."""
    arguments = parser("Opening a million prompts.")
    arguments.add_argument("--rows", type=int, default=NUM_ROWS)
    arguments.add_argument("--measure", help=argparse.SUPPRESS)
    arguments.add_argument("--tokenizer", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.tokenizer)))
        return 0
    bench = Benchmark("data")
    kinds: dict[str, Callable[[Path, int], None]] = {"jsonl": write_jsonl, "parquet": write_parquet}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        save_toy_tokenizer(tokenizer)
        for kind, write in kinds.items():
            path = Path(folder) / f"prompts.{kind}"
            write(path, options.rows)
            repeated = [in_child(path, tokenizer) for _ in range(options.repeats)]
            worst = {name: max(run[name] for run in repeated) for name in repeated[0]}
            bench.row(kind=kind, rows=options.rows, file_mib=path.stat().st_size / MIB, **worst)
            bench.goal(f"seconds to open {options.rows} rows of {kind}", worst["open_s"], at_most=2)
            bench.goal(f"MiB to open {options.rows} rows of {kind}", worst["open_mib"], at_most=200)
            path.unlink()
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
