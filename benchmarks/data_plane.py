"""Cost of moving a batch from the worker that created it to the worker that reads it.

One run compares: this DataProto; the padded TensorDict of other trainers, pickled by Ray; and TransferQueue's
SimpleStorage with jagged columns, in a separate environment. Prompts have 1,024 tokens and 8 samples each, responses
2,500 tokens on average and 8,192 at most. There are six columns: prompts, responses, response_mask, rollout_log_probs,
scores, uid.

    python benchmarks/data_plane.py
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, interleave, parser, speedup
from benchmarks.peer_environments import TRANSFER_QUEUE
from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.controller.transport import store
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged, object_array
from mrl.protocol.wire import encode

SIZES = (256, 512)
MAX_RESPONSE_TOKENS = 8192
PROMPT_TOKENS = 1024
SAMPLES_PER_PROMPT = 8
MEAN_RESPONSE = 2500
WARM_UPS = 30
"""A store starts with fresh memory, whose pages the kernel must clear; training runs far beyond this point."""
ROOT = Path(__file__).resolve().parent.parent


def response_lengths(count: int, mean: int, seed: int) -> list[int]:
    """Return log-normal lengths, long-tailed like responses, with exactly this mean."""
    randomness = random.Random(seed)
    drawn = [randomness.lognormvariate(0.0, 0.6) for _ in range(count)]
    scale = mean * count / sum(drawn)
    lengths = [min(MAX_RESPONSE_TOKENS, max(1, round(length * scale))) for length in drawn]
    while (missing := mean * count - sum(lengths)) != 0:
        row = randomness.randrange(count)
        lengths[row] = min(MAX_RESPONSE_TOKENS, max(1, lengths[row] + missing))
    return lengths


class Peer:
    """Another implementation of the hop, behind a pipe: another interpreter, with its own packages and its own Ray."""

    def __init__(self, script: str, python: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.seconds: list[float] = []
        """The peer's own times, which exclude the pipe."""
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "benchmarks" / "peers" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def hop(self) -> None:
        """Run one hop."""
        self.seconds.append(self.ask(hop=True)["seconds"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "the process has a pipe as input"
        assert stdout is not None, "the process has a pipe as output"
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    def close(self) -> None:
        """Wait for the process to end, or terminate it."""
        assert self._process.stdin is not None, "the process has a pipe as input"
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.terminate()


def socket_bytes() -> int:
    """Return the number of bytes that this process's TCP connections have carried, by the kernel's count."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # Descriptors that are closed or not sockets raise an error and do not count.
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(struct.unpack_from("QQ", info, 120))  # bytes acknowledged and bytes received
    return total


def prompts_of(count: int) -> DataProto:
    """Return the prompts, stored once each, with a row for every sample."""
    num_prompts = count // SAMPLES_PER_PROMPT
    tokens = torch.zeros(num_prompts * PROMPT_TOKENS, dtype=torch.int32)
    batch = DataProto.from_dict(
        {"prompts": jagged(tokens, [PROMPT_TOKENS] * num_prompts)},
        {"uid": [f"prompt-{row}" for row in range(num_prompts)]},
    )
    return store(batch).repeat(SAMPLES_PER_PROMPT)


def bytes_of(count: int, lengths: list[int]) -> int:
    """Return the bytes of all six columns in the object store."""
    total, num_prompts = sum(lengths), count // SAMPLES_PER_PROMPT
    columns: dict[str, Any] = {
        "prompts": jagged(torch.zeros(num_prompts * PROMPT_TOKENS, dtype=torch.int32), [PROMPT_TOKENS] * num_prompts),
        "responses": jagged(torch.zeros(total, dtype=torch.int32), lengths),
        "response_mask": jagged(torch.ones(total, dtype=torch.bool), lengths),
        "rollout_log_probs": jagged(torch.zeros(total), lengths),
        "scores": torch.zeros(count),
        "uid": object_array([f"prompt-{row}" for row in range(num_prompts)]),
    }
    return sum(encode(column, name).nbytes for name, column in columns.items())


def make_groups(context: RunContext, lengths: dict[str, list[int]]) -> tuple[RayWorkerGroup, RayWorkerGroup]:
    """Return producer and consumer, in separate processes."""
    workers = "benchmarks.data_plane_workers"
    producer = RayWorkerGroup("actor", RayClassWithInitArgs(f"{workers}:Producer", lengths), Mesh(1), context)
    return producer, RayWorkerGroup("critic", RayClassWithInitArgs(f"{workers}:Consumer"), Mesh(1), context)


def measure(bench: Benchmark, context: RunContext, peers: dict[str, Peer], repeats: int) -> None:
    """Measure all sizes and implementations in turns."""
    lengths = {str(count): response_lengths(count, MEAN_RESPONSE, seed=count) for count in SIZES}
    lengths |= {f"short {count}": response_lengths(count, MEAN_RESPONSE // 10, seed=count) for count in SIZES}
    producer, consumer = make_groups(context, lengths)
    for count in SIZES:
        batch = prompts_of(count)

        def hop(name: str, batch: DataProto = batch) -> None:
            consumer.consume(batch.union(producer.produce(batch, name)))

        facts = {
            name: peer.ask(lengths=lengths[str(count)], prompt_tokens=PROMPT_TOKENS) for name, peer in peers.items()
        }
        ways: dict[str, Callable[[], object]] = {"mrl": partial(hop, str(count))}
        ways |= {name: peer.hop for name, peer in peers.items()}
        times = interleave(ways, repeats=repeats, warm_ups=WARM_UPS)
        times |= {name: Timing(tuple(peer.seconds[-repeats:])) for name, peer in peers.items()}
        columns: dict[str, Any] = {}
        for name, timing in times.items():
            columns |= {f"{name}_ms": 1e3 * timing.median_s, f"{name}_spread_ms": 1e3 * timing.spread_s}
        ours, padded = bytes_of(count, lengths[str(count)]), facts["padded"]["bytes"]
        through, short = driver_bytes(partial(hop, str(count))), driver_bytes(partial(hop, f"short {count}"))
        columns |= {"mrl_MB": ours / 1e6, "padded_MB": padded / 1e6}
        bench.row(samples=count, **columns, driver_kB=through / 1e3, driver_kB_short=short / 1e3)
        for name in peers:
            bench.goal(f"{count} samples: times faster than {name}", speedup(times["mrl"], times[name]), at_least=10)
        bench.goal(f"{count} samples: times fewer bytes than padded", padded / ours, at_least=20)
        bench.goal(f"{count} samples: driver bytes, relative, at 10 times the length", through / short, at_most=1.1)
    producer.shutdown()
    consumer.shutdown()


def driver_bytes(hop: Callable[[], None], repeats: int = 20) -> float:
    """Return the bytes through the driver's sockets per hop."""
    before = socket_bytes()
    for _ in range(repeats):
        hop()
    return (socket_bytes() - before) / repeats


def main() -> int:
    """Measure, print the results, and return whether the goals are met."""
    arguments = parser(__doc__ or "").parse_args()
    bench = Benchmark("data_plane")
    cluster = ClusterConfig(devices_per_node=2, device="cpu")
    deadlines = DeadlinesConfig()
    placement = PlacementConfig(pools={"producer": 1, "consumer": 1}, roles={"actor": "producer", "critic": "consumer"})
    peers = {"padded": Peer("padded_hop.py", Path(sys.executable))}
    if failed := TRANSFER_QUEUE.install():
        bench.row(samples=f"NOT RUN: {failed}")
    else:
        peers["queue"] = Peer("transfer_queue_hop.py", TRANSFER_QUEUE.python)
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cluster):
        events = EventLog(Path(directory) / "events.jsonl")
        resources = ResourcePoolManager(placement, cluster, deadlines)
        resources.create(Path(directory), events)
        measure(bench, RunContext(Path(directory), events, deadlines, resources), peers, arguments.repeats)
        resources.release()
    for peer in peers.values():
        peer.close()
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
