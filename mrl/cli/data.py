"""`mrl data NAME OUT`: write a published data set as the parquet files that presets expect."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.data.published import PUBLISHED

EXAMPLE = "mrl data gsm8k data/gsm8k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="NAME", choices=PUBLISHED, help=", ".join(PUBLISHED))
    parser.add_argument("out", metavar="OUT", type=Path, help="directory for train.parquet and test.parquet")
    parser.add_argument(
        "--from",
        dest="files",
        metavar="FILE",
        nargs="+",
        type=Path,
        default=[],
        help="files to use instead of the hub's, parquet or jsonl; their names begin with train or test",
    )
    parser.add_argument(
        "--sha256", metavar="FILE=HASH", nargs="+", type=_hash_of, default=[], help="expected hash of a file"
    )


def _hash_of(argument: str) -> tuple[Path, str]:
    name, _, digest = argument.rpartition("=")
    if not name or len(digest) != 64:
        raise argparse.ArgumentTypeError(f'"{argument}" is not FILE=HASH, with 64 hexadecimal digits')
    return Path(name), digest.lower()


def run(arguments: argparse.Namespace) -> int:
    from mrl.data.prepare import find_sources, prepare  # loads pyarrow

    dataset = PUBLISHED[arguments.dataset]
    print(f"{arguments.dataset}: {dataset.repository}@{dataset.revision}")
    sources = find_sources(dataset, arguments.files, dict(arguments.sha256))
    for source in sources:
        verdict = "the published file" if source.is_published else "not the published file, so only rows are counted"
        print(f"  {source.path}: sha256 {source.sha256}, {verdict}", flush=True)
    for target, part in prepare(dataset, sources, arguments.out).items():
        origin = f" of {part.num_read} rows" if part.num_read else f", the last of {sources[0].path.name}"
        print(f"{target}: {len(part.exercises)} prompts{origin}")
        if part.num_repeated:
            print(f"  left out {part.num_repeated}: an earlier row asks the same question")
        for reason, rows in part.refused.items():
            print(f"  refused {len(rows)}: {reason} (the first: {rows[0]})")
    return 0
