"""Weights to engines on other hosts, over links of 1 Gbit/s and 100 Mbit/s: shard to shard compared with whole tensors.

    python benchmarks/reshard_hosts.py            # as root, or if user namespaces are allowed
    python benchmarks/reshard_hosts.py --quick    # links of 1 Gbit/s only

Hosts are network namespaces on a bridge, with links limited in both directions by `tc`. The ranks are those of a run
whose engines have a separate pool: trainer ranks, receivers, and workers without engines, which hold 42 million
parameters in bfloat16. `gather` broadcasts whole tensors to each rank of the engines; `gather_once` broadcasts to one
rank on each host, which passes them on there, like NCCL's rings. For two engines on one host, mrl sends one copy each.

Bytes are the kernel's counts on the links. `limit_s` is the bytes in the most loaded direction of a link, divided by
its rate: no method with this traffic can be faster, and headers make a plain stream a little slower. `bytes_allow` is
the largest speedup of mrl over a method that the bytes allow.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, interleave, parser, speedup
from benchmarks.reshard import make_model
from benchmarks.reshard_hosts_ranks import INTERFACE, LAYOUTS, RANKS_PER_HOST, WAYS, RankPlace
from tests.hosts.hosts import Host, hosts, why_not

RATES = (1000, 100)
"""Rates of a link, in Mbit/s."""
FIRST_PORT = 29500
STREAM_S = 2.0
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print(0, flush=True)
    connection, buffer, count, began = listener.accept()[0], bytearray(1 << 20), 0, 0.0
    while num_bytes := connection.recv_into(buffer):
        began = began or time.perf_counter()
        count += num_bytes
print([count, time.perf_counter() - began])
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    until = time.perf_counter() + float(sys.argv[3])
    while time.perf_counter() < until:
        connection.sendall(bytes(1 << 20))
"""


class World:
    """Ranks of one layout, each a process on its host, which execute commands together."""

    def __init__(self, ranks: Sequence[subprocess.Popen[str]]) -> None:
        self._ranks = ranks

    def tell(self, word: str) -> list[Any]:
        """Send a command to every rank, and return the answers."""
        for rank in self._ranks:
            assert rank.stdin is not None, "it is a pipe"
            print(word, file=rank.stdin, flush=True)
        return [_answer(rank) for rank in self._ranks]


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process on a host exited with {process.wait()}: see its output above")
    return json.loads(line)


def on_host(stack: ExitStack, host: Host, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program on a host. Its input ends with the block, which waits for the program."""
    process = subprocess.Popen(
        [*host.prefix(), sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=host.all_environment() | {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    stack.enter_context(process)
    stack.push(
        lambda failed, *_: process.kill() if failed else None
    )  # other programs that wait for it end with their host
    return process


@contextmanager
def world(hosts_used: Sequence[Host], layout: str, model: Path, num_versions: int) -> Iterator[World]:
    """Start the ranks of a layout."""
    port = FIRST_PORT + 10 * list(LAYOUTS).index(layout)
    addresses = [host.address for host in hosts_used]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(LAYOUTS[layout].num_ranks):
            place = RankPlace(layout, rank, str(model), directory, addresses, port, num_versions)
            program = ("-m", "benchmarks.reshard_hosts_ranks", json.dumps(asdict(place)))
            ranks.append(on_host(stack, hosts_used[rank // RANKS_PER_HOST], *program))
        yield World(ranks)


@dataclass
class Crossing:
    """Measurements of one method over links of one rate."""

    seconds: list[float]
    total_bytes: list[int]
    """Bytes that left a host."""
    most_bytes: list[int]
    """Bytes in the most loaded direction of a link."""

    def take(self, ranks: World, way: str) -> None:
        """Measure once more."""
        answers = ranks.tell(way)
        links = [links for _, links in answers[::RANKS_PER_HOST]]
        self.seconds.append(answers[0][0])
        self.total_bytes.append(sum(out for _, out in links))
        self.most_bytes.append(max(max(both) for both in links))


def stream(hosts_used: Sequence[Host], rate: int) -> dict[str, Any]:
    """Measure one TCP connection between two hosts, without other traffic."""
    address = (hosts_used[1].address, str(FIRST_PORT - rate % 97))
    with ExitStack() as stack:
        receiver = on_host(stack, hosts_used[1], "-c", RECEIVE, *address)
        _answer(receiver)
        on_host(stack, hosts_used[0], "-c", SEND, *address, str(STREAM_S))
        num_bytes, seconds = _answer(receiver)
    limit_s = 8 * num_bytes / rate / 1e6
    return {"seconds": seconds, "bytes": num_bytes, "limit_s": limit_s, "over_limit": seconds / limit_s}


def crossings(ranks: World, repeats: int) -> dict[str, Crossing]:
    """Measure every method in turn."""
    crossings_by_way = {way: Crossing([], [], []) for way in WAYS}
    ways: dict[str, Callable[[], object]] = {way: partial(crossings_by_way[way].take, ranks, way) for way in WAYS}
    for _ in range(repeats):
        ranks.tell("next")
        interleave(ways, repeats=1, warm_ups=0)
        ways = dict(reversed(ways.items()))
    return crossings_by_way


def rows_of(layout: str, rate: int, crossings_by_way: dict[str, Crossing]) -> Iterator[dict[str, Any]]:
    """Yield a line for each method, mrl's first."""
    times = {way: Timing(tuple(crossing.seconds)) for way, crossing in crossings_by_way.items()}
    limits = {
        way: 8 * statistics.median(crossing.most_bytes) / rate / 1e6 for way, crossing in crossings_by_way.items()
    }
    for way, crossing in crossings_by_way.items():
        yield {
            "layout": layout,
            "mbit_per_s": rate,
            "way": way,
            "seconds": times[way].median_s,
            "spread_s": times[way].spread_s,
            "bytes": round(statistics.median(crossing.total_bytes)),
            "limit_s": limits[way],
            "over_limit": times[way].median_s / limits[way],
            "ours_is_faster": speedup(times["ours"], times[way]),
            "bytes_allow": limits[way] / limits["ours"],
        }


def measured(bench: Benchmark, rates: Sequence[int], repeats: int) -> None:
    """Measure all layouts over links of all rates."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as directory, hosts([INTERFACE] * 3) as hosts_used:
        model = make_model("dense 42M", Path(directory))
        for rate in rates:
            for host in hosts_used:
                host.limit(rate)
            bench.row(layout="a plain stream", mbit_per_s=rate, way="TCP", **stream(hosts_used, rate))
        for layout in LAYOUTS:
            with world(hosts_used, layout, model, 1 + repeats * len(rates)) as ranks:
                for rate in rates:
                    print(f"{layout}, {rate} Mbit/s", file=sys.stderr, flush=True)
                    for host in hosts_used:
                        host.limit(rate)
                    if rate == rates[0]:
                        crossings(ranks, 1)  # connects, and touches memory for the first time
                    for row in rows_of(layout, rate, crossings(ranks, repeats)):
                        bench.row(**row)
                wrong += [name for names in ranks.tell("wrong") for name in names]
    bench.goal("tensors that arrived otherwise than they were sent", len(wrong), at_most=0)


def judge(bench: Benchmark, rates: Sequence[int]) -> None:
    """Add the goals of the rows."""
    rows = [row for row in bench.rows if row["way"] in WAYS]
    for rate in rates:
        ours = [row["over_limit"] for row in rows if row["mbit_per_s"] == rate and row["way"] == "ours"]
        bench.goal(f"{rate} Mbit/s: largest seconds over the link's limit", max(ours), at_most=1.3)
    for way in WAYS[1:]:
        shares = [row["ours_is_faster"] / row["bytes_allow"] for row in rows if row["way"] == way]
        bench.goal(f"least speedup over {way}, of the ratio of the most loaded links' bytes", min(shares), at_least=0.8)


def main() -> int:
    """Measure, and report."""
    options = parser("Weights to engines on other hosts, over limited links.")
    options.set_defaults(repeats=3)
    options.add_argument("--quick", action="store_true", help=f"links of {RATES[0]} Mbit/s only")
    arguments = options.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    rates = RATES[:1] if arguments.quick else RATES
    bench = Benchmark("reshard_hosts")
    measured(bench, rates, arguments.repeats)
    judge(bench, rates)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
