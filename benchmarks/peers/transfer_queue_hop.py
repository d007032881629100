"""One hop through TransferQueue's SimpleStorage, from a producer to a consumer actor, in a Python with TransferQueue.

Reads one JSON request per line on standard input and answers each with one JSON line:
`{"lengths": [...], "prompt_tokens": n}` makes the rows, `{"hop": true}` times one hop.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "scores", "uid"]


class End:
    """One end of the hop, in a separate process."""

    def __init__(self) -> None:
        transfer_queue.init()
        self.rows = TensorDict({}, batch_size=[0])

    def make(self, lengths: list[int], prompt_tokens: int) -> int:
        """Make the rows as jagged columns, the fastest form for this peer."""
        count, total = len(lengths), sum(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        prompts = torch.arange(count + 1) * prompt_tokens
        jagged = torch.nested.nested_tensor_from_jagged
        self.rows = TensorDict(
            {
                "prompts": jagged(torch.zeros(count * prompt_tokens, dtype=torch.int32), prompts),
                "responses": jagged(torch.arange(total, dtype=torch.int32), offsets),
                "response_mask": jagged(torch.ones(total, dtype=torch.bool), offsets),
                "rollout_log_probs": jagged(torch.rand(total), offsets),
                "scores": torch.rand(count),
                "uid": torch.arange(count),
            },
            batch_size=[count],
        )
        return sum(column.values().nbytes if column.is_nested else column.nbytes for column in self.rows.values())

    def produce(self, partition: str) -> None:
        """Put the rows."""
        transfer_queue.get_client().put(data=self.rows, partition_id=partition)

    def consume(self, partition: str, count: int) -> float:
        """Get the rows and read every token and log-prob."""
        client = transfer_queue.get_client()
        meta = client.get_meta(data_fields=FIELDS, batch_size=count, partition_id=partition, task_name="consume")
        rows = client.get_data(meta)
        return sum(float(rows[name].values().sum()) for name in ("responses", "rollout_log_probs"))

    def clear(self, partition: str) -> None:
        """Clear the rows. This is not timed."""
        transfer_queue.get_client().clear_partition(partition_id=partition)


def main() -> None:
    """Serve requests until standard input ends."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    actor = ray.remote(End).options(num_cpus=1)
    producer, consumer = actor.remote(), actor.remote()
    count = hop = 0
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "lengths" in request:
            count = len(request["lengths"])
            answer = {"bytes": ray.get(producer.make.remote(request["lengths"], request["prompt_tokens"]))}
        else:
            hop += 1
            partition = f"hop-{hop}"
            began = time.perf_counter()
            ray.get(producer.produce.remote(partition))
            ray.get(consumer.consume.remote(partition, count))
            answer = {"seconds": time.perf_counter() - began}
            ray.get(producer.clear.remote(partition))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
