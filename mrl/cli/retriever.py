"""`mrl retriever CORPUS`: serve searches with Search-R1's protocol."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.errors import SetupError

EXAMPLE = "mrl retriever corpus.jsonl --port 8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS", type=Path, help='jsonl of {"id": ..., "contents": "title\\ntext"}')
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 accepts any client (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port (default 8000)")
    parser.add_argument(
        "--topk", type=int, default=3, help="passages per query, if the request does not set it (default 3)"
    )
    parser.add_argument(
        "--encoder",
        metavar="DIRECTORY",
        type=Path,
        help="model such as E5 that finds passages by vectors instead of BM25",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of the encoder: cpu, cuda or cuda:N, which a run may also need (default cpu)",
    )


def run(arguments: argparse.Namespace) -> int:
    from mrl.agents.retriever import Bm25, Retriever, read_corpus  # loads numpy

    if arguments.encoder is None and arguments.device != "cpu":
        what = f'--device is "{arguments.device}", but without --encoder passages are found by BM25, on the CPU'
        raise SetupError(what, where="retriever", fix="set --encoder, or leave --device out")
    corpus = read_corpus(arguments.corpus)
    texts = [passage["contents"] for passage in corpus]
    if arguments.encoder is None:
        find = Bm25(texts).find
    else:
        from mrl.agents.dense import DenseIndex  # loads torch

        find = DenseIndex(arguments.encoder, texts, arguments.device).find
    with Retriever(arguments.host, arguments.port, corpus, find, arguments.topk) as retriever:
        print(f"{len(corpus)} passages of {arguments.corpus} at {retriever.url}", flush=True)
        retriever.serve_forever()
    return 0
